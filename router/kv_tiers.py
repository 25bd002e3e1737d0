"""PURE. What the nodes of the cluster keep of KV outside of pools, as this router was told: hash -> tier, by node.

One replica of each node tells (`replica/tier_feed.py`); when it is gone nothing of that node is believed until another
one has told everything anew. Nothing is placed by it yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from replica.messages import KVEvent, KVTier, ReplicaId

#: blocks of all nodes that are remembered, about 100 MB; what is beyond is counted and not kept
MOST_BLOCKS = 500_000


class _Node:
    """`teller`: whom this was heard from."""

    __slots__ = ("num_events", "num_left_out", "teller", "tiers")

    def __init__(self, teller: ReplicaId) -> None:
        self.teller = teller
        self.tiers: dict[bytes, KVTier] = {}
        self.num_events = 0
        self.num_left_out = 0


class KVTiers:
    """Of one router."""

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._num_blocks = 0
        self._nodes: dict[str, _Node] = {}
        self._node_of: dict[ReplicaId, str] = {}

    def hear(self, replica_id: ReplicaId, events: Iterable[KVEvent]) -> None:
        """Events of one replica, in order."""
        for event in events:
            if event.tier is KVTier.POOL:
                if event.node:
                    self._node_of[replica_id] = event.node
                continue
            node = self._nodes.get(event.node)
            if event.cleared:  # also of one who speaks from now on, in another's place
                self._drop(event.node)
                node = self._nodes[event.node] = _Node(replica_id)
            if node is not None and node.teller == replica_id:
                self._learn(node, event)

    def gone(self, replica_id: ReplicaId) -> None:
        """Its stream is over."""
        self._node_of.pop(replica_id, None)
        for name in [name for name, node in self._nodes.items() if node.teller == replica_id]:
            self._drop(name)

    def node_of(self, replica_id: ReplicaId) -> str:
        """Whose tiers it reads; empty: none, or not told."""
        return self._node_of.get(replica_id, "")

    def num_blocks(self, node: str) -> dict[str, int]:
        """By tier."""
        found = self._nodes.get(node)
        tiers = () if found is None else found.tiers.values()
        on_disk = sum(tier is KVTier.DISK for tier in tiers)
        return {"host": len(tiers) - on_disk, "disk": on_disk}

    def leading(self, hashes: Sequence[bytes]) -> dict[str, list[KVTier]]:
        """Of each node that has the first of them: where it has how many without a gap."""
        found: dict[str, list[KVTier]] = {}
        for name, node in self._nodes.items():
            run: list[KVTier] = []
            for block_hash in hashes:
                if (tier := node.tiers.get(block_hash)) is None:
                    break
                run.append(tier)
            if run:
                found[name] = run
        return found

    def describe(self) -> list[dict[str, object]]:
        """For `shoal status`."""
        return [
            {
                "node": name,
                "told_by": node.teller,
                "replicas": sum(other == name for other in self._node_of.values()),
                **self.num_blocks(name),
                "left_out": node.num_left_out,
                "events": node.num_events,
            }
            for name, node in self._nodes.items()
        ]

    def _drop(self, name: str) -> None:
        node = self._nodes.pop(name, None)
        if node is not None:
            self._num_blocks -= len(node.tiers)

    def _learn(self, node: _Node, event: KVEvent) -> None:
        before = len(node.tiers)
        node.num_events += 1
        for block_hash in event.removed:
            node.tiers.pop(block_hash, None)
        room = self._most_blocks - self._num_blocks + before - len(node.tiers)
        if len(event.stored) <= room:
            node.tiers.update(dict.fromkeys(event.stored, event.tier))
        else:
            for block_hash in event.stored:
                if room > 0 or block_hash in node.tiers:
                    room -= block_hash not in node.tiers
                    node.tiers[block_hash] = event.tier
                else:
                    node.num_left_out += 1
        self._num_blocks += len(node.tiers) - before
