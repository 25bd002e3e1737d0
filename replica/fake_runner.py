"""PURE. A model runner without a model: deterministic tokens, step time from a cost model. Shipped, not a test helper.

The next token is a function of the whole prefix, but the prefix is not taken from the token list: it is a rolling hash
that lives in a fake KV cache and is read and written *through the block table*. So a wrong block table, a block reused
too early or a shared block that was never computed changes the tokens, as it would with a real model. With a window,
which reaches far beyond the one state that a token needs, everything in it is looked at in each step.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt

from replica.errors import EngineError, InvalidRequestError
from replica.fake_copies import FakeCopies
from replica.messages import SamplingParams, TokenLogprobs
from replica.step import COPY_WAIT_S, NewSequence, OpenArena, RunnerInfo, StepPlan, StepResult

_MASK = (1 << 61) - 1
_MULTIPLIER = 0x5851F42D4C957F2D
_ROOT = 0x1E3779B97F4A7C15


class CostModel(msgspec.Struct, frozen=True):
    """Seconds of a step = base + tokens x per_token + sequences x per_sequence + context tokens read x
    per_context_token.

    The defaults are the default model on two CPU cores with bfloat16.
    """

    base_s: float = 7.5e-3
    per_token_s: float = 2.2e-4
    per_sequence_s: float = 5e-5
    per_context_token_s: float = 4e-7
    #: of one block between pool and arena, beside the steps; 0: none
    per_copy_s: float = 0.0

    def step_s(self, plan: StepPlan) -> float:
        """Predicted duration of `plan` in seconds."""
        context = sum(plan.num_computed)
        return (
            self.base_s
            + self.per_token_s * plan.num_tokens
            + self.per_sequence_s * len(plan.seq_ids)
            + self.per_context_token_s * context
        )


def mix(state: int, token_id: int) -> int:
    """One step of the rolling hash over a prefix."""
    return ((state ^ (token_id + 1)) * _MULTIPLIER + 0x14057B7EF767814F) & _MASK


def prefix_state(token_ids: list[int]) -> int:
    """The rolling hash of a whole prefix: what the fake KV of its last token must hold."""
    state = _ROOT
    for token_id in token_ids:
        state = mix(state, token_id)
    return state


def next_token(state: int, seed: int, vocab_size: int) -> int:
    """The token that follows a prefix with this state."""
    value = (state ^ (seed * 0x9E3779B97F4A7C15)) & _MASK
    value = ((value ^ (value >> 29)) * 0xBF58476D1CE4E5B) & _MASK
    return (value >> 20) % vocab_size


def expected_output(
    prompt_token_ids: list[int], num_tokens: int, *, seed: int = 0, vocab_size: int, eos: frozenset[int] = frozenset()
) -> list[int]:
    """What an undisturbed run gives for a prompt: the reference for every test of scheduling. `eos` are masked out."""
    state, output = prefix_state(prompt_token_ids), []
    for _ in range(num_tokens):
        token_id = _avoid(next_token(state, seed, vocab_size), eos, vocab_size)
        output.append(token_id)
        state = mix(state, token_id)
    return output


def _avoid(token_id: int, banned: frozenset[int], vocab_size: int) -> int:
    while token_id in banned:
        token_id = (token_id + 1) % vocab_size
    return token_id


class _Known:
    """The runner's copy of one sequence."""

    __slots__ = ("allowed", "block_ids", "min_total", "num_prompt_tokens", "sampling", "seed", "states", "token_ids")

    def __init__(self, new: NewSequence) -> None:
        self.token_ids = list(new.token_ids)
        self.block_ids = list(new.block_ids)
        #: what the KV of its leading tokens must hold; with a window only
        self.states: list[int] = []
        self.num_prompt_tokens = new.num_prompt_tokens
        self.sampling: SamplingParams = new.sampling
        # greedy ignores the seed; ignore_eos and min_tokens keep eos out, as masking does in a real sampler
        self.seed = new.sampling.seed if new.sampling.temperature > 0 else 0
        self.min_total = 1 << 60 if new.sampling.ignore_eos else new.num_prompt_tokens + new.sampling.min_tokens
        self.allowed = sorted(new.sampling.allowed_token_ids)

    def banned_words(self) -> frozenset[int]:
        """Last tokens of bad words whose other tokens the output ends in."""
        output = self.token_ids[self.num_prompt_tokens :]
        words = self.sampling.bad_words
        return frozenset(word[-1] for word in words if tuple(output[len(output) - len(word) + 1 :]) == word[:-1])


class FakeModelRunner:
    """Implements `replica.step.ModelRunner`. Does not sleep: `StepResult.duration_s` says how long a device would have
    taken.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 4096,
        block_size: int = 16,
        max_model_len: int = 8192,
        vocab_size: int = 49152,
        eos_token_ids: tuple[int, ...] = (2,),
        cost: CostModel | None = None,
        window: int | None = None,
        open_arena: OpenArena | None = None,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        """`window`: at least 2, since the state of a token is made from the one before it. `open_arena` finds the arena
        of a KVConnector.
        """
        assert window is None or window >= 2, f"a window of {window} tokens"
        self._info = RunnerInfo(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            model_fingerprint="fake",
            description="fake runner: no weights, tokens from a hash of the prefix",
            window=window,
            block_bytes=block_size * 8 * num_ranks,
            kv_degree=num_ranks,
        )
        self.cost = cost or CostModel()
        self._eos = frozenset(eos_token_ids)
        self._kv = array("Q", bytes(8 * num_blocks * block_size))
        self._pool = np.frombuffer(self._kv, np.uint8).reshape(num_blocks, 8 * block_size)
        self.copies = FakeCopies(self._pool, rank, num_ranks, open_arena)
        #: seconds that copies had, beyond those that were carried out
        self._copy_credit_s = 0.0
        self._known: dict[int, _Known] = {}
        self._last: StepResult | None = None
        #: of weights and KV, as every rank says
        self.held_bytes = (0, 0)

    @property
    def info(self) -> RunnerInfo:
        return self._info

    @property
    def pool(self) -> npt.NDArray[np.uint8]:
        """The fake KV: [num_blocks, bytes of a block]."""
        return self._pool

    @property
    def num_known(self) -> int:
        """Sequences the runner still holds."""
        return len(self._known)

    def execute(self, plan: StepPlan) -> StepResult:
        """Advance the fake KV through the block tables. Raises KeyError or IndexError on a plan that breaks the
        contract, EngineError on one with another's tokens in a window.
        """
        self._apply_news(plan)
        self.copies.take(plan)
        seq_ids, token_ids = [], []
        logprobs: dict[int, TokenLogprobs] = {}
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        more: dict[int, list[int]] = {}
        for seq_id, start, count in zip(plan.seq_ids, plan.num_computed, plan.num_scheduled, strict=True):
            known = self._known[seq_id]
            drafts = plan.drafts.get(seq_id, [])
            state = self._write(known, start, count - len(drafts))
            if start + count - len(drafts) == len(known.token_ids):
                token_id = self._choose(known, state)
                known.token_ids.append(token_id)
                seq_ids.append(seq_id)
                token_ids.append(token_id)
                if drafts:
                    more[seq_id] = self._judge(known, drafts)
                if known.sampling.num_logprobs is not None:
                    logprobs[seq_id] = self._logprobs(token_id, known.sampling.num_logprobs)
            num_top = known.sampling.num_prompt_logprobs
            if num_top is not None:
                told = known.token_ids[start + 1 : min(start + count, known.num_prompt_tokens - 1) + 1]
                prompt_logprobs[seq_id] = [self._logprobs(token_id, num_top) for token_id in told]
        duration_s = self.cost.step_s(self._as_read(plan))
        duration_s, copy_s = self._copy(plan, duration_s)
        self._last = StepResult(
            plan.step,
            seq_ids,
            token_ids,
            duration_s,
            logprobs,
            prompt_logprobs,
            more=more,
            copied=self.copies.copied,
            failed_below=self.copies.failed_below,
            copy_s=copy_s,
        )
        return self._last

    def _copy(self, plan: StepPlan, duration_s: float) -> tuple[float, float]:
        """What is copied beside the step. Returns how long the step takes, and the seconds of copies."""
        each = self.cost.per_copy_s
        if plan.waits_for_copies:
            count = self.copies.run(None if not each else max(1, int(COPY_WAIT_S / each)))
            return count * each, count * each
        self._copy_credit_s += duration_s
        count = self.copies.run(int(self._copy_credit_s / each) if each else None)
        self._copy_credit_s = self._copy_credit_s - count * each if self.copies.is_busy else 0.0
        return duration_s, count * each

    def adopt(self, result: StepResult) -> None:
        """As one of several ranks: what rank 0 chose. It has chosen the same. Raises EngineError if it has not."""
        last = self._last
        if last is None or (last.seq_ids, last.token_ids, last.more) != (result.seq_ids, result.token_ids, result.more):
            raise EngineError(f"rank 0 chose other tokens in step {result.step}: {result.token_ids}")

    def begin_anew(self) -> None:
        """As one of several ranks, when a peer was replaced: nothing is known any more."""
        self._known.clear()
        self.copies.begin_anew()
        self._pool[:] = 0
        self._last = None

    def tell_copies(self, tell: Callable[[int, int], None]) -> None:
        """As one of several ranks: who hears how far its copies are."""
        self.copies.on_progress = tell

    def _judge(self, known: _Known, drafts: list[int]) -> list[int]:
        """The tokens that follow, one for each draft that came true. All drafts leave their KV, as on a device."""
        start = len(known.token_ids) - 1
        first = known.token_ids.pop()
        known.token_ids += drafts
        states = [self._write(known, position, 1) for position in range(start, start + len(drafts))]
        del known.token_ids[start:], known.states[start:]
        known.token_ids.append(first)
        for draft, state in zip(drafts, states, strict=True):
            if known.token_ids[-1] != draft:
                break
            known.token_ids.append(self._choose(known, state))
        return known.token_ids[start + 1 :]

    def prepare_grammar(self, grammar: str) -> None:
        """There are no logits that a grammar could mask. Raises InvalidRequestError."""
        raise InvalidRequestError("structured output needs a real model; this replica runs the fake runner")

    def _choose(self, known: _Known, state: int) -> int:
        """The hash's token, moved on past what is forbidden. Bias and penalties change nothing: there are no logits."""
        token_id = next_token(state, known.seed, self._info.vocab_size)
        if known.allowed:
            token_id = known.allowed[token_id % len(known.allowed)]
        banned = self._eos if len(known.token_ids) < known.min_total else frozenset()
        if known.sampling.bad_words:
            banned |= known.banned_words()
        return _avoid(token_id, banned, self._info.vocab_size)

    def _logprobs(self, token_id: int, num_top: int) -> TokenLogprobs:
        """A fixed shape: the token is the likeliest, its neighbours in the vocabulary follow."""
        top = [(token_id + i) % self._info.vocab_size for i in range(num_top)]
        return TokenLogprobs(-0.5, 1, top, [-0.5 * (i + 1) for i in range(num_top)])

    def close(self) -> None:
        self._known.clear()
        self.copies.close()

    def _apply_news(self, plan: StepPlan) -> None:
        for seq_id in plan.dropped:
            self._known.pop(seq_id, None)  # a step that failed may have come before the runner ever saw it
        for new in plan.new:
            self._known[new.seq_id] = _Known(new)
        for seq_id, block_ids in plan.new_block_ids.items():
            self._known[seq_id].block_ids += block_ids

    def _write(self, known: _Known, start: int, count: int) -> int:
        size, blocks, kv = self._info.block_size, known.block_ids, self._kv
        if self._info.window is not None:
            self._read_window(known, start, self._info.window)
        state = _ROOT if start == 0 else kv[blocks[(start - 1) // size] * size + (start - 1) % size]
        for position in range(start, start + count):
            state = mix(state, known.token_ids[position])
            kv[blocks[position // size] * size + position % size] = state
        return state

    def _as_read(self, plan: StepPlan) -> StepPlan:
        """With no more context than a window shows."""
        if (window := self._info.window) is None:
            return plan
        return msgspec.structs.replace(plan, num_computed=[min(window, count) for count in plan.num_computed])

    def _read_window(self, known: _Known, start: int, window: int) -> None:
        """All that the token at `start` sees before it must be there, and be its own. Raises EngineError."""
        states, size = known.states, self._info.block_size
        for token_id in known.token_ids[len(states) : start]:
            states.append(mix(states[-1] if states else _ROOT, token_id))
        for position in range(max(0, start - window + 1), start):
            block_id = known.block_ids[position // size]
            if block_id < 0 or self._kv[block_id * size + position % size] != states[position]:
                raise EngineError(f"the token at {start} sees something else at {position}, in block {block_id}")
