"""PURE. What a tier gives up first.

Blocks are links of chains: without its parent a block is of no use to whoever starts at the front. So only *leaves* are
given up, blocks none of whose children are here and unpinned: a chain goes from its tail to its head, whatever the keys
say, and no orphans are left behind. As long as there is any unpinned block there is a leaf: the deepest of them.

Among leaves the smallest key goes. `lru`: the last use. `cost`: GreedyDual with frequency, `floor + uses * cost`, where
`cost` grows with the position (attention is linear in it), and `floor` is the key of what went last, so that what is
not used any more ages.
"""

from __future__ import annotations

import heapq
from typing import Protocol

#: what lies at this position in the context is twice as dear. Attention makes it so at a few thousand tokens already,
#: but weighed like that, the tails of long prompts that nobody says again push out what is used: 14.9 % of hits against
#: 17.8 of `lru` in 8,000 blocks of a trace, 18.3 with this (docs/findings.md)
COST_DOUBLES_AT_TOKENS = 65_536
#: more uses make nothing dearer, so that what was hot once goes some day
MOST_USES = 16
#: the heap is built anew when so many times more than members are in it
_SLACK = 2


class EvictionOrder(Protocol):
    """Keys: what has the smallest is given up first."""

    def key(self, uses: int, position: int) -> float:
        """Of a block that is used just now, for the `uses`-th time; `position` is its place in its chain."""

    def evicted(self, key: float) -> None:
        """A block with this key went."""


class LruOrder:
    """The last use."""

    def __init__(self) -> None:
        self._tick = 0.0

    def key(self, uses: int, position: int) -> float:
        self._tick += 1
        return self._tick

    def evicted(self, key: float) -> None:
        """Nothing ages but by others being used."""


class CostOrder:
    """What computing it again would cost, times its uses, over what went last."""

    def __init__(self, block_size: int) -> None:
        self._per_block = block_size / COST_DOUBLES_AT_TOKENS
        self._floor = 0.0

    def key(self, uses: int, position: int) -> float:
        return self._floor + min(uses, MOST_USES) * (1.0 + position * self._per_block)

    def evicted(self, key: float) -> None:
        self._floor = max(self._floor, key)


class Evictable:
    """The unpinned blocks of a tier by hash, with their keys and parents. A lazy heap of leaves: O(log n) for each
    call, amortised.
    """

    def __init__(self, order: EvictionOrder) -> None:
        self.order = order
        self._keys: dict[bytes, float] = {}
        self._parents: dict[bytes, bytes] = {}
        #: of each hash, its children among the members; it need not be one itself
        self._num_children: dict[bytes, int] = {}
        #: every leaf is in it with its key; other entries are stale
        self._heap: list[tuple[float, bytes]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._keys

    def add(self, block_hash: bytes, key: float, parent: bytes) -> None:
        """`parent`: empty if there is none, or it is not known."""
        assert block_hash not in self._keys, "it is there already"
        self._keys[block_hash] = key
        if parent and parent != block_hash:
            self._parents[block_hash] = parent
            self._num_children[parent] = self._num_children.get(parent, 0) + 1
        if block_hash not in self._num_children:
            self._push(block_hash, key)

    def remove(self, block_hash: bytes) -> None:
        del self._keys[block_hash]
        parent = self._parents.pop(block_hash, None)
        if parent is None:
            return
        left = self._num_children[parent] - 1
        if left:
            self._num_children[parent] = left
            return
        del self._num_children[parent]
        key = self._keys.get(parent)
        if key is not None:
            self._push(parent, key)

    def pop(self) -> bytes | None:
        """The leaf to be given up, which is no member any more; None: there is no member."""
        heap, keys, num_children = self._heap, self._keys, self._num_children
        while heap:
            key, block_hash = heapq.heappop(heap)
            if keys.get(block_hash) == key and block_hash not in num_children:
                self.order.evicted(key)
                self.remove(block_hash)
                return block_hash
        if keys:  # chains in a ring, which no hash makes: a replica told nonsense
            block_hash = next(iter(keys))
            self.remove(block_hash)
            return block_hash
        return None

    def clear(self) -> None:
        self._keys.clear()
        self._parents.clear()
        self._num_children.clear()
        self._heap.clear()

    def validate(self) -> None:
        """Raises AssertionError."""
        counts: dict[bytes, int] = {}
        for parent in self._parents.values():
            counts[parent] = counts.get(parent, 0) + 1
        assert counts == self._num_children, "children are counted wrongly"
        assert self._parents.keys() <= self._keys.keys(), "a parent is kept of what is gone"
        leaves = {(key, h) for h, key in self._keys.items() if h not in counts}
        assert leaves <= set(self._heap), "a leaf can not be given up"

    def _push(self, block_hash: bytes, key: float) -> None:
        heapq.heappush(self._heap, (key, block_hash))
        if len(self._heap) > _SLACK * len(self._keys) + 64:
            self._heap = [(k, h) for h, k in self._keys.items() if h not in self._num_children]
            heapq.heapify(self._heap)
