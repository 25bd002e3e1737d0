"""The running set against plain lists of sequences, under arbitrary comings, goings and steps."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replica.messages import FinishReason, RequestId, RouterId, SamplingParams
from replica.running_set import RunningSet
from replica.sequence import Sequence
from tests.property.lengths import examples

BLOCK = 4
ROUTERS = [RouterId(name) for name in ("a", "b", "c")]


def make_sequence(seq_id: int, router: RouterId, num_tokens: int, max_tokens: int, stops: tuple[int, ...]) -> Sequence:
    return Sequence(
        seq_id=seq_id,
        request_id=RequestId(str(seq_id)),
        index=0,
        router_id=router,
        prompt_token_ids=list(range(num_tokens)),
        output_token_ids=[],
        sampling=SamplingParams(max_tokens=max_tokens, stop_token_ids=stops),
        order_key=(0.0, seq_id % 3, float(seq_id)),
        root=b"",
        max_total_tokens=num_tokens + max_tokens,
        now=0.0,
    )


class RunningSetMachine(RuleBasedStateMachine):
    """`sequences` is the naive model: a list in admission order, every answer by a walk over it."""

    def __init__(self) -> None:
        super().__init__()
        self.running = RunningSet(BLOCK, is_caching=True, num_rows=1)
        self.sequences: list[Sequence] = []
        self.gone: list[tuple[Sequence, int, int]] = []
        self.next_id = 0

    @rule(
        router=st.sampled_from(ROUTERS),
        num_tokens=st.integers(1, 12),
        max_tokens=st.integers(1, 9),
        hits=st.integers(0, 2),
        stops=st.sampled_from([(), (3,)]),
    )
    def add(self, router: RouterId, num_tokens: int, max_tokens: int, hits: int, stops: tuple[int, ...]) -> None:
        sequence = make_sequence(self.next_id, router, num_tokens, max_tokens, stops)
        self.next_id += 1
        sequence.num_blocks_committed = min(hits, (num_tokens - 1) // BLOCK)
        sequence.num_computed_tokens = sequence.num_blocks_committed * BLOCK
        sequence.block_ids = list(range(-(-num_tokens // BLOCK)))
        self.running.add(sequence)
        self.sequences.append(sequence)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        self.sequences.remove(sequence)
        computed = sequence.num_computed_tokens
        self.running.remove(sequence)
        self.gone.append((sequence, computed, sequence.num_tokens))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def compute_prompt(self, data: st.DataObject) -> None:
        """A chunk; with the last one comes a token."""
        sequence = data.draw(st.sampled_from(self.sequences))
        sequence.num_computed_tokens += data.draw(st.integers(1, sequence.num_uncomputed_tokens))
        sequence.num_blocks_committed = sequence.num_computed_tokens // BLOCK
        if not sequence.num_uncomputed_tokens:
            self.cover(sequence, sequence.num_tokens + 1)
            sequence.append(7)
            sequence.first_token_at = 0.0
        self.running.settle(sequence)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        sequence.abort_reason = FinishReason.ABORT
        self.running.settle(sequence)

    @rule(count=st.integers(0, 6), token_id=st.integers(0, 9))
    def step(self, count: int, token_id: int) -> None:
        """The first `count` decodes get blocks and a token; who is to be looked at is found by looking at all."""
        everyone, prefills = self.running.split()
        decodes = everyone.first(count)
        expected = [s for s in self.sequences if s.num_uncomputed_tokens == 1]
        assert everyone.seq_ids == [s.seq_id for s in expected]
        assert [s.seq_id for s in prefills] == [s.seq_id for s in self.sequences if s.num_uncomputed_tokens > 1]
        expected = expected[:count]
        short = [s for s in expected if s.num_tokens > len(s.block_ids) * BLOCK]
        assert [self.running.owner(row) for row in self.running.without_room(decodes)] == short
        for sequence in short:
            self.cover(sequence, sequence.num_tokens)
        before = [(s.num_computed_tokens, s.token_ids.copy()) for s in expected]
        positions = self.running.advance(decodes, [token_id + i for i in range(len(decodes))])
        for i, (sequence, (computed, token_ids)) in enumerate(zip(expected, before, strict=True)):
            assert sequence.token_ids == [*token_ids, token_id + i]
            assert sequence.num_computed_tokens == computed + 1
            assert self.wants_a_look(sequence) <= (i in positions), f"{sequence} was passed over"
            if i in positions:  # what the scheduler does there
                sequence.num_blocks_committed = sequence.num_computed_tokens // BLOCK
                sequence.first_token_at = 0.0
                self.running.settle(sequence)
        columns = list(self.running.by_router(decodes.rows, decodes.seq_ids, [10 * i for i in decodes.seq_ids]))
        assert {router: list(zip(ids, tokens, strict=True)) for router, ids, tokens in columns} == {
            router: [(s.seq_id, 10 * s.seq_id) for s in expected if s.router_id == router]
            for router in {s.router_id for s in expected}
        }
        assert len(columns) == len({s.router_id for s in expected})

    def wants_a_look(self, sequence: Sequence) -> bool:
        return (
            sequence.first_token_at is None
            or sequence.abort_reason is not None
            or bool(sequence.sampling.stop_token_ids)
            or sequence.num_tokens >= sequence.max_total_tokens
            or sequence.num_computed_tokens // BLOCK > sequence.num_blocks_committed
        )

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def who_is_left(self, data: st.DataObject) -> None:
        """A preemption in the middle of planning."""
        decodes, _ = self.running.split()
        victim = data.draw(st.sampled_from(self.sequences))
        self.sequences.remove(victim)
        self.running.remove(victim)
        left = [s.seq_id for s in self.sequences if s.num_uncomputed_tokens == 1]
        assert self.running.still(decodes).seq_ids == left

    def cover(self, sequence: Sequence, num_tokens: int) -> None:
        sequence.block_ids = list(range(-(-num_tokens // BLOCK)))
        self.running.cover(sequence)

    @invariant()
    def books_agree(self) -> None:
        self.running.validate()
        assert list(self.running) == self.sequences
        assert len(self.running) == len(self.sequences)
        assert list(reversed(self.running)) == self.sequences[::-1]
        assert not self.sequences or self.running.max_priority == max(s.order_key[1] for s in self.sequences)
        num_uncomputed = sum(s.num_uncomputed_tokens for s in self.sequences)
        assert self.running.count_tokens() == (num_uncomputed, sum(s.num_computed_tokens for s in self.sequences))

    @invariant()
    def the_gone_keep_their_counts(self) -> None:
        for sequence, computed, num_tokens in self.gone:
            assert (sequence.num_computed_tokens, sequence.num_tokens) == (computed, num_tokens)
            assert sequence.row == -1


TestRunningSetMachine = RunningSetMachine.TestCase
TestRunningSetMachine.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
