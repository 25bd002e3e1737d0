"""PURE. A model runner that knows lengths only: the contract of `replica/step.py` for a few hundred nanoseconds a
sequence and step, so that a million requests can go through the scheduler.

It keeps no KV, so it cannot see a wrong block table (`FakeModelRunner` does); it does hold each plan to the contract:
everybody is known, intervals go on where the last one ended, and the block table covers them. Output repeats itself
with a period, so that guesses come true; `SamplingParams.seed` is the position at which a sequence says its end token.
"""

from __future__ import annotations

from replica.errors import InvalidRequestError
from replica.fake_runner import CostModel
from replica.step import NewSequence, RunnerInfo, StepPlan, StepResult

EOS = 2


class _Known:
    __slots__ = ("computed", "length", "num_prompt_tokens", "room", "says_end_at", "seq_id")

    def __init__(self, new: NewSequence, block_size: int) -> None:
        self.seq_id = new.seq_id
        self.length = len(new.token_ids)
        self.num_prompt_tokens = new.num_prompt_tokens
        self.room = len(new.block_ids) * block_size
        sampling = new.sampling
        self.says_end_at = -1 if sampling.ignore_eos else new.num_prompt_tokens + sampling.seed - 1
        #: -1: not known yet, a prefix hit decides where the first interval begins
        self.computed = -1

    def token(self, position: int) -> int:
        if position == self.says_end_at:
            return EOS
        period = 6 + self.seq_id % 96
        return 100 + (self.seq_id * 31 + (position - self.num_prompt_tokens) % period) % 40000


class LengthRunner:
    """Implements `replica.step.ModelRunner`. Raises AssertionError for a plan that breaks the contract."""

    def __init__(self, info: RunnerInfo, cost: CostModel) -> None:
        self._info = info
        self._cost = cost
        self._known: dict[int, _Known] = {}

    @property
    def info(self) -> RunnerInfo:
        return self._info

    @property
    def num_known(self) -> int:
        """Sequences the runner still holds."""
        return len(self._known)

    def prepare_grammar(self, grammar: str) -> None:
        """Raises InvalidRequestError: no logits, no grammars."""
        raise InvalidRequestError("structured output needs a real model; this runner knows lengths only")

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out `plan`."""
        self._apply_news(plan)
        seq_ids: list[int] = []
        token_ids: list[int] = []
        more: dict[int, list[int]] = {}
        for seq_id, start, count in zip(plan.seq_ids, plan.num_computed, plan.num_scheduled, strict=True):
            known = self._known[seq_id]
            assert start + count <= known.room, f"{seq_id}: {start + count} tokens, room for {known.room}"
            assert start == known.computed or known.computed < 0, f"{seq_id}: computed {known.computed}, not {start}"
            drafts = plan.drafts.get(seq_id) if plan.drafts else None
            end = start + count - (len(drafts) if drafts else 0)
            known.computed = end
            if end == known.length:
                seq_ids.append(seq_id)
                token_ids.append(known.token(end))
                known.length += 1
                if drafts:
                    more[seq_id] = self._judge(known, drafts)
            else:
                assert end < known.length, f"{seq_id}: {end} computed, {known.length} known"
        return StepResult(plan.step, seq_ids, token_ids, self._cost.step_s(plan), more=more)

    def close(self) -> None:
        self._known.clear()

    def _judge(self, known: _Known, drafts: list[int]) -> list[int]:
        accepted: list[int] = []
        for draft in drafts:
            if draft != known.token(known.length - 1):
                break
            accepted.append(known.token(known.length))
            known.length += 1
            known.computed += 1
        return accepted

    def _apply_news(self, plan: StepPlan) -> None:
        for seq_id in plan.dropped:
            self._known.pop(seq_id, None)  # a step that failed may have come before the runner ever saw it
        for new in plan.new:
            assert new.seq_id not in self._known, f"{new.seq_id} is known already"
            self._known[new.seq_id] = _Known(new, self._info.block_size)
        for seq_id, block_ids in plan.new_block_ids.items():
            self._known[seq_id].room += len(block_ids) * self._info.block_size
