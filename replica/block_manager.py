"""PURE. Paged KV memory of one replica: who owns which block, which blocks hold a known prefix, what to reuse first.

Semantics (vLLM 0.32 is the model; deviations are ours):
- Full blocks only are cached; a lookup never covers the last known token, since somebody must produce its logits.
- A hash is registered when its block *has been computed*, not when it is planned: an unfinished prefill is never
  visible to others (case C-15).
- One hash, one block: a second block with equal content stays unregistered and is the first to be reused. So a removal
  event always means that the last copy is gone (vLLM PR #55092 has that wrong).
- Free order: unregistered blocks are reused first, registered ones least recently used first, the tail of a chain
  before its head.
- With a window (`replica/attention_window.py`) blocks that a sequence has passed are given back while it runs, and the
  blocks of its prompt move along with it: what it gives back it takes again in front, so no half-computed prompt has to
  ask for a block unless somebody shares what it gave back. A hit needs only the blocks of the window before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import msgspec

from replica.attention_window import NULL_BLOCK, Window
from replica.block_offers import Offer, offer_of
from replica.free_list import FreeList
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


class BlockManager:
    """Owns the pool. Does not know who runs when, nor where the bytes are; sizes are in blocks and tokens."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        record_events: bool = False,
        window: int | None = None,
    ) -> None:
        """`window`: of a model all of whose layers have one, in tokens; the largest."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.is_caching = enable_prefix_caching
        self.window = None if window is None else Window(window, block_size)
        #: with a window: blocks that a sequence in its prompt holds at most
        self._most_held = num_blocks
        self._record_events = record_events
        self._ref_count = [0] * num_blocks
        self._hash: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        self._free = FreeList(num_blocks)
        self._stored: list[bytes] = []
        self._removed: list[bytes] = []
        self._cleared = False
        self._num_clears = 0
        self._query_tokens = 0
        self._hit_tokens = 0
        self._num_evictions = 0
        #: block id -> how often it is pinned
        self._pins: dict[int, int] = {}
        #: registered since they were taken last; None: nobody takes them
        self._offers: list[Offer] | None = None

    @property
    def num_free(self) -> int:
        """Blocks nobody references; cached ones among them are still free, pinned ones are not."""
        return len(self._free)

    @property
    def num_pinned_alone(self) -> int:
        """Blocks that are free as soon as the copies that they are pinned for are over."""
        ref_count = self._ref_count
        return sum(ref_count[block_id] == count for block_id, count in self._pins.items())

    @property
    def capacity_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def limit_chunk(self, max_tokens: int | None) -> None:
        """A prompt gets at most so many tokens a step from now on; None: as many as it has. With a window that bounds
        what it holds.
        """
        if self.window is not None and max_tokens is not None:
            self._most_held = min(self.num_blocks, self.window.span(max_tokens))
        else:
            self._most_held = self.num_blocks

    @property
    def max_held_tokens(self) -> int:
        """KV that one sequence in its prompt holds at once, in tokens: the pool, or what a window needs of it."""
        return self._most_held * self.block_size

    def room(self, sequence: Sequence) -> int:
        """Tokens that may be computed next in the blocks it has."""
        return len(sequence.block_ids) * self.block_size - sequence.num_computed_tokens

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks that already hold the leading tokens of `sequence`, at most `num_tokens - 1` of them; with a window
        NULL_BLOCK for those that are passed. Changes nothing but hashes.
        """
        if not self.is_caching or sequence.lacks_prompt_logprobs:
            return []
        sequence.extend_hashes(self.block_size)
        limit = (sequence.num_tokens - 1) // self.block_size
        if self.window is not None:
            end = self.window.hit_end(sequence.block_hashes, self._cached, limit)
            first = self.window.num_passed(end * self.block_size)
            return [NULL_BLOCK] * first + [self._cached[h] for h in sequence.block_hashes[first:end]]
        # `iter` with None as its end: one look-up after the other until the first that finds nothing
        return list(iter(map(self._cached.get, islice(sequence.block_hashes, limit)).__next__, None))

    def num_hit_tokens(self, sequence: Sequence) -> int:
        return len(self.find_prefix(sequence)) * self.block_size

    def num_needed(self, sequence: Sequence) -> int:
        """Blocks that `admit` gives it, prefix hits included."""
        return self._reach(sequence, 0)

    def num_missing(self, sequence: Sequence, keep_free: int) -> int:
        """Free blocks that `admit` would lack; 0 or less: it would go through."""
        hits = self.find_prefix(sequence)
        num_passed = self._num_passed(hits)
        num_free_hits = sum(not self._ref_count[block_id] for block_id in hits[num_passed:])
        return self._reach(sequence, num_passed) - len(hits) + num_free_hits + keep_free - len(self._free)

    def num_held_alone(self, sequence: Sequence) -> int:
        """Blocks that become free when `sequence` gives its own up, those that are pinned as soon as they are not."""
        ref_count, pins = self._ref_count, self._pins
        if not pins:
            return sum(ref_count[block_id] == 1 for block_id in sequence.held_blocks)
        return sum(ref_count[block_id] - pins.get(block_id, 0) == 1 for block_id in sequence.held_blocks)

    def num_shared_tokens(self, sequence: Sequence) -> int:
        """Tokens that others keep computed for `sequence` if it gives its blocks up: it would find them again."""
        num_passed = sequence.num_passed_blocks
        num_shared = len(sequence.block_ids) - num_passed - self.num_held_alone(sequence)
        if self.window is not None and num_passed and num_shared < self.window.num_before:
            return 0
        return (num_passed + num_shared) * self.block_size

    def admit(self, sequence: Sequence, *, keep_free: int = 0) -> bool:
        """Give `sequence` blocks for all its known tokens (with a window: as many of them as it holds at once), prefix
        hits included; all or nothing.

        Reserving the whole prompt keeps a half-computed prefill from ever being the one that cannot grow. `keep_free`
        is the watermark in blocks. Sets `num_computed_tokens` to the hit length. Returns False, with nothing changed,
        if it does not fit.
        """
        assert not sequence.block_ids, f"{sequence} is admitted twice"
        hits = self.find_prefix(sequence)
        num_passed = self._num_passed(hits)
        held = hits[num_passed:] if num_passed else hits
        # hits that sit in the free list stop being free when touched, so they count like new ones (case C-16)
        ref_count = self._ref_count
        free_hits = [block_id for block_id in held if not ref_count[block_id]]
        num_new = self._reach(sequence, num_passed) - len(hits)
        if num_new + len(free_hits) + keep_free > len(self._free):
            return False
        self._free.remove(free_hits)
        for block_id in held:
            ref_count[block_id] += 1
        sequence.block_ids = hits + self._take(num_new)
        sequence.num_passed_blocks = num_passed
        sequence.num_clears_before = self._num_clears
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

    def slide(self, sequence: Sequence, keep_free: int) -> list[int]:
        """In a prompt: give back what is passed and take as much again in front, up to what `admit` would have given.
        Returns the new blocks. If others share what is given back they may be fewer; what is missing comes from the
        free ones above `keep_free`, now or later.
        """
        num_freed = self.release_passed(sequence)
        missing = self._reach(sequence, sequence.num_passed_blocks) - len(sequence.block_ids)
        missing = min(missing, num_freed + max(0, len(self._free) - num_freed - keep_free))
        if missing <= 0:
            return []
        new = self._take(missing)
        sequence.block_ids += new
        return new

    def release_passed(self, sequence: Sequence) -> int:
        """Give back the blocks that no later token of `sequence` sees, if there is a window. Returns how many became
        free. What is computed has to be committed before; the runner need not be told, since it never reads them.
        """
        if self.window is None:
            return 0
        first, end = sequence.num_passed_blocks, self.window.num_passed(sequence.num_computed_tokens)
        if end <= first:
            return 0
        passed = sequence.block_ids[first:end]
        sequence.block_ids[first:end] = [NULL_BLOCK] * (end - first)
        sequence.num_passed_blocks = end
        return self._give_back(passed, sequence)

    def commit(self, sequence: Sequence) -> None:
        """Register the full blocks up to `num_computed_tokens`: from now on others may share them."""
        if not self.is_caching:
            return
        num_full = sequence.num_computed_tokens // self.block_size
        done = sequence.num_blocks_committed
        if num_full <= done:
            return
        if self.window is not None and sequence.num_clears_before != self._num_clears:
            # its blocks stand on forgotten ones, and a window does not ask for those: nobody may find them
            sequence.num_blocks_committed = num_full
            return
        sequence.extend_hashes(self.block_size)
        hashes, cached, stored, offers = self._hash, self._cached, self._stored, self._offers
        for position in range(done, num_full):
            block_hash, block_id = sequence.block_hashes[position], sequence.block_ids[position]
            if hashes[block_id] is None and block_hash not in cached:
                hashes[block_id] = block_hash
                cached[block_hash] = block_id
                if self._record_events:
                    stored.append(block_hash)
                if offers is not None:
                    offers.append(offer_of(sequence, position))
        sequence.num_blocks_committed = num_full

    def free(self, sequence: Sequence) -> None:
        """Give up all references of `sequence`. Registered blocks stay findable until they are reused."""
        self._give_back(sequence.held_blocks, sequence)
        sequence.block_ids = []
        sequence.num_passed_blocks = 0
        sequence.num_blocks_committed = 0
        sequence.num_computed_tokens = 0

    def pin(self, block_ids: list[int]) -> None:
        """A copy reads or writes them: whoever gives them up, they are not used again before `unpin`."""
        ref_count, pins = self._ref_count, self._pins
        self._free.remove([block_id for block_id in block_ids if not ref_count[block_id]])
        for block_id in block_ids:
            ref_count[block_id] += 1
            pins[block_id] = pins.get(block_id, 0) + 1

    def unpin(self, block_ids: list[int]) -> None:
        """Once for each `pin`."""
        pins = self._pins
        for block_id in block_ids:
            pins[block_id] -= 1
            if not pins[block_id]:
                del pins[block_id]
        self._give_back(block_ids, "a copy")

    def has(self, block_hash: bytes, block_id: int) -> bool:
        """`block_id` still holds that content."""
        return self._hash[block_id] == block_hash

    def record_offers(self) -> None:
        """From now on `take_offers` tells what was registered."""
        self._offers = []

    def take_offers(self) -> list[Offer]:
        """Blocks registered since the last call; some may be used again already."""
        if not self._offers:
            return []
        offers, self._offers = self._offers, []
        return offers

    def clear_cache(self) -> None:
        """Forget every cached prefix. Blocks that sequences hold stay theirs; what is registered of them later hangs on
        forgotten parents, so nobody finds it before those are computed anew.
        """
        self._hash = [None] * self.num_blocks
        self._cached.clear()
        self._num_clears += 1
        if self._offers is not None:
            self._offers = []
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
            held, num_passed = sequence.held_blocks, sequence.num_passed_blocks
            assert len(set(held)) == len(held), f"{sequence} holds a block twice"
            assert sequence.block_ids[:num_passed] == [NULL_BLOCK] * num_passed, f"{sequence} holds passed blocks"
            assert num_passed <= (self.window.num_passed(sequence.num_computed_tokens) if self.window else 0), (
                f"{sequence} gave back {num_passed} blocks, and still sees some of them"
            )
            assert sequence.num_computed_tokens <= len(sequence.block_ids) * self.block_size, (
                f"{sequence} has tokens without a block"
            )
            for block_id in held:
                references[block_id] += 1
        for block_id, count in self._pins.items():
            assert count > 0, f"block {block_id} is pinned {count} times"
            references[block_id] += count
        assert references == self._ref_count, f"reference counts {self._ref_count} but tables hold {references}"
        free = list(self._free)
        assert len(free) == len(set(free)) == len(self._free), f"free list is broken: {free}"
        assert set(free) == {b for b, count in enumerate(references) if count == 0}, (
            "free list and reference counts disagree"
        )
        registered = {block_hash: block_id for block_id, block_hash in enumerate(self._hash) if block_hash is not None}
        assert registered == self._cached, "block hashes and the cache index disagree"

    def _num_passed(self, hits: list[int]) -> int:
        """Of prefix hits, those in front that nobody needs."""
        return 0 if self.window is None else self.window.num_passed(len(hits) * self.block_size)

    def _reach(self, sequence: Sequence, num_passed: int) -> int:
        """Length of its block table that is reserved for its known tokens, when so many of it are passed."""
        needed = self.blocks_for(sequence.num_tokens)
        return needed if self.window is None else min(needed, num_passed + self._most_held)

    def _give_back(self, block_ids: list[int], owner: object) -> int:
        """One reference less of each. Returns how many became free."""
        ref_count, unregistered, registered = self._ref_count, list[int](), list[int]()
        for block_id in block_ids:
            count = ref_count[block_id] - 1
            assert count >= 0, f"block {block_id} freed too often, by {owner}"
            ref_count[block_id] = count
            if count == 0:
                (unregistered if self._hash[block_id] is None else registered).append(block_id)
        self._free.push_front(unregistered)
        self._free.push_back(registered[::-1])
        return len(unregistered) + len(registered)

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
