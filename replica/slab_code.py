"""ASYNC (may wait for a compiler). KV between a pool and slots that hold it in 8 or 4 bits (`kv_codec.py`): many slabs
in one call without the interpreter's lock, or numpy where there is no compiler.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from replica.kv_codec import KVCodec, KVShape
from replica.native.builder import SOURCE_FOLDER, NativeUnavailableError, build

Slabs = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.int64]
#: channels of a head that the native code holds on its stack
_MAX_DIM = 1024


class SlabCoder:
    """Of one rank. `encode` and `decode` go row by row; rows are contiguous, `at` and `to` say which."""

    def __init__(self, shape: KVShape, bits: int, use_native: bool = True) -> None:
        """Raises ValueError for a shape that cannot be coded."""
        self._codec = KVCodec(shape, bits)
        self._code = _native(self._codec) if use_native and shape.head_dim <= _MAX_DIM else None

    @property
    def is_native(self) -> bool:
        return self._code is not None

    @property
    def coded_bytes(self) -> int:
        """Of a block of this rank."""
        return self._codec.coded_bytes

    def encode(self, target: Slabs, to: Indices, source: Slabs, at: Indices) -> None:
        """Blocks of the pool `source` into slots."""
        if self._code is not None:
            self._code(1, _addresses(source, at), _addresses(target, to))
            return
        for row, other in zip(to.tolist(), at.tolist(), strict=True):
            self._codec.encode(source[other], target[row])

    def decode(self, target: Slabs, to: Indices, source: Slabs, at: Indices) -> None:
        """Slots into blocks of the pool `target`."""
        if self._code is not None:
            self._code(0, _addresses(target, to), _addresses(source, at))
            return
        for row, other in zip(to.tolist(), at.tolist(), strict=True):
            self._codec.decode(source[other], target[row])


def _addresses(rows: Slabs, at: Indices) -> Indices:
    assert rows.strides[1] == 1, "a row is not one piece of memory"
    return rows.ctypes.data + at * rows.strides[0]


def _native(codec: KVCodec) -> Callable[[int, Indices, Indices], None] | None:
    """`code(encodes, addresses of slabs, addresses of coded ones)`; None: there is no compiler."""
    try:
        library = ctypes.CDLL(str(build(source=SOURCE_FOLDER / "slab_code.cpp")))
    except (NativeUnavailableError, OSError):
        return None
    function = library.code_slabs
    function.restype = None
    pointer = np.ctypeslib.ndpointer(np.int64, flags="C_CONTIGUOUS")
    function.argtypes = [pointer, ctypes.c_int64, ctypes.c_int64, pointer, pointer]
    shape = codec.shape
    sizes = (shape.kv_heads, 2 * shape.layers, shape.block_size, shape.head_dim, codec.group, codec.bits, shape.is_bf16)
    told = np.array(sizes, np.int64)

    def code(encodes: int, slabs: Indices, coded: Indices) -> None:
        function(told, encodes, len(slabs), slabs, coded)

    return code
