"""PURE. When what happened to a sequence whose prompt another replica computes: for `Stages`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replica.sequence import Sequence


class HandOverTimes:
    """Instants of the caller's clock; None: it did not come to that. It has its seat when it is first scheduled."""

    __slots__ = ("continued_at", "first_block_at", "last_block_at", "num_blocks", "resumed_at")

    def __init__(self) -> None:
        #: `Continue` came
        self.continued_at: float | None = None
        #: it was in a step again
        self.resumed_at: float | None = None
        #: blocks of its prompt came before `Continue`: the first and the last of them, as far as that was noticed
        self.first_block_at: float | None = None
        self.last_block_at: float | None = None
        #: leading blocks that were there when somebody looked last
        self.num_blocks: int | None = None

    def look(self, num_blocks: int, now: float) -> None:
        """`num_blocks` leading ones are there."""
        if self.num_blocks is not None and num_blocks > self.num_blocks and self.continued_at is None:
            self.first_block_at = now if self.first_block_at is None else self.first_block_at
            self.last_block_at = now
        self.num_blocks = num_blocks

    def away_s(self, seated_at: float | None, until: float | None) -> float:
        """From its seat to `Continue`."""
        end = until if self.continued_at is None else self.continued_at
        return 0.0 if seated_at is None or end is None else max(0.0, end - seated_at)

    def wait_s(self, until: float | None) -> float:
        """From `Continue` to its next step."""
        end = until if self.resumed_at is None else self.resumed_at
        return 0.0 if self.continued_at is None or end is None else max(0.0, end - self.continued_at)

    @property
    def hidden_s(self) -> float:
        """Of the transfer, the time before `Continue`."""
        if self.first_block_at is None or self.last_block_at is None:
            return 0.0
        return self.last_block_at - self.first_block_at


def look_at_blocks(waiting: Iterable[Sequence], now: float) -> None:
    """Of those that wait with a seat: how many blocks are there."""
    for sequence in waiting:
        remote, times = sequence.remote, sequence.record.hand_over
        if remote is not None and remote.until is not None and times is not None:
            times.look(remote.end, now)
