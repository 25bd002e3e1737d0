"""PURE. Paged KV memory of one replica: who owns which block, which blocks hold a known prefix, what to reuse first.

Semantics (vLLM 0.32 is the model; deviations are ours):
- Full blocks only are cached; a lookup never covers the last known token, since somebody must produce its logits.
- A hash is registered when its block *has been computed*, not when it is planned: an unfinished prefill is never
  visible to others (case C-15).
- One hash, one block: a second block with equal content stays unregistered and is the first to be reused. So a removal
  event always means that the last copy is gone (vLLM PR #55092 has that wrong).
- Free order: unregistered blocks are reused first, registered ones least recently used first, the tail of a chain
  before its head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import msgspec

from replica.messages import KVEvent
from replica.sequence import Sequence


class BlockStats(msgspec.Struct, frozen=True):
    """A snapshot. Hit rate = hit_tokens / query_tokens; lookups of preempted sequences are not counted (case C-19)."""

    num_blocks: int
    num_free: int
    num_cached: int
    query_tokens: int
    hit_tokens: int
    num_evictions: int


class FreeList:
    """Free block ids in reuse order, as an intrusive doubly linked list: every operation is O(1) and allocates nothing.

    A deque would not do: a prefix hit takes a block out of the middle.
    """

    def __init__(self, num_blocks: int) -> None:
        self._end: int = num_blocks  # sentinel: next of the last and previous of the first
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._previous: list[int] = [num_blocks, *range(num_blocks)]
        self._size = num_blocks

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        block_id = self._next[self._end]
        while block_id != self._end:
            yield block_id
            block_id = self._next[block_id]

    def pop_front(self, count: int) -> list[int]:
        """The first `count` in reuse order; the ends are tied once, which makes 2,048 of them four times as fast."""
        assert count <= self._size, "pop from an empty free list"
        following, block_id = self._next, self._next[self._end]
        taken = []
        for _ in range(count):
            taken.append(block_id)
            block_id = following[block_id]
        following[self._end] = block_id
        self._previous[block_id] = self._end
        self._size -= count
        return taken

    def remove(self, block_ids: list[int]) -> None:
        """From wherever they are."""
        following, previous = self._next, self._previous
        for block_id in block_ids:
            before, after = previous[block_id], following[block_id]
            following[before] = after
            previous[after] = before
        self._size -= len(block_ids)

    def push_front(self, block_ids: list[int]) -> None:
        """To be reused first, in this order."""
        self._insert(self._end, block_ids)

    def push_back(self, block_ids: list[int]) -> None:
        """To be reused last, in this order."""
        self._insert(self._previous[self._end], block_ids)

    def _insert(self, before: int, block_ids: list[int]) -> None:
        following, previous, after = self._next, self._previous, self._next[before]
        for block_id in block_ids:
            following[before] = block_id
            previous[block_id] = before
            before = block_id
        following[before] = after
        previous[after] = before
        self._size += len(block_ids)


class BlockManager:
    """Owns the pool. Does not know who runs when, nor where the bytes are; sizes are in blocks and tokens."""

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True, record_events: bool = False
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.is_caching = enable_prefix_caching
        self._record_events = record_events
        self._ref_count = [0] * num_blocks
        self._hash: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        self._free = FreeList(num_blocks)
        self._stored: list[bytes] = []
        self._removed: list[bytes] = []
        self._cleared = False
        self._query_tokens = 0
        self._hit_tokens = 0
        self._num_evictions = 0

    @property
    def num_free(self) -> int:
        """Blocks nobody references; cached ones among them are still free."""
        return len(self._free)

    @property
    def capacity_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks that already hold the leading tokens of `sequence`, at most `num_tokens - 1` of them. Changes nothing
        but hashes.
        """
        if not self.is_caching or sequence.lacks_prompt_logprobs:
            return []
        sequence.extend_hashes(self.block_size)
        limit = (sequence.num_tokens - 1) // self.block_size
        # `iter` with None as its end: one look-up after the other until the first that finds nothing
        return list(iter(map(self._cached.get, islice(sequence.block_hashes, limit)).__next__, None))

    def num_hit_tokens(self, sequence: Sequence) -> int:
        return len(self.find_prefix(sequence)) * self.block_size

    def num_missing(self, sequence: Sequence, keep_free: int) -> int:
        """Free blocks that `admit` would lack; 0 or less: it would go through."""
        hits = self.find_prefix(sequence)
        num_free_hits = sum(not self._ref_count[block_id] for block_id in hits)
        return self.blocks_for(sequence.num_tokens) - len(hits) + num_free_hits + keep_free - len(self._free)

    def num_held_alone(self, sequence: Sequence) -> int:
        """Blocks that become free when `sequence` gives its own up."""
        return sum(self._ref_count[block_id] == 1 for block_id in sequence.block_ids)

    def admit(self, sequence: Sequence, *, keep_free: int = 0) -> bool:
        """Give `sequence` blocks for all its known tokens, prefix hits included; all or nothing.

        Reserving the whole prompt keeps a half-computed prefill from ever being the one that cannot grow. `keep_free`
        is the watermark in blocks. Sets `num_computed_tokens` to the hit length. Returns False, with nothing changed,
        if it does not fit.
        """
        assert not sequence.block_ids, f"{sequence} is admitted twice"
        hits = self.find_prefix(sequence)
        # hits that sit in the free list stop being free when touched, so they count like new ones (case C-16)
        ref_count = self._ref_count
        free_hits = [block_id for block_id in hits if not ref_count[block_id]]
        num_new = self.blocks_for(sequence.num_tokens) - len(hits)
        if num_new + len(free_hits) + keep_free > len(self._free):
            return False
        self._free.remove(free_hits)
        for block_id in hits:
            ref_count[block_id] += 1
        sequence.block_ids = hits + self._take(num_new)
        sequence.num_blocks_committed = len(hits)
        sequence.num_computed_tokens = len(hits) * self.block_size
        if sequence.num_preemptions == 0:
            self._query_tokens += sequence.num_tokens
            self._hit_tokens += sequence.num_computed_tokens
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        return True

    def grow(self, sequence: Sequence, num_tokens: int) -> list[int] | None:
        """Extend the block table to cover `num_tokens`. Returns the new block ids, or None with nothing changed."""
        missing = self.blocks_for(num_tokens) - len(sequence.block_ids)
        if missing <= 0:
            return []
        if missing > len(self._free):
            return None
        new = self._take(missing)
        sequence.block_ids += new
        return new

    def commit(self, sequence: Sequence) -> None:
        """Register the full blocks up to `num_computed_tokens`: from now on others may share them."""
        if not self.is_caching:
            return
        num_full = sequence.num_computed_tokens // self.block_size
        done = sequence.num_blocks_committed
        if num_full <= done:
            return
        sequence.extend_hashes(self.block_size)
        hashes, cached, stored = self._hash, self._cached, self._stored
        for block_hash, block_id in zip(
            sequence.block_hashes[done:num_full], sequence.block_ids[done:num_full], strict=True
        ):
            if hashes[block_id] is None and block_hash not in cached:
                hashes[block_id] = block_hash
                cached[block_hash] = block_id
                if self._record_events:
                    stored.append(block_hash)
        sequence.num_blocks_committed = num_full

    def free(self, sequence: Sequence) -> None:
        """Give up all references of `sequence`. Registered blocks stay findable until they are reused."""
        ref_count, unregistered, registered = self._ref_count, list[int](), list[int]()
        for block_id in sequence.block_ids:
            count = ref_count[block_id] - 1
            assert count >= 0, f"block {block_id} freed too often, by {sequence}"
            ref_count[block_id] = count
            if count == 0:
                (unregistered if self._hash[block_id] is None else registered).append(block_id)
        self._free.push_front(unregistered)
        self._free.push_back(registered[::-1])
        sequence.block_ids = []
        sequence.num_blocks_committed = 0
        sequence.num_computed_tokens = 0

    def clear_cache(self) -> None:
        """Forget every cached prefix. Blocks that sequences hold stay theirs; what is registered of them later hangs on
        forgotten parents, so nobody finds it before those are computed anew.
        """
        self._hash = [None] * self.num_blocks
        self._cached.clear()
        self._stored, self._removed, self._cleared = [], [], self._record_events

    def take_events(self) -> KVEvent | None:
        """Changes of the cached set since the last call, coalesced: a hash stored and removed in between is in neither
        list.
        """
        if not (self._stored or self._removed or self._cleared):
            return None
        stored = [h for h in dict.fromkeys(self._stored) if h in self._cached]
        removed = [h for h in dict.fromkeys(self._removed) if h not in self._cached]
        event = KVEvent(stored=stored, removed=removed, cleared=self._cleared)
        self._stored, self._removed, self._cleared = [], [], False
        return event

    def cached_hashes(self) -> list[bytes]:
        """All registered hashes, oldest first: the snapshot a router starts from."""
        return list(self._cached)

    def stats(self) -> BlockStats:
        return BlockStats(
            num_blocks=self.num_blocks,
            num_free=len(self._free),
            num_cached=len(self._cached),
            query_tokens=self._query_tokens,
            hit_tokens=self._hit_tokens,
            num_evictions=self._num_evictions,
        )

    def validate(self, sequences: Iterable[Sequence]) -> None:
        """Check every invariant against the block tables of all living sequences. Raises AssertionError with the
        story.
        """
        references = [0] * self.num_blocks
        for sequence in sequences:
            assert len(set(sequence.block_ids)) == len(sequence.block_ids), f"{sequence} holds a block twice"
            assert sequence.num_computed_tokens <= len(sequence.block_ids) * self.block_size, (
                f"{sequence} has tokens without a block"
            )
            for block_id in sequence.block_ids:
                references[block_id] += 1
        assert references == self._ref_count, f"reference counts {self._ref_count} but tables hold {references}"
        free = list(self._free)
        assert len(free) == len(set(free)) == len(self._free), f"free list is broken: {free}"
        assert set(free) == {b for b, count in enumerate(references) if count == 0}, (
            "free list and reference counts disagree"
        )
        registered = {block_hash: block_id for block_id, block_hash in enumerate(self._hash) if block_hash is not None}
        assert registered == self._cached, "block hashes and the cache index disagree"

    def _take(self, count: int) -> list[int]:
        taken = self._free.pop_front(count)
        for block_id in taken:
            old = self._hash[block_id]
            if old is not None:  # eviction is lazy: a cached block loses its hash only when it is needed
                self._hash[block_id] = None
                del self._cached[old]
                self._num_evictions += 1
                if self._record_events:
                    self._removed.append(old)
            self._ref_count[block_id] = 1
        return taken
