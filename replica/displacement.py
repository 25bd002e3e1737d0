"""PURE. Before a step: whose turn it is may take the place of less urgent ones that run, or of a tenant's that has more
than its share (`replica/preemption.py` says who goes). For one newcomer a step and rule.
"""

from __future__ import annotations

from replica.block_manager import BlockManager
from replica.kv_transfer import KVTransfer
from replica.messages import PreemptionCause
from replica.progress import SchedulerCounters
from replica.running_set import RunningSet
from replica.sequence import Sequence, Status
from replica.step_growth import Preempt
from replica.step_rules import StepRules
from replica.tenant_ledger import TenantLedger
from replica.waiting_queue import WaitingQueue


class Displacement:
    """Of one scheduler; keeps nothing between two steps."""

    def __init__(
        self,
        blocks: BlockManager,
        queued: WaitingQueue,
        running: RunningSet,
        ledger: TenantLedger,
        counters: SchedulerCounters,
        transfer: KVTransfer | None,
        preempt: Preempt,
    ) -> None:
        self._blocks = blocks
        self._queued = queued
        self._running = running
        self._ledger = ledger
        self._counters = counters
        self._transfer = transfer
        self._preempt = preempt

    def make_way(self, rules: StepRules, now: float) -> None:
        """Put back whoever has to go for those whose turn it is."""
        running, victims = self._running, rules.victims
        max_num_seqs, keep_free = rules.config.max_num_seqs, rules.admission.keep_free
        if self._transfer is not None:
            keep_free -= self._transfer.num_freeing  # some made way already, and their blocks are being stored
        if rules.policy.has_classes and running and (urgent := rules.admission.first()) is not None:
            self._replace(urgent, victims.for_urgent(urgent, running, max_num_seqs, keep_free), rules, now)
        if running and self._queued and rules.seats.is_uneven(self._ledger.weights(self._queued)):
            self._ledger.put_in_order(self._queued, running)
            if (head := rules.admission.first()) is not None and head.status is Status.QUEUED:
                self._replace(head, victims.for_share(head, running, max_num_seqs, keep_free), rules, now)

    def _replace(self, newcomer: Sequence, victims: list[Sequence], rules: StepRules, now: float) -> None:
        if victims and self._has_lane(newcomer, victims, rules):
            for victim in victims:
                self._preempt(victim, PreemptionCause.DISPLACED, now, newcomer)
            self._counters.displaced += len(victims)

    def _has_lane(self, newcomer: Sequence, leaving: list[Sequence], rules: StepRules) -> bool:
        """Without one nobody need leave: `newcomer` could not begin."""
        lanes = rules.lanes()
        if not lanes.is_open:
            for sequence in self._running.split()[1]:
                if sequence not in leaving:
                    lanes.enter(sequence.num_uncomputed_tokens, 0)
        num_uncached = newcomer.num_tokens - self._blocks.num_hit_tokens(newcomer)
        return lanes.is_open or lanes.has_place(num_uncached, rules.max_batched)
