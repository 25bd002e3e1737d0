"""PURE. Blocks of prompts that another replica goes on with: each is offered to the connector when it is computed,
before anything else, and pinned until it is stored. Who ends leaves its blocks here, since somebody waits for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from replica.block_manager import BlockManager
from replica.block_offers import Offer, offer_of
from replica.sequence import Sequence


class SinkStores:
    """Full blocks of prompts whose request has a `kv_sink`."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        #: running sequence -> blocks that were queued, or need not be
        self._running: dict[Sequence, int] = {}
        #: pinned
        self._queue: deque[Offer] = deque()

    def __len__(self) -> int:
        """Blocks that wait to be offered."""
        return len(self._queue)

    def begin(self, sequence: Sequence) -> None:
        """It was admitted."""
        if sequence.sink is not None:
            self._running[sequence] = self._first(sequence)

    def collect(self) -> None:
        """Whatever was computed since, of everybody."""
        for sequence in self._running:
            self._take(sequence)

    def ended(self, sequence: Sequence, is_connected: bool) -> None:
        """It has finished or was put back, and still has its blocks."""
        if sequence in self._running:
            if is_connected:
                self._take(sequence)
            del self._running[sequence]

    def pop(self, most: int, is_under_way: Callable[[bytes], bool]) -> list[Offer]:
        """The oldest, without those that are on their way already: these wait, since that may come to nothing. Whoever
        gets them unpins them.
        """
        taken: dict[bytes, Offer] = {}
        later: list[Offer] = []
        while self._queue and len(taken) < most:
            offer = self._queue.popleft()
            if offer.block_hash in taken or is_under_way(offer.block_hash):
                later.append(offer)
            else:
                taken[offer.block_hash] = offer
        self._queue.extendleft(reversed(later))
        return list(taken.values())

    def clear(self, *, is_again: bool) -> None:
        """Nothing waits any more. `is_again`: another connector may want all of it; else what is computed by now is not
        stored.
        """
        self._blocks.unpin([offer.block_id for offer in self._queue])
        self._queue.clear()
        for sequence in self._running:
            self._running[sequence] = self._first(sequence) if is_again else sequence.num_blocks_committed

    def _first(self, sequence: Sequence) -> int:
        """Position of the first block that is wanted."""
        return 0 if sequence.sink is None else sequence.sink.num_cached_tokens // self._blocks.block_size

    def _take(self, sequence: Sequence) -> None:
        start = self._running[sequence]
        end = min(sequence.num_blocks_committed, sequence.num_prompt_tokens // self._blocks.block_size)
        if end > start:
            self._running[sequence] = end
            offers = [offer_of(sequence, position) for position in range(start, end)]
            self._blocks.pin([offer.block_id for offer in offers])
            self._queue += offers
