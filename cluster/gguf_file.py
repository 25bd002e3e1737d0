"""ASYNC (the gguf package for block sizes and dequantisation; no torch). A GGUF file: what it says, and its tensors.

The gguf package's own reader maps the file and believes its counts, so a small file can keep it busy for hours or fill
the memory. Here every count is held against the bytes that are left. https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from replica.errors import ModelLoadError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_STRING, _ARRAY = 8, 9
#: struct formats by GGUF's value types
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_PAIRS = 65_536
_MAX_STRING_BYTES = 16 << 20
_MAX_DIMS = 4


@dataclass(frozen=True)
class GgufTensor:
    """`shape` as torch has it (GGUF counts the other way round); rows of `row_bytes` from byte `start` on."""

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int
    row_bytes: int

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])


class Metadata:
    """Typed access to what a GGUF says about itself, with the file and the field named in errors."""

    def __init__(self, source: Path, values: Mapping[str, Any]) -> None:
        self.source = source
        self._values = values

    def get(self, name: str, default: Any = None) -> Any:
        return self._values.get(name, default)

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1. Raises ModelLoadError if it is missing without default, or something else."""
        value = self._values.get(name, default)
        if value is None:
            raise ModelLoadError(f"{self.source}: field {name} is missing")
        if type(value) is not int or value < 1:
            raise ModelLoadError(
                f"{self.source}: field {name} is {str(value)[:60]}; allowed is a whole number from 1 on"
            )
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number as the decimal that was meant: it is stored as float32."""
        value = self._values.get(name, default)
        if value is None:
            raise ModelLoadError(f"{self.source}: field {name} is missing")
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ModelLoadError(f"{self.source}: field {name} is {str(value)[:60]}; allowed is a number")
        return float(f"{value:.6g}")

    def text(self, name: str) -> str | None:
        """None where there is none."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, str):
            raise ModelLoadError(f"{self.source}: field {name} is {str(value)[:60]}; allowed is a text")
        return value

    def items(self, name: str, kind: type) -> list[Any] | None:
        """A list of `kind`; None where there is none."""
        value = self._values.get(name)
        if value is not None and not (isinstance(value, list) and all(type(one) is kind for one in value)):
            raise ModelLoadError(f"{self.source}: field {name} is no list of {kind.__name__}")
        return value


class GgufFile:
    """One file, its header read and checked. Raises ModelLoadError for a file that cannot be trusted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                header = _Header(path, file)
                self.metadata, self.tensors = header.read()
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from error

    def rows(self, file: BinaryIO, tensor: GgufTensor, first: int, count: int) -> NDArray[np.float32]:
        """[count, columns] of the tensor, dequantised. `file` is this file, opened.

        Raises ModelLoadError for inf or NaN (a damaged scale makes a whole block of them) and for a file cut short.
        """
        import gguf
        import gguf.quants
        import numpy as np

        file.seek(tensor.start + first * tensor.row_bytes)
        raw = file.read(count * tensor.row_bytes)
        if len(raw) != count * tensor.row_bytes:
            raise ModelLoadError(f"{self.path} was cut short while it was read")
        data = np.frombuffer(raw, np.uint8).reshape(count, tensor.row_bytes)
        kind = gguf.GGMLQuantizationType(tensor.kind)
        if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
            data = data.view(np.float32 if kind == gguf.GGMLQuantizationType.F32 else np.float16)
        with np.errstate(all="ignore"):  # of damaged scales, which are looked for below
            values = np.asarray(gguf.quants.dequantize(data, kind), np.float32).reshape(count, tensor.shape[-1])
        if not np.isfinite(values).all():
            raise ModelLoadError(f"{self.path}: tensor {tensor.name} holds inf or NaN, so the file is damaged")
        return values


class _Header:
    """Reads the header once, front to back."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self._left = self._size

    def read(self) -> tuple[Metadata, list[GgufTensor]]:
        if self._take(4) != b"GGUF":
            raise ModelLoadError(f"{self._path} is not a readable GGUF file: it does not begin with GGUF")
        version = self._number("I")
        if version not in (2, 3):
            raise ModelLoadError(f"{self._path} is a GGUF of version {version}; known are 2 and 3, little endian")
        num_tensors, num_pairs = self._number("Q"), self._number("Q")
        # a tensor takes at least 32 bytes here
        if num_pairs > _MAX_PAIRS or num_tensors > self._left // 32:
            raise ModelLoadError(
                f"{self._path} claims {num_tensors} tensors and {num_pairs} fields, "
                f"more than fit into its {self._size} bytes"
            )
        values: dict[str, Any] = {}
        for _ in range(num_pairs):
            name = self._string()
            values[name] = self._value(self._number("I"))
        metadata = Metadata(self._path, values)
        infos = [self._tensor_info() for _ in range(num_tensors)]
        return metadata, self._places(infos, metadata.count("general.alignment", 32))

    def _places(self, infos: list[tuple[str, tuple[int, ...], int, int]], alignment: int) -> list[GgufTensor]:
        import gguf

        start = -(-(self._size - self._left) // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        end_of_last = 0
        for name, shape, kind, offset in sorted(infos, key=lambda info: info[3]):
            try:
                per_block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
            except (ValueError, KeyError):
                raise ModelLoadError(f"{self._path}: tensor {name} is of type {kind}, which is not known") from None
            if shape[-1] % per_block:
                raise ModelLoadError(
                    f"{self._path}: tensor {name} has rows of {shape[-1]}, not a multiple of {per_block}"
                )
            tensor = GgufTensor(name, shape, kind, start + offset, shape[-1] // per_block * block_bytes)
            num_bytes = tensor.num_rows * tensor.row_bytes
            if tensor.start + num_bytes > self._size:
                raise ModelLoadError(
                    f"{self._path} is cut short: tensor {name} {shape} would end at byte {tensor.start + num_bytes} "
                    f"and the file has {self._size}"
                )
            if offset < end_of_last or name in tensors:
                raise ModelLoadError(f"{self._path}: tensor {name} overlaps another, or is there twice")
            end_of_last = offset + num_bytes
            tensors[name] = tensor
        return list(tensors.values())

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dims = self._number("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise ModelLoadError(
                f"{self._path}: tensor {name[:100]} has {num_dims} dimensions; allowed are 1 to {_MAX_DIMS}"
            )
        shape = tuple(reversed([self._number("Q") for _ in range(num_dims)]))
        if 0 in shape:
            raise ModelLoadError(f"{self._path}: tensor {name[:100]} is empty: {shape}")
        return name, shape, self._number("I"), self._number("Q")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise ModelLoadError(f"{self._path} is damaged: there is no value of type {kind}")
        kind, count = self._number("I"), self._number("Q")
        if kind == _STRING:
            self._check_left(8 * count)
            return [self._string() for _ in range(count)]
        if kind not in _NUMBERS:
            raise ModelLoadError(f"{self._path} is damaged: there are no arrays of type {kind}")
        form = _NUMBERS[kind]
        return list(struct.unpack(f"<{count}{form}", self._take(count * struct.calcsize(form))))

    def _number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self._take(struct.calcsize(form)))[0]

    def _string(self) -> str:
        length = self._number("Q")
        if length > _MAX_STRING_BYTES:
            raise ModelLoadError(f"{self._path} is damaged: it claims a text of {length} bytes")
        return self._take(length).decode("utf-8", errors="replace")

    def _take(self, count: int) -> bytes:
        self._check_left(count)
        self._left -= count
        return self._file.read(count)

    def _check_left(self, count: int) -> None:
        if count > self._left:
            raise ModelLoadError(
                f"{self._path} is cut short or damaged: it claims {count} bytes more and has {self._left} left"
            )
