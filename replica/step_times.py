"""PURE. Where an engine's time goes, step by step. The shell has the clock and tells it."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

from replica.messages import STEP_SECOND_BOUNDS


class StepTimes(msgspec.Struct):
    """Seconds since the start, and steps by their duration."""

    #: the runner worked
    model_s: float = 0.0
    #: `schedule` and `update`, on the event loop
    scheduler_s: float = 0.0
    #: there was work, and the runner waited for the next step: `scheduler_s` and the ways between threads
    between_s: float = 0.0
    #: by `STEP_SECOND_BOUNDS`
    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(STEP_SECOND_BOUNDS) + 1))

    def add(self, model_s: float, scheduler_s: float, period_s: float) -> None:
        """One step; `period_s` from the end of the step before (or, after a pause, from its own beginning) to its
        end.
        """
        self.model_s += model_s
        self.scheduler_s += scheduler_s
        self.between_s += max(0.0, period_s - model_s)
        self.counts[bisect_left(STEP_SECOND_BOUNDS, model_s)] += 1
