"""TORCH. The tensors of a model folder by name, whole or in parts, read when asked for. Knows no architecture.

Files are read with pread into the tensor's own memory. Compared with mapping them: a file that shrinks while it is
read is an error and not a SIGBUS, what was read is not in memory twice, and the kernel's page cache still gives each
byte to all ranks of a node after one of them fetched it.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from replica.cache_folder import cache_folder
from replica.errors import ModelLoadError
from replica.file_digest import file_digest
from replica.safetensors_header import TensorPlace, read_header
from replica.weight_files import weight_files

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
}
#: read and looked at in pieces of this size: what was just read is still in the core's cache
_PIECE_BYTES = 1 << 20
#: parts of rows from this size on are read alone; smaller ones with what lies between them, which the disk reads anyway
_ALONE_BYTES = 16 << 10
#: from here on tensors get memory of their own in huge pages: 15 % faster to fill, and given back when freed
_HUGE_BYTES = 4 << 20
#: float dtypes by the integers of their size: bits of +inf and of -inf. Everything above either is inf or NaN
_INFINITY: dict[str, tuple[type[np.signedinteger], type[np.unsignedinteger], int, int]] = {
    "F16": (np.int16, np.uint16, 0x7C00, 0xFC00),
    "BF16": (np.int16, np.uint16, 0x7F80, 0xFF80),
    "F32": (np.int32, np.uint32, 0x7F800000, 0xFF800000),
    "F64": (np.int64, np.uint64, 0x7FF0000000000000, 0xFFF0000000000000),
}


class _File:
    """One open .safetensors file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.places = read_header(path)
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # twice the readahead

    def fill(self, target: memoryview, offset: int) -> None:
        """Read `target` full from byte `offset` on."""
        try:
            done = os.preadv(self.descriptor, [target], offset)
        except OSError as error:
            raise ModelLoadError(f"{self.path} cannot be read: {error.strerror}") from error
        if done == len(target):
            return
        if done == 0:
            raise ModelLoadError(f"{self.path} was cut short while it was read, at byte {offset}")
        self.fill(target[done:], offset + done)


class Checkpoint:
    """The weight files of a folder as one. Raises ModelLoadError for a file that cannot be trusted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._paths, owners = weight_files(folder)
        self._where: dict[str, _File] = {}
        for path in self._paths:
            file = _File(path)
            for name in file.places:
                if name in self._where:
                    raise ModelLoadError(f"tensor {name} is in two files: {self._where[name].path} and {path.name}")
                self._where[name] = file
        for name, owner in owners.items():
            if name not in self._where or self._where[name].path.name != owner:
                raise ModelLoadError(f"{folder}: the index says tensor {name} is in {owner}, and it is not")

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def __iter__(self) -> Iterator[str]:
        """All names."""
        return iter(self._where)

    def dtypes(self) -> Iterator[tuple[str, str]]:
        """(name, dtype as the file writes it) of all tensors."""
        return ((name, file.places[name].dtype) for name, file in self._where.items())

    def kind(self, name: str) -> str:
        """Its dtype as the file writes it. Raises ModelLoadError if there is no tensor of this name."""
        return self._file(name).places[name].dtype

    def num_bytes(self, name: str) -> int:
        """Of the whole tensor in the file. Raises ModelLoadError if there is none of this name."""
        return self._file(name).places[name].num_bytes

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises ModelLoadError if there is no tensor of this name."""
        return self._file(name).places[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """In the file. Raises ModelLoadError if there is no tensor of this name."""
        return _DTYPES[self._file(name).places[name].dtype]

    def read(
        self,
        name: str,
        part: slice = slice(None),
        dim: int = 0,
        rows: slice = slice(None),
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The tensor, or its `part` (step 1) along `dim`, in the file's dtype; with `dim` > 0 also only of these `rows`
        of the first dimension. Reads no more of the file than it must. `into`: contiguous, of that shape and dtype.

        Raises ModelLoadError if a value is inf or NaN: the model could only answer nonsense.
        """
        file = self._file(name)
        place = file.places[name]
        shape, runs = _part(place, part, dim, rows)
        dtype = _DTYPES[place.dtype]
        tensor = new_tensor(shape, dtype) if into is None else into
        assert (*tensor.shape, tensor.dtype) == (*shape, dtype), f"{name}: {shape} does not fit {tensor.shape}"
        if not tensor.numel():
            return tensor
        for done in _fill(file, place, runs, tensor.reshape(-1).view(torch.uint8).numpy()):
            if not _is_finite(done, place.dtype):
                raise ModelLoadError(f"{file.path}: tensor {name} holds inf or NaN, so the file is damaged")
        return tensor

    def digest(self) -> str:
        """Hex digest of all bytes of the weight files, and of their names."""
        digest = hashlib.sha256()
        for path in self._paths:
            try:
                digest.update(f"{path.name} {file_digest(path, cache_folder() / 'digests')}\0".encode())
            except OSError as error:
                raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}") from error
        return digest.hexdigest()

    def _file(self, name: str) -> _File:
        file = self._where.get(name)
        if file is None:
            raise ModelLoadError(f"tensor {name} is missing from {self.folder}")
        return file


#: what a part is in the file: (pieces, bytes before the first, bytes of each, bytes from one to the next)
_Runs = tuple[int, int, int, int]


def _part(place: TensorPlace, part: slice, dim: int, rows: slice) -> tuple[tuple[int, ...], _Runs]:
    """Shape of the part, and its pieces."""
    if not place.shape:
        assert part == slice(None), "a scalar has no parts"
        return (), (1, 0, place.num_bytes, place.num_bytes)
    length = place.shape[dim]
    start, stop, step = part.indices(length)
    assert step == 1, "parts are contiguous along their dimension"
    wanted = max(0, stop - start)
    before = place.shape[:dim]
    stride = place.num_bytes // math.prod(before) if math.prod(before) else 0
    skipped = 0
    if rows != slice(None):
        assert dim, "rows are a part along the first dimension already"
        chosen = range(before[0])[rows]
        before = (len(chosen), *before[1:])
        skipped = chosen.start * math.prod(before[1:])
    shape, outer = (*before, wanted, *place.shape[dim + 1 :]), math.prod(before)
    inner = stride // length if length else 0
    if wanted == length:  # all of it is one piece
        return shape, (1, skipped * stride, outer * stride, outer * stride)
    return shape, (outer, skipped * stride + start * inner, wanted * inner, stride)


def new_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Not written yet. Large ones are memory of their own."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _HUGE_BYTES:
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).reshape(shape)


def _fill(file: _File, place: TensorPlace, runs: _Runs, memory: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
    """Read the pieces into `memory`, and give what was written after each read."""
    count, first, width, stride = runs
    begin = place.start + first
    view = memory.data
    if count == 1 or width >= _ALONE_BYTES:
        for i in range(count):
            for done in range(0, width, _PIECE_BYTES):
                start, stop = i * width + done, i * width + min(width, done + _PIECE_BYTES)
                file.fill(view[start:stop], begin + i * stride + done)
                yield memory[start:stop]
        return
    if not width:
        return
    rows = max(1, _PIECE_BYTES // stride)
    bounce = np.empty(rows * stride, np.uint8)
    for row in range(0, count, rows):
        num_rows = min(rows, count - row)
        span = (num_rows - 1) * stride + width  # not beyond the last piece: that may be the end of the file
        file.fill(bounce.data[:span], begin + row * stride)
        out = memory[row * width : (row + num_rows) * width]
        out.reshape(num_rows, width)[:] = bounce[: num_rows * stride].reshape(num_rows, stride)[:, :width]
        yield out


def _is_finite(values: NDArray[np.uint8], dtype: str) -> bool:
    """No inf or NaN among floats of 2 to 8 bytes; integers have none, and 8-bit floats are not looked at.

    As integers, inf and NaN are what is largest: seen as signed among the positive, as unsigned among the negative.
    14 GB/s; `isfinite` makes 1.
    """
    known = _INFINITY.get(dtype)
    if known is None or not len(values):
        return True
    signed, unsigned, positive, negative = known
    return bool(values.view(signed).max() < positive and values.view(unsigned).max() < negative)
