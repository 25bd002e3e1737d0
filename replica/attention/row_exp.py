"""TORCH. exp and other pointwise functions over rows, with the same bits for a row wherever it stands."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

# ATen splits larger tensors between threads at arbitrary elements, and finishes each share with scalar code whose exp
# differs from the vector one in the last bit: seen at 200 rows of 208 on 2 threads.
_SERIAL_ELEMENTS = 32768
_VECTOR = 16
# Some functions take two vectors at a time and leave the rest to scalar code. In float32 on AVX-512, sigmoid, silu and
# the tanh form of gelu differed between places at widths of 16, 24, 48 and 80, and not at 32 and 64; exp never did.
_TWO_VECTORS = 32


def _rows_at_once(width: int, step: int) -> int:
    """So many whole rows that one thread computes them, with no scalar end in the middle of one."""
    return max(1, (_SERIAL_ELEMENTS - 1) // width) if width % step == 0 else 1


def row_exp_(x: torch.Tensor) -> torch.Tensor:
    """In-place exp of a contiguous tensor, in pieces of whole rows that one thread computes."""
    if x.device.type != "cpu":
        return x.exp_()
    width = x.shape[-1]
    for piece in x.view(-1, width).split(_rows_at_once(width, _VECTOR)):
        piece.exp_()
    return x


def by_rows(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """`function` of each element of `x`, in pieces as in `row_exp_`; rows are made longer where they end in the middle
    of a vector. `function` may be given zeros beside.
    """
    if x.device.type != "cpu":
        return function(x)
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    missing = -width % _TWO_VECTORS
    rows = F.pad(rows, (0, missing)) if missing else rows.contiguous()
    at_once = _rows_at_once(width + missing, _TWO_VECTORS)
    out = function(rows) if len(rows) <= at_once else torch.cat([function(piece) for piece in rows.split(at_once)])
    return out[:, :width].reshape(x.shape)
