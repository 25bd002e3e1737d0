"""TORCH. Matrices in the layout of the native kernels (native/gemm.h), packed from the files piece by piece."""

from __future__ import annotations

import torch

from replica.native.library import Library
from replica.weight_matrix import Matrix

#: outputs side by side
PANEL = 32


def packed_bytes(shape: tuple[int, int], itemsize: int) -> int:
    """Of a matrix [out, in]; outputs are padded with zeros to whole panels."""
    return -(-shape[0] // PANEL) * PANEL * shape[1] * itemsize


def pack(library: Library, matrix: Matrix, packed: torch.Tensor, interleaved: bool = False) -> None:
    """Read `matrix` into `packed`, uint8 [packed_bytes]. `interleaved`: its two sources, gate and up, alternate every
    16 outputs, so that one panel holds both halves of 16 products.

    A panel is its rows transposed, in words of 4 bytes: one float32, or two bfloat16 that stay side by side. Rows of
    1,024 words: 4.9 GB/s of one core, numpy 2.0, torch's permuting copy of bfloat16 1.5.
    """
    width = PANEL // 2 if interleaved else PANEL
    words = matrix.shape[1] * matrix.dtype.itemsize // 4
    panel_bytes = 4 * PANEL * words
    if matrix.shape[0] % PANEL:
        packed[-panel_bytes:] = 0
    first = 0
    for number, source in enumerate(matrix.sources):
        lane, start = (number * width, 0) if interleaved else (0, first // PANEL)
        assert interleaved or first % PANEL == 0, "sources begin with a panel"
        for row, piece in matrix.pieces(source, width):
            at = packed.data_ptr() + (start + row // width) * panel_bytes
            library.pack(piece.data_ptr(), len(piece), words, at, width, lane)
        first += source.num_rows
