"""PURE. In a model all of whose layers have a window: which blocks of a sequence its later tokens still see.

A query at position p sees positions p - size + 1 to p. So once n tokens are computed, nobody looks before n - size + 1
again: whole blocks in front of that are *passed*.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

#: stands in a block table for a block that was passed and given back: never read, never written
NULL_BLOCK = -1


class Window:
    """Arithmetic of one window over blocks; owns nothing."""

    __slots__ = ("_block_size", "num_before", "size")

    def __init__(self, size: int, block_size: int) -> None:
        """`size`: of the model's windows the largest, in tokens, a query's own position included."""
        assert size >= 1, f"a window of {size} tokens"
        self.size = size
        self._block_size = block_size
        #: blocks that the first query behind a block border sees before that border
        self.num_before = -(-(size - 1) // block_size)

    def num_passed(self, num_computed: int) -> int:
        """Leading blocks that no token from position `num_computed` on sees."""
        return max(0, num_computed - self.size + 1) // self._block_size

    def span(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` consecutive queries and all they see, wherever the first of them lies: at most
        so many. Never more than ceil((size + num_tokens) / block_size) + 1.
        """
        return 1 + -(-(self.size + num_tokens - 2) // self._block_size)

    def hit_end(self, hashes: Sequence[bytes], cached: Container[bytes], limit: int) -> int:
        """The most leading blocks of `hashes`, up to `limit`, that count as computed: the last `num_before` of them (or
        all) are cached, whatever became of those before.

        Looked for from the back. A block that is missing rules out every end that sees it, so one look at the block
        farthest back skips `num_before` ends where nothing is cached: 26 look-ups for 100,000 tokens and a window of
        4,096, and at most two a block in the worst case.
        """
        end = limit
        while end > 0:
            for index in range(max(0, end - max(1, self.num_before)), end):
                if hashes[index] not in cached:
                    end = index
                    break
            else:
                return end
        return 0
