"""TORCH. `python -m replica.check_model FOLDER [--max-model-len N] [--ranks N]`: can this folder be served? One
sentence if not.

Looks at headers and shapes only, so it takes a second or two: `shoal serve` asks it before it starts anything.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from replica.errors import ShoalError
from replica.models.decoder import read_config
from replica.models.decoder_config import DecoderConfig
from replica.shard import check_divides
from replica.weights import WeightReader


def check(folder: Path, max_model_len: int | None) -> None:
    """Raises ModelLoadError or ConfigError with the file and the reason."""
    from replica.config import EngineConfig, ModelConfig
    from replica.model_runner import max_length

    model = read_config(folder)
    if isinstance(model, DecoderConfig):
        _check_tensors(WeightReader(folder, model, torch.float32, headers_only=True))
    else:
        from replica.models.transformers_shape import check_folder

        check_folder(folder)
    max_length(EngineConfig(model=ModelConfig(max_model_len=max_model_len)), model)


def _check_tensors(reader: WeightReader) -> None:
    """All names and shapes."""
    reader.embedding()
    reader.final_norm()
    reader.head()
    for _ in reader.layers():
        pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()
    try:
        check(options.folder, options.max_model_len)
        check_divides(read_config(options.folder).to_cut, options.ranks)
    except ShoalError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
