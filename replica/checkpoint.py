"""TORCH. The tensors of a model folder by name, whole or in parts, read when asked for. Knows no architecture."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from replica.errors import ModelLoadError


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")
    except Exception as error:  # safetensors raises its own type for a bad header
        raise ModelLoadError(f"{path} is cut short or no safetensors file: {error}") from error


class Checkpoint:
    """All .safetensors files of a folder as one. Raises ModelLoadError for a file that cannot be trusted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._paths = sorted(folder.glob("*.safetensors"))
        if not self._paths:
            raise ModelLoadError(f"{folder} holds no .safetensors file")
        files = [_open(path) for path in self._paths]
        self._where = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (not a dict)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises ModelLoadError if there is no tensor of this name."""
        return tuple(self._file(name).get_slice(name).get_shape())

    def read(self, name: str, part: slice = slice(None), dim: int = 0) -> torch.Tensor:
        """The tensor, or its `part` along `dim`, in the file's dtype. Reads no more of the file than it must."""
        index = (slice(None),) * dim + (part,)
        tensor: torch.Tensor = self._file(name).get_slice(name)[index]
        return tensor.contiguous()

    def digest(self) -> str:
        """Hex digest of the weight files: sizes and 256 evenly spaced 64 KiB samples of each.

        A full hash of a large model would cost more than loading it; any training step changes every sample.
        """
        sample, count = 1 << 16, 256
        digest = hashlib.sha256()
        for path in self._paths:
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\0".encode())
            with path.open("rb") as file:
                for i in range(count):
                    file.seek(max(0, size - sample) * i // (count - 1))
                    digest.update(file.read(sample))
        return digest.hexdigest()

    def _file(self, name: str) -> Any:
        file = self._where.get(name)
        if file is None:
            raise ModelLoadError(f"tensor {name} is missing from {self.folder}")
        return file
