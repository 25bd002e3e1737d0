"""TORCH. `python -m replica.check_model FOLDER [MAX_MODEL_LEN]`: can this folder be served? One sentence if not.

Looks at headers and shapes only, so it takes a second or two: `shoal serve` asks it before it starts anything.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from replica.errors import ShoalError
from replica.models.decoder import read_config
from replica.models.decoder_config import DecoderConfig
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
    limit = int(sys.argv[2]) if len(sys.argv) > 2 else None
    try:
        check(Path(sys.argv[1]), limit)
    except ShoalError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
