"""ASYNC. Copies between the pool of a rank and the arena of its node, on a thread beside the steps.

They are carried out in the order of their numbers (`replica/copy_line.py`), up to `_AT_ONCE` slabs a call, which
releases the interpreter's lock for its whole length: with another thread busy in Python, slab after slab by numpy waits
for the lock again and again (docs/kv_connector.md has the figures).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from replica.kv_messages import NO_ARENA, ArenaPlace
from replica.native import library as native
from replica.native.builder import NativeUnavailableError
from replica.runner_thread import name_thread
from replica.slab_code import SlabCoder
from replica.step import Arena, OpenArena, StepPlan

logger = logging.getLogger(__name__)

Slabs = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.int64]
#: slabs of one call: 16 of the default model take 2 ms, and progress is told in between
_AT_ONCE = 16


class CopySlabs(Protocol):
    """`target[to] = source[at]`, row by row; the rows are contiguous."""

    def __call__(self, target: Slabs, to: Indices, source: Slabs, at: Indices) -> None: ...


def by_numpy(target: Slabs, to: Indices, source: Slabs, at: Indices) -> None:
    for row, other in zip(to.tolist(), at.tolist(), strict=True):
        target[row] = source[other]


def by_native(library: native.Library, target: Slabs, to: Indices, source: Slabs, at: Indices) -> None:
    library.copy_slabs(
        target.ctypes.data, to.ctypes.data, target.strides[0], source.ctypes.data, at.ctypes.data, source.strides[0],
        target.shape[1], len(to),
    )  # fmt: skip


def best_copy() -> CopySlabs:
    """One call for many slabs, where the kernels can be had."""
    try:
        library = native.load()
    except NativeUnavailableError:
        return by_numpy
    return lambda target, to, source, at: by_native(library, target, to, source, at)


class BlockCopier:
    """Of one rank. All methods may be called from any thread; `on_progress(copied, failed_below)` is called on the
    copier's own.
    """

    def __init__(
        self,
        pool: Slabs,
        rank: int,
        open_arena: OpenArena,
        copy: CopySlabs,
        on_progress: Callable[[int, int], None] = lambda copied, failed_below: None,
        coder: SlabCoder | None = None,
    ) -> None:
        """`pool`: [num_blocks, bytes of a block of this rank]: the same bytes of a slot are this rank's, or as many as
        `coder` makes of them.
        """
        self._pool, self._coder = pool, coder
        part = self.part_bytes = pool.shape[1] if coder is None else coder.coded_bytes
        self._part = slice(rank * part, (rank + 1) * part)
        self._member = f"rank {rank}"
        self._open_arena, self._copy, self.on_progress = open_arena, copy, on_progress
        self._changed = threading.Condition()
        #: (number behind the last, is a load, sources, targets), or another arena
        self._queue: deque[tuple[int, bool, Indices, Indices] | ArenaPlace] = deque()
        self._is_working = self._is_closed = False
        self._num_taken = 0
        self._copied = self._failed_below = 0
        self._copy_s = 0.0
        self._place: ArenaPlace | None = None
        self._arena: Arena | None = None
        self._thread: threading.Thread | None = None

    def take(self, plan: StepPlan) -> None:
        """What `plan` says of copies; those that were taken before are left out."""
        with self._changed:
            if plan.arena is not None:
                self._queue.append(plan.arena)
            count = len(plan.loads) + len(plan.stores)
            if count and plan.first_copy >= self._num_taken:
                self._add(plan.first_copy, True, plan.loads)
                self._add(plan.first_copy + len(plan.loads), False, plan.stores)
                self._num_taken = plan.first_copy + count
            if not self._queue:
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="shoal-copies", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Until everything taken is copied, or so long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queue and not self._is_working, timeout_s)

    def progress(self) -> tuple[int, int, float]:
        """Copies below the first number are over, some below the second one failed; seconds of copies since the last
        call.
        """
        with self._changed:
            seconds, self._copy_s = self._copy_s, 0.0
            return self._copied, self._failed_below, seconds

    def begin_anew(self) -> None:
        """Forget what was to be copied; when this returns nothing is read or written any more."""
        with self._changed:
            self._queue.clear()
            self._changed.wait_for(lambda: not self._is_working)

    def close(self) -> None:
        """End the thread and unmap. Idempotent."""
        with self._changed:
            self._queue.clear()
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._unmap()

    def _add(self, first: int, is_load: bool, pairs: list[tuple[int, int]]) -> None:
        for start in range(0, len(pairs), _AT_ONCE):
            some = np.array(pairs[start : start + _AT_ONCE], np.int64)
            order = (first + start + len(some), is_load, some[:, 0].copy(), some[:, 1].copy())
            self._queue.append(order)

    def _work(self) -> None:
        name_thread(b"shoal-copies")
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closed)
                if self._is_closed:
                    return
                order = self._queue.popleft()
                self._is_working = True
            began = time.perf_counter()
            is_good = True
            if isinstance(order, ArenaPlace):
                self._use(order)
            else:
                is_good = self._carry_out(*order[1:])
            with self._changed:
                self._is_working = False
                if not isinstance(order, ArenaPlace):
                    self._copy_s += time.perf_counter() - began
                    self._copied = order[0]
                    if not is_good:
                        self._failed_below = order[0]
                    self.on_progress(self._copied, self._failed_below)
                self._changed.notify_all()

    def _carry_out(self, is_load: bool, sources: Indices, targets: Indices) -> bool:
        if self._arena is None:
            return False
        arena = self._arena.array[:, self._part]
        target, source = (self._pool, arena) if is_load else (arena, self._pool)
        if min(sources.min(), targets.min()) < 0 or sources.max() >= len(source) or targets.max() >= len(target):
            logger.error("copies to %s from %s do not fit: %d, %d", targets, sources, len(target), len(source))
            return False
        copy = self._copy if self._coder is None else self._coder.decode if is_load else self._coder.encode
        copy(target, targets, source, sources)
        return True

    def _use(self, place: ArenaPlace) -> None:
        if place == self._place and self._arena is not None:
            return
        self._unmap()
        self._place = place
        if place == NO_ARENA:
            return
        try:
            arena = self._open_arena(place, self._member)
        except Exception as error:  # every copy fails then, and what was to be loaded is computed
            logger.warning("%s: the arena of the KV connector cannot be mapped: %s", self._member, error)
            return
        if arena.array.shape[1] < self._part.stop:
            logger.warning("%s: slots of %d bytes hold no block", self._member, arena.array.shape[1])
            arena.close()
            return
        self._arena = arena

    def _unmap(self) -> None:
        if self._arena is not None:
            self._arena.close()
            self._arena = None
