"""PURE. The host tier: which block is in which slot of the arena, who reads it, what is given up for another.

A block that was forgotten (`forget_all`) is *void*: nobody finds it, and its slot is free when the last reader is gone
or its writer is done. A new block with the same hash is another object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from cluster.kv_connector.eviction import Evictable, EvictionOrder
from cluster.kv_connector.slots import SlotPool, SlotState


class Block:
    """One block in one slot, from the moment somebody may write it until the slot is free."""

    __slots__ = ("block_hash", "is_sealed", "is_void", "key", "parent", "pins", "position", "slot", "uses")

    def __init__(self, block_hash: bytes, parent: bytes, position: int, uses: int, slot: int) -> None:
        self.block_hash = block_hash
        #: the hash before it in its chain; empty: none, or not known
        self.parent = parent
        self.position = position
        self.uses = uses
        #: -1: it is not in the arena any more
        self.slot = slot
        self.is_sealed = False
        self.is_void = False
        #: leases and jobs that read it
        self.pins = 0
        self.key = 0.0

    def __repr__(self) -> str:
        flags = " ".join(name for name in ("is_sealed", "is_void") if getattr(self, name))
        return f"<Block {self.block_hash.hex()[:8]} slot={self.slot} pins={self.pins} {flags}>"


class HostTier:
    """Owns the arena's slots. Does not know who reads and who writes."""

    def __init__(self, num_slots: int, order: EvictionOrder, before_change: Callable[[bytes], None]) -> None:
        """`before_change(hash)` is called before a block begins or ceases to be found, or whoever fills it gives up."""
        self.slots = SlotPool(num_slots)
        self._order = order
        self._before_change = before_change
        #: sealed or being filled, not void
        self._blocks: dict[bytes, Block] = {}
        self._evictable = Evictable(order)
        self._num_filling = 0
        #: sealed, void, and read by somebody
        self._lingering: set[Block] = set()
        self.num_evictions = 0

    @property
    def num_found(self) -> int:
        """Blocks that can be found."""
        return len(self._blocks) - self._num_filling

    @property
    def num_lingering(self) -> int:
        """Slots of void blocks that somebody still reads."""
        return len(self._lingering)

    @property
    def num_pins(self) -> int:
        """Of all blocks; O(n)."""
        return sum(block.pins for block in self._blocks.values()) + sum(block.pins for block in self._lingering)

    @property
    def num_available(self) -> int:
        """Slots that can be had at once."""
        return self.slots.num_free + len(self._evictable)

    def find(self, block_hash: bytes) -> Block | None:
        """If it can be read."""
        block = self._blocks.get(block_hash)
        return block if block is not None and block.is_sealed else None

    def get(self, block_hash: bytes) -> Block | None:
        """Also one that is being filled."""
        return self._blocks.get(block_hash)

    def found(self) -> Iterator[bytes]:
        return (h for h, block in self._blocks.items() if block.is_sealed)

    def begin(self, block_hash: bytes, parent: bytes, position: int, state: SlotState, uses: int = 0) -> Block | None:
        """A slot for a block that is not here, perhaps another's; None: all are in use."""
        assert block_hash not in self._blocks, "it is here already"
        if not self.slots.num_free and not self._evict():
            return None
        block = Block(block_hash, parent, position, uses, self.slots.take(state))
        self._blocks[block_hash] = block
        self._num_filling += 1
        return block

    def seal(self, block: Block, pins: int = 0) -> None:
        """It is written. Void by now: its slot is free; else it is found from now on, and has so many readers."""
        if block.is_void:
            self.give_up(block)
            return
        self._before_change(block.block_hash)
        self.slots.move(block.slot, SlotState.SEALED)
        self._num_filling -= 1
        block.is_sealed, block.pins, block.uses = True, pins, max(1, block.uses)
        block.key = self._order.key(block.uses, block.position)
        if not pins:
            self._evictable.add(block.block_hash, block.key, block.parent)

    def give_up(self, block: Block, state: SlotState = SlotState.FREE) -> None:
        """It was not written, or not to its end; `state` is what becomes of its slot."""
        assert not block.is_sealed, f"{block} is sealed"
        if not block.is_void:
            self._before_change(block.block_hash)
            del self._blocks[block.block_hash]
            self._num_filling -= 1
            block.is_void = True
        self.slots.move(block.slot, state)
        block.slot = -1

    def free_quarantined(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.slots.move(slot, SlotState.FREE)

    def pin(self, block: Block) -> None:
        """One reader more."""
        assert block.is_sealed, f"{block} can not be read"
        if not block.pins and not block.is_void:
            self._evictable.remove(block.block_hash)
        block.pins += 1

    def unpin(self, block: Block) -> None:
        """One reader less; the last of a void block frees its slot."""
        assert block.pins > 0, f"{block} is not read by anybody"
        block.pins -= 1
        if block.pins:
            return
        if block.is_void:
            self._lingering.remove(block)
            self._free(block)
        else:
            self._evictable.add(block.block_hash, block.key, block.parent)

    def use(self, blocks: Sequence[Block]) -> None:
        """They are asked for, pinned all of them, in the order of their chain: the tail counts as used before the
        head.
        """
        for block in reversed(blocks):
            block.uses += 1
            block.key = self._order.key(block.uses, block.position)

    def forget_all(self) -> None:
        """Nothing that is here, or about to be, is found any more."""
        for block in self._blocks.values():
            block.is_void = True
            if block.is_sealed:
                self._before_change(block.block_hash)
                if block.pins:
                    self._lingering.add(block)
                else:
                    self._free(block)
        self._blocks.clear()
        self._evictable.clear()
        self._num_filling = 0

    def validate(self) -> None:
        """Raises AssertionError."""
        self.slots.validate()
        self._evictable.validate()
        filling = 0
        for block_hash, block in self._blocks.items():
            assert not block.is_void, f"{block} is found and should not be"
            state = self.slots.states[block.slot]
            if block.is_sealed:
                assert state is SlotState.SEALED, f"{block} is sealed, its slot is {state.name}"
                assert (block_hash in self._evictable) == (block.pins == 0), (
                    f"{block}: pinned or evictable, one of them"
                )
            else:
                assert state in (SlotState.RESERVED, SlotState.STAGING), f"{block} is filled in a {state.name} slot"
                assert block.pins == 0, f"{block} is read before it is sealed"
                filling += 1
        assert filling == self._num_filling, "blocks that are being filled are counted wrongly"
        used = [block.slot for block in self._blocks.values()]
        assert len(used) == len(set(used)), "two blocks in one slot"
        assert len(self._evictable) == sum(b.is_sealed and not b.pins for b in self._blocks.values()), (
            "evictable ghosts"
        )
        sealed = self.slots.count()[SlotState.SEALED]
        assert sealed == self.num_found + len(self._lingering), "sealed slots that nobody finds and nobody reads"

    def _evict(self) -> bool:
        block_hash = self._evictable.pop()
        if block_hash is None:
            return False
        self._before_change(block_hash)
        self._free(self._blocks.pop(block_hash))
        self.num_evictions += 1
        return True

    def _free(self, block: Block) -> None:
        self.slots.move(block.slot, SlotState.FREE)
        block.slot, block.is_sealed = -1, False
