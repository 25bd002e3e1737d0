"""PURE. The copies between pool and arena as the engine knows them: numbered, told to the runner, over.

A runner carries copies out in the order of their numbers, so one number says through which they are done. A step that
failed may have come before the runner read its plan, so its copies are told once more, with the same numbers: a runner
leaves out what it was told before.
"""

from __future__ import annotations

from collections import deque

import msgspec

from replica.kv_messages import ArenaPlace
from replica.step import StepPlan


class CopyJob:
    """Copies that are over together. `owner` knows what they are for."""

    __slots__ = ("end", "first", "is_load", "owner", "pairs")

    def __init__(self, pairs: list[tuple[int, int]], is_load: bool, owner: object) -> None:
        #: (slot, block id) of a load, (block id, slot) of a store
        self.pairs = pairs
        self.is_load = is_load
        self.owner = owner
        self.first = self.end = -1


class CopyBatch(msgspec.Struct, frozen=True):
    """What one plan tells of copies."""

    first_copy: int
    loads: list[tuple[int, int]]
    stores: list[tuple[int, int]]
    arena: ArenaPlace | None

    def into(self, plan: StepPlan) -> StepPlan:
        """`plan` with them."""
        return msgspec.structs.replace(
            plan,
            loads=self.loads,
            stores=self.stores,
            first_copy=self.first_copy,
            arena=self.arena,
        )


class CopyLine:
    """Knows neither leases nor sequences."""

    def __init__(self) -> None:
        self._unsent: list[CopyJob] = []
        self._sent: deque[CopyJob] = deque()
        #: of the step in the runner's hands
        self._told: CopyBatch | None = None
        #: of a step that failed
        self._again: CopyBatch | None = None
        self._arena: ArenaPlace | None = None
        self._next = 0

    @property
    def is_busy(self) -> bool:
        """Some copies are not over."""
        return bool(self._sent or self._unsent)

    @property
    def num_copies(self) -> int:
        """That are not over."""
        return sum(len(job.pairs) for jobs in (self._sent, self._unsent) for job in jobs)

    def use(self, arena: ArenaPlace) -> None:
        """Of the copies added from now on."""
        assert not self._unsent, "drop_unsent() first"
        self._arena = arena

    def add(self, job: CopyJob) -> None:
        self._unsent.append(job)

    def drop_unsent(self) -> list[CopyJob]:
        """Those that no runner knows of will not be carried out."""
        dropped, self._unsent = self._unsent, []
        self._arena = None
        return dropped

    def take(self) -> CopyBatch | None:
        """What the next plan tells; None: nothing. Copies of a failed step come alone, since they may belong to another
        arena than new ones.
        """
        if self._again is not None:
            self._told, self._again = self._again, None
            return self._told
        if not self._unsent and self._arena is None:
            self._told = None
            return None
        jobs = sorted(self._unsent, key=lambda job: not job.is_load)  # somebody waits for loads
        self._unsent = []
        first = self._next
        for job in jobs:
            job.first, self._next = self._next, self._next + len(job.pairs)
            job.end = self._next
        self._sent += jobs
        loads = [pair for job in jobs if job.is_load for pair in job.pairs]
        stores = [pair for job in jobs if not job.is_load for pair in job.pairs]
        self._told, self._arena = CopyBatch(first, loads, stores, self._arena), None
        return self._told

    def step_failed(self) -> None:
        """Whether the runner has read the last plan is not known."""
        self._again, self._told = self._told or self._again, None

    def progress(self, copied: int, failed_below: int) -> list[tuple[CopyJob, bool]]:
        """Jobs that are over, in order, and whether their bytes are good."""
        over = []
        while self._sent and self._sent[0].end <= copied:
            job = self._sent.popleft()
            over.append((job, job.first >= failed_below))
        return over

    def reset(self) -> list[CopyJob]:
        """The runner has lost everything: returns what was not over."""
        lost = [*self._sent, *self._unsent]
        self._sent.clear()
        self._unsent = []
        self._told = self._again = self._arena = None
        return lost
