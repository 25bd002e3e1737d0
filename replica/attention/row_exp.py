"""TORCH. exp and other pointwise functions over rows, with the same bits for a row wherever it stands."""

from __future__ import annotations

from collections.abc import Callable

import torch

# ATen splits larger tensors between threads at arbitrary elements, and finishes each share with scalar code whose exp
# differs from the vector one in the last bit: seen at 200 rows of 208 on 2 threads.
_SERIAL_ELEMENTS = 32768
_VECTOR = 16


def _rows_at_once(width: int) -> int:
    """So many whole rows that one thread computes them, with no scalar end in the middle of one."""
    return max(1, (_SERIAL_ELEMENTS - 1) // width) if width % _VECTOR == 0 else 1


def row_exp_(x: torch.Tensor) -> torch.Tensor:
    """In-place exp of a contiguous tensor, in pieces of whole rows that one thread computes."""
    if x.device.type != "cpu":
        return x.exp_()
    width = x.shape[-1]
    for piece in x.view(-1, width).split(_rows_at_once(width)):
        piece.exp_()
    return x


def by_rows(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """`function` of each element of `x`, in pieces as in `row_exp_`."""
    if x.device.type != "cpu":
        return function(x)
    rows = x.contiguous().view(-1, x.shape[-1])
    at_once = _rows_at_once(x.shape[-1])
    if len(rows) <= at_once:
        return function(rows).view(x.shape)
    return torch.cat([function(piece) for piece in rows.split(at_once)]).view(x.shape)
