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

import msgspec

from replica.block_manager import BlockManager
from replica.config import SchedulerConfig
from replica.messages import STEP_TOKEN_BOUNDS, FinishReason, TokenLogprobs
from replica.sequence import Sequence, Status
from replica.step import StepPlan, StepResult
from replica.step_budget import StepBudget
from replica.waiting_queue import WaitingQueue


class SchedulerCounters(msgspec.Struct):
    """Totals since the start. `recomputed_tokens` is work done again after preemptions."""

    steps: int = 0
    scheduled_tokens: int = 0
    #: by `STEP_TOKEN_BOUNDS`
    step_token_counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(STEP_TOKEN_BOUNDS) + 1))
    prompt_tokens: int = 0
    #: of `prompt_tokens`, those found in the prefix cache
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    admitted: int = 0
    #: seconds between submit and first schedule, summed over admitted sequences
    queue_time_s: float = 0.0
    finished: dict[FinishReason, int] = msgspec.field(default_factory=lambda: dict.fromkeys(FinishReason, 0))


class Progress(msgspec.Struct, frozen=True):
    """What a step changed for one sequence: a new token, the end, or both."""

    sequence: Sequence
    new_token_ids: list[int]
    finish_reason: FinishReason | None
    #: one entry a new token, where asked for
    logprobs: list[TokenLogprobs] = []
    #: with `INVALID`
    message: str = ""


class Scheduler:
    """The only one that moves a sequence between queued, returning, running and finished. Knows neither clock nor
    device.
    """

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, eos_token_ids: tuple[int, ...]) -> None:
        assert config.max_num_batched_tokens is not None, "resolve() the configuration first"
        self._config = config
        self._max_batched = config.max_num_batched_tokens
        self._blocks = blocks
        self._eos = frozenset(eos_token_ids)
        self._watermark_blocks = int(config.watermark * blocks.num_blocks)
        self.queued = WaitingQueue()
        self.returning = WaitingQueue()
        #: seq_id -> a waiting sequence that may not run yet, because its grammar is being compiled
        self.blocked: dict[int, Sequence] = {}
        self.running: list[Sequence] = []
        self._dropped: list[int] = []
        self._in_step: list[Sequence] = []
        self.counters = SchedulerCounters()

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.returning or self.queued)

    @property
    def num_queued(self) -> int:
        """Accepted and never scheduled: what the cap bounds."""
        return len(self.queued) + sum(s.status is Status.QUEUED for s in self.blocked.values())

    @property
    def has_news_for_runner(self) -> bool:
        """True if the runner still holds sequences that are gone."""
        return bool(self._dropped)

    def add(self, sequence: Sequence, is_blocked: bool = False) -> None:
        """Take a fresh (queued) or resumed (returning) sequence. A blocked one waits for `unblock` first."""
        if is_blocked:
            self.blocked[sequence.seq_id] = sequence
        else:
            self._queue_of(sequence).push(sequence)

    def unblock(self, sequence: Sequence) -> None:
        """It may run now; its place is the one its order key gives it."""
        del self.blocked[sequence.seq_id]
        self._queue_of(sequence).push(sequence)

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
            return False
        self._finish(sequence, reason, now)
        return True

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing to compute and nothing to tell the runner."""
        assert not self._in_step, "update() the last step first"
        budget = StepBudget(self._max_batched, self._config.long_prefill_token_threshold)
        num_preemptions = self.counters.preemptions
        self._schedule_running(budget)
        if self.counters.preemptions == num_preemptions:
            self._admit(self.returning, budget, now)
            if not self.returning:
                self._admit(self.queued, budget, now)
        if not budget.sequences and not self._dropped:
            return None
        plan = budget.plan(self.counters.steps, self._dropped)
        self._dropped = []
        self._in_step = budget.sequences
        self.counters.steps += 1
        if plan.num_tokens:
            self.counters.scheduled_tokens += plan.num_tokens
            self.counters.step_token_counts[bisect_left(STEP_TOKEN_BOUNDS, plan.num_tokens)] += 1
        return plan

    def update(self, plan: StepPlan, result: StepResult, now: float) -> list[Progress]:
        """Take in what the runner computed for `plan`. Returns one `Progress` per sequence that got a token or
        ended.
        """
        progress: list[Progress] = []
        sampled = dict(zip(result.seq_ids, result.token_ids, strict=True))
        for sequence, num_tokens in zip(self._in_step, plan.num_scheduled, strict=True):
            sequence.in_step = False
            rework = (
                min(sequence.num_tokens_at_preemption, sequence.num_computed_tokens + num_tokens)
                - sequence.num_computed_tokens
            )
            if rework > 0:
                self.counters.recomputed_tokens += rework
            sequence.num_computed_tokens += num_tokens
            if sequence.abort_reason is not None:
                self._blocks.commit(sequence)
                self._finish(sequence, sequence.abort_reason, now)
                progress.append(Progress(sequence, [], sequence.abort_reason))
                continue
            self._take_prompt_logprobs(sequence, result, num_tokens)
            if message := result.failed.get(sequence.seq_id):
                progress.append(self.invalidate(sequence, message, now))
                continue
            token_id = sampled.get(sequence.seq_id)
            if token_id is None:
                self._blocks.commit(sequence)
                continue
            progress.append(self._append(sequence, token_id, result.logprobs.get(sequence.seq_id), now))
        self._in_step = []
        return progress

    def fail_step(self, now: float) -> list[Progress]:
        """The runner raised: end every sequence of the step with ERROR. Their KV is not trusted, so nothing of it is
        registered.
        """
        progress = []
        for sequence in self._in_step:
            sequence.in_step = False
            reason = sequence.abort_reason or FinishReason.ERROR
            self._finish(sequence, reason, now)
            progress.append(Progress(sequence, [], reason))
        self._in_step = []
        return progress

    def living(self) -> list[Sequence]:
        """Every unfinished sequence, each exactly once."""
        return [*self.running, *self.returning, *self.queued, *self.blocked.values()]

    def invalidate(self, sequence: Sequence, message: str, now: float) -> Progress:
        """End a sequence that cannot go on as it was asked for, here or elsewhere; `message` is for the client."""
        self._blocks.commit(sequence)
        self._finish(sequence, FinishReason.INVALID, now)
        return Progress(sequence, [], FinishReason.INVALID, message=message)

    def validate(self) -> None:
        """Check queues against states. Raises AssertionError."""
        everyone = self.living()
        assert len({s.seq_id for s in everyone}) == len(everyone), "a sequence is in two queues"
        assert len(self.running) <= self._config.max_num_seqs, "more running than max_num_seqs"
        for queue, status in (
            (self.running, {Status.RUNNING}),
            (self.returning, {Status.RETURNING}),
            (self.queued, {Status.QUEUED}),
            (list(self.blocked.values()), {Status.QUEUED, Status.RETURNING}),
        ):
            for sequence in queue:
                assert sequence.status in status, f"{sequence} is in the wrong queue"
                assert sequence.num_computed_tokens <= sequence.num_tokens, f"{sequence} computed more than it knows"
                assert bool(sequence.block_ids) == (sequence.status is Status.RUNNING), (
                    f"{sequence} holds blocks in the wrong state"
                )
        self._blocks.validate(everyone)

    def _schedule_running(self, budget: StepBudget) -> None:
        prefills: list[Sequence] = []
        # a copy, because preemption shortens the list from its end while we walk it: no victim is planned yet
        for sequence in self.running.copy():
            if sequence.status is not Status.RUNNING:
                break
            if len(sequence.token_ids) - sequence.num_computed_tokens > 1:
                prefills.append(sequence)
            elif budget.tokens_left:
                new_blocks = self._grow(sequence)
                if new_blocks is None:
                    break
                budget.spend(sequence, 1, new_blocks)
        for sequence in prefills:
            if sequence.status is Status.RUNNING and budget.tokens_left:
                budget.spend(sequence, budget.chunk(sequence.num_uncomputed_tokens), [])

    def _grow(self, sequence: Sequence) -> list[int] | None:
        """Blocks for one more token, preempting from the end of `running`. None: `sequence` itself had to go."""
        while (new_blocks := self._blocks.grow(sequence, sequence.num_tokens)) is None:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return None
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
            self.running.append(sequence)
            if sequence.first_scheduled_at is None:
                sequence.first_scheduled_at = now
                self.counters.admitted += 1
                self.counters.queue_time_s += now - sequence.submitted_at
                self.counters.prompt_tokens += sequence.num_prompt_tokens
                self.counters.cached_prompt_tokens += sequence.num_cached_tokens
            if not self._config.enable_chunked_prefill:
                budget.allow_whole(sequence.num_uncomputed_tokens)
            budget.spend(sequence, budget.chunk(sequence.num_uncomputed_tokens), [])

    def _fits_budget(self, sequence: Sequence, budget: StepBudget) -> bool:
        """Always, with chunks. Without them a prompt wants a budget that covers it, but the first one of a step gets
        its way: else a prompt longer than the budget, or one beside many decodes, would wait for ever."""
        if self._config.enable_chunked_prefill or not budget.has_prefill:
            return True
        hits = len(self._blocks.find_prefix(sequence)) * self._blocks.block_size
        return sequence.num_tokens - hits <= budget.tokens_left

    def _take_prompt_logprobs(self, sequence: Sequence, result: StepResult, num_tokens: int) -> None:
        """The first entry belongs to the position behind the step's first token; after a preemption some are known."""
        given = result.prompt_logprobs.get(sequence.seq_id)
        if given is not None and sequence.lacks_prompt_logprobs:
            first = sequence.num_computed_tokens - num_tokens
            sequence.prompt_logprobs += given[len(sequence.prompt_logprobs) - first :]

    def _append(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None, now: float) -> Progress:
        sequence.token_ids.append(token_id)
        self._blocks.commit(sequence)
        self.counters.generation_tokens += 1
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        reason = self._stop_check(sequence, token_id)
        if reason is not None:
            self._finish(sequence, reason, now)
        return Progress(sequence, [token_id], reason, [] if logprobs is None else [logprobs])

    def _stop_check(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        """Order as in vLLM: eos, stop token ids, length. `min_tokens` is kept by the sampler, which masks stop tokens
        until then.
        """
        sampling = sequence.sampling
        if token_id in self._eos and (not sampling.ignore_eos or sampling.grammar):
            return FinishReason.STOP  # behind a complete grammar there is nothing but eos, whatever was asked for
        if token_id in sampling.stop_token_ids:
            sequence.stop_reason = token_id
            return FinishReason.STOP
        if sequence.num_tokens >= sequence.max_total_tokens:
            return FinishReason.LENGTH
        return None

    def _finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        elif sequence.seq_id in self.blocked:
            del self.blocked[sequence.seq_id]
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
