"""PURE. Which blocks are worth a slot: all of them, or those that are asked for a second time."""

from __future__ import annotations

from collections import OrderedDict


class ReuseFilter:
    """Hashes that were asked for once, the last `most` of them: 100 bytes each. An exact list and no sketch: at four
    times the arena's blocks it takes a thousandth of the arena, and never admits what nobody asked for twice.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # a plain dict would take ever longer to find its first key, as others before it are deleted
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def is_second(self, block_hash: bytes) -> bool:
        """It is asked for; True if it was before. Then it is remembered no more: it is stored."""
        if block_hash in self._seen:
            del self._seen[block_hash]
            return True
        self._seen[block_hash] = None
        if len(self._seen) > self._most:
            self._seen.popitem(last=False)
        return False

    def clear(self) -> None:
        self._seen.clear()
