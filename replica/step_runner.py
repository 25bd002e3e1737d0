"""ASYNC. The runner as the engine sees it, whatever stands behind: a thread, a process, or ranks on worker actors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from replica.step import RunnerInfo, StepPlan, StepResult


class StepRunner(Protocol):
    """Used from one event loop."""

    #: called when `is_lost` becomes True, in a step or between two
    on_loss: Callable[[], object]

    @property
    def counters(self) -> Mapping[str, float]:
        """What it counts of itself, for `ReplicaLoad.counters`; always the same object."""
        ...

    @property
    def is_lost(self) -> bool:
        """A part of it is gone, and all KV: nothing works before `recover`."""
        ...

    async def start(self) -> RunnerInfo:
        """Load the model. Raises what loading raises."""
        ...

    def execute(self, plan: StepPlan) -> asyncio.Future[StepResult]:
        """Begin a step at once, one at a time. The future raises RanksLostError, or what the runner raised."""
        ...

    async def prepare_grammar(self, grammar: str) -> None:
        """Compile it, beside steps where that is possible. Raises InvalidRequestError."""
        ...

    async def recover(self) -> None:
        """After a loss: make it whole; it then knows no sequence. Raises EngineError if that is not possible."""
        ...

    async def close(self) -> None:
        """Free the device. Idempotent."""
        ...
