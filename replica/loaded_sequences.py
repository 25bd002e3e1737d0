"""PURE. Running sequences around their load: in no step before it, and made known to the runner after it.

A loaded sequence may go on as a decode, if one token is left; the runner has to hear of it before, and to hear of it
again if the step in which it was told failed.
"""

from __future__ import annotations

from replica.kv_transfer import KVTransfer, is_loading
from replica.progress import SchedulerCounters
from replica.running_set import RunningSet
from replica.sequence import Sequence, Status
from replica.step_budget import StepBudget


class LoadedSequences:
    """Those that the runner does not know yet."""

    def __init__(self, transfer: KVTransfer | None, running: RunningSet, counters: SchedulerCounters) -> None:
        self._transfer = transfer
        self._running = running
        self._counters = counters
        self._untold: list[Sequence] = []
        #: with the step in the runner's hands
        self._told: list[Sequence] = []

    def __contains__(self, sequence: Sequence) -> bool:
        """It is to be told of."""
        return sequence in self._untold

    def ready(self, prefills: list[Sequence], budget: StepBudget) -> list[Sequence]:
        """Those whose blocks are there. The others have their lane, for what will be left of their prompt."""
        if any(sequence.remote is not None for sequence in prefills):
            prefills = [sequence for sequence in prefills if sequence.remote is None]
        if self._transfer is None or not self._transfer.num_loading:
            return prefills
        for sequence in prefills:
            if is_loading(sequence):
                budget.lanes.enter(self._transfer.num_left(sequence), 0)
        return [sequence for sequence in prefills if not is_loading(sequence)]

    def add(self, sequences: list[Sequence]) -> None:
        """Their blocks are filled, or will be computed: they take part in the next step."""
        for sequence in sequences:
            if sequence.num_preemptions == 0:
                found = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
                self._counters.cached_prompt_tokens += max(0, found - sequence.num_cached_tokens)
                sequence.num_cached_tokens = max(found, sequence.num_cached_tokens)
            self.take_in(sequence)

    def take_in(self, sequence: Sequence) -> None:
        """It takes part in the next step."""
        self._running.settle(sequence)
        self._untold.append(sequence)

    def introduce(self, budget: StepBudget, now: float) -> None:
        """Tell the runner of them in the step that is being planned."""
        if self._untold or self._told:
            self._told, self._untold = [s for s in self._untold if s.status is Status.RUNNING], []
            for sequence in self._told:
                if not sequence.known_to_runner:
                    budget.introduce(sequence)
                if (times := sequence.record.hand_over) is not None and times.resumed_at is None:
                    times.resumed_at = now

    def step_failed(self) -> None:
        """The runner may not have read the plan."""
        for sequence in self._told:
            if sequence.status is Status.RUNNING and not sequence.in_step:
                sequence.known_to_runner = False
                self._untold.append(sequence)
        self._told = []
