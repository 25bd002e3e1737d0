"""TORCH. A linear weight that is not read yet. It can be had whole, or in pieces by who packs it anyway: then packing
takes memory for one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from replica.checkpoint import Checkpoint, new_tensor

#: what was just read and converted is packed while most of it is still in the core's cache
_PIECE_BYTES = 2 << 20


@dataclass(frozen=True)
class Source:
    """These columns of these rows of a two-dimensional tensor in the files."""

    name: str
    rows: slice
    columns: slice

    @property
    def num_rows(self) -> int:
        return int(self.rows.stop) - int(self.rows.start)


class Matrix:
    """[out, in] in `dtype`: the rows of `sources` one below the other, and `num_zeros` rows of zeros below them."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        sources: Sequence[Source],
        dtype: torch.dtype,
        note: Callable[[int], None],
        num_zeros: int = 0,
    ) -> None:
        """`note` is told how many bytes of `dtype` were read."""
        columns = sources[0].columns
        self.shape = (sum(source.num_rows for source in sources) + num_zeros, int(columns.stop) - int(columns.start))
        self.dtype = dtype
        self.sources = tuple(sources)
        self._checkpoint = checkpoint
        self._note = note

    def read(self) -> torch.Tensor:
        """Whole, read into its own memory."""
        whole = new_tensor(self.shape, self.dtype)
        end = 0
        for source in self.sources:
            start, end = end, end + source.num_rows
            if self._checkpoint.dtype(source.name) == self.dtype:
                self._read(source, source.rows, whole[start:end])
                continue
            for row, piece in self.pieces(source, 1):
                whole[start + row : start + row + len(piece)] = piece
        whole[end:] = 0
        return whole

    def pieces(self, source: Source, multiple: int) -> Iterator[tuple[int, torch.Tensor]]:
        """The rows of `source` in order, a multiple of `multiple` at a time but for the last: (number of the first,
        rows). Each piece is good until the next one is asked for.
        """
        dtype = self._checkpoint.dtype(source.name)
        row_bytes = self.shape[1] * max(dtype.itemsize, self.dtype.itemsize)
        num_rows = max(1, _PIECE_BYTES // max(1, row_bytes * multiple)) * multiple
        memory = torch.empty((min(num_rows, source.num_rows), self.shape[1]), dtype=dtype)
        start = int(source.rows.start)
        for row in range(0, source.num_rows, num_rows):
            count = min(num_rows, source.num_rows - row)
            piece = self._read(source, slice(start + row, start + row + count), memory[:count])
            yield row, piece.to(self.dtype)

    def _read(self, source: Source, rows: slice, into: torch.Tensor) -> torch.Tensor:
        self._note(into.numel() * self.dtype.itemsize)
        if self._checkpoint.shape(source.name)[1] == self.shape[1]:
            return self._checkpoint.read(source.name, rows, into=into)
        return self._checkpoint.read(source.name, source.columns, 1, rows, into)
