"""Copies between a pool and an arena, on the copier's thread."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from replica.block_copier import BlockCopier, CopySlabs, best_copy, by_numpy
from replica.kv_codec import KVCodec, KVShape
from replica.kv_messages import ArenaPlace, KVPeer, KVSpace
from replica.slab_code import SlabCoder
from replica.step import Arena, StepPlan
from tests.unit.tier_harness import FakeArena

PLACE = ArenaPlace("", KVPeer("r", "1"), KVSpace("m", 16, 64, 2, ""), "c")
WAIT_S = 10.0


class World:
    """Two ranks of one pool, 30 blocks of 64 bytes, and an arena of 40 slots with some bytes to spare."""

    def __init__(self, copy: CopySlabs) -> None:
        self.slots = np.arange(40 * 80, dtype=np.int64).astype(np.uint8).reshape(40, 80)
        self.pools = [np.zeros((30, 32), np.uint8) for _ in range(2)]
        self.is_there = True
        self.told: list[tuple[int, int]] = []
        self.ranks = [
            BlockCopier(pool, rank, self.open, copy, lambda *told: self.told.append(told))
            for rank, pool in enumerate(self.pools)
        ]

    def open(self, place: ArenaPlace, member: str) -> Arena:
        if not self.is_there:
            raise OSError("nobody listens")
        return FakeArena(self.slots)

    def take(
        self, first: int, loads: list[tuple[int, int]], stores: list[tuple[int, int]], is_new: bool = False
    ) -> None:
        plan = StepPlan(0, [], [], [], loads=loads, stores=stores, first_copy=first, arena=PLACE if is_new else None)
        for rank in self.ranks:
            rank.take(plan)
        for rank in self.ranks:
            rank.wait(WAIT_S)


@pytest.fixture(params=[by_numpy, best_copy()], ids=["numpy", "best"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(request.param)
    yield world
    for rank in world.ranks:
        rank.close()
        rank.close()


def test_each_rank_copies_its_part_in_order(world: World) -> None:
    before = world.slots.copy()
    # block 3 goes on to slot 39: a load comes before the stores of its plan
    world.take(0, [(slot, slot % 30) for slot in range(20)], [(3, 39)], is_new=True)
    for rank, pool in enumerate(world.pools):
        part = slice(32 * rank, 32 * rank + 32)
        assert (pool[:20] == before[:20, part]).all()
        assert (world.slots[39, part] == before[3, part]).all()
        copied, failed, seconds = world.ranks[rank].progress()
        assert (copied, failed) == (21, 0)
        assert seconds > 0
        assert world.ranks[rank].progress()[2] == 0
    assert (world.slots[39, 64:] == before[39, 64:]).all(), "beyond the block"
    assert world.told[-1] == (21, 0)


def test_what_was_told_before_is_not_copied_again(world: World) -> None:
    world.take(0, [(1, 1)], [], is_new=True)
    world.pools[0][1] = 7
    world.take(0, [(1, 1)], [], is_new=True)
    assert (world.pools[0][1] == 7).all()
    world.take(1, [(1, 2)], [])
    assert world.ranks[0].progress()[:2] == (2, 0)


def test_without_an_arena_copies_fail_and_work_again_with_the_next_one(world: World) -> None:
    world.is_there = False
    world.take(0, [(1, 1)], [(2, 2)], is_new=True)
    assert world.ranks[0].progress()[:2] == (2, 2)
    assert not world.pools[0].any()
    world.is_there = True
    world.take(2, [(1, 1)], [], is_new=True)
    assert world.ranks[0].progress()[:2] == (3, 2)
    assert (world.pools[0][1] == world.slots[1, :32]).all()


def test_slots_and_blocks_that_do_not_exist_fail(world: World) -> None:
    world.take(0, [(40, 1)], [], is_new=True)
    world.take(1, [], [(30, 1)])
    world.take(2, [(-1, 1)], [])
    assert world.ranks[1].progress()[:2] == (3, 3)


def test_numbers_go_on_after_a_new_beginning(world: World) -> None:
    world.take(0, [(1, 1)], [], is_new=True)
    for rank in world.ranks:
        rank.begin_anew()
    world.take(500, [(2, 2)], [], is_new=True)
    assert world.ranks[0].progress()[:2] == (501, 0)
    assert (world.pools[1][2] == world.slots[2, 32:64]).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("use_native", [True, False])
def test_coded_blocks_are_each_ranks_part_of_a_smaller_slot(bits: int, use_native: bool) -> None:
    shape = KVShape(2, 2, 4, 16, True)
    values = np.random.default_rng(1).normal(size=(2, 30, shape.slab_bytes // 2)).astype(np.float32)
    before = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    pools = before.copy()
    coder = SlabCoder(shape, bits, use_native)
    slots = np.full((40, 2 * coder.coded_bytes + 3), 9, np.uint8)  # ranks' parts begin anywhere
    ranks = [
        BlockCopier(pool, rank, lambda place, member: FakeArena(slots), by_numpy, coder=coder)
        for rank, pool in enumerate(pools)
    ]
    stores, loads = [(block, 39 - block) for block in range(30)], [(39 - block, block) for block in range(29)]
    for first, plan_loads, plan_stores in ((0, [], stores), (30, loads, [])):
        for rank in ranks:
            rank.take(StepPlan(0, [], [], [], loads=plan_loads, stores=plan_stores, first_copy=first, arena=PLACE))
            rank.wait(WAIT_S)
    assert [rank.progress()[:2] for rank in ranks] == [(59, 0), (59, 0)]
    assert (slots[:, 2 * coder.coded_bytes :] == 9).all(), "beyond the block"
    codec, coded, back = (
        KVCodec(shape, bits),
        np.empty(coder.coded_bytes, np.uint8),
        np.empty(shape.slab_bytes, np.uint8),
    )
    step = {8: 0.07, 4: 0.6}[bits]
    for number in (0, 1):
        assert (pools[number, 29] == before[number, 29]).all(), "it was not loaded"
        for block in range(29):
            codec.encode(before[number, block], coded)
            codec.decode(coded, back)
            apart = _floats(pools[number, block]) - _floats(back)
            assert np.abs(apart).max() < step, "another number than the codec's own, by more than one step"
            assert (apart == 0).mean() > 0.98
        ranks[number].close()


def _floats(slab: np.ndarray) -> np.ndarray:
    return (slab.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
