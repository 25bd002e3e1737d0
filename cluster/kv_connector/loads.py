"""PURE. `Acquire`: what is here is leased, what is on disk or on another node is brought into the arena for it.

Blocks on their way are shared: whoever asks for one waits for the same job. A lease is answered when all of its run is
there, when the rest of it can not come, or at its deadline, with the longest leading run that is there; what comes
later stays as cache.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from cluster.kv_connector.disk_index import DiskBlock, DiskTier
from cluster.kv_connector.disk_writer import DiskWriter
from cluster.kv_connector.holders import Holder, Lease
from cluster.kv_connector.host_tier import Block, HostTier
from cluster.kv_connector.instructions import Fetch, Instruction, JobId, MemberId, ReadDisk, Send
from cluster.kv_connector.peers import Peers
from cluster.kv_connector.slots import SlotState
from replica.kv_messages import KV_LEASE_S, Acquire, Acquired, KVTier

#: blocks of one Fetch: they can be given when the whole job has ended, so it is not long
MOST_IN_FETCH = 64
#: a Fetch may take so long, or as long as who asked waits
LONGEST_FETCH_S = 5.0


class _OnWay(msgspec.Struct):
    """A block that a job fills."""

    tier: KVTier
    #: who waits for it; twice, who asked twice
    leases: list[Lease] = []


class _DiskJob(msgspec.Struct, frozen=True):
    block: Block
    source: DiskBlock
    begun_at: float


class _FetchJob(msgspec.Struct, frozen=True):
    blocks: list[Block]
    peer_id: str
    begun_at: float


class LoadCounters(msgspec.Struct):
    """Blocks, totals since the start."""

    asked: int = 0
    given: dict[KVTier, int] = {}
    #: leases whose time was over before all had come
    late: int = 0
    #: read from disk, and not what was written there
    corrupt: int = 0
    not_fetched: int = 0


class Loads:
    """Owns leases, and the jobs that bring blocks."""

    def __init__(
        self,
        host: HostTier,
        disk: DiskTier,
        peers: Peers,
        writer: DiskWriter,
        jobs: Iterator[JobId],
        *,
        most_leased: int,
        most_staging: int,
    ) -> None:
        """`most_leased`: slots of one holder; `most_staging`: slots that jobs fill at once."""
        self._host = host
        self._disk = disk
        self._peers = peers
        self._writer = writer
        self._jobs = jobs
        self._most_leased = most_leased
        self._most_staging = most_staging
        self._disk_jobs: dict[JobId, _DiskJob] = {}
        self._fetch_jobs: dict[JobId, _FetchJob] = {}
        self._on_way: dict[Block, _OnWay] = {}
        #: (deadline, tie break, lease); also of such as were answered since
        self._deadlines: list[tuple[float, int, Lease]] = []
        self._num_deadlines = 0
        self.counters = LoadCounters()
        #: of this connector: told to whom something is taken from
        self.generation = 0

    @property
    def num_staging(self) -> int:
        """Slots that jobs fill."""
        return len(self._on_way)

    @property
    def num_awaited(self) -> int:
        """Blocks of leases that are not pinned, since they are on their way."""
        return sum(len(way.leases) for way in self._on_way.values())

    def num_stuck(self, before: float) -> int:
        """Slots of jobs that began until then."""
        fetched = [job for job in self._fetch_jobs.values() if job.begun_at <= before]
        return sum(j.begun_at <= before for j in self._disk_jobs.values()) + sum(len(j.blocks) for j in fetched)

    @property
    def next_deadline(self) -> float | None:
        """Of who waits for an answer."""
        while self._deadlines and not self._deadlines[0][2].num_missing:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def acquire(self, holder: Holder, member: MemberId, message: Acquire, now: float) -> list[Instruction]:
        """A lease, answered at once if nothing has to come."""
        lease = Lease(holder, member, message.lease_id)
        holder.leases[lease.lease_id] = lease
        self.counters.asked += len(message.hashes)
        found = self._find(message, lease)
        bringing = _Bringing(self, message, now)
        for i, block in enumerate(found):
            block = block or bringing.bring(i)
            if block is None:  # no room for it: what comes after it is of no use
                self._unpin([later for later in found[i:] if later is not None])
                break
            _learn_chain(block, message, i)
            lease.blocks.append(block)
            lease.tiers.append(KVTier.HOST if block.is_sealed else self._on_way[block].tier)
            if not block.is_sealed:
                self._on_way[block].leases.append(lease)
                lease.num_missing += 1
        holder.leased.update(lease.blocks)
        if not lease.num_missing:
            return [self._answer(lease), *bringing.told()]
        self._num_deadlines += 1
        within_s = min(max(0.0, message.within_s), KV_LEASE_S)
        heapq.heappush(self._deadlines, (now + within_s, self._num_deadlines, lease))
        return bringing.told()

    def release(self, lease: Lease) -> None:
        """Nobody reads it any more, or waits for it."""
        self._cut(lease, 0)
        lease.holder.leases.pop(lease.lease_id, None)

    def disk_read(self, job: JobId, checksum: int | None) -> list[Instruction]:
        """`checksum`: of what was read; None: it could not be read. An unknown job is ignored."""
        done = self._disk_jobs.pop(job, None)
        if done is None:
            return []
        told: list[Instruction] = []
        is_good = checksum == done.source.checksum
        if not is_good:
            self.counters.corrupt += 1
            told += self._writer.drop(done.source)
        self._disk.end_read(done.source)
        return told + self._arrived(done.block, is_good)

    def fetched(self, job: JobId, oks: Sequence[bool]) -> list[Instruction]:
        """For each block, whether it is there and good; what is missing in `oks` is not. An unknown job is ignored."""
        done = self._fetch_jobs.pop(job, None)
        if done is None:
            return []
        told: list[Instruction] = []
        for i, block in enumerate(done.blocks):
            is_good = i < len(oks) and oks[i]
            if not is_good:
                self.counters.not_fetched += 1
                self._peers.does_not_have(done.peer_id, block.block_hash)
            told += self._arrived(block, is_good)
        return told

    def on_time(self, now: float) -> list[Instruction]:
        """Whose time is over is answered with what is there."""
        told: list[Instruction] = []
        while (deadline := self.next_deadline) is not None and deadline <= now:
            lease = heapq.heappop(self._deadlines)[2]
            self.counters.late += 1
            self._cut(lease, next(i for i, block in enumerate(lease.blocks) if not block.is_sealed))
            told.append(self._answer(lease))
        return told

    def forget_all(self) -> list[Instruction]:
        """What is on its way is of before: whoever waits for it gets nothing. What was answered can be read on."""
        told: list[Instruction] = []
        for _, _, lease in sorted(self._deadlines, key=lambda entry: entry[1]):
            if lease.num_missing:
                self._cut(lease, 0)
                told.append(self._answer(lease))
        self._deadlines.clear()
        return told

    def validate(self, holders: Sequence[Holder]) -> None:
        """Raises AssertionError."""
        leases = [lease for holder in holders for lease in holder.leases.values()]
        for holder in holders:
            counted = Counter(block for lease in holder.leases.values() for block in lease.blocks)
            assert holder.leased == counted, "leased slots are counted wrongly"
            assert len(counted) <= self._most_leased, "too many slots are leased"
        waits = [id(lease) for way in self._on_way.values() for lease in way.leases]
        assert len(waits) == sum(lease.num_missing for lease in leases), "who waits for what is not clear"
        assert set(waits) == {id(lease) for lease in leases if lease.num_missing}, "somebody waits for nothing"
        waiting = {id(entry[2]) for entry in self._deadlines}
        assert all(id(lease) in waiting for lease in leases if lease.num_missing), "somebody waits without an end"
        jobs = [job.block for job in self._disk_jobs.values()]
        jobs += [block for job in self._fetch_jobs.values() for block in job.blocks]
        assert len(jobs) == len(set(jobs)), "a block comes by two jobs"
        assert set(jobs) == set(self._on_way), "a block comes by no job"
        assert len(jobs) <= self._most_staging, "too much is on its way"
        for block in jobs:
            assert self._host.slots.states[block.slot] is SlotState.STAGING, f"{block} is written and may not be"

    # ---- for `_Bringing` ----

    def stage_from_disk(self, block_hash: bytes, parent: bytes, position: int, now: float) -> ReadDisk | None:
        """None: no slot for it now."""
        source = self._disk.begin_read(block_hash)
        block = self._stage(block_hash, parent, position, KVTier.DISK, source.uses)
        if block is None:
            self._disk.end_read(source)
            return None
        job = next(self._jobs)
        self._disk_jobs[job] = _DiskJob(block, source, now)
        return ReadDisk(job, source.disk_slot, block.slot, block_hash, source.checksum)

    def stage_from_peer(self, block_hash: bytes, parent: bytes, position: int) -> Block | None:
        """The caller makes a job of it."""
        return self._stage(block_hash, parent, position, KVTier.REMOTE, 0)

    def begin_fetch(self, peer_id: str, blocks: list[Block], within_s: float, now: float) -> Fetch:
        job = next(self._jobs)
        self._fetch_jobs[job] = _FetchJob(blocks, peer_id, now)
        hashes, slots = [block.block_hash for block in blocks], [block.slot for block in blocks]
        return Fetch(job, peer_id, hashes, slots, max(within_s, LONGEST_FETCH_S), self.generation)

    def get(self, block_hash: bytes) -> Block | None:
        return self._host.get(block_hash)

    def is_on_disk(self, block_hash: bytes) -> bool:
        return block_hash in self._disk

    def havers(self, block_hash: bytes, sources: Sequence[str]) -> list[str]:
        return self._peers.havers(block_hash, sources)

    # ---- inside ----

    def _find(self, message: Acquire, lease: Lease) -> list[Block | None]:
        """The run as far as it can be had: blocks that are here, pinned, or on their way; None: to be brought. All of
        them are pinned before anything is brought, since for that something may have to be given up.

        A slot that the holder has by another lease costs it no room: an opening that all share would else use it up.
        """
        holder = lease.holder
        with_peers, sources = not holder.is_peer, () if holder.is_peer else message.sources
        room = self._most_leased - len(holder.leased)
        found: list[Block | None] = []
        for block_hash in message.hashes:
            block = self._host.get(block_hash)
            if block not in holder.leased:
                if room <= 0:
                    lease.is_limited = True
                    break
                room -= 1
            if block is None:
                if block_hash not in self._disk and not (with_peers and self._peers.havers(block_hash, sources)):
                    break
            elif block.is_sealed:
                self._host.pin(block)
            elif block not in self._on_way:
                break  # a holder writes it: nobody finds it before it is sealed
            found.append(block)
        return found

    def _stage(self, block_hash: bytes, parent: bytes, position: int, tier: KVTier, uses: int) -> Block | None:
        if len(self._on_way) >= self._most_staging:
            return None
        block = self._host.begin(block_hash, parent, position, SlotState.STAGING, uses)
        if block is not None:
            self._on_way[block] = _OnWay(tier)
        return block

    def _arrived(self, block: Block, is_good: bool) -> list[Instruction]:
        """A job has let go of it."""
        way = self._on_way[block]
        told: list[Instruction] = []
        if is_good and not block.is_void:
            del self._on_way[block]
            self._host.seal(block, len(way.leases))
            self._writer.offer(block)
            for lease in way.leases:
                lease.num_missing -= 1
                if not lease.num_missing:
                    told.append(self._answer(lease))
            return told
        while way.leases:
            lease = way.leases[0]
            self._cut(lease, lease.blocks.index(block))
            if not lease.num_missing:
                told.append(self._answer(lease))
        del self._on_way[block]
        self._host.give_up(block)
        return told

    def _answer(self, lease: Lease) -> Send:
        if not lease.blocks:
            lease.holder.leases.pop(lease.lease_id, None)
        self._host.use(lease.blocks)
        for tier in lease.tiers:
            self.counters.given[tier] = self.counters.given.get(tier, 0) + 1
        for block in lease.blocks:
            self._writer.offer(block)
        slots = [block.slot for block in lease.blocks]
        return Send(lease.member, Acquired(lease.lease_id, slots, list(lease.tiers), lease.is_limited))

    def _cut(self, lease: Lease, end: int) -> None:
        """Only the blocks before `end` stay leased."""
        for block in lease.blocks[end:]:
            if block.is_sealed:
                self._host.unpin(block)
            else:
                self._on_way[block].leases.remove(lease)
                lease.num_missing -= 1
        leased = lease.holder.leased
        for block in lease.blocks[end:]:
            leased[block] -= 1
            if not leased[block]:
                del leased[block]
        del lease.blocks[end:], lease.tiers[end:]

    def _unpin(self, blocks: list[Block]) -> None:
        for block in blocks:
            if block.is_sealed:
                self._host.unpin(block)


class _Bringing:
    """Of one Acquire: jobs for what is not in the arena. Neighbours that one peer has travel together."""

    def __init__(self, loads: Loads, message: Acquire, now: float) -> None:
        self._loads = loads
        self._message = message
        self._now = now
        self._peer_id = ""
        self._blocks: list[Block] = []
        self._told: list[Instruction] = []

    def bring(self, i: int) -> Block | None:
        """A slot that a job fills with the i-th; None: there is no room for it."""
        block_hash = self._message.hashes[i]
        block = self._loads.get(block_hash)
        if block is not None:  # the same hash stood before it
            return block
        parent, position = _chain(self._message, i)
        if self._loads.is_on_disk(block_hash):
            read = self._loads.stage_from_disk(block_hash, parent, position, self._now)
            if read is None:
                return None
            self._told.append(read)
            return self._loads.get(block_hash)
        havers = self._loads.havers(block_hash, self._message.sources)
        block = self._loads.stage_from_peer(block_hash, parent, position)
        if block is None:
            return None
        peer_id = self._peer_id if self._peer_id in havers else havers[0]
        if peer_id != self._peer_id or len(self._blocks) == MOST_IN_FETCH:
            self._end_fetch()
        self._peer_id = peer_id
        self._blocks.append(block)
        return block

    def told(self) -> list[Instruction]:
        self._end_fetch()
        return self._told

    def _end_fetch(self) -> None:
        if self._blocks:
            self._told.append(self._loads.begin_fetch(self._peer_id, self._blocks, self._message.within_s, self._now))
            self._blocks = []


def _chain(message: Acquire, i: int) -> tuple[bytes, int]:
    """Parent and position of the i-th hash."""
    return message.hashes[i - 1] if i else message.before, message.first + i


def _learn_chain(block: Block, message: Acquire, i: int) -> None:
    """Who stored it may not have said where in its chain it is. It is pinned or on its way, so nothing is sorted by it
    now.
    """
    if not block.parent:
        block.parent, block.position = _chain(message, i)
