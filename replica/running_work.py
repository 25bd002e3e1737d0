"""PURE. What those who run do in a step: decodes first, with blocks for them, then pieces of prompts.

**Whose prompt is first.** Among tenants that share a replica, prompts get the tokens of a step in the order of what
their tenants got (`replica/tenant_ledger.py`). And a step may be a *guest's*: if the tenant of the one whose turn it is
to join has half of its credit left over others (the hosts), it joins before the hosts' prompts, and those take no part
in this step. Prompts of 20 to 60 tokens beside a tenant that floods with prompts of 500 to 2,000, virtual time, TTFT
p50: 54 instead of 181 ms (17 alone), and on the default model's two cores 188 instead of 458 (38 alone). Of two steps
that follow each other one at most is a guest's, so hosts' prompts get on. Decodes are in every step: to leave out those
of the hosts as well takes 2 of 27 ms from the guest's TTFT, and makes streams wait for prompts.
"""

from __future__ import annotations

import copy

import numpy as np

from replica.block_manager import BlockManager
from replica.kv_transfer import KVTransfer
from replica.loaded_sequences import LoadedSequences
from replica.progress import SchedulerCounters
from replica.running_set import Decodes, RunningSet
from replica.sequence import Sequence, Status
from replica.step_budget import StepBudget
from replica.step_growth import Preempt, StepGrowth
from replica.step_pace import StepPace
from replica.step_rules import StepRules
from replica.tenant_ledger import TenantLedger
from replica.waiting_queue import WaitingQueue


class RunningWork:
    """Of one scheduler: first `plan_decodes`, then `plan_prompts`."""

    def __init__(
        self,
        blocks: BlockManager,
        queued: WaitingQueue,
        returning: WaitingQueue,
        running: RunningSet,
        ledger: TenantLedger,
        counters: SchedulerCounters,
        transfer: KVTransfer | None,
        loaded: LoadedSequences,
        pace: StepPace,
        preempt: Preempt,
    ) -> None:
        self._blocks = blocks
        self._queued = queued
        self._returning = returning
        self._running = running
        self._ledger = ledger
        self._counters = counters
        self._loaded = loaded
        self._pace = pace
        self._growth = StepGrowth(blocks, running, transfer, preempt)
        #: in the middle of their prompt, in the step that is being planned
        self._prefills: list[Sequence] = []
        self._was_guests = False

    def plan_decodes(self, budget: StepBudget, rules: StepRules, now: float) -> tuple[Decodes, bool]:
        """Who lacks one token. Returns them, and whether somebody waits for copies to free a block."""
        everyone, prefills = self._running.split()
        self._prefills = prefills = self._loaded.ready(prefills, budget)
        decodes = everyone.first(budget.tokens_left)
        num_preemptions = self._counters.preemptions
        new_blocks, stalled = self._growth.grow(decodes, prefills, budget.tokens_left, rules, now)
        budget.tell_blocks(new_blocks)
        if self._counters.preemptions != num_preemptions:
            decodes = self._running.still(decodes)
            self._prefills = [s for s in prefills if s.status is Status.RUNNING]
        self._loaded.introduce(budget, now)
        if stalled:
            decodes = decodes.only(~np.isin(decodes.rows, stalled))
        if decodes:
            budget.spend_decodes(decodes.seq_ids, self._running.num_computed[decodes.rows].tolist())
            budget.limit(self._pace.limit(len(decodes), budget.tokens_left))
        return decodes, bool(stalled)

    def plan_prompts(self, budget: StepBudget, rules: StepRules, may_admit: bool, now: float) -> bool:
        """Pieces of running prompts. True if it is a guest's step, in which nobody else joins."""
        prefills, self._prefills = self._prefills, []
        if budget.lanes.has_long_lane and self._has_short_prompt(prefills, rules):
            budget.lanes.share(budget.tokens_left)
        if prefills and len(self._running.tenants) > 1:
            self._ledger.settle(self._running)
            prefills.sort(key=lambda sequence: self._ledger.counter(sequence.tenant))
        hosts = self._hosts(budget, rules) if may_admit and not self._was_guests else frozenset()
        self._was_guests = bool(hosts) and self._admit_guests(hosts, prefills, budget, rules, now)
        for sequence in prefills:
            if not (self._was_guests and sequence.tenant in hosts):
                self._spend(sequence, budget, rules)
        return self._was_guests

    def _spend(self, sequence: Sequence, budget: StepBudget, rules: StepRules) -> None:
        if not rules.config.enable_chunked_prefill and not budget.has_prefill:
            # it began while prompts were cut: as one that begins now, the first of a step gets all it wants
            budget.allow_whole(sequence.num_uncomputed_tokens)
        budget.spend_prompt(sequence, self._blocks.room(sequence))

    def _hosts(self, budget: StepBudget, rules: StepRules) -> frozenset[str]:
        """Tenants whose prompts would wait for the one whose turn it is to join, if that may be."""
        running, queued = self._running, self._queued
        has_place = queued and len(running) < rules.config.max_num_seqs and budget.tokens_left
        if not has_place or (len(running.tenants) == 1 and running.tenants.keys() == queued.tenants.keys()):
            return frozenset()
        self._ledger.put_in_order(queued, running)
        guest = rules.admission.first()
        if guest is None or guest.status is not Status.QUEUED:
            return frozenset()
        self._ledger.settle(running)
        return self._ledger.hosts(guest.tenant, running.tenants)

    def _admit_guests(
        self, hosts: frozenset[str], prefills: list[Sequence], budget: StepBudget, rules: StepRules, now: float
    ) -> bool:
        """False: nobody could join, and nothing has changed."""
        lanes, num_running = budget.lanes, len(self._running)
        if not lanes.is_open:
            budget.lanes = copy.copy(lanes)
            for sequence in prefills:
                if sequence.tenant in hosts:
                    budget.lanes.enter(sequence.num_uncomputed_tokens, 0)
        rules.admission.admit(budget, now, hosts)
        if len(self._running) > num_running:
            return True
        budget.lanes = lanes
        return False

    def _has_short_prompt(self, prefills: list[Sequence], rules: StepRules) -> bool:
        """Some prompt that is not long wants tokens; waiting ones are judged by their length."""
        threshold = rules.config.long_prefill_token_threshold
        return any(s.num_uncomputed_tokens <= threshold for s in prefills) or any(
            s.num_tokens <= threshold for queue in (self._returning, self._queued) for s in queue
        )
