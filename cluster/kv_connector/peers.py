"""PURE. What the connectors of other nodes say that they have: their events, mirrored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from replica.kv_messages import TierEvent


class Peers:
    """Hashes by peer. A peer that missed one event is believed nothing until it has told everything anew."""

    def __init__(self, before_change: Callable[[bytes], None]) -> None:
        self._before_change = before_change
        self._hashes: dict[str, set[bytes]] = {}
        self._next_number: dict[str, int] = {}
        #: hash -> who has it, in the order in which they told
        self._havers: dict[bytes, list[str]] = {}

    def __len__(self) -> int:
        return len(self._hashes)

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._havers

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._havers)

    def is_connected(self, peer_id: str) -> bool:
        return peer_id in self._hashes

    def connected(self, peer_id: str) -> None:
        """It will tell everything, from number 0 on."""
        self.gone(peer_id)
        self._hashes[peer_id] = set()
        self._next_number[peer_id] = 0

    def gone(self, peer_id: str) -> None:
        self._forget(peer_id)
        self._hashes.pop(peer_id, None)
        self._next_number.pop(peer_id, None)

    def event(self, peer_id: str, event: TierEvent) -> bool:
        """False: one is missing before it, and nothing of this peer is believed any more."""
        if peer_id not in self._hashes:
            return True
        if event.number != self._next_number[peer_id]:
            self.gone(peer_id)
            return False
        self._next_number[peer_id] += 1
        if event.is_cleared:
            self._forget(peer_id)
        mine = self._hashes[peer_id]
        for block_hash in event.removed:
            if block_hash in mine:
                mine.remove(block_hash)
                self._remove(peer_id, block_hash)
        for hashes in event.stored.values():
            for block_hash in hashes:
                if block_hash not in mine:
                    self._before_change(block_hash)
                    mine.add(block_hash)
                    self._havers.setdefault(block_hash, []).append(peer_id)
        return True

    def havers(self, block_hash: bytes, sources: Iterable[str]) -> list[str]:
        """Who may have it: `sources` first, which are believed if they are connected, then those that told so."""
        told = self._havers.get(block_hash, ())
        return [*dict.fromkeys([*(peer for peer in sources if peer in self._hashes), *told])]

    def told(self, block_hash: bytes, sources: Sequence[str]) -> list[str]:
        """Who said so, `sources` first."""
        told = self._havers.get(block_hash, ())
        return [*(peer for peer in sources if peer in told), *(peer for peer in told if peer not in sources)]

    def does_not_have(self, peer_id: str, block_hash: bytes) -> None:
        """It was asked for it, and there was none."""
        mine = self._hashes.get(peer_id)
        if mine is not None and block_hash in mine:
            mine.remove(block_hash)
            self._remove(peer_id, block_hash)

    def forget_all(self) -> None:
        """Believe nobody what they told until now."""
        for peer_id in self._hashes:
            self._forget(peer_id)

    def validate(self) -> None:
        """Raises AssertionError."""
        told = {(peer, h) for peer, hashes in self._hashes.items() for h in hashes}
        assert told == {(peer, h) for h, peers in self._havers.items() for peer in peers}, "both books of peers differ"
        assert all(self._havers.values()), "a hash that nobody has"

    def _forget(self, peer_id: str) -> None:
        for block_hash in self._hashes.get(peer_id, ()):
            self._remove(peer_id, block_hash)
        if peer_id in self._hashes:
            self._hashes[peer_id] = set()

    def _remove(self, peer_id: str, block_hash: bytes) -> None:
        self._before_change(block_hash)
        havers = self._havers[block_hash]
        havers.remove(peer_id)
        if not havers:
            del self._havers[block_hash]
