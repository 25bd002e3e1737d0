"""PURE. `Reserve` and `Seal`: who may write which slot, and when what is written is found."""

from __future__ import annotations

import msgspec

from cluster.kv_connector.admission import ReuseFilter
from cluster.kv_connector.disk_writer import DiskWriter
from cluster.kv_connector.holders import Holder, Reservation
from cluster.kv_connector.host_tier import Block, HostTier
from cluster.kv_connector.slots import SlotState
from replica.kv_messages import Reserve, Reserved, Seal


class StoreCounters(msgspec.Struct):
    """Blocks, totals since the start."""

    asked: int = 0
    stored: int = 0
    #: reserved, and not written to the end
    not_written: int = 0
    #: refused: it is here, or somebody fills it
    known: int = 0
    #: refused: not asked for before
    not_reused: int = 0
    #: refused: all slots are in use, or the holder has too many
    no_room: int = 0


class Stores:
    """Owns reservations."""

    def __init__(self, host: HostTier, writer: DiskWriter, reuse: ReuseFilter | None, most_reserved: int) -> None:
        """`reuse`: None, if everything is worth a slot; `most_reserved`: slots of one holder."""
        self._host = host
        self._writer = writer
        self._reuse = reuse
        self._most_reserved = most_reserved
        self.counters = StoreCounters()

    def reserve(self, holder: Holder, message: Reserve) -> Reserved:
        """Answered at once, whatever there is room for."""
        blocks: dict[int, Block] = {}
        slots: list[int] = []
        counters = self.counters
        counters.asked += len(message.hashes)
        for i, block_hash in enumerate(message.hashes):
            block = self._host.get(block_hash)
            if block is not None:
                counters.known += 1
                self._used(block)
            elif not message.must_stay and self._reuse is not None and not self._reuse.is_second(block_hash):
                counters.not_reused += 1
            elif holder.num_reserved < self._most_reserved and (block := self._begin(message, i)) is not None:
                holder.num_reserved += 1
                blocks[i] = block
                slots.append(block.slot)
                continue
            else:
                counters.no_room += 1
            slots.append(-1)
        if blocks:
            holder.reservations[message.reservation_id] = Reservation(blocks, message.must_stay)
        return Reserved(message.reservation_id, slots)

    def seal(self, holder: Holder, message: Seal) -> bool:
        """What is written is found from now on, unless everything was forgotten since it was reserved. Of an unknown
        reservation nothing follows. True: somebody may wait for the news.
        """
        reservation = holder.reservations.pop(message.reservation_id, None)
        if reservation is None:
            return False
        written = set(message.written)
        holder.num_reserved -= len(reservation.blocks)
        # the tail first, so that the head counts as used last
        for i, block in reversed(reservation.blocks.items()):
            if i in written:
                self.counters.stored += not block.is_void
                self._host.seal(block)
            else:
                self.counters.not_written += 1
                self._host.give_up(block)
        # to disk from head to tail: it will be read in that order
        for block in reservation.blocks.values():
            if block.is_sealed:
                self._writer.offer(block)
        return reservation.must_stay and bool(written)

    def give_up(self, holder: Holder, state: SlotState) -> list[int]:
        """All reservations of the holder are void; returns their slots, which are `state` now."""
        slots: list[int] = []
        for reservation in holder.reservations.values():
            for block in reservation.blocks.values():
                slots.append(block.slot)
                self._host.give_up(block, state)
        holder.reservations.clear()
        holder.num_reserved = 0
        return slots

    def forget_all(self) -> None:
        """Whoever was asked for before counts as not asked for."""
        if self._reuse is not None:
            self._reuse.clear()

    def validate(self, holders: list[Holder]) -> None:
        """Raises AssertionError."""
        reserved: list[Block] = []
        for holder in holders:
            mine = [block for reservation in holder.reservations.values() for block in reservation.blocks.values()]
            assert holder.num_reserved == len(mine) <= self._most_reserved, "reserved slots are counted wrongly"
            reserved += mine
        states = self._host.slots.states
        assert all(states[block.slot] is SlotState.RESERVED for block in reserved), "somebody writes what is not his"
        assert len({block.slot for block in reserved}) == len(reserved), "two holders write one slot"
        quarantined = [slot for holder in holders for slot in holder.quarantine]
        assert all(states[slot] is SlotState.QUARANTINED for slot in quarantined), "a slot left quarantine alone"
        counts = self._host.slots.count()
        assert counts[SlotState.RESERVED] == len(reserved), "a slot is reserved by nobody"
        assert counts[SlotState.QUARANTINED] == len(quarantined), "a slot is in nobody's quarantine"

    def _begin(self, message: Reserve, i: int) -> Block | None:
        parent = message.parents[i] if i < len(message.parents) else b""
        position = message.positions[i] if i < len(message.positions) else 0
        return self._host.begin(message.hashes[i], parent, max(0, position), SlotState.RESERVED)

    def _used(self, block: Block) -> None:
        """Somebody computed what is here: it would have been of use."""
        if block.is_sealed:
            self._host.pin(block)
            self._host.use([block])
            self._host.unpin(block)
            self._writer.offer(block)
