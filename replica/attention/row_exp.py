"""TORCH. exp over rows, with the same bits for a row wherever it stands."""

from __future__ import annotations

import torch

# ATen splits larger tensors between threads at arbitrary elements, and finishes each share with scalar code whose exp
# differs from the vector one in the last bit: seen at 200 rows of 208 on 2 threads.
_SERIAL_ELEMENTS = 32768
_VECTOR = 16


def row_exp_(x: torch.Tensor) -> torch.Tensor:
    """In-place exp of a contiguous tensor, in pieces of whole rows that one thread computes."""
    if x.device.type != "cpu":
        return x.exp_()
    width = x.shape[-1]
    rows = max(1, (_SERIAL_ELEMENTS - 1) // width) if width % _VECTOR == 0 else 1
    for piece in x.view(-1, width).split(rows):
        piece.exp_()
    return x
