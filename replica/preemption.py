"""PURE. Who is put back, how often, and what becomes of its KV.

Three causes. A running sequence cannot get its next block: somebody that runs goes, perhaps that sequence itself. Or
(under a policy with classes) a waiting sequence is strictly more urgent than one that runs and finds no place: the less
urgent ones go, if that helps. Or one whose turn it is finds no place, and its tenant has less than its share of the
places: some of a tenant that has more go (`replica/seat_shares.py`), if that helps.

The victim of the first cause:
- `preemption_victim: policy`: under `fcfs` the one admitted last, else the one with the largest key.
- `cost`: the one with the fewest tokens to compute again. Blocks that others hold as well will be found in the prefix
  cache; the rest counts as lost, since the pool is full and what is freed is what is taken. One that outranks the
  sequence in need is left alone. So is one that has at most a block to go, whose blocks come back by themselves, and
  one that shares all of its blocks, which would give nothing.
One whose blocks are being loaded is left alone: they are its own soon, and nobody's now.
Whoever was preempted `max_preemptions` times is protected from all causes. Last resort, if all are protected: the
policy's victim as if nobody were, so the first in the policy's order always gets to its end.

What becomes of its KV (`preemption_mode`): `recompute` gives it up, though what nobody takes is found again; `offload`
has the KVConnector keep what is computed, and loads it again; `auto` does what takes less time by what was measured of
copies and of prompts. Without a connector all three recompute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from replica.block_manager import BlockManager
from replica.config import SchedulerConfig
from replica.kv_transfer import KVTransfer, is_loading
from replica.order import OrderPolicy, outranks
from replica.running_set import RunningSet
from replica.seat_shares import SeatShares
from replica.sequence import Sequence


class TakeBack(Protocol):
    """What becomes of the KV of a preempted sequence."""

    def __call__(self, sequence: Sequence, now: float) -> None: ...


def take_back_by(mode: str, blocks: BlockManager, transfer: KVTransfer | None) -> TakeBack:
    """The strategy that `preemption_mode` names."""

    def recompute(sequence: Sequence, now: float) -> None:
        blocks.free(sequence)  # full blocks stay findable until they are taken; the rest is computed again

    def offload(sequence: Sequence, now: float) -> None:
        if transfer is not None and (mode == "offload" or keeps(sequence, blocks, transfer)):
            transfer.keep(sequence, now)
        blocks.free(sequence)

    return recompute if mode == "recompute" or transfer is None else offload


def keeps(sequence: Sequence, blocks: BlockManager, transfer: KVTransfer) -> bool:
    """`auto`: to keep and load it takes less time than to compute it again. While one of them was not measured, it is
    kept: a copy is cheap, and is measured by it.
    """
    times = transfer.times(sequence, blocks.num_shared_tokens(sequence))
    return times is None or times[0] < times[1]


class VictimChoice:
    """Looks at the running sequences and names who goes; takes nothing from anybody."""

    def __init__(self, config: SchedulerConfig, policy: OrderPolicy, blocks: BlockManager) -> None:
        self._policy = policy
        self._blocks = blocks
        self._max_preemptions = config.max_preemptions
        self._by_cost = config.preemption_victim == "cost"
        self._by_key = config.policy != "fcfs"

    def for_blocks(self, needy: Sequence, running: RunningSet) -> Sequence:
        """Who goes so that `needy`, which runs, may grow. It may be itself."""
        if self._by_cost and (victim := self._cheapest(needy, running)) is not None:
            return victim
        victim = self._last(running, self._may_go)
        return victim if victim is not None else self._last(running, lambda s: not is_loading(s)) or needy

    def for_urgent(self, urgent: Sequence, running: RunningSet, max_num_seqs: int, keep_free: int) -> list[Sequence]:
        """Who goes so that `urgent`, which waits, may run: the fewest, least urgent first. Nobody, if it fits anyway or
        would not fit even then.
        """
        if not self._policy.has_classes or running.max_priority <= urgent.order_key[1]:
            return []
        last_first = sorted(running, key=lambda s: s.queue_key, reverse=True)
        lesser = (s for s in last_first if outranks(self._policy, urgent.standing, s.standing))
        return self._fewest(urgent, lesser, len(running), max_num_seqs, keep_free)

    def for_share(self, waiting: Sequence, running: RunningSet, max_num_seqs: int, keep_free: int) -> list[Sequence]:
        """Who goes so that `waiting`, whose turn it is, may run: others' beyond their share. Nobody, if it fits anyway
        or would not fit even then. Nobody who outranks it goes.
        """
        givers = SeatShares(running).givers(waiting)
        lesser = (s for s in givers if not outranks(self._policy, s.standing, waiting.standing))
        return self._fewest(waiting, lesser, len(running), max_num_seqs, keep_free)

    def _fewest(
        self, newcomer: Sequence, lesser: Iterable[Sequence], num_running: int, max_num_seqs: int, keep_free: int
    ) -> list[Sequence]:
        """The first of `lesser` that together make a place for `newcomer`."""
        if num_running > max_num_seqs:
            return []  # it was lowered while they ran: nobody is put back for that, and nobody joins until enough ended
        missing = self._blocks.num_missing(newcomer, keep_free)
        if missing <= 0 and num_running < max_num_seqs:
            return []
        victims: list[Sequence] = []
        for sequence in lesser:
            if self._may_go(sequence):
                victims.append(sequence)
                missing -= self._blocks.num_held_alone(sequence)
                if missing <= 0:
                    return victims
        return []

    def _may_go(self, sequence: Sequence) -> bool:
        return sequence.num_preemptions < self._max_preemptions and not is_loading(sequence)

    def _last(self, running: RunningSet, may_go: Callable[[Sequence], bool]) -> Sequence | None:
        """The last in the policy's order among those who may go."""
        if self._by_key:
            return max(filter(may_go, running), key=lambda s: s.queue_key, default=None)
        return next(filter(may_go, reversed(running)), None)

    def _cheapest(self, needy: Sequence, running: RunningSet) -> Sequence | None:
        candidates = [
            sequence
            for sequence in running
            if self._may_go(sequence)
            and not outranks(self._policy, sequence.standing, needy.standing)
            and sequence.max_total_tokens - sequence.num_tokens > self._blocks.block_size
            and (sequence is needy or self._blocks.num_held_alone(sequence))
        ]
        # of equals the one admitted last
        return min(reversed(candidates), key=self._rework, default=None)

    def _rework(self, sequence: Sequence) -> int:
        return max(0, sequence.num_computed_tokens - self._blocks.num_shared_tokens(sequence))
