"""PURE. Blocks on their way into the arena: the jobs that bring them from disk and from other nodes, and which leases
wait for which of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from cluster.kv_connector.disk_index import DiskBlock, DiskTier
from cluster.kv_connector.disk_writer import DiskWriter
from cluster.kv_connector.holders import Lease
from cluster.kv_connector.host_tier import Block, HostTier
from cluster.kv_connector.instructions import Fetch, Instruction, JobId, ReadDisk
from cluster.kv_connector.peers import Peers
from cluster.kv_connector.slots import SlotState
from replica.kv_messages import KV_LEASE_S, KVTier

#: blocks of one Fetch: they can be given when the whole job has ended, so it is not long
MOST_IN_FETCH = 64
#: a Fetch may take so long, or as long as who asked waits
LONGEST_FETCH_S = 5.0


class OnWay(msgspec.Struct):
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


class Staging:
    """Owns the jobs. Seals nothing: whoever hears that a job has ended takes its blocks off (`take`)."""

    def __init__(
        self, host: HostTier, disk: DiskTier, peers: Peers, writer: DiskWriter, jobs: Iterator[JobId], most: int
    ) -> None:
        """`most`: slots that jobs fill at once."""
        self._host = host
        self._disk = disk
        self._peers = peers
        self._writer = writer
        self._jobs = jobs
        self._most = most
        #: of this connector: told to whom something is taken from
        self.generation = 0
        self._disk_jobs: dict[JobId, _DiskJob] = {}
        self._fetch_jobs: dict[JobId, _FetchJob] = {}
        self._on_way: dict[Block, OnWay] = {}
        #: read from disk, and not what was written there; not brought from a peer
        self.num_corrupt = self.num_not_fetched = 0

    def __len__(self) -> int:
        """Slots that jobs fill."""
        return len(self._on_way)

    def __contains__(self, block: Block) -> bool:
        return block in self._on_way

    @property
    def num_awaited(self) -> int:
        """Blocks of leases that are not pinned, since they are on their way."""
        return sum(len(way.leases) for way in self._on_way.values())

    def num_stuck(self, before: float) -> int:
        """Slots of jobs that began until then."""
        fetched = [job for job in self._fetch_jobs.values() if job.begun_at <= before]
        return sum(j.begun_at <= before for j in self._disk_jobs.values()) + sum(len(j.blocks) for j in fetched)

    def way(self, block: Block) -> OnWay:
        return self._on_way[block]

    def take(self, block: Block) -> OnWay:
        """Its job has let go of it."""
        return self._on_way.pop(block)

    def from_disk(self, block_hash: bytes, parent: bytes, position: int, now: float) -> ReadDisk | None:
        """None: no slot for it now."""
        source = self._disk.begin_read(block_hash)
        block = self._begin(block_hash, parent, position, KVTier.DISK, source.uses)
        if block is None:
            self._disk.end_read(source)
            return None
        job = next(self._jobs)
        self._disk_jobs[job] = _DiskJob(block, source, now)
        return ReadDisk(job, source.disk_slot, block.slot, block_hash, source.checksum)

    def from_peer(self, block_hash: bytes, parent: bytes, position: int) -> Block | None:
        """The caller makes a job of it."""
        return self._begin(block_hash, parent, position, KVTier.REMOTE, 0)

    def begin_fetch(self, peer_id: str, blocks: list[Block], within_s: float, now: float) -> Fetch:
        job = next(self._jobs)
        self._fetch_jobs[job] = _FetchJob(blocks, peer_id, now)
        hashes, slots = [block.block_hash for block in blocks], [block.slot for block in blocks]
        return Fetch(job, peer_id, hashes, slots, max(within_s, LONGEST_FETCH_S), self.generation)

    def disk_read(self, job: JobId, checksum: int | None) -> tuple[list[Instruction], list[tuple[Block, bool]]]:
        """What follows, and the blocks that were brought, or not. An unknown job is ignored."""
        done = self._disk_jobs.pop(job, None)
        if done is None:
            return [], []
        told: list[Instruction] = []
        is_good = checksum == done.source.checksum
        if not is_good:
            self.num_corrupt += 1
            told += self._writer.drop(done.source)
        self._disk.end_read(done.source)
        return told, [(done.block, is_good)]

    def fetched(self, job: JobId, oks: Sequence[bool]) -> list[tuple[Block, bool]]:
        """The blocks that were brought, or not. An unknown job is ignored."""
        done = self._fetch_jobs.pop(job, None)
        if done is None:
            return []
        ended = []
        for i, block in enumerate(done.blocks):
            is_good = i < len(oks) and oks[i]
            if not is_good:
                self.num_not_fetched += 1
                self._peers.does_not_have(done.peer_id, block.block_hash)
            ended.append((block, is_good))
        return ended

    def validate(self, leases: Sequence[Lease]) -> None:
        """Raises AssertionError."""
        waits = [id(lease) for way in self._on_way.values() for lease in way.leases]
        assert len(waits) == sum(lease.num_missing for lease in leases), "who waits for what is not clear"
        assert set(waits) == {id(lease) for lease in leases if lease.num_missing}, "somebody waits for nothing"
        jobs = [job.block for job in self._disk_jobs.values()]
        jobs += [block for job in self._fetch_jobs.values() for block in job.blocks]
        assert len(jobs) == len(set(jobs)), "a block comes by two jobs"
        assert set(jobs) == set(self._on_way), "a block comes by no job"
        assert len(jobs) <= self._most, "too much is on its way"
        for block in jobs:
            assert self._host.slots.states[block.slot] is SlotState.STAGING, f"{block} is written and may not be"

    # ---- for `Bringing` ----

    def get(self, block_hash: bytes) -> Block | None:
        return self._host.get(block_hash)

    def is_on_disk(self, block_hash: bytes) -> bool:
        return block_hash in self._disk

    def havers(self, block_hash: bytes, lease: Lease) -> list[str]:
        """Peers to ask. Who waits believes nobody who has not said so: its sources will have it, perhaps not yet."""
        if lease.waits:
            return self._peers.told(block_hash, lease.sources)
        return self._peers.havers(block_hash, lease.sources)

    def _begin(self, block_hash: bytes, parent: bytes, position: int, tier: KVTier, uses: int) -> Block | None:
        if len(self._on_way) >= self._most:
            return None
        block = self._host.begin(block_hash, parent, position, SlotState.STAGING, uses)
        if block is not None:
            self._on_way[block] = OnWay(tier)
        return block


class Bringing:
    """Of a lease that gets longer: jobs for what is not in the arena. Neighbours that one peer has travel together."""

    def __init__(self, staging: Staging, lease: Lease, now: float) -> None:
        self._staging = staging
        self._lease = lease
        self._now = now
        self._peer_id = ""
        self._blocks: list[Block] = []
        self._told: list[Instruction] = []

    def bring(self, i: int) -> Block | None:
        """A slot that a job fills with the i-th; None: there is no room for it."""
        staging, lease = self._staging, self._lease
        block_hash = lease.hashes[i]
        block = staging.get(block_hash)
        if block is not None:  # the same hash stood before it
            return block
        parent, position = lease.chain(i)
        if staging.is_on_disk(block_hash):
            read = staging.from_disk(block_hash, parent, position, self._now)
            if read is None:
                return None
            self._told.append(read)
            return staging.get(block_hash)
        havers = staging.havers(block_hash, lease)
        block = staging.from_peer(block_hash, parent, position)
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
            within_s = min(self._lease.within_s, KV_LEASE_S)
            self._told.append(self._staging.begin_fetch(self._peer_id, self._blocks, within_s, self._now))
            self._blocks = []
