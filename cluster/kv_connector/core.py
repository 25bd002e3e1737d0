"""PURE. The decisions of a KVConnector: which block is in which slot, who may read and write it, what goes to disk,
what is brought from there and from other nodes.

Events in, instructions out; the shell carries them out with sockets, files and memory. Time is an argument and never
goes back. A connection is a `MemberId` of the shell's; a job's answer may come in any order, twice, or late.

    FREE ──Reserve──> RESERVED ──Seal──> SEALED ──evicted, or void and not read──> FREE
      │                  │ holder given up
      │                  └──> QUARANTINED ──its last connection is gone──> FREE
      └──ReadDisk, Fetch──> STAGING ──answered──> SEALED or FREE

A block is found from its `Seal` on, without a checksum: nobody writes it any more, and memory is trusted as a replica's
own pool is. A checksum is made by whoever has the bytes in hand anyway, the thread that writes them to disk or to a
socket, and tested by the one that reads them there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import msgspec

from cluster.kv_connector.admission import ReuseFilter
from cluster.kv_connector.config import KVCacheConfig
from cluster.kv_connector.disk_index import DiskRecord, DiskTier
from cluster.kv_connector.disk_writer import DiskWriter
from cluster.kv_connector.eviction import CostOrder, EvictionOrder, LruOrder
from cluster.kv_connector.holders import Holder, Holders
from cluster.kv_connector.host_tier import HostTier
from cluster.kv_connector.instructions import Close, Instruction, JobId, MemberId, Resync, Send
from cluster.kv_connector.loads import Loads
from cluster.kv_connector.peers import Peers
from cluster.kv_connector.slots import SlotState
from cluster.kv_connector.stats import ConnectorStats
from cluster.kv_connector.stores import Stores
from cluster.kv_connector.tier_news import TierNews
from replica.kv_messages import (
    KV_LEASE_S,
    Acquire,
    Beat,
    Clear,
    Cleared,
    Hello,
    KVPeer,
    KVSpace,
    KVTier,
    LostSlots,
    Release,
    Reserve,
    Seal,
    TierEvent,
    ToConnector,
    Unwelcome,
    Welcome,
)

#: of the arena: what one holder may lease, what one may reserve, what jobs may fill at once
LEASE_SHARE = 0.5
RESERVE_SHARE = 0.25
STAGING_SHARE = 0.5
#: writes to disk on their way; their slots cannot be given up
MOST_WRITES = 32
WRITE_SHARE = 0.25
#: hashes that are remembered as asked for once, for each slot
SEEN_PER_SLOT = 4
#: without a call for so long it was the connector that was not there, and nobody is called silent for it
STOOD_STILL_S = KV_LEASE_S / 2
#: a job that is not answered for so long is stuck, and its slot stranded
JOB_PATIENCE_S = 60.0


class ConnectorCore:
    """Owns everything that a connector decides by. Knows no socket, file, memory or clock."""

    def __init__(
        self,
        config: KVCacheConfig,
        space: KVSpace,
        num_slots: int,
        num_disk_slots: int,
        *,
        identity: KVPeer,
        slot_bytes: int,
        on_disk: Iterable[DiskRecord] = (),
        generation: int = 0,
    ) -> None:
        """`on_disk`: what the index on disk says, of the same space; its slabs are checked when they are read.
        `generation`: of what is there.
        """
        self.space = space
        self._welcome = Welcome(identity, num_slots, slot_bytes, KV_LEASE_S)
        self._news = TierNews(self.tier_of)

        def changed(block_hash: bytes) -> None:
            self._news.before_change(block_hash)
            self._loads.waiting.note(block_hash)

        self._host = HostTier(num_slots, _order(config, space), changed)
        self._disk = DiskTier(num_disk_slots, _order(config, space), changed)
        self._peers = Peers(changed)
        jobs = itertools.count()
        min_uses = 2 if config.disk_admission == "second_use" else 1
        most_writes = min(MOST_WRITES, _share(WRITE_SHARE, num_slots))
        self._writer = DiskWriter(self._host, self._disk, jobs, most_writes, min_uses)
        self._loads = Loads(
            self._host,
            self._disk,
            self._peers,
            self._writer,
            jobs,
            most_leased=_share(LEASE_SHARE, num_slots),
            most_staging=_share(STAGING_SHARE, num_slots),
        )
        self._disk.restore(on_disk)
        reuse = ReuseFilter(SEEN_PER_SLOT * num_slots) if config.tier_admission == "second_use" else None
        self._stores = Stores(self._host, self._writer, reuse, _share(RESERVE_SHARE, num_slots))
        self._holders = Holders()
        self._called_at = float("-inf")
        #: who waits for the disk to be empty
        self._clears: list[Send] = []
        self._set_generation(generation)

    @property
    def generation(self) -> int:
        """See `TierEvent.generation`."""
        return self._news.generation

    def tier_of(self, block_hash: bytes) -> KVTier | None:
        """The nearest that has it."""
        if self._host.find(block_hash) is not None:
            return KVTier.HOST
        if block_hash in self._disk:
            return KVTier.DISK
        return KVTier.REMOTE if block_hash in self._peers else None

    def held(self, now: float) -> tuple[list[Instruction], dict[KVTier, list[bytes]]]:
        """All that this node can give, by tier. Carry out first what comes along: the news until now, so that what
        follows later is the difference to this.
        """
        held: dict[KVTier, list[bytes]] = {KVTier.HOST: list(self._host.found())}
        held[KVTier.DISK] = [h for h in self._disk if self._host.find(h) is None]
        return self._news.tell(now), held

    @property
    def holders(self) -> list[Holder]:
        """Everybody who has the arena mapped; to look at."""
        return self._holders.all()

    # ---- connections ----

    def on_hello(self, member: MemberId, hello: Hello, now: float, *, is_peer: bool = False) -> list[Instruction]:
        """First word of a connection. `is_peer`: a connector, which reads what this node has and is told of it."""
        why = self._holders.why_not(hello, self.space, is_peer)
        if why is not None:
            return [Send(member, Unwelcome(why)), Close([member])]
        told: list[Instruction] = []
        for old in self._holders.supersede(hello.holder):
            told += self._give_up(old)
        told += self._loads.follow(now)  # what it was writing may be elsewhere
        self._holders.join(member, hello.holder, is_peer, now)
        told.append(Send(member, self._welcome))
        if hello.wants_events:
            told += self._news.tell(now)
            known = itertools.chain(self._host.found(), self._disk, () if is_peer else self._peers)
            told += self._news.join(member, is_peer, dict.fromkeys(known))
        return told

    def on_message(self, member: MemberId, message: ToConnector, now: float) -> list[Instruction]:
        """Of somebody who was welcomed; from whoever was given up only ends are taken."""
        holder = self._holders.of(member)
        if holder is None:
            return []
        holder.heard_at = now  # also of who was given up and does not know it yet: it reads on what it leases
        told: list[Instruction] = []
        match message:
            case Acquire() | Reserve() if holder.is_given_up:
                pass
            case Acquire():
                told += self._acquire(holder, member, message, now)
            case Release(lease_ids=lease_ids):
                for lease_id in lease_ids:
                    if (lease := holder.leases.get(lease_id)) is not None:
                        self._loads.release(lease)
            case Reserve():
                told += self._reserve(holder, member, message)
            case Seal():
                if self._stores.seal(holder, message):
                    self._news.hurry()
            case Clear(clear_id=clear_id):
                # also of who was given up, who is not answered any more: to forget is always right
                self._set_generation(self.generation + 1)
                told += self._clear(None if holder.is_given_up else Send(member, Cleared(clear_id)))
            case Beat() | Hello():
                pass
        return told + self._after(now)

    def on_gone(self, member: MemberId, now: float) -> list[Instruction]:
        """A connection has ended, and with it its process, or its process does not touch the arena any more."""
        self._news.leave(member)
        self._clears = [clear for clear in self._clears if clear.member != member]
        holder = self._holders.leave(member)
        if holder is None:
            return []
        told: list[Instruction] = []
        if not holder.members:
            self._end(holder)
        elif member in holder.askers and not holder.is_given_up:
            told += self._give_up(holder)
        return told + self._after(now)

    # ---- jobs ----

    def on_disk_read(self, job: JobId, checksum: int | None, now: float) -> list[Instruction]:
        """`checksum`: of the bytes that were read; None: they could not be read."""
        return self._loads.disk_read(job, checksum) + self._after(now)

    def on_disk_written(self, job: JobId, checksum: int | None, now: float) -> list[Instruction]:
        """`checksum`: of the bytes that were written; None: they, or their entry in the index, could not be written."""
        self._writer.written(job, checksum, now)
        return self._after(now)

    def on_disk_cleared(self, job: JobId, ok: bool, now: float) -> list[Instruction]:
        """The index on disk is empty."""
        self._writer.cleared(job, ok, now)
        return self._after(now)

    def on_fetched(self, job: JobId, oks: Sequence[bool], now: float) -> list[Instruction]:
        """For each hash of the job, whether it is there and good."""
        return self._loads.fetched(job, oks) + self._after(now)

    # ---- other nodes ----

    def on_peer(self, peer_id: str) -> list[Instruction]:
        """A connector of another node will tell what it has, from the beginning."""
        self._peers.connected(peer_id)
        return []

    def on_peer_event(self, peer_id: str, event: TierEvent, now: float) -> list[Instruction]:
        told = self._catch_up(event.generation)
        if event.generation < self.generation:
            # it has not forgotten yet what was to be forgotten; it will, and tell everything anew
            event = TierEvent(event.number, is_cleared=True)
        if not self._peers.event(peer_id, event):
            told.append(Resync(peer_id))
        return told + self._after(now)

    def on_generation(self, generation: int, now: float) -> list[Instruction]:
        """Of a connector that wants blocks of this one."""
        return self._catch_up(generation) + self._after(now)

    def on_peer_gone(self, peer_id: str) -> list[Instruction]:
        self._peers.gone(peer_id)
        return []

    # ---- time ----

    @property
    def next_deadline(self) -> float | None:
        """When `on_time` has something to do if nothing happens before; besides, it wants to be called every second."""
        due = [at for at in (self._loads.next_deadline, self._news.due_at) if at is not None]
        return min(due, default=None)

    def on_time(self, now: float) -> list[Instruction]:
        """Time has passed."""
        if now - self._called_at > STOOD_STILL_S:  # words of everybody may lie unread
            self._holders.hear_all(now)
        self._called_at = now
        told = self._loads.on_time(now)
        for holder in self._holders.silent(now - KV_LEASE_S):
            void = [Send(lease.member, LostSlots(lease.lease_id)) for lease in holder.leases.values()]
            self._release_all(holder)
            if not holder.is_given_up:  # it hears of it, if it ever listens again
                told += [*void, *self._give_up(holder)]
        return told + self._after(now)

    # ---- what is the matter ----

    def stats(self, now: float) -> ConnectorStats:
        """A snapshot; O(holders + jobs)."""
        holders = self._holders.all()
        host, slots = self._host, self._host.slots
        living = [h for h in holders if h.is_living(now, KV_LEASE_S + 1.0)]
        num_reserved = sum(h.num_reserved for h in living)
        num_quarantined = sum(len(h.quarantine) for h in holders if h.members)
        num_stuck = self._loads.staging.num_stuck(now - JOB_PATIENCE_S) + self._writer.num_stuck(now - JOB_PATIENCE_S)
        accounted = slots.num_free + host.num_found + host.num_lingering + num_reserved + num_quarantined
        return ConnectorStats(
            num_slots=len(slots),
            num_free=slots.num_free,
            num_found=host.num_found,
            num_leased=sum(h.num_leased for h in holders),
            num_reserved=num_reserved,
            num_staging=len(self._loads.staging),
            num_lingering=host.num_lingering,
            num_quarantined=num_quarantined,
            num_stranded=len(slots) - accounted - len(self._loads.staging) + num_stuck,
            num_holders=len(holders),
            num_disk_slots=self._disk.num_slots,
            num_on_disk=len(self._disk),
            num_disk_writes=self._writer.num_writes,
            num_waiting_for_disk=self._writer.num_waiting,
            num_not_written=self._writer.num_dropped,
            num_disk_failures=self._writer.num_failed,
            num_evictions=host.num_evictions,
            num_disk_evictions=self._disk.num_evictions,
            num_peers=len(self._peers),
            loads=msgspec.structs.replace(self._loads.counters, given=dict(self._loads.counters.given)),
            stores=msgspec.structs.replace(self._stores.counters),
        )

    def validate(self) -> None:
        """Raises AssertionError; O(slots)."""
        holders = self._holders.all()
        self._holders.validate()
        self._host.validate()
        self._writer.validate()
        self._peers.validate()
        self._loads.validate(holders)
        self._stores.validate(holders)
        pins = sum(h.num_leased for h in holders) - self._loads.staging.num_awaited + self._writer.num_writes
        assert pins == self._host.num_pins, "pins of nobody, or leases without them"

    # ---- inside ----

    def _acquire(self, holder: Holder, member: MemberId, message: Acquire, now: float) -> list[Instruction]:
        holder.askers.add(member)
        if message.lease_id in holder.leases:
            return []
        return self._loads.acquire(holder, member, message, now)

    def _reserve(self, holder: Holder, member: MemberId, message: Reserve) -> list[Instruction]:
        holder.askers.add(member)
        if message.reservation_id in holder.reservations:
            return []
        answer = self._stores.reserve(holder, message)
        told: list[Instruction] = [Send(member, answer)]
        if message.must_stay and len(self._loads.waiting):
            slots = zip(message.hashes, answer.slots, strict=True)
            told += self._loads.cannot_come([h for h, slot in slots if slot < 0 and self._host.get(h) is None])
        return told

    def _clear(self, answer: Send | None) -> list[Instruction]:
        """Nothing of before is found from now on. Answered when that is true after a restart as well."""
        told = self._loads.forget_all()
        self._host.forget_all()
        self._writer.forget_all()
        self._stores.forget_all()
        self._peers.forget_all()
        self._news.cleared()
        if answer is not None:
            self._clears.append(answer)
        return told

    def _catch_up(self, generation: int) -> list[Instruction]:
        """Somebody else was cleared, and so is this one."""
        if generation <= self.generation:
            return []
        self._set_generation(generation)
        return self._clear(None)

    def _set_generation(self, generation: int) -> None:
        self._news.generation = self._loads.staging.generation = generation

    def _after(self, now: float) -> list[Instruction]:
        """What follows whatever happened."""
        told = self._loads.follow(now)
        told += self._writer.plan(now)
        due_at = self._news.due_at
        if due_at is not None and due_at <= now:
            told += self._news.tell(now)
        if self._clears and not self._writer.is_clearing:
            # whoever hears `Cleared` has heard before what is not there any more
            told += [*self._news.tell(now), *self._clears]
            self._clears = []
        return told

    def _give_up(self, holder: Holder) -> list[Instruction]:
        """It gets nothing more, and its connections end. What it may still write is kept from others."""
        holder.is_given_up = True
        self._clears = [clear for clear in self._clears if clear.member not in holder.members]
        holder.quarantine += self._stores.give_up(holder, SlotState.QUARANTINED)
        for lease in [lease for lease in holder.leases.values() if lease.is_open]:
            self._loads.stop(lease)
        for member in holder.members:
            self._news.leave(member)
        return [Close(sorted(holder.members))]

    def _release_all(self, holder: Holder) -> None:
        for lease in list(holder.leases.values()):
            self._loads.release(lease)

    def _end(self, holder: Holder) -> None:
        """Nobody of it is left."""
        self._release_all(holder)
        self._stores.give_up(holder, SlotState.FREE)
        self._host.free_quarantined(holder.quarantine)
        self._holders.remove(holder)


def _order(config: KVCacheConfig, space: KVSpace) -> EvictionOrder:
    return LruOrder() if config.eviction == "lru" else CostOrder(space.block_size)


def _share(share: float, num_slots: int) -> int:
    return max(1, int(share * num_slots))
