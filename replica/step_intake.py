"""PURE. The second half of a step: takes in what the runner computed.

Sequences that got one token like all others are advanced as columns (`replica/running_set.py`). One at a time go: those
that crossed a block border, ended, were aborted or failed, want more told than the token, or computed a chunk of their
prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress

import numpy as np

from replica.block_manager import BlockManager
from replica.messages import FinishReason
from replica.progress import Progress, SchedulerCounters, StepProgress
from replica.running_set import Decodes, RunningSet
from replica.sequence import Sequence
from replica.speculation import judge
from replica.step import StepPlan, StepResult

_NOT_FINITE = "The model computed NaN or infinity for this request, so no token can be chosen."
#: ends a sequence: frees its blocks and takes it out of its queue
Finish = Callable[[Sequence, FinishReason, float], None]


class InStep:
    """Who takes part in a step, in plan order: the decodes, then chunks of prompts."""

    __slots__ = ("chunks", "decodes", "rows")

    def __init__(self, decodes: Decodes, chunks: list[Sequence]) -> None:
        self.decodes = decodes
        self.chunks = chunks
        self.rows = np.concatenate([decodes.rows, np.array([s.row for s in chunks], np.int64)])

    def __len__(self) -> int:
        return len(self.rows)


class StepIntake:
    """Changes the running sequences and their blocks; who ends is taken out by `finish`, the scheduler's."""

    def __init__(
        self,
        blocks: BlockManager,
        running: RunningSet,
        counters: SchedulerCounters,
        eos_token_ids: tuple[int, ...],
        finish: Finish,
    ) -> None:
        self._blocks = blocks
        self._running = running
        self._counters = counters
        self._eos = frozenset(eos_token_ids)
        self._finish = finish

    def take(self, members: InStep, plan: StepPlan, result: StepResult, now: float) -> StepProgress:
        """What `result` means for each member of the step that `plan` asked for."""
        self._running.in_step[members.rows] = False
        decodes, apart = members.decodes, list[Sequence]()
        counts = plan.num_scheduled[len(decodes) :]
        if result.seq_ids[: len(decodes)] != decodes.seq_ids:
            # some have no token: the runner could not go on with them
            mask = np.isin(decodes.seq_ids, result.seq_ids)
            apart = [self._running.owner(row) for row in decodes.rows[~mask].tolist()]
            decodes, counts = decodes.only(mask), [1] * len(apart) + counts
        num_decodes = len(decodes)
        assert result.seq_ids[:num_decodes] == decodes.seq_ids, "the result is not in plan order"
        progress = self._take_decodes(decodes, result.token_ids[:num_decodes], plan, result, now)
        sampled = dict(zip(result.seq_ids[num_decodes:], result.token_ids[num_decodes:], strict=True))
        for sequence, num_tokens in zip([*apart, *members.chunks], counts, strict=True):
            token_id = sampled.get(sequence.seq_id)
            if item := self._take_chunk(sequence, num_tokens, token_id, plan, result, now):
                progress.others.append(item)
        return progress

    def invalidate(self, sequence: Sequence, message: str, now: float) -> Progress:
        """End a sequence that cannot go on as it was asked for, here or elsewhere; `message` is for the client."""
        return self._end(sequence, FinishReason.INVALID, now, message)

    def _take_decodes(
        self, decodes: Decodes, token_ids: list[int], plan: StepPlan, result: StepResult, now: float
    ) -> StepProgress:
        positions = self._running.advance(decodes, token_ids)
        self._counters.generation_tokens += len(token_ids)
        if plan.drafts:
            guessed = [i for i, seq_id in enumerate(decodes.seq_ids) if seq_id in plan.drafts]
            positions = sorted({*positions, *guessed})
        if not self._eos.isdisjoint(token_ids):
            positions = sorted({*positions, *(i for i, token_id in enumerate(token_ids) if token_id in self._eos)})
        others: list[Progress] = []
        is_plain = np.ones(len(decodes), np.bool_)
        for position, row in zip(positions, decodes.rows[positions].tolist(), strict=True):
            if item := self._look(self._running.owner(row), token_ids[position], plan, result, now):
                others.append(item)
                is_plain[position] = False
        if others:
            decodes, token_ids = decodes.only(is_plain), list(compress(token_ids, is_plain.tolist()))
        return StepProgress(decodes, token_ids, others)

    def _look(
        self, sequence: Sequence, token_id: int, plan: StepPlan, result: StepResult, now: float
    ) -> Progress | None:
        """A decode that has been advanced already. None: there is no more to tell than the token."""
        if sequence.abort_reason is not None:
            self._counters.generation_tokens -= 1  # nobody gets it
            return self._end(sequence, sequence.abort_reason, now)
        is_first = sequence.first_token_at is None
        reason = self._take_token(sequence, token_id, now)
        token_ids = [token_id]
        if drafts := plan.drafts.get(sequence.seq_id):
            more = result.more.get(sequence.seq_id, [])
            judge(sequence, len(drafts), len(more), self._counters)
            while reason is None and len(token_ids) <= len(more):
                token_id = more[len(token_ids) - 1]
                token_ids.append(token_id)
                reason = self._take_accepted(sequence, token_id, now)
        logprobs = result.logprobs.get(sequence.seq_id)
        if reason is None and logprobs is None and not is_first and len(token_ids) == 1:
            return None
        return Progress(sequence, token_ids, reason, [logprobs] if logprobs else [], is_first=is_first)

    def _take_accepted(self, sequence: Sequence, token_id: int, now: float) -> FinishReason | None:
        """Its last known token was a draft that came true, so it is computed; `token_id` follows."""
        sequence.num_computed_tokens += 1
        sequence.append(token_id)
        self._counters.generation_tokens += 1
        return self._take_token(sequence, token_id, now)

    def _take_chunk(
        self, sequence: Sequence, num_tokens: int, token_id: int | None, plan: StepPlan, result: StepResult, now: float
    ) -> Progress | None:
        """None: its prompt goes on."""
        before = sequence.num_computed_tokens
        sequence.num_computed_tokens = before + num_tokens
        sequence.record.computed(plan.step, num_tokens)
        rework = min(sequence.num_tokens_at_preemption, before + num_tokens) - before
        self._counters.recomputed_tokens += max(0, rework)
        if sequence.abort_reason is not None:
            return self._end(sequence, sequence.abort_reason, now)
        self._take_prompt_logprobs(sequence, result, num_tokens)
        if message := result.failed.get(sequence.seq_id):
            return self.invalidate(sequence, message, now)
        if sequence.seq_id in result.not_finite:
            self._finish(sequence, FinishReason.NOT_FINITE, now)  # what was computed in this step is not to be shared
            return Progress(sequence, [], FinishReason.NOT_FINITE, message=_NOT_FINITE)
        if token_id is None:
            self._blocks.commit(sequence)
            if sequence.num_uncomputed_tokens == 1:  # else the next `schedule` does it, and takes others in return
                self._blocks.release_passed(sequence)
            return None
        sequence.append(token_id)
        self._counters.generation_tokens += 1
        is_first = sequence.first_token_at is None
        reason = self._take_token(sequence, token_id, now)
        logprobs = result.logprobs.get(sequence.seq_id)
        return Progress(sequence, [token_id], reason, [logprobs] if logprobs else [], is_first=is_first)

    def _take_prompt_logprobs(self, sequence: Sequence, result: StepResult, num_tokens: int) -> None:
        """The first entry belongs to the position behind the step's first token; after a preemption some are known."""
        given = result.prompt_logprobs.get(sequence.seq_id)
        if given is not None and sequence.lacks_prompt_logprobs:
            first = sequence.num_computed_tokens - num_tokens
            sequence.prompt_logprobs += given[len(sequence.prompt_logprobs) - first :]

    def _take_token(self, sequence: Sequence, token_id: int, now: float) -> FinishReason | None:
        """Its last known token is `token_id`, just sampled."""
        self._blocks.commit(sequence)
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        reason = self._stop_check(sequence, token_id)
        if reason is None:
            self._blocks.release_passed(sequence)
            self._running.settle(sequence)
        else:
            self._finish(sequence, reason, now)
        return reason

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

    def _end(self, sequence: Sequence, reason: FinishReason, now: float, message: str = "") -> Progress:
        """Without a token; what was computed may be shared."""
        self._blocks.commit(sequence)
        self._finish(sequence, reason, now)
        return Progress(sequence, [], reason, message=message)
