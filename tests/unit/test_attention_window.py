"""Windows: which blocks are passed, what a hit needs, and what a sequence holds of a pool smaller than its prompt."""

from __future__ import annotations

import random

import numpy as np
import pytest

from replica.attention_window import NULL_BLOCK, Window
from replica.block_manager import BlockManager
from replica.errors import EngineError
from replica.fake_runner import FakeModelRunner, expected_output
from replica.input_batch import InputBatch, SequenceStore
from replica.messages import FinishReason, RefusalReason, SamplingParams
from replica.sequence import Sequence
from replica.step import NewSequence, StepPlan
from tests.property.test_block_manager import make_sequence
from tests.unit.engine_harness import VOCAB, Harness

BLOCK = 4
SIZES = (1, 2, 3, 4, 5, 8, 9, 13)


def first_seen(position: int, size: int) -> int:
    return max(0, position - size + 1)


@pytest.mark.parametrize("size", SIZES)
def test_a_block_is_passed_once_no_later_token_sees_any_of_it(size: int) -> None:
    for num_computed in range(40):
        seen = {p // BLOCK for q in range(num_computed, 60) for p in range(first_seen(q, size), q + 1)}
        assert Window(size, BLOCK).num_passed(num_computed) == min(seen)


@pytest.mark.parametrize("size", SIZES)
def test_the_span_is_that_of_the_worst_place(size: int) -> None:
    for count in range(1, 20):
        starts = range(size, size + BLOCK)
        spans = [(start + count - 1) // BLOCK - first_seen(start, size) // BLOCK + 1 for start in starts]
        span = Window(size, BLOCK).span(count)
        assert span == max(spans)
        assert span <= -(-(size + count) // BLOCK) + 1


class Counting(set[bytes]):
    num_looks = 0

    def __contains__(self, key: object) -> bool:
        self.num_looks += 1
        return super().__contains__(key)


@pytest.mark.parametrize("size", SIZES)
def test_a_hit_ends_as_far_back_as_its_window_is_there(size: int) -> None:
    rng, window = random.Random(size), Window(size, BLOCK)
    hashes = [bytes([i]) for i in range(30)]
    for _ in range(300):
        limit, share = rng.randrange(31), rng.choice([0.0, 0.5, 0.9, 1.0])
        cached = Counting(h for h in hashes if rng.random() < share)
        ends = []
        for end in range(limit + 1):
            seen = {p // BLOCK for p in range(first_seen(end * BLOCK, max(size, 2)), end * BLOCK)}
            if {hashes[index] for index in seen} <= cached:
                ends.append(end)
        cached.num_looks = 0
        assert window.hit_end(hashes, cached, limit) == max(ends)
        assert cached.num_looks <= 2 * limit


def test_an_empty_cache_costs_a_look_a_window() -> None:
    cached = Counting()
    assert Window(4096, 16).hit_end([b""] * 6250, cached, 6250) == 0
    assert cached.num_looks <= 26


def admit(blocks: BlockManager, seq_id: int, token_ids: list[int]) -> Sequence:
    """Admitted and computed to its end, in one piece."""
    sequence = make_sequence(seq_id, token_ids)
    assert blocks.admit(sequence)
    assert blocks.grow(sequence, sequence.num_tokens) is not None
    sequence.num_computed_tokens = sequence.num_tokens
    blocks.commit(sequence)
    return sequence


def test_a_hit_without_the_blocks_before_its_window() -> None:
    """40 tokens, of which the first 16 were taken by others: the last 9 before a border are enough."""
    blocks = BlockManager(10, BLOCK, window=9)
    prompt = list(range(40))
    first = admit(blocks, 0, prompt)
    assert blocks.release_passed(first) == 8
    blocks.free(first)
    other = admit(blocks, 1, list(range(100, 124)))  # takes six: those passed go before those of the last window
    assert blocks.stats().num_evictions == 6
    again = make_sequence(2, [*prompt, 40, 41])
    assert blocks.admit(again)
    assert again.num_cached_tokens == 40
    assert again.block_ids[:8] == [NULL_BLOCK] * 8
    assert len(again.held_blocks) == 3
    blocks.validate([other, again])
    blocks.free(other)
    blocks.free(again)
    assert blocks.num_free == 10


def test_what_was_computed_on_a_forgotten_cache_is_not_found() -> None:
    """A window does not ask for the blocks before it, so those that stand on forgotten ones are not registered."""
    blocks = BlockManager(16, BLOCK, window=5)
    running = make_sequence(0, list(range(40)))
    assert blocks.admit(running)
    running.num_computed_tokens = 16
    blocks.commit(running)
    blocks.clear_cache()
    running.num_computed_tokens = 40
    blocks.commit(running)
    assert blocks.cached_hashes() == []
    blocks.free(running)
    assert blocks.admit(running)
    running.num_computed_tokens = 40
    blocks.commit(running)
    assert len(blocks.cached_hashes()) == 10


def sliding(window: int | None, num_blocks: int, max_model_len: int = 4096, **settings: object) -> Harness:
    harness = Harness(num_blocks=num_blocks, **settings)  # type: ignore[arg-type]
    runner = FakeModelRunner(
        num_blocks=num_blocks,
        block_size=BLOCK,
        max_model_len=max_model_len,
        vocab_size=VOCAB,
        eos_token_ids=(),
        window=window,
    )
    return harness.over(runner)


def most_held(harness: Harness) -> int:
    return max((len(s.held_blocks) for s in harness.core.scheduler.running), default=0)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [1, 7, 32])
def test_a_prompt_of_many_windows_runs_in_a_pool_that_holds_a_few(budget: int, caching: bool) -> None:
    """60 blocks of prompt; what is held is at most ceil((window + chunk) / block) + 1, in the answer too."""
    harness = sliding(10, 11, max_num_batched_tokens=budget, caching=caching)
    prompt = [i % 97 for i in range(240)]
    assert harness.submit("long", prompt, max_tokens=30) is None
    num_steps = 0
    bound = -(-(10 + budget) // BLOCK) + 1
    while (plan := harness.plan()) is not None:
        assert most_held(harness) <= bound
        if harness.core.scheduler.running and len(harness.tokens.get("long", [])) > 1:
            assert most_held(harness) <= -(-(10 + 1) // BLOCK) + 1, "in the answer a chunk is one token"
        num_steps += 1
        harness.finish(plan)
    assert num_steps == -(-240 // budget) + 29 + 1, "chunks are as long as without a window"
    assert harness.tokens["long"] == expected_output(prompt, 30, vocab_size=VOCAB)
    assert harness.ends["long"] is FinishReason.LENGTH
    assert harness.core.blocks.num_free == 11


def test_what_can_never_fit_is_told_by_the_window() -> None:
    """A window of 10 needs four blocks wherever it lies: with those the context is the limit, with three the pool."""
    assert sliding(10, 4, max_model_len=300).submit("a", [1] * 299, max_tokens=1) is None
    assert sliding(10, 4, max_model_len=300).submit("a", [1] * 300) is RefusalReason.NEVER_FITS
    assert sliding(10, 3, max_model_len=300).submit("a", [1] * 11, max_tokens=1) is None
    assert sliding(10, 3, max_model_len=300).submit("a", [1] * 12) is RefusalReason.NEVER_FITS
    assert sliding(None, 4, max_model_len=300).submit("a", [1] * 16) is RefusalReason.NEVER_FITS


def test_several_long_prompts_run_side_by_side() -> None:
    """Each reserves window and chunk, ten blocks of its hundred: three of them fit 32 blocks and need no preemption."""
    harness = sliding(10, 32, max_num_batched_tokens=28)
    prompts = {name: [(i * step) % 89 for i in range(400)] for name, step in (("a", 1), ("b", 3), ("c", 5))}
    for name, prompt in prompts.items():
        assert harness.submit(name, prompt, max_tokens=20) is None
    harness.step()
    harness.step()
    assert harness.running() == ["a"], "the budget is spent on the first"
    harness.run()
    assert harness.core.scheduler.counters.preemptions == 0
    for name, prompt in prompts.items():
        assert harness.tokens[name] == expected_output(prompt, 20, vocab_size=VOCAB)


@pytest.mark.parametrize(("num_blocks", "is_short"), [(8, True), (12, False)])
def test_a_prompt_whose_blocks_others_share_takes_what_is_free(num_blocks: int, is_short: bool) -> None:
    """What it gives back does not become free, so there is less to take in front: it goes on in smaller pieces, and
    when there is nothing it puts somebody back, as a stream would. Both come to their end.
    """
    harness = sliding(16, num_blocks, max_num_batched_tokens=8, long_prefill_token_threshold=4)
    prompt = [i % 53 for i in range(120)]
    assert harness.submit("a", prompt, max_tokens=12) is None
    for _ in range(10):
        harness.step()
    assert harness.submit("b", prompt, max_tokens=12) is None
    harness.step()
    assert harness.sequence("b").num_cached_tokens == 40
    assert len(set(harness.sequence("a").held_blocks) & set(harness.sequence("b").held_blocks)) == 4
    harness.run()
    assert (harness.core.scheduler.counters.preemptions > 0) == is_short
    for name in ("a", "b"):
        assert harness.tokens[name] == expected_output(prompt, 12, vocab_size=VOCAB)
    assert harness.core.blocks.num_free == num_blocks


def test_a_larger_chunk_while_it_runs() -> None:
    """Tables grow to the new size from what is free; a smaller one is kept by what is told next."""
    harness = sliding(10, 40, max_num_batched_tokens=8)
    prompt = [i % 61 for i in range(400)]
    assert harness.submit("a", prompt, max_tokens=4) is None
    assert harness.step() == {"a": 8}
    harness.configure(max_num_batched_tokens=64)
    assert harness.step() == {"a": 64}
    harness.configure(max_num_batched_tokens=8)
    harness.step()
    assert harness.step() == {"a": 8}
    harness.run()
    assert harness.tokens["a"] == expected_output(prompt, 4, vocab_size=VOCAB)


def test_without_chunks_a_prompt_longer_than_the_pool_is_computed_in_pieces_as_large_as_the_pool() -> None:
    harness = sliding(10, 12, enable_chunked_prefill=False)
    prompt = [i % 61 for i in range(200)]
    assert harness.submit("a", prompt, max_tokens=4) is None
    assert harness.step() == {"a": 48}
    harness.run()
    assert harness.tokens["a"] == expected_output(prompt, 4, vocab_size=VOCAB)


@pytest.mark.parametrize(("window", "is_seen"), [(5, False), (6, True)])
def test_the_fake_runner_notices_what_is_somebody_elses(window: int, is_seen: bool) -> None:
    """The token at 8 sees 3, the last one of the block that another sequence has by now, with a window of 6."""
    runner = FakeModelRunner(num_blocks=8, block_size=BLOCK, vocab_size=VOCAB, window=window)
    sampling = SamplingParams(max_tokens=4)
    runner.execute(StepPlan(0, [0], [0], [8], new=[NewSequence(0, list(range(9)), 9, [0, 1, 2], sampling)]))
    runner.execute(StepPlan(1, [1], [0], [4], new=[NewSequence(1, [5] * 4, 4, [0], sampling)]))
    plan = StepPlan(2, [0], [8], [1])
    if is_seen:
        with pytest.raises(EngineError, match="the token at 8 sees something else at 3, in block 0"):
            runner.execute(plan)
    else:
        assert runner.execute(plan).token_ids == expected_output(list(range(9)), 1, vocab_size=VOCAB)


@pytest.mark.parametrize(("window", "problem"), [(None, "outside 0..7"), (6, "sees position 3"), (5, "")])
def test_a_runner_refuses_a_plan_that_lacks_a_block_in_sight(window: int | None, problem: str) -> None:
    store = SequenceStore(BLOCK, 8, 64, VOCAB, (), window=window)
    new = NewSequence(0, list(range(9)), 9, [NULL_BLOCK, 1, 2], SamplingParams(max_tokens=4))
    plan = StepPlan(0, [0], [8], [1], new=[new])

    def assemble(plan: StepPlan) -> InputBatch:
        store.apply(plan)
        return store.assemble(plan)

    if problem:
        with pytest.raises(EngineError, match=problem):
            assemble(plan)
    else:
        assert np.array_equal(assemble(plan).slots, [2 * BLOCK])
