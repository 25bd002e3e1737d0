"""PURE. Picks the tokens of each step: continuous batching, chunked prefill, preemption by recompute.

One step, in order (vLLM's v1 model with three deliberate changes, marked *):
1. Running sequences that lack one token (decodes) first*, then running sequences in the middle of their prompt. A chunk
   can so never take the budget from a stream that is already talking.
2. A running sequence that cannot get a block preempts the running sequence admitted last, which may be itself.
3. If nothing was preempted: returning sequences, then queued ones, in key order, until one does not fit. Admission
   reserves blocks for all known tokens*, so only decode growth can fail later; the watermark applies only while
   something runs.
4. A preempted sequence waits as *returning*, before anything fresh and at its old place*.

`schedule` and `update` alternate; between them the runner works, and `add` and `abort` may be called at any time.
"""

from __future__ import annotations

from bisect import bisect_left

from replica.block_manager import BlockManager
from replica.config import SchedulerConfig
from replica.messages import STEP_TOKEN_BOUNDS, FinishReason
from replica.progress import Progress, SchedulerCounters, StepProgress
from replica.running_set import Decodes, RunningSet
from replica.sequence import Sequence, Status
from replica.step import StepPlan, StepResult
from replica.step_budget import StepBudget
from replica.step_intake import InStep, StepIntake
from replica.waiting_queue import WaitingQueue


class Scheduler:
    """The only one that moves a sequence between queued, returning, running and finished. Knows neither clock nor
    device.
    """

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, eos_token_ids: tuple[int, ...]) -> None:
        assert config.max_num_batched_tokens is not None, "resolve() the configuration first"
        self._config = config
        self._max_batched = config.max_num_batched_tokens
        self._blocks = blocks
        self._watermark_blocks = int(config.watermark * blocks.num_blocks)
        self.queued = WaitingQueue()
        self.returning = WaitingQueue()
        #: waiting sequences that may not run yet, because their grammar is being compiled
        self.blocked = WaitingQueue()
        self.running = RunningSet(blocks.block_size, blocks.is_caching)
        self.counters = SchedulerCounters()
        self._dropped: list[int] = []
        self._in_step: InStep | None = None
        self._intake = StepIntake(blocks, self.running, self.counters, eos_token_ids, self._finish)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.returning or self.queued)

    @property
    def num_queued(self) -> int:
        """Accepted and never scheduled: what the cap bounds."""
        return len(self.queued) + self.blocked.num_fresh

    @property
    def has_news_for_runner(self) -> bool:
        """True if the runner still holds sequences that are gone."""
        return bool(self._dropped)

    def add(self, sequence: Sequence, is_blocked: bool = False) -> None:
        """Take a fresh (queued) or resumed (returning) sequence. A blocked one waits for `unblock` first."""
        queue = self.blocked if is_blocked else self._queue_of(sequence)
        queue.push(sequence)

    def unblock(self, sequence: Sequence) -> None:
        """It may run now; its place is the one its order key gives it."""
        self.blocked.remove(sequence)
        self._queue_of(sequence).push(sequence)

    def abort(self, sequence: Sequence, reason: FinishReason, now: float) -> bool:
        """End `sequence`. True if it is over now; False if the runner works on it, so that its blocks are freed by
        `update`.
        """
        if sequence.status is Status.FINISHED:
            return True
        if sequence.in_step:
            # the first reason stays: a drain must not announce as moved what its router gave up
            sequence.abort_reason = sequence.abort_reason or reason
            self.running.settle(sequence)
            return False
        self._finish(sequence, reason, now)
        return True

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing to compute and nothing to tell the runner."""
        assert not self._in_step, "update() the last step first"
        budget = StepBudget(self._max_batched, self._config.long_prefill_token_threshold)
        num_preemptions = self.counters.preemptions
        decodes = self._schedule_running(budget)
        if self.counters.preemptions == num_preemptions:
            self._admit(self.returning, budget, now)
            if not self.returning:
                self._admit(self.queued, budget, now)
        members = InStep(decodes, budget.chunks)
        if not members and not self._dropped:
            return None
        plan = budget.plan(self.counters.steps, self._dropped)
        self._dropped = []
        self._in_step = members
        self.running.in_step[members.rows] = True
        self.counters.steps += 1
        if num_tokens := plan.num_tokens:
            self.counters.scheduled_tokens += num_tokens
            self.counters.step_token_counts[bisect_left(STEP_TOKEN_BOUNDS, num_tokens)] += 1
        return plan

    def update(self, plan: StepPlan, result: StepResult, now: float) -> StepProgress:
        """Take in what the runner computed for `plan`: who got a token or ended."""
        members, self._in_step = self._in_step, None
        assert members is not None, "schedule() a step first"
        return self._intake.take(members, plan, result, now)

    def fail_step(self, now: float) -> list[Progress]:
        """The runner raised: end every sequence of the step with ERROR. Their KV is not trusted, so nothing of it is
        registered.
        """
        members, self._in_step = self._in_step, None
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

    def invalidate(self, sequence: Sequence, message: str, now: float) -> Progress:
        """End a sequence that cannot go on as it was asked for, here or elsewhere; `message` is for the client."""
        return self._intake.invalidate(sequence, message, now)

    def validate(self) -> None:
        """Check queues against states. Raises AssertionError."""
        everyone = self.living()
        assert len({s.seq_id for s in everyone}) == len(everyone), "a sequence is in two queues"
        assert len(self.running) <= self._config.max_num_seqs, "more running than max_num_seqs"
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
        assert all(s.known_to_runner for s in self.running), "the runner does not know somebody who runs"
        members = [] if self._in_step is None else self._in_step.rows.tolist()
        assert {s.row for s in self.running if s.in_step} == set(members), "who is in the step is not clear"
        self._blocks.validate(everyone)

    def _schedule_running(self, budget: StepBudget) -> Decodes:
        everyone, prefills = self.running.split()
        decodes = everyone.first(budget.tokens_left)
        num_preemptions = self.counters.preemptions
        new_blocks = self._grow(decodes)
        if self.counters.preemptions != num_preemptions:
            decodes = self.running.still(decodes)
        if decodes:
            budget.spend_decodes(decodes.seq_ids, self.running.num_computed[decodes.rows].tolist(), new_blocks)
        for sequence in prefills:
            if sequence.status is Status.RUNNING and budget.tokens_left:
                budget.spend(sequence, budget.chunk(sequence.num_uncomputed_tokens))
        return decodes

    def _grow(self, decodes: Decodes) -> dict[int, list[int]]:
        """Blocks for one token more, for those who need one: one decode in `block_size`. Returns what each got."""
        new_blocks: dict[int, list[int]] = {}
        for row in self.running.without_room(decodes):
            if not self.running.is_owned(row):
                continue  # preempted for one of the earlier ones
            sequence = self.running.owner(row)
            while (grown := self._blocks.grow(sequence, sequence.num_tokens)) is None:
                victim = self.running.last
                new_blocks.pop(victim.seq_id, None)  # it may have been one of the earlier ones
                self._preempt(victim)
                if victim is sequence:
                    break
            else:
                self.running.cover(sequence)
                new_blocks[sequence.seq_id] = grown
        return new_blocks

    def _preempt(self, victim: Sequence) -> None:
        assert not victim.in_step, f"{victim} is already part of the step"
        self.running.remove(victim)
        victim.num_tokens_at_preemption = max(victim.num_tokens_at_preemption, victim.num_computed_tokens)
        self._release(victim)
        victim.num_preemptions += 1
        self.counters.preemptions += 1
        victim.status = Status.RETURNING
        self.returning.push(victim)

    def _admit(self, waiting: WaitingQueue, budget: StepBudget, now: float) -> None:
        while budget.tokens_left and len(self.running) < self._config.max_num_seqs:
            sequence = waiting.peek()
            if sequence is None or not self._fits_budget(sequence, budget):
                return
            keep_free = self._watermark_blocks if self.running else 0
            if not self._blocks.admit(sequence, keep_free=keep_free):
                return
            waiting.pop()
            sequence.status = Status.RUNNING
            self.running.add(sequence)
            if sequence.first_scheduled_at is None:
                sequence.first_scheduled_at = now
                self.counters.admitted += 1
                self.counters.queue_time_s += now - sequence.submitted_at
                self.counters.prompt_tokens += sequence.num_prompt_tokens
                self.counters.cached_prompt_tokens += sequence.num_cached_tokens
            if not self._config.enable_chunked_prefill:
                budget.allow_whole(sequence.num_uncomputed_tokens)
            budget.spend(sequence, budget.chunk(sequence.num_uncomputed_tokens))

    def _fits_budget(self, sequence: Sequence, budget: StepBudget) -> bool:
        """Always, with chunks. Without them a prompt wants a budget that covers it, but the first one of a step gets
        its way: else a prompt longer than the budget, or one beside many decodes, would wait for ever."""
        if self._config.enable_chunked_prefill or not budget.has_prefill:
            return True
        hits = len(self._blocks.find_prefix(sequence)) * self._blocks.block_size
        return sequence.num_tokens - hits <= budget.tokens_left

    def _finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        elif self.blocked.holds(sequence):
            self.blocked.remove(sequence)
        else:
            self._queue_of(sequence).remove(sequence)
        self._release(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        sequence.finished_at = now
        self.counters.finished[reason] += 1

    def _queue_of(self, sequence: Sequence) -> WaitingQueue:
        return self.queued if sequence.status is Status.QUEUED else self.returning

    def _release(self, sequence: Sequence) -> None:
        self._blocks.free(sequence)
        if sequence.known_to_runner:
            sequence.known_to_runner = False
            self._dropped.append(sequence.seq_id)
