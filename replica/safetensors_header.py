"""PURE. Where each tensor of a .safetensors file lies. Trusts nothing that the header says: every claim is held against
the size of the file before anybody allocates or reads by it.

A file is the header's length (8 bytes, little endian), the header (a JSON object: name -> dtype, shape, data_offsets),
and the data, which the tensors cover from end to end without holes or overlaps.
https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from replica.errors import ModelLoadError

#: the format's own limit; a model of 100,000 tensors needs 12 MB
MAX_HEADER_BYTES = 100_000_000
#: bytes of one element, for the dtypes that torch has too
ITEM_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
_MAX_DIMS = 8
_MAX_NAME_CHARS = 1000


class TensorPlace(msgspec.Struct, frozen=True):
    """One tensor of a file: `shape` elements of `dtype` (a key of ITEM_BYTES) from byte `start` of the file on."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_header(path: Path) -> dict[str, TensorPlace]:
    """The tensors of `path` by name. Raises ModelLoadError with the file and what is wrong with it."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 10:
                raise ModelLoadError(f"{path} is cut short or no safetensors file: it has {size} bytes")
            if length > MAX_HEADER_BYTES:
                raise ModelLoadError(
                    f"{path} is no safetensors file: its header claims {length} bytes; "
                    f"at most {MAX_HEADER_BYTES} are allowed"
                )
            if length > size - 8:
                raise ModelLoadError(
                    f"{path} is cut short: its header claims {length} bytes and the file has {size} in all"
                )
            text = file.read(length)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from error
    return _checked(path, _parsed(path, text), 8 + length, size)


def _parsed(path: Path, text: bytes) -> dict[str, _Entry]:
    try:
        raw = msgspec.json.decode(text.rstrip(b" "), type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        return {name: msgspec.json.decode(value, type=_Entry) for name, value in raw.items()}
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise ModelLoadError(f"{path}: the header is not what the safetensors format asks for: {error}") from error


def _checked(path: Path, entries: Mapping[str, _Entry], start: int, size: int) -> dict[str, TensorPlace]:
    """Offsets in the file, once dtypes, shapes and offsets agree with each other and with the `size` of the file."""
    places: dict[str, TensorPlace] = {}
    covered = 0
    # a name that the JSON holds twice shows as a hole: the decoder keeps the last
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        if not 0 < len(name) <= _MAX_NAME_CHARS:
            raise ModelLoadError(
                f"{path}: a tensor's name has {len(name)} characters; allowed are 1 to {_MAX_NAME_CHARS}"
            )
        if entry.dtype not in ITEM_BYTES:
            allowed = ", ".join(ITEM_BYTES)
            raise ModelLoadError(f"{path}: tensor {name} has dtype {entry.dtype[:40]!r}; known are {allowed}")
        if len(entry.shape) > _MAX_DIMS or any(length < 0 for length in entry.shape):
            raise ModelLoadError(f"{path}: tensor {name} has shape {str(entry.shape)[:100]}, which no tensor has")
        begin, end = entry.data_offsets
        num_bytes = math.prod(entry.shape) * ITEM_BYTES[entry.dtype]
        if end - begin != num_bytes:
            raise ModelLoadError(
                f"{path}: tensor {name} claims {entry.dtype}{entry.shape}, {num_bytes} bytes, and gets {end - begin}"
            )
        if begin != covered:
            what = "overlaps another" if begin < covered else "leaves a hole before it"
            raise ModelLoadError(f"{path}: tensor {name} begins at byte {begin} of the data and {what} ({covered})")
        if start + end > size:
            raise ModelLoadError(
                f"{path} is cut short: tensor {name} ends at byte {start + end} and the file has {size} bytes"
            )
        covered = end
        places[name] = TensorPlace(entry.dtype, tuple(entry.shape), start + begin, num_bytes)
    if start + covered != size:
        raise ModelLoadError(f"{path}: {size - start - covered} bytes behind the last tensor belong to none")
    return places
