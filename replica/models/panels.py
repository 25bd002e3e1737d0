"""TORCH. Matrices in the layout of the native kernels (native/gemm.h), packed from the files piece by piece."""

from __future__ import annotations

import numpy as np
import torch

from replica.weight_matrix import Matrix

#: outputs side by side
PANEL = 32


def packed_bytes(shape: tuple[int, int], itemsize: int) -> int:
    """Of a matrix [out, in]; outputs are padded with zeros to whole panels."""
    return -(-shape[0] // PANEL) * PANEL * shape[1] * itemsize


def pack(matrix: Matrix, packed: torch.Tensor, interleaved: bool = False) -> None:
    """Read `matrix` into `packed`, uint8 [packed_bytes]. `interleaved`: its two sources, gate and up, alternate every
    16 outputs, so that one panel holds both halves of 16 products.

    A panel is its rows transposed, in words of 4 bytes: one float32, or two bfloat16 that stay side by side. Moved by
    numpy, 2 to 12 GB/s of one core; torch's permuting copy of the two bytes apart made 1.5.
    """
    num_words = matrix.shape[1] * matrix.dtype.itemsize // 4
    panels = packed.view(torch.int32).numpy().reshape(-1, num_words, PANEL)
    if matrix.shape[0] % PANEL:
        panels[-1] = 0
    width = PANEL // 2 if interleaved else PANEL
    first = 0
    for number, source in enumerate(matrix.sources):
        columns = slice(number * width, (number + 1) * width) if interleaved else slice(PANEL)
        assert interleaved or first % PANEL == 0, "sources begin with a panel"
        start = 0 if interleaved else first // PANEL
        for row, piece in matrix.pieces(source, width):
            words = piece.view(torch.int32).numpy()
            whole = len(words) // width
            at = start + row // width
            blocks = words[: whole * width].reshape(whole, width, num_words)
            np.copyto(panels[at : at + whole, :, columns], blocks.transpose(0, 2, 1))
            if rest := len(words) % width:
                panels[at + whole, :, columns][:, :rest] = words[whole * width :].T
        first += source.num_rows
