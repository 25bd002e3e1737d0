"""PURE. The disk tier: which block is in which disk slot, what is given up for another, what is written next.

Writes follow sealing at once, in the background and a bounded number at a time, so that the arena can give up any block
without waiting for a disk. What finds the backlog full is not written then; it is offered again when it is used again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

import msgspec

from cluster.kv_connector.eviction import Evictable, EvictionOrder
from cluster.kv_connector.host_tier import Block


class DiskRecord(msgspec.Struct, frozen=True):
    """What the index on disk says of a disk slot; records of a start come least recently written first."""

    block_hash: bytes
    disk_slot: int
    checksum: int
    position: int = 0
    parent: bytes = b""


class DiskBlock:
    """One block in one disk slot, from the moment it may be written until the slot is free."""

    __slots__ = ("block_hash", "checksum", "disk_slot", "is_void", "key", "parent", "pins", "position", "uses")

    def __init__(self, block_hash: bytes, parent: bytes, position: int, uses: int, disk_slot: int) -> None:
        self.block_hash = block_hash
        self.parent = parent
        self.position = position
        self.uses = uses
        self.disk_slot = disk_slot
        self.checksum = 0
        #: jobs that read it
        self.pins = 0
        self.is_void = False
        self.key = 0.0


class DiskTier:
    """Owns the disk slots. Does not know what a file is."""

    def __init__(self, num_slots: int, order: EvictionOrder, before_change: Callable[[bytes], None]) -> None:
        self.num_slots = num_slots
        self._order = order
        self._before_change = before_change
        self._blocks: dict[bytes, DiskBlock] = {}
        self._evictable = Evictable(order)
        self._free = list(range(num_slots - 1, -1, -1))
        #: taken by `begin`, not ended
        self._being_written: set[int] = set()
        #: void, and read by somebody
        self._num_lingering = 0
        self.num_evictions = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._blocks

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._blocks)

    @property
    def is_idle(self) -> bool:
        """Nobody reads or writes any of its slots."""
        return len(self._free) + len(self._blocks) == self.num_slots and len(self._evictable) == len(self._blocks)

    def restore(self, records: Iterable[DiskRecord]) -> None:
        """What a former connector left. Of two records for a slot or a hash the later counts, as in a journal; a slot
        that is not there is left out.
        """
        by_slot = {r.disk_slot: r for r in records if 0 <= r.disk_slot < self.num_slots}
        by_hash = {r.block_hash: r for r in by_slot.values()}
        for record in by_hash.values():
            block = DiskBlock(record.block_hash, record.parent, record.position, 1, record.disk_slot)
            block.checksum = record.checksum
            self._add(block)
        used = {record.disk_slot for record in by_hash.values()}
        self._free = [slot for slot in range(self.num_slots - 1, -1, -1) if slot not in used]

    def begin(self, block: Block) -> DiskBlock | None:
        """A disk slot to write `block` into, perhaps another's; None: all are in use."""
        if not self._free and not self._evict():
            return None
        written = DiskBlock(block.block_hash, block.parent, block.position, block.uses, self._free.pop())
        self._being_written.add(written.disk_slot)
        return written

    def written(self, block: DiskBlock, checksum: int) -> None:
        """It is on disk: found from now on, unless it is void."""
        self._being_written.remove(block.disk_slot)
        if block.is_void or block.block_hash in self._blocks:
            self._free.append(block.disk_slot)
            return
        block.checksum = checksum
        self._before_change(block.block_hash)
        self._add(block)

    def not_written(self, block: DiskBlock) -> None:
        self._being_written.remove(block.disk_slot)
        self._free.append(block.disk_slot)

    def begin_read(self, block_hash: bytes) -> DiskBlock:
        """Its slot is not given to others until `end_read`."""
        block = self._blocks[block_hash]
        if not block.pins:
            self._evictable.remove(block_hash)
        block.pins += 1
        return block

    def end_read(self, block: DiskBlock) -> None:
        block.pins -= 1
        if block.pins:
            return
        if block.is_void:
            self._num_lingering -= 1
            self._free.append(block.disk_slot)
            return
        block.uses += 1
        block.key = self._order.key(block.uses, block.position)
        self._evictable.add(block.block_hash, block.key, block.parent)

    def drop(self, block: DiskBlock) -> bool:
        """It is no good. False: it was forgotten already."""
        if block.is_void:
            return False
        self._before_change(block.block_hash)
        del self._blocks[block.block_hash]
        self._make_void(block)
        return True

    def forget_all(self) -> None:
        """Nothing that is here is found any more."""
        for block in self._blocks.values():
            self._before_change(block.block_hash)
            self._make_void(block)
        self._blocks.clear()

    def validate(self) -> None:
        """Raises AssertionError."""
        self._evictable.validate()
        for block_hash, block in self._blocks.items():
            assert not block.is_void, "a void block is found on disk"
            assert (block_hash in self._evictable) == (block.pins == 0), "pinned or evictable, one of them"
        used = [*self._free, *self._being_written, *(block.disk_slot for block in self._blocks.values())]
        assert len(used) == len(set(used)), "a disk slot has two uses"
        assert len(used) + self._num_lingering == self.num_slots, "a disk slot is lost"

    def _add(self, block: DiskBlock) -> None:
        block.key = self._order.key(block.uses, block.position)
        self._blocks[block.block_hash] = block
        self._evictable.add(block.block_hash, block.key, block.parent)

    def _make_void(self, block: DiskBlock) -> None:
        block.is_void = True
        if block.pins:
            self._num_lingering += 1
        else:
            self._evictable.remove(block.block_hash)
            self._free.append(block.disk_slot)

    def _evict(self) -> bool:
        block_hash = self._evictable.pop()
        if block_hash is None:
            return False
        self._before_change(block_hash)
        self._free.append(self._blocks.pop(block_hash).disk_slot)
        self.num_evictions += 1
        return True


class WriteBacklog:
    """Sealed blocks that are to be written, oldest first, a bounded number."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()
        self.num_dropped = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def offer(self, block: Block) -> None:
        if block.block_hash in self._blocks or len(self._blocks) < self._most:
            self._blocks[block.block_hash] = block
        else:
            self.num_dropped += 1

    def pop(self) -> Block | None:
        """The oldest that is still in the arena; None: there is none."""
        while self._blocks:
            _, block = self._blocks.popitem(last=False)
            if block.is_sealed and not block.is_void:
                return block
        return None

    def clear(self) -> None:
        self._blocks.clear()
