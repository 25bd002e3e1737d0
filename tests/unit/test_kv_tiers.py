"""What a tier gives up first, which blocks get a slot at all, and the sizes of both."""

from __future__ import annotations

import pytest

from cluster.config import load
from cluster.kv_connector.admission import ReuseFilter
from cluster.kv_connector.config import KVCacheConfig, num_slots
from cluster.kv_connector.eviction import COST_DOUBLES_AT_TOKENS, CostOrder, Evictable, EvictionOrder, LruOrder
from cluster.kv_connector.instructions import WriteDisk
from cluster.kv_connector.slots import SlotPool, SlotState
from cluster.kv_connector.tier_figures import tier_figures
from cluster.status import format_status
from replica.config import CacheConfig
from replica.errors import ConfigError
from tests.unit.kv_node import Node, hashes, of


def order(name: str) -> EvictionOrder:
    return LruOrder() if name == "lru" else CostOrder(16)


@pytest.mark.parametrize("name", ["lru", "cost"])
def test_a_chain_goes_from_its_tail_however_it_was_stored(name: str) -> None:
    """Decoding stores the tail last, so to an LRU alone the head is the oldest."""
    blocks, by = Evictable(order(name)), order(name)
    chain = hashes(5)
    for i, block in enumerate(chain):
        blocks.add(block, by.key(1, i), chain[i - 1] if i else b"")
    assert [blocks.pop() for _ in range(6)] == [*reversed(chain), None]
    blocks.validate()


def test_a_block_with_two_children_goes_after_both() -> None:
    blocks = Evictable(LruOrder())
    a, b, c = hashes(3)
    for i, (block, parent) in enumerate([(a, b""), (b, a), (c, a)]):
        blocks.add(block, float(i), parent)
    assert [blocks.pop() for _ in range(3)] == [b, c, a]


def test_what_hangs_on_a_pinned_block_does_not_hold_what_is_before_it() -> None:
    """A pinned block is no member, so there is a leaf as long as there is any member."""
    blocks = Evictable(LruOrder())
    a, b, c = hashes(3)
    for i, (block, parent) in enumerate([(a, b""), (b, a), (c, b)]):
        blocks.add(block, float(i), parent)
    blocks.remove(c)
    blocks.remove(b)
    assert blocks.pop() == a
    blocks.add(b, 1.0, a)
    assert (blocks.pop(), blocks.pop()) == (b, None)


def test_chains_in_a_ring_end_too() -> None:
    blocks = Evictable(LruOrder())
    a, b, c = hashes(3)
    for block, parent in ((a, b), (b, a), (c, c)):
        blocks.add(block, 1.0, parent)
    assert {blocks.pop() for _ in range(3)} == {a, b, c}
    blocks.validate()


def test_by_cost_deep_and_used_blocks_stay_and_what_is_not_used_ages() -> None:
    by = CostOrder(16)
    deep = COST_DOUBLES_AT_TOKENS // 16
    assert by.key(1, deep) == pytest.approx(2 * by.key(1, 0))
    assert by.key(3, 0) > by.key(1, deep)
    assert by.key(1000, 0) == by.key(16, 0)
    blocks = Evictable(by)
    hot, *cold = hashes(20)
    blocks.add(hot, by.key(5, 0), b"")
    gone: list[bytes | None] = []
    for block in cold:  # each comes once, and one goes for it
        blocks.add(block, by.key(1, 0), b"")
        if len(blocks) > 3:
            gone.append(blocks.pop())
    assert gone.index(hot) >= 6
    blocks.validate()


def test_a_heap_of_stale_entries_does_not_grow() -> None:
    blocks = Evictable(LruOrder())
    for i in range(2000):
        blocks.add(b"a", float(i), b"")
        blocks.remove(b"a")
    assert len(blocks._heap) <= 66


def test_only_moves_that_make_sense_are_made() -> None:
    pool = SlotPool(1)
    slot = pool.take(SlotState.RESERVED)
    pool.move(slot, SlotState.QUARANTINED)
    with pytest.raises(AssertionError, match="slot 0 is QUARANTINED and is to become SEALED"):
        pool.move(slot, SlotState.SEALED)
    pool.move(slot, SlotState.FREE)
    pool.validate()


def test_the_filter_remembers_the_last_ones() -> None:
    reuse = ReuseFilter(2)
    assert [reuse.is_second(h) for h in (b"a", b"b", b"a")] == [False, False, True]
    assert [reuse.is_second(h) for h in (b"c", b"d", b"b", b"d")] == [False, False, False, True]
    assert len(reuse) <= 2


def test_second_use_stores_what_is_asked_for_again_and_what_must_stay() -> None:
    node = Node(num_slots=32, tier_admission="second_use")
    chain = hashes(3)
    assert node.store(chain) == [-1] * 3
    assert min(node.store(chain[:2])) >= 0
    assert min(node.store(hashes(2, "put back"), must_stay=True)) >= 0
    stats = node.core.stats(node.now).stores
    assert (stats.not_reused, stats.stored) == (3, 4)


def test_disk_by_second_use_writes_what_was_used_again() -> None:
    node = Node(num_slots=32, num_disk_slots=32, disk_admission="second_use")
    node.store(hashes(4))
    assert of(node.told, WriteDisk) == []
    node.release(node.acquire(hashes(2)))
    assert [job.block_hash for job in of(node.told, WriteDisk)] == hashes(2)


def test_a_full_backlog_drops_and_takes_again_what_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.kv_connector.disk_writer.MOST_WAITING", 4)
    node = Node(num_slots=256, num_disk_slots=256)
    node.store(hashes(50))
    stats = node.core.stats(node.now)
    assert (stats.num_disk_writes, stats.num_waiting_for_disk, stats.num_not_written) == (4, 0, 46)
    node.write_all()
    assert node.core.stats(node.now).num_on_disk == 4
    node.release(node.acquire(hashes(50)))
    node.write_all()
    assert node.core.stats(node.now).num_on_disk == 8


def test_both_tiers_are_off_unless_they_are_asked_for() -> None:
    config = load({})
    assert not config.kv_cache.has_connector
    assert type(config.engine_config().cache) is CacheConfig
    assert load({"kv_cache": {"host_tier_gib": 2, "load_wait_ms": 5}}).engine_config().cache.load_wait_ms == 5


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"disk_tier_gib": 4}, "kv_cache: disk_tier_gib is 4 and host_tier_gib is 0, .* give host_tier_gib as well"),
        (
            {"host_tier_gib": 1, "enable_prefix_caching": False},
            "kv_cache: host_tier_gib is 1 and enable_prefix_caching is false, .*allowed then: host_tier_gib 0",
        ),
        ({"host_tier_gib": -1}, "kv_cache.host_tier_gib: .*greater than or equal to 0.*got -1"),
        ({"eviction": "fifo"}, "kv_cache.eviction: .*'lru' or 'cost'.*got 'fifo'"),
        ({"host_tier_gb": 1}, "kv_cache.host_tier_gb: unknown key; did you mean 'host_tier_gib'?"),
    ],
)
def test_what_can_not_work_is_said(data: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load({"kv_cache": data})


@pytest.mark.parametrize("mode", ["offload", "auto"])
def test_kv_is_kept_only_where_there_is_a_place_for_it(mode: str) -> None:
    sentence = f"scheduler.preemption_mode is '{mode}', .* kv_cache.host_tier_gib is 0; .*allowed then: 'recompute'"
    with pytest.raises(ConfigError, match=sentence):
        load({"scheduler": {"preemption_mode": mode}})
    assert load({"scheduler": {"preemption_mode": mode}, "kv_cache": {"host_tier_gib": 1}}).kv_cache.has_connector


def test_what_is_told_of_a_tier_is_a_line_of_shoal_status() -> None:
    node = Node(num_slots=16)
    node.store(hashes(4))
    node.release(node.acquire(hashes(4)))
    told = tier_figures(node.core.stats(node.now), 100, None, None)
    assert (told["tier_blocks_host"], told["tier_given_host"], told["tier_stored_bytes_host"]) == (4, 4, 400)
    zeros = ("queued", "queue_cap", "returning", "running", "kv_blocks", "kv_blocks_free", "kv_fragmentation", "step")
    shown = {"replica_id": "r", "state": "up", "oldest_wait_s": 0.0, "counters": told, **dict.fromkeys(zeros, 0)}
    status = {"router_id": "r", "requests": 0, "held": 0, "replicas": [shown]}
    line = format_status(status).splitlines()[-1].strip()
    assert line == "KV tiers of its node: host 4 of 16 blocks (25 %), 4 hits; 4 blocks asked for"


def test_slots_of_a_size() -> None:
    assert num_slots(0.5, 368_640) == 1456
    assert num_slots(0, 368_640) == 0
    assert KVCacheConfig(host_tier_gib=1).has_connector
