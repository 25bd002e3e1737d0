"""ASYNC (may wait for a compiler). The kernels' C interface as Python types.

Field order here and in forward.cpp must agree; `ABI` guards it.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from functools import lru_cache

from replica.native.builder import NativeUnavailableError, build

ABI = 4


class Layer(ctypes.Structure):
    """Pointers to one layer's packed weights."""

    _fields_ = [(name, c_void_p) for name in ("qkv", "o", "gate_up", "down", "input_norm", "post_norm")]


class Model(ctypes.Structure):
    """Everything that stays the same from step to step."""

    _fields_ = [
        *[
            (name, c_int32)
            for name in (
                "hidden",
                "num_layers",
                "num_heads",
                "num_kv_heads",
                "head_dim",
                "intermediate",
                "vocab",
                "is_bf16",
                "num_threads",
                "block_size",
            )
        ],
        ("eps", c_float),
        ("scale", c_float),
        *[(name, c_void_p) for name in ("embed", "head", "final_norm", "cos", "sin")],
        ("layers", POINTER(Layer)),
        ("kv", c_void_p),
        *[(name, c_int64) for name in ("block_stride", "head_stride", "layer_stride", "kv_stride")],
    ]


#: arrays of an InputBatch that the kernels read, by the same name in both
_TOKEN_ARRAYS = ("token_ids", "positions", "slots", "seq_start", "seq_slot", "block_tables")
_SAMPLING_ARRAYS = ("sample_rows", "temperature", "top_p", "min_p", "top_k", "uniform")
STEP_ARRAYS = (*_TOKEN_ARRAYS, *_SAMPLING_ARRAYS)


class Step(ctypes.Structure):
    """One step's inputs and outputs; see `replica.input_batch.InputBatch` for the shapes."""

    _fields_ = [
        *[
            (name, c_int32)
            for name in ("num_tokens", "num_seqs", "num_samples", "num_chosen", "logits_stride", "defers_choice")
        ],
        *[(name, c_void_p) for name in _TOKEN_ARRAYS],
        ("table_stride", c_int64),
        *[(name, c_void_p) for name in (*_SAMPLING_ARRAYS, "logits", "tokens", "scratch")],
    ]


class Library:
    """The loaded kernels. Calls release the GIL for their whole length."""

    def __init__(self, path: str) -> None:
        lib = ctypes.CDLL(path)
        lib.shoal_abi.restype = c_int32
        if lib.shoal_abi() != ABI:
            raise NativeUnavailableError(f"{path} has another interface version; remove it")
        lib.shoal_isa.restype = c_char_p
        lib.shoal_scratch_bytes.restype = c_int64
        lib.shoal_scratch_bytes.argtypes = [POINTER(Model), c_int32, c_int32]
        lib.shoal_forward.restype = None
        lib.shoal_forward.argtypes = [POINTER(Model), POINTER(Step)]
        lib.shoal_choose.restype = None
        lib.shoal_choose.argtypes = [POINTER(Model), POINTER(Step)]
        lib.shoal_use_huge_pages.restype = None
        lib.shoal_use_huge_pages.argtypes = [c_void_p, c_int64]
        lib.shoal_pack.restype = None
        lib.shoal_pack.argtypes = [c_void_p, c_int64, c_int64, c_void_p, c_int32, c_int32]
        lib.shoal_copy_slabs.restype = None
        lib.shoal_copy_slabs.argtypes = [
            *(c_void_p, c_void_p, c_int64),
            *(c_void_p, c_void_p, c_int64),
            *(c_int64, c_int64),
        ]
        lib.shoal_sample.restype = c_int32
        lib.shoal_sample.argtypes = [c_void_p, c_int32, c_float, c_int32, c_float, c_float, c_double]
        self._lib = lib
        self.isa: str = lib.shoal_isa().decode()

    def scratch_bytes(self, model: Model, num_tokens: int, num_samples: int) -> int:
        """Working memory `forward` needs for a step of this size."""
        return int(self._lib.shoal_scratch_bytes(ctypes.byref(model), num_tokens, num_samples))

    def forward(self, model: Model, step: Step) -> None:
        """Run one step; all pointers must stay valid until it returns."""
        self._lib.shoal_forward(ctypes.byref(model), ctypes.byref(step))

    def choose(self, model: Model, step: Step) -> None:
        """The choice that a step with `defers_choice` left open."""
        self._lib.shoal_choose(ctypes.byref(model), ctypes.byref(step))

    def use_huge_pages(self, address: int, num_bytes: int) -> None:
        """Ask for huge pages; call before the memory is first touched."""
        self._lib.shoal_use_huge_pages(address, num_bytes)

    def pack(self, rows: int, num_rows: int, words: int, panels: int, width: int, lane: int) -> None:
        """`rows` [num_rows, words of 4 bytes] into lanes from `lane` on of `panels`, `width` rows to a panel."""
        self._lib.shoal_pack(rows, num_rows, words, panels, width, lane)

    def copy_slabs(
        self, to: int, to_index: int, to_stride: int, source: int, from_index: int, from_stride: int, num_bytes: int,
        count: int,
    ) -> None:  # fmt: skip
        """`count` pieces of `num_bytes`; `to_index` and `from_index` are addresses of int64 in units of the strides."""
        self._lib.shoal_copy_slabs(to, to_index, to_stride, source, from_index, from_stride, num_bytes, count)

    def sample(
        self, address: int, num: int, temperature: float, top_k: int, top_p: float, uniform: float, min_p: float = 0.0
    ) -> int:
        """Token of one row of float32 logits at `address`."""
        return int(self._lib.shoal_sample(address, num, temperature, top_k, top_p, min_p, uniform))


@lru_cache(maxsize=4)
def _load(*_settings: str | None) -> Library:
    path = str(build())
    try:
        return Library(path)
    except OSError as error:
        raise NativeUnavailableError(f"cannot load {path}: {error}") from error


def load() -> Library:
    """The kernels, built if need be, loaded once. Raises NativeUnavailableError with the reason."""
    return _load(*(os.environ.get(name) for name in ("SHOAL_NATIVE", "SHOAL_CACHE", "CXX")))
