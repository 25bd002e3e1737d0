"""PURE. What one step may still spend, and the plan that grows from it. Thrown away after the step."""

from __future__ import annotations

from replica.copy_line import CopyBatch
from replica.prefill_lanes import PrefillLanes
from replica.sequence import Sequence
from replica.step import NewSequence, StepPlan


class StepBudget:
    """Tokens left in a step, and the plan so far. Decides nothing about order."""

    __slots__ = (
        "_drafts",
        "_new",
        "_new_blocks",
        "_num_computed",
        "_num_scheduled",
        "_seq_ids",
        "chunks",
        "has_prefill",
        "lanes",
        "tokens_left",
    )

    def __init__(self, max_tokens: int, lanes: PrefillLanes) -> None:
        self.tokens_left = max_tokens
        self.lanes = lanes
        #: a chunk of a prompt is already in the plan
        self.has_prefill = False
        #: sequences that were given tokens of their prompt, in plan order; they come after the decodes
        self.chunks: list[Sequence] = []
        self._seq_ids: list[int] = []
        self._num_computed: list[int] = []
        self._num_scheduled: list[int] = []
        self._new: list[NewSequence] = []
        self._new_blocks: dict[int, list[int]] = {}
        self._drafts: dict[int, list[int]] = {}

    def allow_whole(self, num_uncomputed: int) -> None:
        """Chunked prefill is off: the step becomes as long as this prompt needs."""
        self.lanes.open_wide()
        self.tokens_left = max(self.tokens_left, num_uncomputed)

    def tell_blocks(self, new_blocks: dict[int, list[int]]) -> None:
        """What was added to the block tables of running sequences. Before anything else."""
        self._new_blocks = new_blocks

    def spend_decodes(self, seq_ids: list[int], num_computed: list[int]) -> None:
        """Plan one token of each of these, whose block tables cover it. Before any chunk."""
        assert not self._seq_ids, "decodes come first"
        self.tokens_left -= len(seq_ids)
        self._seq_ids = seq_ids.copy()
        self._num_computed = num_computed
        self._num_scheduled = [1] * len(seq_ids)

    def limit(self, num_tokens: int) -> None:
        """From now on at most so many more."""
        self.tokens_left = min(self.tokens_left, num_tokens)

    def spend_drafts(self, position: int, drafts: list[int], new_blocks: list[int]) -> None:
        """Plan `drafts` behind the one token of the decode at `position`, whose block table covers them with
        `new_blocks`.
        """
        seq_id = self._seq_ids[position]
        self.tokens_left -= len(drafts)
        self._num_scheduled[position] += len(drafts)
        self._drafts[seq_id] = drafts
        if new_blocks:
            self._new_blocks[seq_id] = self._new_blocks.get(seq_id, []) + new_blocks

    @property
    def num_tokens(self) -> int:
        """Planned so far."""
        return sum(self._num_scheduled)

    def spend_prompt(self, sequence: Sequence, room: int) -> None:
        """Plan the next piece of the prompt of `sequence`, whose block table covers `room` tokens more. It may get
        nothing.
        """
        num_uncomputed = sequence.num_uncomputed_tokens
        num_tokens = min(room, self.lanes.chunk(num_uncomputed, self.tokens_left))
        self.lanes.enter(num_uncomputed, num_tokens)
        if not num_tokens:
            return
        self.tokens_left -= num_tokens
        self.has_prefill = self.has_prefill or num_tokens > 1
        self.chunks.append(sequence)
        self._seq_ids.append(sequence.seq_id)
        self._num_computed.append(sequence.num_computed_tokens)
        self._num_scheduled.append(num_tokens)
        if not sequence.known_to_runner:
            self.introduce(sequence)

    def introduce(self, sequence: Sequence) -> None:
        """Tell the runner of it, with the blocks that it has now."""
        sequence.known_to_runner = True
        self._new.append(
            NewSequence(
                seq_id=sequence.seq_id,
                token_ids=sequence.token_ids.copy(),
                num_prompt_tokens=sequence.num_prompt_tokens,
                block_ids=sequence.block_ids.copy(),
                sampling=sequence.sampling,
            )
        )

    def plan(
        self, step: int, dropped: list[int], copies: CopyBatch | None = None, waits_for_copies: bool = False
    ) -> StepPlan:
        plan = StepPlan(
            step=step,
            seq_ids=self._seq_ids,
            num_computed=self._num_computed,
            num_scheduled=self._num_scheduled,
            new=self._new,
            new_block_ids=self._new_blocks,
            dropped=dropped,
            drafts=self._drafts,
            waits_for_copies=waits_for_copies,
        )
        return plan if copies is None else copies.into(plan)
