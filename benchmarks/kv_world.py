"""A world around the core of a KVConnector that goes wrong at any step, and knows what every slab really holds.

Holders are groups of processes: an engine that asks, ranks that copy. They are killed one by one or stopped and
continued, hear what is sent to them late, come back as other incarnations. Jobs end in any order, fail, are answered
twice; slabs on disk are flipped; peers come, tell, skip an event and go; the cache is emptied; the connector itself is
killed and starts again from its disk.

A slab's content is (hash, generation): the generation counts `Clear`. Whoever writes tears the slab first; whoever
reads looks at every step. So a read of what is not sealed, a write after a free, a block that comes back after a
`Clear` or a corrupt one all show as wrong content.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence

from cluster.kv_connector.config import KVCacheConfig
from cluster.kv_connector.core import JOB_PATIENCE_S, ConnectorCore
from cluster.kv_connector.disk_index import DiskRecord
from cluster.kv_connector.instructions import (
    ClearDisk,
    Close,
    DropDisk,
    Fetch,
    Instruction,
    ReadDisk,
    Resync,
    Send,
    WriteDisk,
)
from cluster.kv_connector.tier_news import EVERY_S
from replica.kv_messages import (
    KV_LEASE_S,
    Acquired,
    Beat,
    Cleared,
    Hello,
    KVPeer,
    KVSpace,
    KVTier,
    LostSlots,
    Reserved,
    TierEvent,
    ToConnector,
    Unwelcome,
)

SPACE = KVSpace("model", 16, 4096, 1, "layout")
#: what a slab holds while somebody writes it
TORN = (b"torn", -1)
Content = tuple[bytes, int]
PEERS = ("node-1", "node-2")


#: six of 12, the latter three with the beginning of another
CHAINS = [[bytes([c, i]) * 8 for i in range(12)] for c in range(3)]
CHAINS += [CHAINS[c][: 3 + 2 * c] + [bytes([c + 3, i]) * 8 for i in range(3 + 2 * c, 12)] for c in range(3)]
HASHES = [*dict.fromkeys(h for chain in CHAINS for h in chain)]


def checksum(content: Content) -> int:
    return zlib.crc32(repr(content).encode())


class Group:
    """One incarnation of a replica: member 0 of `members` is the engine, the others are ranks."""

    def __init__(self, peer: KVPeer, is_peer: bool, now: float) -> None:
        self.peer = peer
        self.is_peer = is_peer
        self.engine = -1
        self.members: list[int] = []
        self.is_stopped = False
        #: told to close, or it has lost its engine: it only finishes
        self.is_closing = False
        self.spoke_at = now
        self.inbox: list[Send | Close] = []
        self.next_id = 0
        #: lease -> hashes, generation when asked, deadline
        self.asked: dict[int, tuple[list[bytes], int, float]] = {}
        #: lease -> blocks that were given, heard of or not
        self.given: dict[int, int] = {}
        self.leases: dict[int, list[tuple[bytes, int]]] = {}
        self.reserving: dict[int, tuple[list[bytes], int]] = {}
        #: reservation -> place -> (slot, content)
        self.writes: dict[int, dict[int, tuple[int, Content]]] = {}
        #: of each member, what the connector told it: next number, hash -> tier
        self.news: dict[int, tuple[int, dict[bytes, KVTier]]] = {}


class World:
    """`step` does one thing, `rng` says which; AssertionError if anything is wrong."""

    def __init__(self, config: KVCacheConfig, num_slots: int, num_disk_slots: int) -> None:
        self.config, self.num_slots, self.num_disk_slots = config, num_slots, num_disk_slots
        self.now = 0.0
        self.next_member = 0
        self.next_incarnation = 0
        self.generation = 0
        #: the core's own count, as it was last seen, and as it is on disk
        self.seen_generation = self.generation_on_disk = 0
        #: nothing older is found; what is sure to be gone from disk
        self.oldest, self.oldest_on_disk = 0, 0
        self.disk: list[Content] = [TORN] * num_disk_slots
        self.index: dict[int, DiskRecord] = {}
        self.groups: list[Group] = []
        self.counts: dict[str, int] = {}
        self.start()

    def start(self) -> None:
        """A connector with a new arena, and what is on disk."""
        self.memory: list[Content] = [TORN] * self.num_slots
        self.jobs: dict[int, tuple[Instruction, int, float]] = {}
        self.answered: list[Callable[[], list[Instruction]]] = []
        self.groups = []
        self.unwelcome: set[int] = set()
        self.closed: set[int] = set()
        self.peers: dict[str, int] = {}
        #: of each peer, how often it has forgotten everything, as it tells it
        self.peer_generations = dict.fromkeys(PEERS, 0)
        self.core = ConnectorCore(
            self.config,
            SPACE,
            self.num_slots,
            self.num_disk_slots,
            identity=KVPeer("node-0", str(self.next_incarnation)),
            slot_bytes=4096,
            on_disk=list(self.index.values()),
            generation=self.generation_on_disk,
        )
        self.carry_out(self.core.on_time(self.now))  # as the shell does: its first call hears everybody
        self.follow()

    # ---- instructions ----

    def carry_out(self, told: Sequence[Instruction]) -> None:
        for instruction in told:
            match instruction:
                case Send(member=member, message=message):
                    assert member not in self.closed, f"{message} to who was told that nothing more comes"
                    self._sent(member, message)
                    for group in self.groups:
                        if member in group.members:
                            group.inbox.append(instruction)
                case Close(members=members):
                    self.closed.update(members)
                    for group in self.groups:
                        if set(members) & set(group.members):
                            group.inbox.append(instruction)
                case DropDisk(disk_slot=disk_slot, block_hash=block_hash):
                    assert self.index.pop(disk_slot).block_hash == block_hash, "it was another one's by then"
                case WriteDisk():
                    assert not self._is_clearing(), "something is written while the disk is emptied"
                    self.index.pop(instruction.disk_slot, None)
                    assert all(
                        getattr(job[0], "disk_slot", -1) != instruction.disk_slot for job in self.jobs.values()
                    ), "a disk slot is written that another job has"
                    self.disk[instruction.disk_slot] = TORN
                    self.jobs[instruction.job] = (instruction, self.generation, self.now)
                case ReadDisk(slot=slot, disk_slot=disk_slot, block_hash=block_hash):
                    assert self.index[disk_slot].block_hash == block_hash, "another block is there"
                    self.memory[slot] = TORN
                    self.jobs[instruction.job] = (instruction, self.generation, self.now)
                case Fetch(slots=slots):
                    for slot in slots:
                        self.memory[slot] = TORN
                    self.jobs[instruction.job] = (instruction, self.generation, self.now)
                case ClearDisk():
                    assert not any(isinstance(job[0], WriteDisk) for job in self.jobs.values()), "a write is on its way"
                    self.jobs[instruction.job] = (instruction, self.generation, self.now)
                case Resync(peer_id=peer_id):
                    self.peers.pop(peer_id, None)

    def follow(self) -> None:
        """The core has forgotten everything, since a peer had: so has the world."""
        if self.core.generation > self.seen_generation:
            self.generation += 1
            self.oldest = self.generation
            self.count("cleared with a peer")
        self.seen_generation = self.core.generation

    def _is_clearing(self) -> bool:
        return any(isinstance(job[0], ClearDisk) for job in self.jobs.values())

    def _sent(self, member: int, message: object) -> None:
        """What has to be true when the connector says it, whether or not it is ever heard."""
        if isinstance(message, Cleared):
            self.oldest_on_disk = self.generation
            assert all(self.disk[slot][1] >= self.generation for slot in self.index), "Cleared, and still on disk"
        if isinstance(message, Unwelcome):
            self.unwelcome.add(member)
        if isinstance(message, Acquired):
            group = next(g for g in self.groups if member in g.members)
            hashes, _, deadline = group.asked[message.lease_id]
            assert self.now <= deadline + 1e-9, "answered too late"
            assert message.num_before == group.given.get(message.lease_id, 0), "a piece is missing, or comes twice"
            group.given[message.lease_id] = message.num_before + len(message.slots)
            hashes = hashes[message.num_before :]
            self.count("pieces", not message.is_last)
            assert len(message.tiers) == len(message.slots) <= len(hashes), "more than was asked for"
            for block_hash, slot in zip(hashes, message.slots, strict=False):
                content, generation = self.memory[slot]
                assert content == block_hash, f"{block_hash!r} was promised, and there is {content!r}"
                assert generation >= self.oldest, "it was forgotten, and comes back"
            self.count("blocks given", len(message.slots))
            self.count("answers")

    def count(self, name: str, by: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + by

    # ---- steps ----

    def look(self) -> None:
        """Readers and jobs see what they should."""
        for group in self.groups:
            if group.is_stopped or self.now - group.spoke_at > KV_LEASE_S:
                continue
            for lease in group.leases.values():
                for block_hash, slot in lease:
                    assert self.memory[slot][0] == block_hash, f"slot {slot} changed while {group.peer} read it"
        for instruction, _, _ in self.jobs.values():
            if isinstance(instruction, WriteDisk):
                content = self.memory[instruction.slot][0]
                assert content == instruction.block_hash, "a slab changed while it was written to disk"

    def check(self) -> None:
        """All books, and what everybody was told."""
        self.core.validate()
        stats = self.core.stats(self.now)
        assert stats.num_stranded == 0, f"{stats.num_stranded} slots are nobody's"
        self.count("quarantined slots seen", stats.num_quarantined)
        self.count("lingering slots seen", stats.num_lingering)

    def move_clock(self, seconds: float) -> None:
        """The core is called at every instant at which it wants to be."""
        end = self.now + seconds
        while (at := self.core.next_deadline) is not None and at <= end:
            self.now = max(self.now, at)
            self.carry_out(self.core.on_time(self.now))
            following = self.core.next_deadline
            assert following is None or following > self.now, "what was due is still due"
        self.now = end
        self.carry_out(self.core.on_time(self.now))

    def pass_time(self, seconds: float) -> None:
        self.move_clock(seconds)
        for group in self.groups:
            if not group.is_stopped and not group.is_closing:
                self.say(group, Beat())
        late = [job for job, (_, _, begun_at) in self.jobs.items() if self.now - begun_at > JOB_PATIENCE_S / 2]
        for job in late:
            self.end_job(job, random.Random(job))
        for group in self.groups:
            forgotten = [key for key in group.asked if not group.is_closing and self._is_forgotten(group, key)]
            assert not forgotten, f"{group.peer} has no answer in time to {forgotten}"
        silent = {group.peer for group in self.groups if self.now - group.spoke_at > KV_LEASE_S}
        for holder in self.core.holders:
            if holder.peer in silent:
                assert holder.num_leased == holder.num_reserved == 0, f"{holder.peer} is silent, and still has slots"
        if seconds >= EVERY_S:
            self.look_at_news()

    def _is_forgotten(self, group: Group, lease_id: int) -> bool:
        """Its time is over, and no answer is on its way."""
        if group.asked[lease_id][2] >= self.now - 1e-9 or group.is_stopped:
            return False
        on_way = [m.message for m in group.inbox if isinstance(m, Send)]
        if any(isinstance(m, Close) for m in group.inbox):
            return False
        ends = [m for m in on_way if isinstance(m, LostSlots) or (isinstance(m, Acquired) and m.is_last)]
        return all(m.lease_id != lease_id for m in ends)

    def look_at_news(self) -> None:
        """Nothing is untold: everybody connected knows exactly what is there."""
        self.move_clock(EVERY_S)
        truth = {h: tier for h in HASHES if (tier := self.core.tier_of(h)) is not None}
        near = {h: tier for h, tier in truth.items() if tier is not KVTier.REMOTE}
        for group in self.groups:
            for member in set(group.members) - self.closed:
                known = dict(group.news[member][1])
                for sent in group.inbox:
                    if isinstance(sent, Send) and sent.member == member and isinstance(sent.message, TierEvent):
                        _apply(known, sent.message)
                assert known == (near if group.is_peer else truth), f"{group.peer} was told something else"

    # ---- holders ----

    def say(self, group: Group, message: ToConnector, member: int | None = None) -> None:
        self.look_at_the_clock(group)
        group.spoke_at = self.now
        self.carry_out(self.core.on_message(group.engine if member is None else member, message, self.now))

    def _connect(self, group: Group, name: str) -> None:
        member, self.next_member = self.next_member, self.next_member + 1
        if group.engine < 0:
            group.engine = member
        group.members.append(member)
        group.news[member] = (0, {})
        hello = Hello(group.peer, name, SPACE)
        self.carry_out(self.core.on_hello(member, hello, self.now, is_peer=group.is_peer))

    def look_at_the_clock(self, group: Group) -> None:
        """Who was silent for the lease has none, whatever it has heard."""
        if self.now - group.spoke_at > KV_LEASE_S:
            group.leases.clear()
            group.asked.clear()

    def hear(self, group: Group) -> None:
        inbox, group.inbox = group.inbox, []
        for sent in inbox:
            if isinstance(sent, Close):
                group.is_closing = True
                group.leases.clear()
                group.asked.clear()
                continue
            match sent.message:
                case Acquired(lease_id=lease_id, slots=slots, num_before=start):
                    asked = group.asked.get(lease_id)
                    if asked is not None and slots:
                        group.leases.setdefault(lease_id, []).extend(zip(asked[0][start:], slots, strict=False))
                    if sent.message.is_last:
                        group.asked.pop(lease_id, None)
                case LostSlots(lease_id=lease_id):
                    group.leases.pop(lease_id, None)
                    group.asked.pop(lease_id, None)
                case Reserved(reservation_id=number, slots=slots):
                    hashes, generation = group.reserving.pop(number)
                    wanted = {i: (slot, (hashes[i], generation)) for i, slot in enumerate(slots) if slot >= 0}
                    if wanted and not group.is_closing:
                        group.writes[number] = wanted
                case TierEvent() as event:
                    next_number, known = group.news[sent.member]
                    assert event.number == next_number, "an event is missing"
                    group.news[sent.member] = (next_number + 1, _apply(known, event))
                case Unwelcome():
                    group.is_closing = True
                case _:
                    pass

    def leave(self, group: Group, member: int) -> None:
        group.members.remove(member)
        if member == group.engine:
            group.is_closing = True
            group.asked.clear()
        group.inbox = [m for m in group.inbox if isinstance(m, Close) or m.member != member]
        if not set(group.members) - self.unwelcome:  # who was not welcome has not mapped the arena
            group.leases.clear()
            group.writes.clear()
        if not group.members:
            self.groups.remove(group)
        self.carry_out(self.core.on_gone(member, self.now))

    # ---- jobs, disk, peers ----

    def all_jobs_end(self, rng: random.Random) -> None:
        for job in rng.sample(list(self.jobs), k=len(self.jobs)):
            self.end_job(job, rng)

    def end_job(self, job: int, rng: random.Random) -> None:
        instruction, generation, _ = self.jobs.pop(job)
        core, now = self.core, self.now
        ok = rng.random() < 0.9
        match instruction:
            case ReadDisk(disk_slot=disk_slot, slot=slot):
                self.memory[slot] = self.disk[disk_slot]
                found = checksum(self.disk[disk_slot]) if ok else None
                self._answer(lambda: core.on_disk_read(job, found, now))
            case WriteDisk(disk_slot=disk_slot, slot=slot, block_hash=block_hash):
                if ok:
                    self.disk[disk_slot] = content = self.memory[slot]
                    place = (instruction.position, instruction.parent)
                    self.index[disk_slot] = DiskRecord(block_hash, disk_slot, checksum(content), *place)
                written = checksum(self.memory[slot]) if ok else None
                self._answer(lambda: core.on_disk_written(job, written, now))
            case ClearDisk():
                if ok:
                    self.index.clear()
                    self.generation_on_disk = core.generation
                self._answer(lambda: core.on_disk_cleared(job, ok, now))
            case Fetch(hashes=hashes, slots=slots):
                theirs = self.peer_generations[instruction.peer_id]
                if instruction.generation > theirs:  # it forgets what it has, and gives nothing
                    self.peer_generations[instruction.peer_id] = instruction.generation
                    ok, hashes = False, []
                elif core.generation > theirs:
                    generation = -1  # it was asked before this node was cleared, and is not yet
                oks = [rng.random() < 0.8 for _ in hashes][: len(hashes) if ok else 1]
                for block_hash, slot, is_good in zip(hashes, slots, oks, strict=False):
                    self.memory[slot] = (block_hash, generation) if is_good else TORN
                self._answer(lambda: core.on_fetched(job, oks, now))
        self.count("jobs")

    def _answer(self, tell: Callable[[], list[Instruction]]) -> None:
        self.carry_out(tell())
        self.answered = [*self.answered[-5:], tell]

    def note(self) -> None:
        """What the core has counted."""
        stats = self.core.stats(self.now)
        for tier, number in stats.loads.given.items():
            self.count(f"given from {tier}", number)
        for name in ("late", "corrupt", "not_fetched"):
            self.count(name, getattr(stats.loads, name))
        for name in ("num_evictions", "num_disk_evictions", "num_disk_failures"):
            self.count(name.removeprefix("num_"), getattr(stats, name))

    def end(self) -> None:
        """Everybody leaves, all jobs end: every slot is free or holds a block that can be found."""
        for group in list(self.groups):
            for member in list(group.members):
                self.leave(group, member)
        while self.jobs:
            self.all_jobs_end(random.Random(0))
        self.pass_time(KV_LEASE_S)
        while self.jobs:
            self.all_jobs_end(random.Random(0))
        self.check()
        stats = self.core.stats(self.now)
        assert stats.num_free + stats.num_found == stats.num_slots, f"not at baseline: {stats}"
        self.note()
        assert stats.num_holders == stats.num_leased == stats.num_staging == stats.num_disk_writes == 0, stats


def _apply(known: dict[bytes, KVTier], event: TierEvent) -> dict[bytes, KVTier]:
    if event.is_cleared:
        known.clear()
    for block_hash in event.removed:
        known.pop(block_hash, None)
    for tier, hashes in event.stored.items():
        for block_hash in hashes:
            known[block_hash] = tier
    return known
