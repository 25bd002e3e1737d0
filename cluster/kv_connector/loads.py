"""PURE. `Acquire`: what is here is leased, what is on disk or on another node is brought into the arena for it, and
with `waits` what nobody has yet is waited for.

Blocks on their way are shared: whoever asks for one waits for the same job. A lease is answered when all of its run is
there, when the rest of it can not come, or at its deadline, with the longest leading run that is there; what comes
later stays as cache.

Who waits is answered in pieces. Its run gets longer when its next hash is sealed here, or when a peer tells that it has
it. Hashes that it waits for count against what its holder may lease, so whatever comes can be given to it; without a
slot for the next one the wait ends.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from cluster.kv_connector.disk_index import DiskTier
from cluster.kv_connector.disk_writer import DiskWriter
from cluster.kv_connector.holders import Holder, Lease
from cluster.kv_connector.host_tier import Block, HostTier
from cluster.kv_connector.instructions import Instruction, JobId, MemberId, Send
from cluster.kv_connector.peers import Peers
from cluster.kv_connector.staging import Bringing, Staging
from cluster.kv_connector.wait_list import WaitList
from replica.kv_messages import KV_LEASE_S, Acquire, Acquired, KVTier

#: the longest wait for blocks that nobody has; its holder gives it up long before
LONGEST_WAIT_S = 600.0


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
    """Owns leases, and through `staging` the jobs that bring blocks."""

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
        self._most_leased = most_leased
        self.staging = Staging(host, disk, peers, writer, jobs, most_staging)
        self.waiting = WaitList()
        #: (deadline, tie break, lease); also of such as were answered since
        self._deadlines: list[tuple[float, int, Lease]] = []
        self._num_deadlines = 0
        self._counters = LoadCounters()

    @property
    def counters(self) -> LoadCounters:
        self._counters.corrupt = self.staging.num_corrupt
        self._counters.not_fetched = self.staging.num_not_fetched
        return self._counters

    @property
    def next_deadline(self) -> float | None:
        """Of who waits for an answer."""
        while self._deadlines and not self._deadlines[0][2].is_open:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def acquire(self, holder: Holder, member: MemberId, message: Acquire, now: float) -> list[Instruction]:
        """A lease, answered at once if nothing has to come."""
        lease = Lease(holder, member, message)
        self._counters.asked += len(message.hashes)
        room = self._most_leased - len(holder.leased) - holder.num_hoped
        if lease.waits:
            self._limit(lease, room)
        told = self._extend(lease, room, now)
        holder.leases[lease.lease_id] = lease
        if lease.is_open:
            self._num_deadlines += 1
            within_s = min(max(0.0, message.within_s), LONGEST_WAIT_S if lease.waits else KV_LEASE_S)
            heapq.heappush(self._deadlines, (now + within_s, self._num_deadlines, lease))
        return [*self._tell([lease]), *told]

    def release(self, lease: Lease) -> None:
        """Nobody reads it any more, or waits for it."""
        lease.is_answered = True
        self._end(lease, 0)
        lease.holder.leases.pop(lease.lease_id, None)

    def stop(self, lease: Lease) -> None:
        """Its holder hears no more. What it was told of it may still read."""
        if not lease.num_told:
            self.release(lease)
            return
        lease.is_answered = True
        self._end(lease, lease.num_told)

    def disk_read(self, job: JobId, checksum: int | None) -> list[Instruction]:
        """`checksum`: of what was read; None: it could not be read. An unknown job is ignored."""
        told, ended = self.staging.disk_read(job, checksum)
        return told + self._arrived(ended)

    def fetched(self, job: JobId, oks: Sequence[bool]) -> list[Instruction]:
        """For each block, whether it is there and good; what is missing in `oks` is not. An unknown job is ignored."""
        return self._arrived(self.staging.fetched(job, oks))

    def follow(self, now: float) -> list[Instruction]:
        """What was waited for has come, or was told of: runs get longer."""
        told: list[Instruction] = []
        while (lease := self.waiting.pop()) is not None:
            fetches = self._extend(lease, None, now)
            told += [*self._tell([lease]), *fetches]
        return told

    def cannot_come(self, block_hashes: Sequence[bytes]) -> list[Instruction]:
        """Who was to store these has got no slots: nobody waits for them any more."""
        missing = set(block_hashes)
        told: list[Instruction] = []
        for lease in self.waiting.all():
            start = len(lease.blocks)
            end = next((i for i in range(start, len(lease.hashes)) if lease.hashes[i] in missing), None)
            if end is not None:
                del lease.hashes[end:]
                lease.is_limited = True
                self.waiting.watch(lease)
                told += self._tell([lease])
        return told

    def on_time(self, now: float) -> list[Instruction]:
        """Whose time is over is answered with what is there."""
        told: list[Instruction] = []
        while (deadline := self.next_deadline) is not None and deadline <= now:
            lease = heapq.heappop(self._deadlines)[2]
            self._counters.late += 1
            self._end(lease, next((i for i, b in enumerate(lease.blocks) if not b.is_sealed), len(lease.blocks)))
            told += self._tell([lease])
        return told

    def forget_all(self) -> list[Instruction]:
        """What is on its way is of before: whoever waits for it gets nothing. What was answered can be read on."""
        told: list[Instruction] = []
        for _, _, lease in sorted(self._deadlines, key=lambda entry: entry[1]):
            if lease.is_open:
                self._end(lease, lease.num_told)
                told += self._tell([lease])
        self._deadlines.clear()
        return told

    def validate(self, holders: Sequence[Holder]) -> None:
        """Raises AssertionError."""
        leases = [lease for holder in holders for lease in holder.leases.values()]
        for holder in holders:
            counted = Counter(block for lease in holder.leases.values() for block in lease.blocks)
            assert holder.leased == counted, "leased slots are counted wrongly"
            assert len(counted) <= self._most_leased, "too many slots are leased"
        self.staging.validate(leases)
        self.waiting.validate(leases)
        waiting = {id(entry[2]) for entry in self._deadlines}
        assert all(id(lease) in waiting for lease in leases if lease.is_open), "somebody waits without an end"
        for lease in self.waiting.all():
            assert not self._can_be_had(lease), "it waits for what is there"
        for lease in leases:
            assert lease.is_answered != lease.is_open, "answered, and more is to come; or neither"
            assert all(block.is_sealed for block in lease.blocks[: lease.num_told]), "what was given is not there"

    # ---- inside ----

    def _limit(self, lease: Lease, room: int) -> None:
        """Of who waits: no more than its holder may lease, once all of it has come."""
        leased = lease.holder.leased
        for i, block_hash in enumerate(lease.hashes):
            if self._host.get(block_hash) not in leased:
                room -= 1
                if room < 0:
                    lease.is_limited = True
                    del lease.hashes[i:]
                    return

    def _extend(self, lease: Lease, room: int | None, now: float) -> list[Instruction]:
        """Add what can be had behind what it has. `room`: slots that its holder may lease more; None: it has them."""
        start, found = len(lease.blocks), self._find(lease, room)
        bringing = Bringing(self.staging, lease, now)
        for i, block in enumerate(found, start):
            block = block or bringing.bring(i)
            if block is None:  # no room for it: what comes after it is of no use
                self._unpin([later for later in found[i - start :] if later is not None])
                lease.waits = False
                break
            if not block.parent:
                # who stored it may not have said where in its chain it is. It is pinned or on its way, so nothing is
                # sorted by it now
                block.parent, block.position = lease.chain(i)
            lease.blocks.append(block)
            if block.is_sealed:
                lease.tiers.append(KVTier.HOST)
            else:
                way = self.staging.way(block)
                lease.tiers.append(way.tier)
                way.leases.append(lease)
                lease.num_missing += 1
        lease.holder.leased.update(lease.blocks[start:])
        self._settle(lease)
        return bringing.told()

    def _find(self, lease: Lease, room: int | None) -> list[Block | None]:
        """The run as far as it can be had: blocks that are here, pinned, or on their way; None: to be brought. All of
        them are pinned before anything is brought, since for that something may have to be given up.

        A slot that the holder has by another lease costs it no room: an opening that all share would else use it up.
        """
        holder = lease.holder
        with_peers = not holder.is_peer
        found: list[Block | None] = []
        for block_hash in lease.hashes[len(lease.blocks) :]:
            block = self._host.get(block_hash)
            if room is not None and block not in holder.leased:
                if room <= 0:
                    lease.is_limited = True
                    break
                room -= 1
            if block is None:
                if block_hash not in self._disk and not (with_peers and self.staging.havers(block_hash, lease)):
                    break
            elif block.is_sealed:
                self._host.pin(block)
            elif block not in self.staging:
                break  # a holder writes it: nobody finds it before it is sealed
            found.append(block)
        return found

    def _can_be_had(self, lease: Lease) -> bool:
        """What it waits for."""
        block_hash = lease.hashes[len(lease.blocks)]
        block = self._host.get(block_hash)
        if block is not None:
            return block.is_sealed
        return block_hash in self._disk or (not lease.holder.is_peer and bool(self.staging.havers(block_hash, lease)))

    def _arrived(self, ended: list[tuple[Block, bool]]) -> list[Instruction]:
        """Jobs have let go of them."""
        touched: dict[Lease, None] = {}
        for block, is_good in ended:
            if is_good and not block.is_void:
                way = self.staging.take(block)
                self._host.seal(block, len(way.leases))
                self._writer.offer(block)
                for lease in way.leases:
                    lease.num_missing -= 1
                    touched[lease] = None
                continue
            way = self.staging.way(block)
            while way.leases:
                lease = way.leases[0]
                self._cut(lease, lease.blocks.index(block))
                self._settle(lease)
                touched[lease] = None
            self.staging.take(block)
            self._host.give_up(block)
        return self._tell(touched)

    def _tell(self, leases: Sequence[Lease] | dict[Lease, None]) -> list[Instruction]:
        """What they have more than they were told."""
        told: list[Instruction] = []
        for lease in leases:
            is_last, start, end = not lease.is_open, lease.num_told, lease.num_told
            if lease.is_answered or not (is_last or lease.waits):
                continue
            while end < len(lease.blocks) and lease.blocks[end].is_sealed:
                end += 1
            if end == start and not is_last:
                continue
            lease.num_told, lease.is_answered = end, is_last
            if not lease.blocks:
                lease.holder.leases.pop(lease.lease_id, None)
            blocks, tiers = lease.blocks[start:end], lease.tiers[start:end]
            self._host.use(blocks)
            for tier in tiers:
                self._counters.given[tier] = self._counters.given.get(tier, 0) + 1
            for block in blocks:
                self._writer.offer(block)
            slots = [block.slot for block in blocks]
            answer = Acquired(lease.lease_id, slots, tiers, lease.is_limited, start, is_last)
            told.append(Send(lease.member, answer))
        return told

    def _end(self, lease: Lease, end: int) -> None:
        """It waits for nothing more, and keeps the blocks before `end`."""
        lease.waits = False
        self._cut(lease, end)
        self._settle(lease)

    def _settle(self, lease: Lease) -> None:
        """Its blocks have changed: what else it hopes for."""
        if not lease.waits:
            del lease.hashes[len(lease.blocks) :]
        self.waiting.watch(lease)

    def _cut(self, lease: Lease, end: int) -> None:
        """Only the blocks before `end` stay leased."""
        for block in lease.blocks[end:]:
            if block.is_sealed:
                self._host.unpin(block)
            else:
                self.staging.way(block).leases.remove(lease)
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
