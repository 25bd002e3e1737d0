"""PURE. Copies between a fake pool and an arena: a share of them at the end of each step, so that what is read too
early is not there, and what is reused too early is overwritten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from replica.kv_messages import NO_ARENA, ArenaPlace
from replica.step import Arena, OpenArena, StepPlan


class FakeCopies:
    """Carries out copies when it is told to, without a thread."""

    def __init__(self, pool: npt.NDArray[np.uint8], rank: int, size: int, open_arena: OpenArena | None) -> None:
        """`pool`: [num_blocks, bytes of a block], of one rank of `size`."""
        self._pool = pool
        self._rank = rank
        part = pool.shape[1]
        self._part = slice(rank * part, (rank + 1) * part)
        self._open_arena = open_arena
        self._place: ArenaPlace | None = None
        self._arena: Arena | None = None
        #: (is a load, source, destination), or another arena
        self._queue: deque[tuple[bool, int, int] | ArenaPlace] = deque()
        self._num_taken = 0
        self.copied = 0
        self.failed_below = 0
        #: hears `copied` and `failed_below`
        self.on_progress: Callable[[int, int], None] = lambda copied, failed_below: None
        #: at most so many copies a step; None: what `seconds` allows
        self.most: int | None = None

    @property
    def is_busy(self) -> bool:
        """Something is still to be copied."""
        return bool(self._queue)

    def take(self, plan: StepPlan) -> None:
        """Those that were taken before are left out."""
        if plan.arena is not None:
            self._queue.append(plan.arena)
        count = len(plan.loads) + len(plan.stores)
        if count and plan.first_copy >= self._num_taken:
            self._num_taken = plan.first_copy + count
            self._queue += [(True, slot, block_id) for slot, block_id in plan.loads]
            self._queue += [(False, block_id, slot) for block_id, slot in plan.stores]

    def run(self, most: int | None) -> int:
        """Carry out at most `most`; returns how many."""
        most = most if self.most is None else self.most
        count = 0
        while self._queue and (isinstance(self._queue[0], ArenaPlace) or most is None or count < most):
            order = self._queue.popleft()
            if isinstance(order, ArenaPlace):
                self._use(order)
                continue
            count += 1
            self.copied = self._num_taken - sum(not isinstance(o, ArenaPlace) for o in self._queue)
            if not self._copy(*order):
                self.failed_below = self.copied
        if count:
            self.on_progress(self.copied, self.failed_below)
        return count

    def begin_anew(self) -> None:
        """Forget what was to be copied."""
        self._queue.clear()

    def close(self) -> None:
        self._queue.clear()
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def _use(self, place: ArenaPlace) -> None:
        if place == self._place and self._arena is not None:
            return
        if self._arena is not None:
            self._arena.close()
        self._place, self._arena = place, None
        if self._open_arena is not None and place != NO_ARENA:
            try:
                self._arena = self._open_arena(place, f"rank {self._rank}")
            except Exception:
                return  # every copy fails, and what was to be loaded is computed

    def _copy(self, is_load: bool, source: int, target: int) -> bool:
        if self._arena is None:
            return False
        slots = self._arena.array
        if is_load:
            self._pool[target] = slots[source, self._part]
        else:
            slots[target, self._part] = self._pool[source]
        return True
