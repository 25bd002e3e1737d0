"""TORCH. `python -m replica.check_model FOLDER [--max-model-len N] [--ranks N]`: can this folder be served? One
sentence if not.

Looks at headers, shapes and the small files only, so it takes a second or two: `shoal serve` asks it before it starts
anything.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from replica.checkpoint import Checkpoint
from replica.config_checks import brings_code, read_model_config
from replica.errors import ConfigError, ModelLoadError, ShoalError
from replica.json_file import check_file
from replica.models.decoder import read_config
from replica.models.decoder_config import DecoderConfig
from replica.models.loading import check_ranks
from replica.side_files import check_side_files
from replica.tensor_names import told_of_unread
from replica.weights import WeightReader

#: Gemma's, with 262,144 tokens, has 33 MB
_MAX_TOKENIZER_BYTES = 256 << 20
_SMALL_BYTES = 64 << 10


def check(folder: Path, max_model_len: int | None, num_ranks: int = 1) -> list[str]:
    """Raises ModelLoadError or ConfigError with the file and the reason. Returns what people should be told of a model
    that can be served.
    """
    from replica.config import EngineConfig, ModelConfig
    from replica.model_runner import max_length

    _check_code(folder, read_model_config(folder))
    check_side_files(folder)
    model = read_config(folder)
    check_ranks(model, num_ranks)
    notes: list[str] = []
    if isinstance(model, DecoderConfig):
        reader = WeightReader(folder, model, torch.float32, headers_only=True)
        _check_tensors(reader)
        if names := reader.unread():
            notes.append(told_of_unread(folder, names))
    else:
        from replica.models.transformers_shape import check_folder

        check_folder(folder)
    _read_small(Checkpoint(folder))
    max_length(EngineConfig(model=ModelConfig(max_model_len=max_model_len)), model)
    check_tokenizer(folder, model.vocab_size)
    return notes


def _check_tensors(reader: WeightReader) -> None:
    """All names and shapes."""
    reader.embedding()
    reader.final_norm()
    reader.head()
    for _ in reader.layers():
        pass


def _read_small(checkpoint: Checkpoint) -> None:
    """Norms and biases, values and all: a damaged model shows there first. The rest is looked at while loading."""
    for name in checkpoint:
        if checkpoint.num_bytes(name) <= _SMALL_BYTES:
            checkpoint.read(name)


def _check_code(folder: Path, raw: Mapping[str, Any]) -> None:
    """A model that only its own Python files know is refused. One that transformers knows as well is read by us or by
    transformers (Phi-3 ships such files), and the files are never looked at.
    """
    if not brings_code(raw):
        return
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    kind = raw.get("model_type")
    if kind not in CONFIG_MAPPING_NAMES:
        raise ModelLoadError(
            f"{folder / 'config.json'}: only the folder's own code (auto_map) knows model_type={str(kind)[:60]!r}, "
            "and Shoal runs no code of a model; there is no option to allow it"
        )


def check_tokenizer(folder: Path, vocab_size: int) -> None:
    """tokenizer.json can be read, and no token of it lies beyond the embedding's `vocab_size` rows."""
    import tokenizers

    path = folder / "tokenizer.json"
    check_file(path, _MAX_TOKENIZER_BYTES)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        raise ModelLoadError(f"{path} cannot be read as a tokenizer: {str(error)[:200]}") from error
    most = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
    if most >= vocab_size:
        raise ModelLoadError(
            f"{path} knows token {most} and the model's embedding has {vocab_size} rows (vocab_size in config.json); "
            "they do not belong together"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()
    try:
        for note in check(options.folder, options.max_model_len, options.ranks):
            print(f"warning: {note}")
    except ShoalError as error:
        print(error)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
