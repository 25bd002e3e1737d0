"""PURE. What a replica tells routers of the tiers of its node: KV events with tier and node.

Every replica says once which node's connector it has. One of each node *speaks* for that connector, the one to which it
tells its figures: a router hears of each block once, however many replicas share it. Each router is told the difference
to what it was told, a bounded number of hashes a message, whatever happens in between.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from replica.kv_messages import KVTier, TierEvent
from replica.messages import KVEvent, RouterId

#: hashes of one message: 16 KiB, and at 50 ms 20,000 a second
MOST_HASHES = 1024
#: who was told the figures of the connector (each second) speaks for so long
SPEAKS_S = 3.0
#: changes that wait for a router beyond what there is: then it is told everything anew
_MOST_CHANGES = 1 << 16


class _Listener:
    """One router. `owed`: hashes of which it may not know where they are."""

    __slots__ = ("is_told", "knows_node", "must_clear", "owed")

    def __init__(self) -> None:
        self.knows_node = self.is_told = self.must_clear = False
        self.owed: dict[bytes, None] = {}

    def begin(self, everything: Iterable[bytes]) -> None:
        self.is_told = self.must_clear = True
        self.owed = dict.fromkeys(everything)


class TierFeed:
    """Of one replica. Blocks that only other nodes have are told by theirs."""

    def __init__(self) -> None:
        self._node = ""
        self._tiers: dict[bytes, KVTier] = {}
        self._listeners: dict[RouterId, _Listener] = {}
        #: whom to tell that this node is not spoken for any more, and which it was
        self._left: dict[RouterId, str] = {}
        self._chosen_at = float("-inf")

    def __len__(self) -> int:
        """Blocks on this node."""
        return len(self._tiers)

    def connected(self, node: str) -> None:
        """`node`: of the connector; it will tell everything."""
        self.gone()
        self._node = node

    def gone(self) -> None:
        """The connector is: nobody can say what it has."""
        for router_id, listener in self._listeners.items():
            if listener.is_told:
                self._left[router_id] = self._node
        self._node, self._chosen_at = "", float("-inf")
        self._tiers.clear()
        self._listeners.clear()

    def chosen(self, now: float) -> None:
        """The connector told its figures to this replica, and to no other."""
        self._chosen_at = now

    def learn(self, event: TierEvent) -> None:
        """The next event of the connector."""
        if event.is_cleared:
            self._tiers.clear()
            for listener in self._listeners.values():
                if listener.is_told:
                    listener.begin(())
        for block_hash in event.removed:
            self._tiers.pop(block_hash, None)
        self._owe(event.removed)
        for tier, hashes in event.stored.items():
            if tier is KVTier.REMOTE:  # here no more
                for block_hash in hashes:
                    self._tiers.pop(block_hash, None)
            else:
                self._tiers.update(dict.fromkeys(hashes, tier))
            self._owe(hashes)

    def is_owed(self, now: float) -> bool:
        """Some router is to be told something that was not."""
        if self._left:
            return True
        if not self._speaks(now):
            return False
        return any(one.owed or one.must_clear or not one.is_told for one in self._listeners.values())

    def take(self, router_id: RouterId, now: float) -> list[KVEvent]:
        """For the next message to this router."""
        told: list[KVEvent] = []
        if (node := self._left.pop(router_id, None)) is not None:
            told.append(KVEvent(cleared=True, tier=KVTier.HOST, node=node))
        if not self._node:
            return told
        listener = self._listeners.get(router_id)
        if listener is None:
            listener = self._listeners[router_id] = _Listener()
        if not listener.knows_node:
            listener.knows_node = True
            told.append(KVEvent(node=self._node))
        if self._speaks(now):
            if not listener.is_told:
                listener.begin(self._tiers)
            told += self._next(listener)
        return told

    def forget(self, router_id: RouterId) -> None:
        """Its stream is over."""
        self._listeners.pop(router_id, None)
        self._left.pop(router_id, None)

    def _speaks(self, now: float) -> bool:
        return now - self._chosen_at <= SPEAKS_S

    def _owe(self, hashes: list[bytes]) -> None:
        for listener in self._listeners.values():
            if listener.is_told:
                listener.owed.update(dict.fromkeys(hashes))
                if len(listener.owed) > len(self._tiers) + _MOST_CHANGES:
                    listener.begin(self._tiers)

    def _next(self, listener: _Listener) -> list[KVEvent]:
        if not listener.owed and not listener.must_clear:
            return []
        some = list(islice(listener.owed, MOST_HASHES))
        stored: dict[KVTier, list[bytes]] = {KVTier.HOST: [], KVTier.DISK: []}
        removed: list[bytes] = []
        for block_hash in some:
            del listener.owed[block_hash]
            tier = self._tiers.get(block_hash)
            (removed if tier is None else stored[tier]).append(block_hash)
        cleared, listener.must_clear = listener.must_clear, False
        events = [KVEvent(stored[KVTier.HOST], removed, cleared, KVTier.HOST, self._node)]
        if stored[KVTier.DISK]:
            events.append(KVEvent(stored[KVTier.DISK], tier=KVTier.DISK, node=self._node))
        return events
