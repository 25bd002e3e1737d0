"""Failures of offload tiers that users of other systems reported (group F), as far as the core of a KVConnector decides
them. F-03 is the scheduler's; F-07 and what of F-06 and F-10 is about files are the disk tier's.
"""

from __future__ import annotations

import msgspec
import pytest

from cluster.kv_connector.disk_index import DiskRecord
from cluster.kv_connector.instructions import ClearDisk, Close, ReadDisk, WriteDisk
from replica.config import CacheConfig
from replica.kv_events import slot_layout
from replica.kv_messages import Clear, Cleared, KVSpace, Seal, Unwelcome, Welcome
from tests.unit.kv_node import SPACE, Node, hashes, messages, of, only


def test_f_01_a_full_tier_skips_stores_at_once_and_stores_again_when_it_can() -> None:
    node = Node(num_slots=4)
    node.hello(2, "replica-1")
    held, other = hashes(2, "held"), hashes(2, "other")
    for wanted in (held, other):
        for block in wanted:
            node.store([block])
    leases = [node.acquire(held), node.acquire(other, member=2)]
    assert [len(lease.slots) for lease in leases] == [2, 2]
    for number in range(20):
        assert node.store(hashes(6, f"new{number}")) == [-1] * 6  # an answer at once, and no instruction to wait for
    stats = node.core.stats(node.now)
    assert (stats.stores.no_room, stats.num_evictions, stats.num_free) == (120, 0, 0)
    node.release(leases[0])
    assert node.store(hashes(1, "again"))[0] >= 0
    assert node.count_found(hashes(1, "again")) == 1


def test_f_04_what_is_being_loaded_is_not_given_up() -> None:
    """`benchmarks/kv_world.py` looks at the bytes as well."""
    node = Node(num_slots=4)
    x = hashes(1, "x")
    slot = only(node.store(x))
    for number in range(10):
        lease = node.acquire(x)
        assert lease.slots == [slot]
        for other in range(10):
            taken = only(node.store(hashes(1, f"{number}.{other}")))
            assert taken not in (slot, -1)
        node.release(lease)
    assert node.core.stats(node.now).num_evictions == 97


def test_f_06_a_block_is_found_when_it_is_written_and_not_before() -> None:
    node = Node(num_slots=128)
    node.hello(2, "replica-1")
    prompt = hashes(32)
    numbers = [node.reserve([block])[0] for block in prompt[:5]]
    assert node.count_found(prompt, member=2) == 0
    for sealed, number in enumerate(numbers, 1):
        node.seal(number, 1)
        assert node.count_found(prompt, member=2) == sealed
    # also the replica that writes it finds nothing early, and nobody may write it a second time
    number, _ = node.reserve(prompt[5:])
    assert node.count_found(prompt) == 5
    assert node.reserve(prompt[5:], member=2)[1] == [-1] * 27
    node.say(Seal(number, list(range(10))))
    assert node.count_found(prompt) == 15
    assert node.core.stats(node.now).num_free == 128 - 15


@pytest.mark.parametrize("field", KVSpace.__struct_fields__)
def test_f_09_another_space_is_refused_with_its_field_and_both_values(field: str) -> None:
    node = Node()
    ours = getattr(SPACE, field)
    theirs = f"{ours}x" if isinstance(ours, str) else ours + 1
    other = msgspec.structs.replace(SPACE, **{field: theirs})
    told = node.hello(2, "replica-1", space=other)
    said = only(messages(told, Unwelcome, 2)).message
    assert said.startswith(f"{field} is {theirs!r} at your side and {ours!r} here")
    assert of(told, Close) == [Close([2])]
    assert not messages(told, Welcome)
    assert node.acquire(hashes(1), member=2).told == []
    assert node.core.stats(node.now).num_holders == 1


def test_f_09_compression_is_another_space() -> None:
    """Even where its slots had as many bytes."""
    layouts = [slot_layout(CacheConfig(offload_dtype=dtype)) for dtype in ("model", "int8", "int4")]
    assert len(set(layouts)) == 3
    told = Node().hello(2, "replica-1", space=msgspec.structs.replace(SPACE, layout=layouts[1]))
    assert "int8' at your side" in only(messages(told, Unwelcome, 2)).message


def test_f_10_what_is_on_disk_is_found_after_a_restart() -> None:
    chain = hashes(6)
    first = Node(num_slots=32, num_disk_slots=16)
    first.store(chain[:3])
    first.store(chain)
    jobs = of(first.told, WriteDisk)
    assert first.write_all() == 6
    records = [DiskRecord(job.block_hash, job.disk_slot, 7, job.position, job.parent) for job in jobs]
    second = Node(num_slots=16, num_disk_slots=16, on_disk=records)
    assert second.core.stats(0).num_on_disk == 6
    lease = second.acquire(chain)
    reads = of(lease.told, ReadDisk)
    assert [(read.disk_slot, read.checksum) for read in reads] == [(job.disk_slot, 7) for job in jobs]
    assert lease.answer is None
    for read in reads:
        second.kept(second.core.on_disk_read(read.job, 7, 0.1))
    assert only(second.answers()).tiers == ["disk"] * 6
    # what is there is not written a second time, and its disk slots are not given to others
    second.told.clear()
    second.store(hashes(4, "new"))
    written = {job.disk_slot for job in of(second.told, WriteDisk)}
    assert len(written) == 4
    assert not written & {record.disk_slot for record in records}


@pytest.mark.parametrize("slot", [-1, 8])
def test_f_10_an_index_that_names_what_is_not_there_is_used_as_far_as_it_goes(slot: int) -> None:
    a, b, c = hashes(3)
    records = [DiskRecord(a, slot, 7), DiskRecord(b, 2, 7), DiskRecord(c, 2, 8), DiskRecord(c, 3, 9)]
    node = Node(num_slots=8, num_disk_slots=8, on_disk=records)
    node.core.validate()
    assert node.core.stats(0).num_on_disk == 1
    assert of(node.acquire([c]).told, ReadDisk)[0].checksum == 9


def test_f_12_a_block_that_is_on_its_way_does_not_come_back_after_clear() -> None:
    """On its way into the arena, and from there to disk; what is leased can be read on."""
    node = Node(num_slots=16, num_disk_slots=16)
    node.hello(2, "replica-1")
    on_disk, to_disk, writing = hashes(1, "on disk"), hashes(2, "to disk"), hashes(2, "writing")
    node.store(on_disk)
    node.write_all()
    node.store(to_disk)
    number, _ = node.reserve(writing)
    lease = node.acquire(to_disk[:1])
    assert len(lease.slots) == 1
    told = node.say(Clear(5))
    assert not messages(told, Cleared)
    assert not of(told, ClearDisk)  # first the writes end
    for job in of(node.told, WriteDisk):
        told = node.kept(node.core.on_disk_written(job.job, 7, node.now))
    # no Cleared before the disk is empty, and nothing is written meanwhile
    clear = only(of(told, ClearDisk))
    node.seal(number, 2)
    node.store(hashes(1, "fresh"))
    assert not of(node.told[node.told.index(clear) :], WriteDisk)
    node.told.clear()
    told = node.kept(node.core.on_disk_cleared(clear.job, True, node.now))
    assert messages(told, Cleared, 1) == [Cleared(5)]
    for gone in (on_disk, to_disk, writing):
        assert node.count_found(gone, member=2) == 0
    assert node.count_found(hashes(1, "fresh")) == 1
    assert node.core.stats(node.now).num_lingering == 1
    node.release(lease)
    node.write_all()
    stats = node.core.stats(node.now)
    assert (stats.num_lingering, stats.num_found, stats.num_on_disk, stats.num_free) == (0, 1, 1, 15)


def test_f_12_who_waits_for_a_forgotten_block_gets_nothing() -> None:
    node = Node(num_slots=8, num_disk_slots=8, on_disk=[DiskRecord(hashes(1)[0], 0, 7)])
    read = only(of(node.acquire(hashes(1)).told, ReadDisk))
    told = node.say(Clear(1))
    assert [answer.slots for answer in node.answers()] == [[]]
    node.kept(node.core.on_disk_read(read.job, 7, node.now))
    clear = only(of(told, ClearDisk))
    node.kept(node.core.on_disk_cleared(clear.job, False, node.now))  # it could not: told again, no Cleared
    assert not messages(node.told, Cleared)
    clear = only(of(node.wait(1.0), ClearDisk))
    node.kept(node.core.on_disk_cleared(clear.job, True, node.now))
    assert len(messages(node.told, Cleared)) == 1
    assert node.count_found(hashes(1)) == 0
    assert node.core.stats(node.now).num_free == 8


def test_f_13_a_slot_that_is_used_again_has_no_memory() -> None:
    """Slots are all of one size, so what can be remembered wrongly is who was in one: nothing of the block before."""
    node = Node(num_slots=1, num_disk_slots=0)
    a, b = hashes(1, "a"), hashes(1, "b")
    node.store(a)
    lease = node.acquire(a)
    node.release(lease)
    assert only(node.store(b)) == lease.slots[0]
    node.release(lease)  # again: it is nobody's
    assert node.count_found(a) == 0
    assert node.count_found(b) == 1
    assert node.acquire([]).slots == []
    assert node.store([]) == []
