"""PURE. Which files of a model folder hold its weights. Only .safetensors count: a pickle can run code when read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replica.errors import ModelLoadError
from replica.json_file import read_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
#: DeepSeek-V3's, with 91,991 tensors, has 9 MB
_MAX_INDEX_BYTES = 64 << 20
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def weight_files(folder: Path) -> tuple[list[Path], Mapping[str, str]]:
    """The folder's weight files, sorted, and what the index says: tensor -> file name (empty without an index).

    With an index these are the files that it names, else model.safetensors, else every .safetensors file. Raises
    ModelLoadError for an index that names anything but files of this folder, and for a folder without such weights.
    """
    index = folder / INDEX_NAME
    single = folder / SINGLE_NAME
    if index.is_file():
        owners = _index(index)
        names = sorted(set(owners.values()))
        if single.is_file() and SINGLE_NAME not in names:
            raise ModelLoadError(
                f"{folder} holds two sets of weights, {SINGLE_NAME} and what {INDEX_NAME} names; remove one of them"
            )
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise ModelLoadError(f"{index} names {missing[0]}, which is not there ({len(missing)} files missing)")
        return [folder / name for name in names], owners
    if single.is_file():
        return [single], {}
    paths = sorted(path for path in folder.glob("*.safetensors") if path.is_file())  # opening a FIFO waits for ever
    if not paths:
        raise ModelLoadError(_why_none(folder))
    return paths, {}


def _index(path: Path) -> dict[str, str]:
    weight_map: Any = read_json(path, _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{path}: weight_map is no object that maps tensors to files")
    for tensor, name in weight_map.items():
        # a link in the folder is its owner's business (the Hugging Face cache consists of them); a way out of it
        # in a file that came with the model is not
        is_plain = isinstance(name, str) and not any(mark in name for mark in ("/", "\\", "\0"))
        if not is_plain or name in (".", "..") or not name.endswith(".safetensors"):
            raise ModelLoadError(
                f"{path}: tensor {tensor[:100]} is said to be in {str(name)[:100]!r}; "
                "allowed are names of .safetensors files of this folder, without a path"
            )
    return weight_map


def _why_none(folder: Path) -> str:
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    if not pickles:
        return f"{folder} holds no .safetensors file"
    return (
        f"{folder} holds its weights as a pickle only ({pickles[0]}), and reading a pickle can run any code; "
        "convert it once where you trust it (transformers: save_pretrained writes .safetensors) "
        "or take a copy that has them"
    )
