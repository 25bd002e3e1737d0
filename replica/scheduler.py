"""PURE. Picks the tokens of each step: continuous batching, chunked prefill, preemption.

One step, in order (vLLM's v1 model with deliberate changes, marked *):
1. Under a policy with classes, whose turn it is may take the place of less urgent running sequences*
   (`replica/displacement.py`); one such sequence a step.
2. Running sequences that lack one token (decodes) first*, then running sequences in the middle of their prompt, by
   tenants' turns (`replica/running_work.py`)*. A chunk can so never take the budget from a stream that is already
   talking.
3. A running sequence that cannot get a block preempts one, which may be itself.
4. If nothing was preempted for blocks: waiting sequences in the order of their turn (`replica/step_admission.py`).
   Admission reserves blocks for all known tokens*, so only decode growth can fail later; the watermark applies only
   while something runs.
5. Tokens that are left over go to guesses of what running sequences say next (`replica/speculation.py`)*.
6. Nobody is put back for a block that a copy from or to the KVConnector gives back in a moment: who wants one stays out
   of the step. Who is being loaded is in no step either (`replica/kv_transfer.py`)*.
7. A preempted sequence waits as *returning*, before anything fresh that does not outrank it, and at its old place*.

`schedule` and `update` alternate; between them the runner works, and `add`, `abort` and `configure` may be called at
any time.
"""

from __future__ import annotations

from bisect import bisect_left

from replica.accounts import MAX_ACCOUNTS, EndedSequences, Queue, account, oldest
from replica.block_manager import BlockManager
from replica.config import SchedulerConfig
from replica.displacement import Displacement
from replica.hand_over_times import look_at_blocks
from replica.kv_transfer import KVTransfer, is_loading
from replica.loaded_sequences import LoadedSequences
from replica.messages import (
    STEP_SEQUENCE_BOUNDS,
    STEP_TOKEN_BOUNDS,
    FinishReason,
    PreemptionCause,
    RequestId,
    SequenceAccount,
    WaitCause,
)
from replica.order import OrderPolicy, QueueKey
from replica.progress import Progress, SchedulerCounters, StepProgress
from replica.remote_prefill import RemotePrefills, is_away
from replica.running_set import RunningSet
from replica.running_work import RunningWork
from replica.sequence import Sequence, Status
from replica.speculation import Drafter
from replica.step import StepPlan, StepResult
from replica.step_admission import note_no_room
from replica.step_budget import StepBudget
from replica.step_intake import InStep, StepIntake
from replica.step_pace import StepPace
from replica.step_rules import StepRules
from replica.tenant_ledger import TenantLedger
from replica.waiting_queue import WaitClock, WaitingQueue


class Scheduler:
    """The only one that moves a sequence between queued, returning, running and finished. Knows neither clock nor
    device.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        eos_token_ids: tuple[int, ...],
        transfer: KVTransfer | None = None,
    ) -> None:
        self._blocks = blocks
        self._transfer = transfer
        self.queued = WaitingQueue()
        self.returning = WaitingQueue()
        #: waiting sequences that may not run yet: their grammar is being compiled, or the KVConnector was asked
        self.blocked = WaitingQueue()
        window = None if blocks.window is None else blocks.window.size
        self.running = RunningSet(blocks.block_size, blocks.is_caching, window)
        self.ledger = TenantLedger()
        self._wait_clock = WaitClock()
        self.counters = SchedulerCounters()
        self._loaded = LoadedSequences(transfer, self.running, self.counters)
        #: whose prompt another replica computes
        self.remote = RemotePrefills(blocks, self.running, self._loaded)
        self._rules = self._make_rules(config)
        #: more than this may not run: `max_num_seqs`, or those who ran already when it was lowered
        self._most_running = config.max_num_seqs
        self.ended = EndedSequences()
        self._dropped: list[int] = []
        #: of the step in the runner's hands
        self._told_dropped: list[int] = []
        self._in_step: InStep | None = None
        #: when `schedule` was called last
        self._planned_at: float | None = None
        self.pace = StepPace(config.tpot_target_ms / 1000)
        if transfer is not None:
            transfer.serve(self.remote, self._token_s)
        self._displacement = Displacement(
            blocks, self.queued, self.running, self.ledger, self.counters, transfer, self.preempt
        )
        self._work = RunningWork(
            blocks,
            self.queued,
            self.returning,
            self.running,
            self.ledger,
            self.counters,
            transfer,
            self._loaded,
            self.pace,
            self.preempt,
        )
        self._intake = StepIntake(blocks, self.running, self.counters, eos_token_ids, self._finish)

    @property
    def policy(self) -> OrderPolicy:
        return self._rules.policy

    @property
    def max_num_seqs(self) -> int:
        return self._rules.config.max_num_seqs

    @property
    def prompt_token_limit(self) -> int:
        """Tokens that prompts, and guesses, could have in the last step that was asked for."""
        limit = self.pace.prompt_tokens
        return self._rules.max_batched if limit is None else min(limit, self._rules.max_batched)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.returning or self.queued)

    @property
    def num_queued(self) -> int:
        """Accepted and never scheduled: what the cap bounds."""
        return len(self.queued) + self.blocked.num_fresh

    @property
    def num_waiting(self) -> int:
        """Queued and returning, blocked ones included."""
        return len(self.queued) + len(self.returning) + len(self.blocked)

    def oldest_wait_s(self, now: float) -> float:
        """Of the one that waits longest; 0: nobody waits."""
        since = self._wait_clock.oldest()
        return 0.0 if since is None else max(0.0, now - since)

    @property
    def has_news_for_runner(self) -> bool:
        """True if the runner still holds sequences that are gone."""
        return bool(self._dropped)

    def add(self, sequence: Sequence, is_blocked: bool = False) -> None:
        """Take a fresh (queued) or resumed (returning) sequence. A blocked one waits for `unblock` first."""
        sequence.queue_key = self._key(sequence)
        if is_blocked:
            self.blocked.push(sequence)
        else:
            self._join_queue(sequence)
        self._wait_clock.begin(sequence, self.num_waiting)

    def unblock(self, sequence: Sequence) -> None:
        """It may run now; its place is the one its order key gives it."""
        self.blocked.remove(sequence)
        self._join_queue(sequence)

    def go_on(self, sequence: Sequence, token_ids: list[int], now: float) -> None:
        """Its router has the word of who computed its prompt: these tokens, or none."""
        queue = self.blocked if self.blocked.holds(sequence) else self._queue_of(sequence)
        if (times := sequence.record.hand_over) is not None:
            look_at_blocks([sequence], now)
            times.continued_at = now
        if sequence.status is Status.RUNNING:
            self.remote.go_on(sequence, token_ids, now)
            return
        queue.remove(sequence)
        self.remote.go_on(sequence, token_ids, now)
        queue.push(sequence)

    def answered(self, sequences: list[Sequence]) -> None:
        """The KVConnector's word has come, or will not: they wait for their turn again, where they were."""
        for sequence in sequences:
            if self.blocked.holds(sequence):
                self.blocked.remove(sequence)
                self._queue_of(sequence).push(sequence)

    def configure(self, config: SchedulerConfig) -> None:
        """Another configuration from the next `schedule` on, whatever the runner is doing. `config` is resolved.

        Nobody is ended or put back for it: above a lowered `max_num_seqs` nobody is admitted until enough have ended. A
        prompt that is computed in part goes on by the new rules. A new order holds for all who wait and run.
        """
        old, rules = self._rules, self._make_rules(config)
        self._rules = rules
        self._most_running = max(config.max_num_seqs, len(self.running))
        self.pace.target_s = config.tpot_target_ms / 1000
        if not rules.orders_like(old):
            for sequence in self.running:
                sequence.queue_key = self._key(sequence)
            for queue in (self.queued, self.returning, self.blocked):
                queue.sort_by(self._key)
        if config.speculative_ngram != old.config.speculative_ngram:
            for sequence in self.living():
                if sequence.drafter is not None:  # it looks things up by the old length; its guess may be in the step
                    sequence.drafter = Drafter()

    def abort(self, sequence: Sequence, reason: FinishReason, now: float) -> bool:
        """End `sequence`. True if it is over now; False if the runner works on it, so that its blocks are freed by
        `update`.
        """
        if sequence.status is Status.FINISHED:
            return True
        if sequence.in_step:
            # A drain must not announce as moved what its router gave up, before or after: nobody is left to be told.
            if sequence.abort_reason is not FinishReason.ABORT:
                sequence.abort_reason = reason
            if sequence.record.end_asked_at is None:
                sequence.record.end_asked_at = now
            self.running.settle(sequence)
            return False
        self._finish(sequence, reason, now)
        return True

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing to compute and nothing to tell the runner."""
        assert not self._in_step, "update() the last step first"
        rules, self._planned_at = self._rules, now
        if self.remote:
            look_at_blocks(self.remote.waiting, now)
        self._most_running = max(rules.config.max_num_seqs, min(self._most_running, len(self.running)))
        budget = StepBudget(rules.max_batched, rules.lanes())
        self._displacement.make_way(rules, now)
        num_preemptions, transfer = self.counters.preemptions, self._transfer
        decodes, has_stalled = self._work.plan_decodes(budget, rules, now)
        may_admit = self.counters.preemptions == num_preemptions and not has_stalled
        is_guests = self._work.plan_prompts(budget, rules, may_admit, now)
        if may_admit:
            if not is_guests:
                rules.admission.admit(budget, now)
            rules.speculation.draft(decodes, budget, rules.admission.keep_free)
        elif (head := rules.admission.first()) is not None:
            note_no_room(head, WaitCause.BLOCKS, now)
        members = InStep(decodes, budget.chunks)
        copies = None
        if transfer is not None:
            transfer.plan_stores(now)
            copies = transfer.take_copies()
        is_copying = transfer is not None and transfer.is_copying
        if not members and not self._dropped and copies is None and not is_copying:
            return None
        plan = budget.plan(self.counters.steps, self._dropped, copies, is_copying and not members)
        self._dropped, self._told_dropped = [], self._dropped
        self._in_step = members
        self.running.in_step[members.rows] = True
        self.counters.steps += 1
        if num_tokens := plan.num_tokens:
            self.counters.scheduled_tokens += num_tokens
            self.counters.step_token_counts[bisect_left(STEP_TOKEN_BOUNDS, num_tokens)] += 1
            self.counters.scheduled_sequences += len(members)
            self.counters.step_sequence_counts[bisect_left(STEP_SEQUENCE_BOUNDS, len(members))] += 1
        return plan

    def update(self, plan: StepPlan, result: StepResult, now: float) -> StepProgress:
        """Take in what the runner computed for `plan`: who got a token or ended."""
        members, self._in_step = self._in_step, None
        assert members is not None, "schedule() a step first"
        num_decodes = len(members.decodes)
        if not plan.waits_for_copies:
            self.pace.learn(num_decodes, plan.num_tokens - num_decodes, result.duration_s)
        progress = self._intake.take(members, plan, result, now)
        if self._transfer is not None:
            self._loaded.add(self._transfer.progress(result))
        return progress

    def fail_step(self, now: float) -> list[Progress]:
        """The runner raised: end every sequence of the step with ERROR. Their KV is not trusted, so nothing of it is
        registered.
        """
        members, self._in_step = self._in_step, None
        if self._transfer is not None:
            self._transfer.step_failed()
        self._loaded.step_failed()
        # perhaps the runner failed before it had read them; to forget somebody twice does no harm
        self._dropped, self._told_dropped = self._told_dropped + self._dropped, []
        progress = []
        for row in [] if members is None else members.rows.tolist():
            sequence = self.running.owner(row)
            reason = sequence.abort_reason or FinishReason.ERROR
            self._finish(sequence, reason, now)
            progress.append(Progress(sequence, [], reason))
        return progress

    def living(self) -> list[Sequence]:
        """Every unfinished sequence, each exactly once."""
        return [*self.running, *self.returning, *self.queued, *self.blocked]

    def explain(self, request_id: RequestId, limit: int, now: float) -> list[SequenceAccount]:
        """Accounts of a request, living or lately ended; with an empty id, of the `limit` requests that have been here
        longest.
        """
        living = self.living()
        if request_id:
            living, limit = [s for s in living if s.request_id == request_id], MAX_ACCOUNTS
        queue = Queue(self._rules.admission.in_turn(), self._planned_at)
        accounts = [account(s, self._blocks.num_needed(s), now, queue) for s in oldest(living, limit)]
        return accounts + (self.ended.of(request_id) if request_id else [])

    def invalidate(self, sequence: Sequence, message: str, now: float) -> Progress:
        """End a sequence that cannot go on as it was asked for, here or elsewhere; `message` is for the client."""
        return self._intake.invalidate(sequence, message, now)

    def validate(self) -> None:
        """Check queues against states. Raises AssertionError."""
        everyone = self.living()
        assert len({s.seq_id for s in everyone}) == len(everyone), "a sequence is in two queues"
        assert len(self.running) <= self._most_running, "more running than max_num_seqs, or than when it was lowered"
        for queue, status in (
            (self.running, {Status.RUNNING}),
            (self.returning, {Status.RETURNING}),
            (self.queued, {Status.QUEUED}),
            (self.blocked, {Status.QUEUED, Status.RETURNING}),
        ):
            for sequence in queue:
                assert sequence.status in status, f"{sequence} is in the wrong queue"
                assert sequence.num_computed_tokens <= sequence.num_tokens, f"{sequence} computed more than it knows"
                assert bool(sequence.block_ids) == (sequence.status is Status.RUNNING), (
                    f"{sequence} holds blocks in the wrong state"
                )
        for waiting in (self.returning, self.queued, self.blocked):
            waiting.validate()
        self.running.validate()
        assert all(s.known_to_runner or is_loading(s) or is_away(s) or s in self._loaded for s in self.running), (
            "the runner does not know somebody who runs"
        )
        members = [] if self._in_step is None else self._in_step.rows.tolist()
        assert {s.row for s in self.running if s.in_step} == set(members), "who is in the step is not clear"
        self._blocks.validate(everyone)
        self.remote.validate()
        if self._transfer is not None:
            self._transfer.validate()

    def _token_s(self) -> float:
        """Seconds of a prompt token when the whole step is for one prompt; 0: not measured."""
        base_s, _, token_s = self.pace.line
        return token_s + base_s / self._rules.max_chunk_tokens if token_s else 0.0

    def preempt(self, victim: Sequence, cause: PreemptionCause, now: float, by: Sequence) -> None:
        """Take the blocks of a running sequence that is in no step, for `by`; it waits as returning, where it was."""
        assert not victim.in_step, f"{victim} is already part of the step"
        self.running.remove(victim)
        victim.record.put_back(cause, victim.num_computed_tokens, by.request_id, now)
        victim.num_tokens_at_preemption = max(victim.num_tokens_at_preemption, victim.num_computed_tokens)
        if self._transfer is not None:
            self._transfer.ended(victim)
        self.remote.put_back(victim)
        self._rules.take_back(victim, now)
        self._forget_at_runner(victim)
        victim.num_preemptions += 1
        self.counters.preemptions += 1
        victim.status = Status.RETURNING
        victim.queue_key = self._key(victim)
        self.returning.push(victim)
        self._wait_clock.begin(victim, self.num_waiting)

    def _make_rules(self, config: SchedulerConfig) -> StepRules:
        queues = (self.returning, self.queued, self.running)
        rules = StepRules(
            config, self._blocks, *queues, self.counters, self.ledger, self.blocked, self._transfer, self.remote
        )
        self._blocks.limit_chunk(rules.max_chunk)
        return rules

    def _key(self, sequence: Sequence) -> QueueKey:
        work = 0
        if self.policy.needs_work:
            work = sequence.max_total_tokens - self._blocks.num_hit_tokens(sequence)
        return self.policy.key(sequence.order_key, work, sequence.seq_id)

    def _finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        elif self.blocked.holds(sequence):
            self.blocked.remove(sequence)
        else:
            self._queue_of(sequence).remove(sequence)
        self.ledger.settle((sequence,))
        if self._transfer is not None:
            self._transfer.ended(sequence)
        self.remote.ended(sequence)
        self._blocks.free(sequence)
        self._forget_at_runner(sequence)
        was_put_back = sequence.status is Status.RETURNING and sequence.first_scheduled_at is not None
        sequence.record.stopped_waiting(now, was_put_back)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        sequence.finished_at = now
        self.counters.finished[reason] += 1
        self.ended.add(sequence, self._blocks.num_needed(sequence), now)

    def _join_queue(self, sequence: Sequence) -> None:
        if sequence.status is Status.QUEUED:
            self.ledger.arrives(sequence.tenant, sequence.tenant_weight, self.queued, self.running)
        self._queue_of(sequence).push(sequence)

    def _queue_of(self, sequence: Sequence) -> WaitingQueue:
        return self.queued if sequence.status is Status.QUEUED else self.returning

    def _forget_at_runner(self, sequence: Sequence) -> None:
        if sequence.known_to_runner:
            sequence.known_to_runner = False
            self._dropped.append(sequence.seq_id)
