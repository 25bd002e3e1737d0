"""PURE. The runner's copy of its sequences, and the assembly of one step's arrays from it. No work per token in Python.

Called TORCH in the design; it turned out to need numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from replica.attention_window import NULL_BLOCK
from replica.errors import EngineError, InvalidRequestError
from replica.grammar import GrammarCompiler, GrammarError
from replica.sampler import uniform
from replica.sampling_rules import SequenceRules
from replica.step import NewSequence, StepPlan

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class InputBatch:
    """One step, flat over all its tokens; sequences lie one after the other."""

    token_ids: Ints  # [num_tokens]
    positions: Ints  # [num_tokens]
    slots: NDArray[np.int64]  # [num_tokens] where K and V go
    seq_start: Ints  # [num_seqs + 1] first token row of each sequence
    seq_slot: Ints  # [num_seqs] row in block_tables
    block_tables: Ints  # [all slots, blocks]
    sampled: NDArray[np.intp]  # [num_chosen] which sequences of the plan sample; one with drafts stands here for each
    sample_rows: Ints  # [num_samples >= num_chosen] token rows whose logits are wanted; those that sample come first
    temperature: NDArray[np.float32]  # [num_chosen], 0 is greedy
    top_k: Ints  # [num_chosen], 0 is off
    top_p: NDArray[np.float32]  # [num_chosen]
    min_p: NDArray[np.float32]  # [num_chosen], 0 is off
    uniform: NDArray[np.float64]  # [num_chosen]
    #: sample index, rules, output so far: of the sequences whose logits are changed or told about before the choice
    ruled: tuple[tuple[int, SequenceRules, Ints], ...] = ()
    prompt_rows: tuple[PromptRows, ...] = ()
    #: of the sequences with drafts: first sample index, drafts
    drafted: tuple[tuple[int, Ints], ...] = ()

    @property
    def num_chosen(self) -> int:
        return len(self.sampled)


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Logits rows [first, first + len(next_ids)) of a sequence that wants logprobs of its prompt."""

    seq_id: int
    first: int
    next_ids: Ints
    num_top: int


class SequenceStore:
    """Per-sequence rows in arrays that grow on demand: tokens, block table, sampling parameters.

    Invariant: a slot is either in `_free` or owned by exactly one seq_id of `_slots`.
    """

    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        vocab_size: int,
        eos: tuple[int, ...],
        grammars: GrammarCompiler | None = None,
        with_rules: bool = True,
        window: int | None = None,
    ) -> None:
        """`with_rules`: False on a rank that chooses nothing; it still computes the logits of prompts. `window`: as in
        `RunnerInfo`.
        """
        self._window = window
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._max_len = max_model_len
        self._vocab_size = vocab_size
        self._eos = eos
        self._grammars = grammars
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._with_rules = with_rules
        self._rules: dict[int, SequenceRules] = {}  # by slot
        #: by slot, of the sequences that want logprobs of their prompt: how many beside each
        self._num_prompt_logprobs: dict[int, int] = {}
        #: seq_id -> why its rules do not work; it stays known until the plan drops it
        self.failed: dict[int, str] = {}
        self._tokens = np.zeros((0, 256), np.int32)
        self._blocks = np.zeros((0, 256 // block_size + 1), np.int32)
        self._num_tokens = np.zeros(0, np.int64)
        self._num_blocks_of = np.zeros(0, np.int64)
        self._num_prompt = np.zeros(0, np.int64)
        self._temperature = np.zeros(0, np.float32)
        self._top_p = np.zeros(0, np.float32)
        self._min_p = np.zeros(0, np.float32)
        self._top_k = np.zeros(0, np.int32)
        self._seed = np.zeros(0, np.uint64)

    def __len__(self) -> int:
        return len(self._slots)

    def apply(self, plan: StepPlan) -> None:
        """Take over what `plan` changes: dropped, new, new blocks, in this order. Raises EngineError."""
        for seq_id in plan.dropped:
            slot = self._slots.pop(seq_id, None)
            if slot is not None:
                self._free.append(slot)
                self._rules.pop(slot, None)
                self._num_prompt_logprobs.pop(slot, None)
                self.failed.pop(seq_id, None)
        for new in plan.new:
            self._add(new)
        for seq_id, block_ids in plan.new_block_ids.items():
            self._append_blocks(self._slot(seq_id), block_ids)

    def _slot(self, seq_id: int) -> int:
        slot = self._slots.get(seq_id)
        if slot is None:
            raise EngineError(f"the plan names sequence {seq_id}, which this runner does not know")
        return slot

    def _add(self, new: NewSequence) -> None:
        if new.seq_id in self._slots:
            raise EngineError(f"sequence {new.seq_id} is new in the plan but already known")
        tokens = np.asarray(new.token_ids, np.int64)
        if not 0 < len(tokens) <= self._max_len or tokens.min() < 0 or tokens.max() >= self._vocab_size:
            raise EngineError(
                f"sequence {new.seq_id}: needs 1 to {self._max_len} token ids within 0..{self._vocab_size - 1}"
            )
        if not self._free:
            self._grow_slots()
        slot = self._free.pop()
        self._slots[new.seq_id] = slot
        self._reserve_tokens(len(tokens) + 1)
        self._tokens[slot, : len(tokens)] = tokens
        self._num_tokens[slot] = len(tokens)
        self._num_prompt[slot] = new.num_prompt_tokens
        self._num_blocks_of[slot] = 0
        self._append_blocks(slot, new.block_ids, lowest=0 if self._window is None else NULL_BLOCK)
        sampling = new.sampling
        self._temperature[slot] = sampling.temperature
        self._top_p[slot] = sampling.top_p
        self._min_p[slot] = sampling.min_p
        self._top_k[slot] = sampling.top_k
        self._seed[slot] = sampling.seed & 0xFFFFFFFFFFFFFFFF
        if sampling.num_prompt_logprobs is not None:  # whatever becomes of its rules: ranks have to compute alike
            self._num_prompt_logprobs[slot] = sampling.num_prompt_logprobs
        if sampling.has_rules and self._with_rules:
            self._add_rules(slot, new)

    def _add_rules(self, slot: int, new: NewSequence) -> None:
        prompt, output = new.token_ids[: new.num_prompt_tokens], new.token_ids[new.num_prompt_tokens :]
        try:
            rules = SequenceRules(new.sampling, prompt, output, self._vocab_size, self._eos, self._grammars)
        except (InvalidRequestError, GrammarError) as error:
            self.failed[new.seq_id] = str(error)
        else:
            self._rules[slot] = rules

    def _append_blocks(self, slot: int, block_ids: list[int], lowest: int = 0) -> None:
        start = int(self._num_blocks_of[slot])
        end = start + len(block_ids)
        if end > self._blocks.shape[1]:
            self._blocks = _widened(self._blocks, max(end, 2 * self._blocks.shape[1]))
        ids = np.asarray(block_ids, np.int32)
        if len(ids) and (ids.min() < lowest or ids.max() >= self._num_blocks):
            raise EngineError(f"a block id of the plan is outside 0..{self._num_blocks - 1}")
        self._blocks[slot, start:end] = ids
        self._num_blocks_of[slot] = end

    def _grow_slots(self) -> None:
        old = len(self._num_tokens)
        size = max(16, 2 * old)
        for name in ("_tokens", "_blocks", "_num_tokens", "_num_blocks_of", "_num_prompt"):
            self._lengthen(name, size)
        for name in ("_temperature", "_top_p", "_min_p", "_top_k", "_seed"):
            self._lengthen(name, size)
        self._free.extend(range(size - 1, old - 1, -1))

    def _lengthen(self, name: str, size: int) -> None:
        array = getattr(self, name)
        longer = np.zeros((size, *array.shape[1:]), array.dtype)
        longer[: len(array)] = array
        setattr(self, name, longer)

    def _reserve_tokens(self, length: int) -> None:
        if length > self._tokens.shape[1]:
            self._tokens = _widened(self._tokens, max(length, 2 * self._tokens.shape[1]))

    def assemble(self, plan: StepPlan) -> InputBatch:
        """Arrays of the step. Raises EngineError when a sequence lacks tokens or blocks for what is scheduled."""
        slots = np.fromiter((self._slot(s) for s in plan.seq_ids), np.int64, len(plan.seq_ids))
        computed = np.asarray(plan.num_computed, np.int64)
        scheduled = np.asarray(plan.num_scheduled, np.int64)
        end = computed + scheduled
        known = self._num_tokens[slots]
        num_drafts = self._write_drafts(plan) if plan.drafts else None
        reach = known if num_drafts is None else known + num_drafts
        self._check(plan, end, reach, self._num_blocks_of[slots] * self._block_size, scheduled)
        if self._window is not None:
            self._check_window(plan, slots, np.maximum(0, computed - self._window + 1))
        seq_start = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(scheduled, out=seq_start[1:])
        if len(slots) == seq_start[-1]:  # every sequence computes one token
            slot_of, positions = slots, computed
        else:
            slot_of = np.repeat(slots, scheduled)
            positions = np.arange(seq_start[-1]) + np.repeat(computed - seq_start[:-1], scheduled)
        block, offset = np.divmod(positions, self._block_size)
        sampled = np.flatnonzero(end == reach)
        sample_rows = seq_start[1:][sampled] - np.int32(1)
        drafted: tuple[tuple[int, Ints], ...] = ()
        if num_drafts is not None:
            sampled, sample_rows, drafted = _with_drafts(plan, sampled, num_drafts, seq_start)
        who = slots[sampled]
        # behind position p stands output number p + 1 - num_prompt, drafts and known tokens alike
        output_positions = positions[sample_rows] + 1 - self._num_prompt[who]
        temperature = self._temperature[who]
        prompt_rows = self._prompt_rows(plan, slots, len(sampled)) if self._num_prompt_logprobs else ()
        if prompt_rows:
            sample_rows = np.concatenate(
                [sample_rows, *(seq_start[i] + np.arange(n, dtype=np.int32) for i, n, _ in prompt_rows)]
            )
        return InputBatch(
            token_ids=self._tokens[slot_of, positions],
            positions=positions.astype(np.int32),
            slots=self._blocks[slot_of, block].astype(np.int64) * self._block_size + offset,
            seq_start=seq_start,
            seq_slot=slots.astype(np.int32),
            block_tables=self._blocks,
            sampled=sampled,
            sample_rows=sample_rows,
            temperature=temperature,
            top_k=self._top_k[who],
            top_p=self._top_p[who],
            min_p=self._min_p[who],
            uniform=uniform(self._seed[who], output_positions) if temperature.any() else np.zeros(len(who)),
            ruled=self._ruled(who) if self._rules else (),
            prompt_rows=tuple(rows for _, _, rows in prompt_rows),
            drafted=drafted,
        )

    def _write_drafts(self, plan: StepPlan) -> NDArray[np.int64]:
        """Put drafts behind the known tokens, where the next ones may overwrite them. Returns how many each sequence of
        the plan has. Raises EngineError.
        """
        counts = np.zeros(len(plan.seq_ids), np.int64)
        for i, seq_id in enumerate(plan.seq_ids):
            if (drafts := plan.drafts.get(seq_id)) is None:
                continue
            slot, tokens = self._slot(seq_id), np.asarray(drafts, np.int64)
            if tokens.min() < 0 or tokens.max() >= self._vocab_size:
                raise EngineError(f"sequence {seq_id}: drafts need token ids within 0..{self._vocab_size - 1}")
            start = int(self._num_tokens[slot])
            if plan.num_computed[i] != start - 1 or plan.num_scheduled[i] != len(tokens) + 1:
                raise EngineError(f"sequence {seq_id} has {len(tokens)} drafts, but is not at its last known token")
            self._reserve_tokens(start + len(tokens) + 1)
            self._tokens[slot, start : start + len(tokens)] = tokens
            counts[i] = len(tokens)
        return counts

    def _check(
        self,
        plan: StepPlan,
        end: NDArray[np.int64],
        known: NDArray[np.int64],
        room: NDArray[np.int64],
        scheduled: NDArray[np.int64],
    ) -> None:
        """The kernels trust these bounds with raw pointers."""
        wrong = (end > known) | (end > room) | (scheduled < 1) | (end > self._max_len) | (end < scheduled)
        if wrong.any():
            i = int(np.flatnonzero(wrong)[0])
            raise EngineError(
                f"sequence {plan.seq_ids[i]}: {scheduled[i]} tokens up to position {end[i]} scheduled, "
                f"with {known[i]} tokens known, block room for {room[i]} and max_model_len {self._max_len}"
            )

    def _check_window(self, plan: StepPlan, slots: NDArray[np.int64], first: NDArray[np.int64]) -> None:
        """The block with the first position that each sequence sees is there, and so are those behind it: NULL_BLOCK
        only leads.
        """
        missing = self._blocks[slots, first // self._block_size] < 0
        if missing.any():
            i = int(np.flatnonzero(missing)[0])
            raise EngineError(f"sequence {plan.seq_ids[i]} sees position {first[i]}, and has no block for it")

    def _ruled(self, who: NDArray[np.int64]) -> tuple[tuple[int, SequenceRules, Ints], ...]:
        ruled = []
        for index, slot in enumerate(who.tolist()):
            rules = self._rules.get(slot)
            if rules is not None and rules.is_active(int(self._num_tokens[slot] - self._num_prompt[slot])):
                ruled.append((index, rules, self._tokens[slot, self._num_prompt[slot] : self._num_tokens[slot]]))
        return tuple(ruled)

    def _prompt_rows(self, plan: StepPlan, slots: NDArray[np.int64], first: int) -> list[tuple[int, int, PromptRows]]:
        """(index in the plan, number of rows, rows) of the sequences that want logprobs of prompt tokens which follow
        the tokens of this step.
        """
        found = []
        for i, (seq_id, slot) in enumerate(zip(plan.seq_ids, slots.tolist(), strict=True)):
            if (num_top := self._num_prompt_logprobs.get(slot)) is None:
                continue
            start = plan.num_computed[i]
            end = min(start + plan.num_scheduled[i], int(self._num_prompt[slot]) - 1)
            if end > start:
                next_ids = self._tokens[slot, start + 1 : end + 1]
                found.append((i, end - start, PromptRows(seq_id, first, next_ids, num_top)))
                first += end - start
        return found

    def append(self, batch: InputBatch, tokens: NDArray[np.int32]) -> NDArray[np.intp]:
        """Add the sampled tokens to their sequences. Returns the sample indices of those that count: behind a rejected
        draft nothing does.
        """
        kept = np.arange(len(tokens))
        at = batch.positions[batch.sample_rows[: len(tokens)]].astype(np.int64) + 1
        if batch.drafted:
            counts = np.ones(len(tokens), np.bool_)
            for first, drafts in batch.drafted:
                wrong = np.flatnonzero(tokens[first : first + len(drafts)] != drafts)
                if len(wrong):
                    counts[first + wrong[0] + 1 : first + len(drafts) + 1] = False
            kept = np.flatnonzero(counts)
            at, tokens = at[kept], tokens[kept]
        if len(at):
            self._reserve_tokens(int(at.max()) + 1)
        slots = batch.seq_slot[batch.sampled[kept]]
        self._tokens[slots, at] = tokens
        self._num_tokens[slots] = at + 1  # of several of one sequence the last one counts, and that is the largest
        return kept


def _with_drafts(
    plan: StepPlan, sampled: NDArray[np.intp], num_drafts: NDArray[np.int64], seq_start: Ints
) -> tuple[NDArray[np.intp], Ints, tuple[tuple[int, Ints], ...]]:
    """Each of `sampled` once for its last known token and once for each draft: the sequences, their token rows, and
    (first sample index, drafts) of those that have some.
    """
    rows_of = num_drafts[sampled] + 1
    first = np.cumsum(rows_of) - rows_of
    repeated = np.repeat(sampled, rows_of)
    rows = np.arange(len(repeated)) - np.repeat(first + rows_of, rows_of) + seq_start[1:][repeated]
    drafted = tuple(
        (int(first[i]), np.asarray(plan.drafts[plan.seq_ids[sampled[i]]], np.int32))
        for i in np.flatnonzero(rows_of > 1).tolist()
    )
    return repeated, rows.astype(np.int32), drafted


def _widened(array: Ints, width: int) -> Ints:
    wider = np.zeros((array.shape[0], width), array.dtype)
    wider[:, : array.shape[1]] = array
    return wider
