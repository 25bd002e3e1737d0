"""Who may read and write which slot of an arena, and what becomes of it when somebody is gone."""

from __future__ import annotations

import msgspec
import pytest

from cluster.kv_connector.core import JOB_PATIENCE_S
from cluster.kv_connector.disk_index import DiskRecord
from cluster.kv_connector.instructions import Close, DropDisk, ReadDisk, Send, WriteDisk
from replica.kv_messages import (
    KV_LEASE_S,
    Acquire,
    Acquired,
    Beat,
    KVTier,
    LostSlots,
    Release,
    Reserve,
    Seal,
    TierEvent,
    Unwelcome,
    Welcome,
)
from tests.unit.kv_node import Node, hashes, messages, of, only


def on_disk(wanted: list[bytes]) -> list[DiskRecord]:
    return [DiskRecord(h, i, 7, i, wanted[i - 1] if i else b"") for i, h in enumerate(wanted)]


# ---- holders ----


def test_a_member_is_welcomed_and_told_everything_at_once() -> None:
    node = Node(num_slots=16)
    node.store(hashes(2))
    told = node.hello(2, "replica-1")
    welcome = only(messages(told, Welcome, 2))
    assert (welcome.num_slots, welcome.slot_bytes, welcome.lease_s) == (16, 4096, KV_LEASE_S)
    event = only(messages(told, TierEvent, 2))
    assert event.number == 0
    assert {tier: set(found) for tier, found in event.stored.items()} == {KVTier.HOST: set(hashes(2))}


def test_the_last_process_of_a_holder_takes_everything_along() -> None:
    """A rank still maps the arena when the engine is gone: what was reserved waits for it."""
    node = Node(num_slots=16)
    node.hello(2)
    node.store(hashes(2))
    node.acquire(hashes(2))
    node.reserve(hashes(3, "w"))
    told = node.gone(1)
    assert of(told, Close) == [Close([2])]
    stats = node.core.stats(node.now)
    assert (stats.num_quarantined, stats.num_reserved, stats.num_leased) == (3, 0, 2)
    assert node.gone(2) == []
    stats = node.core.stats(node.now)
    assert (stats.num_quarantined, stats.num_leased, stats.num_holders, stats.num_free) == (0, 0, 0, 14)


def test_a_rank_that_is_replaced_takes_nothing_along() -> None:
    node = Node(num_slots=16)
    node.hello(2)
    number, _ = node.reserve(hashes(2))
    assert node.gone(2) == []
    node.hello(3)
    node.seal(number, 2)
    assert node.count_found(hashes(2)) == 2


def test_who_is_silent_loses_its_leases_and_is_not_trusted_with_its_slots_before_it_is_gone() -> None:
    node = Node(num_slots=4)
    node.hello(2, "replica-1")
    node.store(hashes(1), member=2)
    lease = node.acquire(hashes(1))
    node.reserve(hashes(1, "w"))
    for _ in range(4):
        node.wait(KV_LEASE_S / 3)
        node.say(Beat(), member=2)
    told = node.wait(0)
    sent = [t for t in node.told if isinstance(t, Send | Close) and (isinstance(t, Close) or t.member == 1)]
    assert sent[-2:] == [Send(1, LostSlots(lease.lease_id)), Close([1])]
    assert told == []
    # what it leased may be given up, what it may still write not
    assert node.core.stats(node.now).num_quarantined == 1
    taken = {only(node.store(hashes(1, f"{i}"), member=2)) for i in range(12)}
    assert len(taken) == 3
    # it goes on: nothing of what it says has an effect, and it is gone when it closes
    node.say(Beat())
    assert node.acquire(hashes(1)).told == []
    assert node.say(Reserve(90, hashes(1, "v"))) == []
    node.say(Seal(2, [0]))
    assert node.count_found(hashes(1, "w"), member=2) == 0
    node.gone(1)
    stats = node.core.stats(node.now)
    assert (stats.num_quarantined, stats.num_holders) == (0, 1)


def test_beats_renew_everything() -> None:
    node = Node()
    node.store(hashes(1))
    node.acquire(hashes(1))
    for _ in range(10):
        node.wait(KV_LEASE_S / 3)
        node.say(Beat())
    assert node.core.stats(node.now).num_leased == 1
    assert not of(node.told, Close)


def test_nobody_is_called_silent_after_the_connector_itself_stood_still() -> None:
    """Their words lie unread in its sockets."""
    node = Node()
    node.store(hashes(1))
    node.acquire(hashes(1))
    node.wait(1)
    assert of(node.wait(3 * KV_LEASE_S), Close) == []
    for _ in range(2):
        assert of(node.wait(KV_LEASE_S / 2), Close) == []
    assert of(node.wait(1), Close) == [Close([1])]


def test_a_newer_incarnation_takes_the_place_of_an_older_one_for_good() -> None:
    node = Node(num_slots=8)
    node.reserve(hashes(2))
    told = node.hello(2, incarnation="b")
    assert of(told, Close) == [Close([1])]
    assert node.core.stats(node.now).num_quarantined == 2
    # a straggler of the old one does not turn it round
    told = node.hello(3, incarnation="a")
    assert "a newer incarnation of it has taken its place" in only(messages(told, Unwelcome)).message
    assert node.acquire(hashes(1), member=2).answer is not None
    node.gone(1)
    assert node.core.stats(node.now).num_free == 8


def test_who_was_given_up_comes_again_when_all_of_it_is_gone() -> None:
    node = Node()
    node.hello(2)
    node.acquire(hashes(1))
    node.gone(1)
    told = node.hello(3)
    assert "1 of its connections are still open" in only(messages(told, Unwelcome, 3)).message
    node.gone(2)
    assert messages(node.hello(4), Welcome, 4)


def test_one_identity_is_either_a_replica_or_a_connector() -> None:
    node = Node()
    assert "is a replica already" in only(messages(node.hello(2, is_peer=True), Unwelcome)).message


# ---- leases ----


def test_a_lease_is_the_leading_run_and_no_more() -> None:
    node = Node(num_slots=32)
    chain = hashes(6)
    node.store(chain[:2] + chain[3:])
    assert node.count_found(chain) == 2
    assert node.count_found(chain[3:]) == 3
    assert node.count_found(hashes(1, "nobody's")) == 0


def test_a_holder_leases_a_share_and_is_told_when_it_wants_more() -> None:
    node = Node(num_slots=8)
    chain = hashes(6)
    for block in chain:
        node.store([block])
    first = node.acquire(chain)
    assert first.answer is not None
    assert (len(first.slots), first.answer.is_limited) == (4, True)
    second = node.acquire(chain[4:])
    assert second.answer is not None
    assert (second.slots, second.answer.is_limited) == ([], True)
    node.release(first)
    assert len(node.acquire(chain[4:]).slots) == 2


def test_an_opening_that_all_share_is_counted_once() -> None:
    """Half of 32 slots may be leased by one holder: four leases of the same four blocks are four of them."""
    node = Node(num_slots=32)
    node.store(hashes(7))
    leases = [node.acquire(hashes(4)) for _ in range(4)]
    assert [len(lease.slots) for lease in leases] == [4, 4, 4, 4]
    longer = node.acquire(hashes(7))
    assert longer.answer is not None
    assert (len(longer.slots), longer.answer.is_limited) == (7, False)


def test_two_leases_of_one_block_end_apart() -> None:
    node = Node(num_slots=2)
    node.hello(2, "replica-1")
    node.store(hashes(1))
    first, second = node.acquire(hashes(1)), node.acquire(hashes(1), member=2)
    node.release(first)
    assert node.store(hashes(1, "a"))[0] >= 0
    assert node.store(hashes(1, "b"))[0] not in second.slots
    node.release(second, member=2)
    assert node.core.stats(node.now).num_leased == 0


def test_releasing_what_is_not_leased_does_nothing() -> None:
    node = Node()
    node.store(hashes(1))
    lease = node.acquire(hashes(1))
    node.say(Release([lease.lease_id + 1, -5]))
    assert node.core.stats(node.now).num_leased == 1
    node.say(Release([lease.lease_id, lease.lease_id]))
    assert node.core.stats(node.now).num_leased == 0


def test_a_number_that_is_in_use_is_no_second_lease_or_reservation() -> None:
    node = Node(num_slots=16)
    node.store(hashes(2))
    lease = node.acquire(hashes(2))
    assert node.say(Acquire(lease.lease_id, hashes(2), 1.0)) == []
    number, _ = node.reserve(hashes(1, "w"))
    assert node.say(Reserve(number, hashes(1, "v"))) == []
    stats = node.core.stats(node.now)
    assert (stats.num_leased, stats.num_reserved) == (2, 1)


# ---- from disk ----


def test_two_who_ask_for_one_block_share_the_read_and_the_late_one_is_answered_in_time() -> None:
    chain = hashes(3)
    node = Node(num_slots=16, num_disk_slots=8, on_disk=on_disk(chain))
    node.hello(2, "replica-1")
    reads = of(node.acquire(chain, within_s=1.0).told, ReadDisk)
    assert len(reads) == 3
    second = node.acquire(chain, member=2, within_s=0.1)
    assert of(second.told, ReadDisk) == []
    node.kept(node.core.on_disk_read(reads[0].job, 7, node.now))
    node.kept(node.core.on_disk_read(reads[2].job, 7, node.now))
    assert node.answers() == []
    assert node.core.next_deadline == pytest.approx(0.05)  # news first
    node.wait(0.1)
    answer = only(messages(node.told, Acquired, 2))
    assert (len(answer.slots), answer.tiers) == (1, [KVTier.DISK])
    node.kept(node.core.on_disk_read(reads[1].job, 7, node.now))
    assert only(messages(node.told, Acquired, 1)).slots == [read.slot for read in reads]
    assert node.core.stats(node.now).loads.late == 1


def test_what_comes_too_late_stays_as_cache() -> None:
    chain = hashes(2)
    node = Node(num_slots=8, num_disk_slots=8, on_disk=on_disk(chain))
    lease = node.acquire(chain, within_s=0.1)
    node.wait(0.2)
    assert only(node.answers()).slots == []
    for read in of(lease.told, ReadDisk):
        node.kept(node.core.on_disk_read(read.job, 7, node.now))
    again = node.acquire(chain)
    assert again.answer is not None
    assert again.answer.tiers == [KVTier.HOST] * 2


def test_a_question_that_is_taken_back_is_not_answered() -> None:
    node = Node(num_slots=8, num_disk_slots=8, on_disk=on_disk(hashes(2)))
    lease = node.acquire(hashes(2))
    node.release(lease)
    for read in of(lease.told, ReadDisk):
        node.kept(node.core.on_disk_read(read.job, 7, node.now))
    node.wait(2.0)
    assert node.answers() == []
    assert node.core.stats(node.now).num_leased == 0


@pytest.mark.parametrize("checksum", [None, 8])
def test_a_slab_that_is_not_what_was_written_is_a_miss_and_forgotten(checksum: int | None) -> None:
    chain = hashes(3)
    node = Node(num_slots=8, num_disk_slots=8, on_disk=on_disk(chain))
    reads = of(node.acquire(chain).told, ReadDisk)
    told = node.kept(node.core.on_disk_read(reads[1].job, checksum, node.now))
    assert of(told, DropDisk) == [DropDisk(1, chain[1])]
    node.kept(node.core.on_disk_read(reads[0].job, 7, node.now))
    assert only(node.answers()).slots == [reads[0].slot]
    node.kept(node.core.on_disk_read(reads[2].job, 7, node.now))
    node.kept(node.core.on_disk_read(reads[2].job, 7, node.now))  # twice
    assert node.count_found(chain) == 1
    assert node.count_found(chain[2:]) == 1
    stats = node.core.stats(node.now)
    assert (stats.num_on_disk, stats.loads.corrupt, stats.num_staging) == (2, 1, 0)
    # a new store of the same block has nothing to do with it
    assert node.store(chain[1:2])[0] >= 0
    assert node.write_all() == 1
    assert node.core.stats(node.now).num_on_disk == 3


def test_a_job_without_an_answer_for_a_minute_has_stranded_its_slot() -> None:
    node = Node(num_slots=8, num_disk_slots=8, on_disk=on_disk(hashes(2)))
    reads = of(node.acquire(hashes(2)).told, ReadDisk)
    node.core.on_time(JOB_PATIENCE_S - 1)
    assert node.core.stats(JOB_PATIENCE_S - 1).num_stranded == 0
    assert node.core.stats(JOB_PATIENCE_S).num_stranded == 2
    for read in reads:
        node.core.on_disk_read(read.job, None, JOB_PATIENCE_S)
    assert node.core.stats(JOB_PATIENCE_S).num_stranded == 0


def test_staging_takes_no_more_than_its_share() -> None:
    chain = hashes(8)
    node = Node(num_slots=8, num_disk_slots=8, on_disk=on_disk(chain))
    node.hello(2, "replica-1")
    assert len(of(node.acquire(chain).told, ReadDisk)) == 4
    lease = node.acquire(chain[4:], member=2)
    assert lease.slots == []
    assert lease.answer is not None


def test_writes_to_disk_are_bounded_and_a_failing_disk_is_left_alone_for_a_while() -> None:
    node = Node(num_slots=400, num_disk_slots=400)
    node.store(hashes(100))
    jobs = of(node.told, WriteDisk)
    assert len(jobs) == 32
    assert [job.position for job in jobs] == list(range(32))  # in the order in which they will be read
    for job in jobs:
        node.core.on_disk_written(job.job, None, node.now)
    assert len(of(node.told, WriteDisk)) == 32
    node.told = []
    node.wait(0.9)
    assert of(node.told, WriteDisk) == []
    for job in of(node.wait(0.2), WriteDisk):
        node.core.on_disk_written(job.job, None, node.now)
    node.told = []
    node.wait(1.9)  # twice as long
    assert of(node.told, WriteDisk) == []
    node.wait(0.2)
    assert node.write_all() == 36  # those that failed are written when they are used again
    assert node.core.stats(node.now).num_on_disk == 36


def test_what_is_given_up_in_the_arena_comes_back_from_disk() -> None:
    chain = hashes(4)
    node = Node(num_slots=4, num_disk_slots=16)
    for i in range(4):
        node.say(Reserve(100 + i, chain[i : i + 1], False, [chain[i - 1] if i else b""], [i]))
        node.say(Seal(100 + i, [0]))
    node.write_all()
    for block in hashes(4, "other"):
        node.store([block])
        node.write_all()
    lease = node.acquire(chain[:2])
    reads = of(lease.told, ReadDisk)
    assert len(reads) == 2
    for read in reads:
        node.kept(node.core.on_disk_read(read.job, 7, node.now))
    assert only(node.answers()).tiers == [KVTier.DISK] * 2
    assert node.core.stats(node.now).loads.given == {KVTier.DISK: 2}


def test_a_snapshot_is_no_live_object() -> None:
    node = Node()
    before = node.core.stats(node.now)
    node.store(hashes(2))
    node.acquire(hashes(2))
    assert before.stores.stored == 0
    assert before.loads.given == {}
    assert msgspec.json.encode(before)
