"""PURE. Blocks for one token more, for running sequences that need one; and who makes way where there is none.

With a KVConnector some blocks are not free only because a copy reads or writes them. Those come back in milliseconds,
so nobody is put back for them: who wants one stays out of the step. Whoever was put back would have to be loaded again,
which takes as long, and so would the one after it, since blocks that are being stored do not come free by it.
"""

from __future__ import annotations

from typing import Protocol

from replica.block_manager import BlockManager
from replica.kv_transfer import KVTransfer
from replica.messages import PreemptionCause
from replica.running_set import Decodes, RunningSet
from replica.sequence import Sequence
from replica.step_rules import StepRules


class Preempt(Protocol):
    """The scheduler's."""

    def __call__(self, victim: Sequence, cause: PreemptionCause, now: float, by: Sequence) -> None: ...


class StepGrowth:
    """Of one scheduler; keeps nothing between two steps."""

    def __init__(
        self, blocks: BlockManager, running: RunningSet, transfer: KVTransfer | None, preempt: Preempt
    ) -> None:
        self._blocks = blocks
        self._running = running
        self._transfer = transfer
        self._preempt = preempt

    def grow(
        self, decodes: Decodes, prefills: list[Sequence], num_tokens: int, rules: StepRules, now: float
    ) -> tuple[dict[int, list[int]], list[int]]:
        """One decode in `block_size` needs a block, and with a window a prompt whose blocks others share. Returns what
        each got, and rows of those that wait for a copy to give one back. `num_tokens`: in the step, at most.
        """
        new_blocks: dict[int, list[int]] = {}
        stalled: list[int] = []
        needy = self._running.without_room(decodes)
        if self._blocks.window is not None and prefills:
            short = self._slide(prefills, new_blocks, rules.admission.keep_free)
            needy += short if num_tokens > len(decodes) else []
        for row in needy:
            if not self._running.is_owned(row):
                continue  # preempted for one of the earlier ones
            sequence = self._running.owner(row)
            while (grown := self._blocks.grow(sequence, sequence.num_computed_tokens + 1)) is None:
                if self._transfer is not None:
                    if self._transfer.make_room():
                        continue
                    if self._transfer.frees_soon():
                        self._transfer.counters.stalls += 1
                        stalled.append(row)
                        break
                victim = rules.victims.for_blocks(sequence, self._running)
                new_blocks.pop(victim.seq_id, None)  # it may have been one of the earlier ones
                self._preempt(victim, PreemptionCause.BLOCKS, now, sequence)
                if victim is sequence:
                    break
            else:
                self._running.cover(sequence)
                new_blocks[sequence.seq_id] = grown
        return new_blocks, stalled

    def _slide(self, prefills: list[Sequence], new_blocks: dict[int, list[int]], keep_free: int) -> list[int]:
        """Prompts give back blocks that their window has passed, and take others in front (into `new_blocks`). Returns
        rows of those without room for a token even so.
        """
        short: list[int] = []
        for sequence in prefills:
            if new := self._blocks.slide(sequence, keep_free):
                new_blocks[sequence.seq_id] = new
                self._running.cover(sequence)
            elif not self._blocks.room(sequence):
                short.append(sequence.row)
        return short
