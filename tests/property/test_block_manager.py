"""The block manager against a naive model, under arbitrary sequences of operations (invariants 9 to 14 of the field
notes).
"""

from __future__ import annotations

from collections.abc import Iterable

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replica.block_hash import root_hash
from replica.block_manager import BlockManager
from replica.messages import RequestId, RouterId, SamplingParams
from replica.sequence import Sequence
from tests.property.lengths import examples

BLOCK = 4
NUM_BLOCKS = 12


def make_sequence(seq_id: int, token_ids: Iterable[int], salt: str = "") -> Sequence:
    return Sequence(
        seq_id=seq_id,
        request_id=RequestId(str(seq_id)),
        index=0,
        router_id=RouterId("r"),
        prompt_token_ids=list(token_ids),
        output_token_ids=[],
        sampling=SamplingParams(max_tokens=100),
        order_key=(0.0, 0, float(seq_id)),
        root=root_hash("model", salt),
        max_total_tokens=10_000,
        now=0.0,
    )


class BlockMachine(RuleBasedStateMachine):
    """`content` is the naive model: what was really written into each block, position by position, by whoever computed
    it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(NUM_BLOCKS, BLOCK, record_events=True)
        self.living: list[Sequence] = []
        self.salts: dict[int, str] = {}
        self.content: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}
        self.replayed: set[bytes] = set()
        self.next_id = 0

    def compute(self, sequence: Sequence, num_tokens: int) -> None:
        """Write KV of the next tokens into the sequence's own blocks, as a runner would, then register them."""
        start = sequence.num_computed_tokens
        for position in range(start, start + num_tokens):
            block_id = sequence.block_ids[position // BLOCK]
            prefix = tuple(sequence.token_ids[: position + 1])
            self.content[(block_id, position % BLOCK)] = (self.salts[sequence.seq_id], prefix)
        sequence.num_computed_tokens += num_tokens
        self.blocks.commit(sequence)

    @rule(
        pattern=st.integers(0, 2),
        length=st.integers(1, 30),
        salt=st.sampled_from(["", "tenant"]),
        keep=st.integers(0, 3),
    )
    def admit(self, pattern: int, length: int, salt: str, keep: int) -> None:
        # three underlying texts, so that prefixes are shared often
        sequence = make_sequence(self.next_id, [(pattern * position) % 5 for position in range(length)], salt)
        before = self.snapshot()
        ok = self.blocks.admit(sequence, keep_free=keep)
        if not ok:
            assert self.snapshot() == before, "a refused admission changed something"
            return
        self.salts[sequence.seq_id] = salt
        self.next_id += 1
        self.living.append(sequence)
        assert sequence.num_computed_tokens < sequence.num_tokens, "the last token must be computed again"
        assert self.blocks.num_free >= keep
        self.check_hits(sequence)

    def check_hits(self, sequence: Sequence) -> None:
        """Every token that counts as computed is really there, for the same prefix and salt."""
        for position in range(sequence.num_computed_tokens):
            key = (sequence.block_ids[position // BLOCK], position % BLOCK)
            assert self.content[key] == (self.salts[sequence.seq_id], tuple(sequence.token_ids[: position + 1]))

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def compute_some(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.living))
        left = sequence.num_uncomputed_tokens
        if left:
            self.compute(sequence, data.draw(st.integers(1, left)))

    @precondition(lambda self: self.living)
    @rule(data=st.data(), token_id=st.integers(0, 4))
    def decode(self, data: st.DataObject, token_id: int) -> None:
        sequence = data.draw(st.sampled_from(self.living))
        before = self.snapshot()
        new = self.blocks.grow(sequence, sequence.num_tokens + 1)
        if new is None:
            assert self.snapshot() == before, "a refused growth changed something"
            return
        sequence.token_ids.append(token_id)

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.living))
        self.living.remove(sequence)
        self.blocks.free(sequence)
        assert sequence.block_ids == []

    @rule()
    def clear(self) -> None:
        self.blocks.clear_cache()
        assert self.blocks.stats().num_cached == 0

    def snapshot(self) -> object:
        return (list(self.blocks._free), list(self.blocks._ref_count), list(self.blocks._hash))

    @invariant()
    def books_agree(self) -> None:
        self.blocks.validate(self.living)

    @invariant()
    def living_data_is_intact(self) -> None:
        """Nobody wrote into a block that somebody else still reads."""
        for sequence in self.living:
            self.check_hits(sequence)

    @invariant()
    def events_replay_to_the_cache(self) -> None:
        event = self.blocks.take_events()
        if event is not None:
            if event.cleared:
                self.replayed.clear()
            self.replayed -= set(event.removed)
            self.replayed |= set(event.stored)
        assert self.replayed == set(self.blocks.cached_hashes())


TestBlockMachine = BlockMachine.TestCase
TestBlockMachine.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
