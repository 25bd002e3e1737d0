"""Named cases of the block manager; `tests/property/test_block_manager.py` has the arbitrary ones."""

from __future__ import annotations

import pytest

from replica.block_manager import BlockManager
from replica.sequence import Sequence
from tests.property.test_block_manager import make_sequence

BLOCK = 4


def admit(blocks: BlockManager, seq_id: int, token_ids: list[int], *, compute: bool = True) -> Sequence:
    sequence = make_sequence(seq_id, token_ids)
    assert blocks.admit(sequence)
    if compute:
        sequence.num_computed_tokens = sequence.num_tokens
        blocks.commit(sequence)
    return sequence


def test_the_last_token_of_a_wholly_cached_prompt_is_computed_again() -> None:
    """Case C-01, with blocks of 4: 16 tokens twice, then 16 + 4, then again."""
    blocks = BlockManager(32, BLOCK)
    prompt = list(range(16))
    hits = []
    for seq_id, tokens in enumerate([prompt, prompt, [*prompt, 90, 91, 92, 93], [*prompt, 90, 91, 92, 93]]):
        sequence = make_sequence(seq_id, tokens)
        assert blocks.admit(sequence)
        hits.append(sequence.num_cached_tokens)
        sequence.num_computed_tokens = len(tokens)
        blocks.commit(sequence)
        blocks.free(sequence)
    assert hits == [0, 12, 16, 16]


def test_hits_in_the_free_list_count_against_it() -> None:
    """Case C-16: five free blocks, two of them hold the prefix."""
    blocks = BlockManager(5, BLOCK)
    blocks.free(admit(blocks, 0, list(range(8))))
    order = list(blocks._free)
    too_long = make_sequence(1, [*range(8), *range(50, 66)])
    assert not blocks.admit(too_long)
    assert (list(blocks._free), blocks._ref_count, too_long.block_ids) == (order, [0] * 5, [])
    fits = make_sequence(2, [*range(8), *range(50, 62)])
    assert blocks.admit(fits)
    assert fits.num_computed_tokens == 8
    assert blocks.num_free == 0


def test_unregistered_blocks_are_reused_first_then_the_oldest_tail() -> None:
    blocks = BlockManager(8, BLOCK)
    old = admit(blocks, 0, list(range(8)))  # two registered blocks
    young = admit(blocks, 1, [*range(100, 108), 1])  # two registered, one partial
    old_table, young_table = old.block_ids, young.block_ids
    blocks.free(old)
    blocks.free(young)
    partial = young_table[2]
    assert next(iter(blocks._free)) == partial, "garbage before any cached prefix"
    # three blocks were never used; after them the registered ones in order of age, tails before heads
    assert list(blocks._free)[-4:] == [old_table[1], old_table[0], young_table[1], young_table[0]]


def test_a_touched_prefix_survives_others() -> None:
    blocks = BlockManager(6, BLOCK)
    blocks.free(admit(blocks, 0, list(range(8))))
    blocks.free(admit(blocks, 1, list(range(100, 108))))
    blocks.free(admit(blocks, 2, [*range(8), 1]))  # touches the first prefix again
    blocks.free(admit(blocks, 3, list(range(200, 216)), compute=False))  # needs four blocks
    assert len(blocks.find_prefix(make_sequence(4, [*range(8), 9]))) == 2
    assert blocks.find_prefix(make_sequence(5, [*range(100, 108), 9])) == []


def test_blocks_of_an_unfinished_prefill_are_invisible() -> None:
    """Case C-15: planned is not computed."""
    blocks = BlockManager(16, BLOCK)
    sequence = make_sequence(0, list(range(16)))
    assert blocks.admit(sequence)
    other = make_sequence(1, [*range(16), 1])
    assert blocks.find_prefix(other) == []
    sequence.num_computed_tokens = 9
    blocks.commit(sequence)
    assert blocks.find_prefix(other) == sequence.block_ids[:2]
    blocks.free(sequence)  # aborted in the middle
    assert len(blocks.find_prefix(other)) == 2


def test_two_that_compute_the_same_block_keep_one_registered() -> None:
    blocks = BlockManager(8, BLOCK, record_events=True)
    first, second = (make_sequence(i, list(range(4))) for i in range(2))
    for sequence in (first, second):
        assert blocks.admit(sequence)
    for sequence in (first, second):
        sequence.num_computed_tokens = 4
        blocks.commit(sequence)
    assert blocks.stats().num_cached == 1
    event = blocks.take_events()
    assert event is not None
    assert len(event.stored) == 1
    (duplicate,) = second.block_ids
    blocks.free(second)
    assert next(iter(blocks._free)) == duplicate
    assert blocks.find_prefix(make_sequence(2, [*range(4), 1])) == first.block_ids


def test_lookups_after_a_preemption_are_not_counted() -> None:
    """Case C-19: the hit rate tells about requests, not about our own second tries."""
    blocks = BlockManager(8, BLOCK)
    sequence = admit(blocks, 0, list(range(9)))
    before = blocks.stats()
    blocks.free(sequence)
    sequence.num_preemptions = 1
    assert blocks.admit(sequence)
    assert sequence.num_computed_tokens == 8, "its own blocks are found again"
    after = blocks.stats()
    assert (after.query_tokens, after.hit_tokens) == (before.query_tokens, before.hit_tokens) == (9, 0)
    assert sequence.num_cached_tokens == 0, "what the API reports is the first admission"


@pytest.mark.parametrize("caching", [True, False])
def test_caching_off_never_shares(caching: bool) -> None:
    blocks = BlockManager(8, BLOCK, enable_prefix_caching=caching)
    blocks.free(admit(blocks, 0, list(range(8))))
    assert bool(blocks.find_prefix(make_sequence(1, [*range(8), 1]))) == caching


def test_salts_do_not_share() -> None:
    blocks = BlockManager(8, BLOCK)
    blocks.free(admit(blocks, 0, list(range(8))))
    assert blocks.find_prefix(make_sequence(1, [*range(8), 1], salt="other")) == []


def test_an_event_tells_only_what_is_left_at_the_end() -> None:
    blocks = BlockManager(2, BLOCK, record_events=True)
    blocks.free(admit(blocks, 0, list(range(4))))
    blocks.free(admit(blocks, 1, list(range(50, 58))))  # evicts the first
    event = blocks.take_events()
    assert event is not None
    assert set(event.stored) == set(blocks.cached_hashes())
    assert len(event.stored) == 2
    assert blocks.take_events() is None
