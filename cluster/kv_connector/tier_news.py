"""PURE. What is told to whoever is connected: which blocks can be had, and from which tier.

Changes are gathered by hash and told at most every `EVERY_S`, as the difference between what was told last and what is
true now: what came and went in between is in no message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cluster.kv_connector.instructions import Instruction, MemberId, Send
from replica.kv_messages import KVTier, TierEvent

#: how late news may be
EVERY_S = 0.05
#: hashes of one message: 4.5 MB, of 16 that a message may have
MOST_AT_ONCE = 250_000


class TierNews:
    """`tier_of(hash)` is the nearest tier that has it. Peers are told of this node's tiers only: what a third one has
    they hear from itself.
    """

    def __init__(self, tier_of: Callable[[bytes], KVTier | None]) -> None:
        self._tier_of = tier_of
        #: told along with everything
        self.generation = 0
        #: what was told of those that have changed since
        self._before: dict[bytes, KVTier | None] = {}
        self._is_cleared = False
        #: number of the next event of each, and whether it is a peer
        self._members: dict[MemberId, tuple[int, bool]] = {}
        self._told_at = float("-inf")

    def before_change(self, block_hash: bytes) -> None:
        """To be called before where it can be had may change."""
        if block_hash not in self._before:
            self._before[block_hash] = self._tier_of(block_hash)

    def cleared(self) -> None:
        """Nothing of before can be had: whoever hears it forgets everything."""
        self._is_cleared = True
        self._before = dict.fromkeys(self._before)

    def join(self, member: MemberId, is_peer: bool, everything: Iterable[bytes]) -> list[Instruction]:
        """The first message has everything, in parts if it is long. Call it after `tell`."""
        self._members[member] = (0, is_peer)
        stored = [(h, tier) for h in everything if (tier := self._tier_of(h)) is not None]
        parts = [stored[i : i + MOST_AT_ONCE] for i in range(0, len(stored), MOST_AT_ONCE)] or [[]]
        return [told for part in parts if (told := self._event(member, part, [], False, True)) is not None]

    def leave(self, member: MemberId) -> None:
        self._members.pop(member, None)

    def hurry(self) -> None:
        """Somebody waits for what has changed: nothing more is gathered."""
        self._told_at = float("-inf")

    @property
    def due_at(self) -> float | None:
        """When `tell` has something to say."""
        return self._told_at + EVERY_S if self._before or self._is_cleared else None

    def tell(self, now: float) -> list[Instruction]:
        """All that has changed, to everybody."""
        if not self._before and not self._is_cleared:
            return []
        stored: list[tuple[bytes, KVTier]] = []
        removed: list[tuple[bytes, KVTier]] = []
        for block_hash, before in self._before.items():
            tier = self._tier_of(block_hash)
            if tier is not None and tier is not before:
                stored.append((block_hash, tier))
            if before is not None and (tier is None or tier is KVTier.REMOTE is not before):
                removed.append((block_hash, before))
        is_cleared, self._is_cleared, self._before, self._told_at = self._is_cleared, False, {}, now
        told: list[Instruction] = []
        for member in list(self._members):
            event = self._event(member, stored, removed, is_cleared, False)
            if event is not None:
                told.append(event)
        return told

    def _event(
        self,
        member: MemberId,
        stored: list[tuple[bytes, KVTier]],
        removed: list[tuple[bytes, KVTier]],
        is_cleared: bool,
        is_first: bool,
    ) -> Send | None:
        number, is_peer = self._members[member]
        by_tier: dict[KVTier, list[bytes]] = {}
        now_remote = set()
        for block_hash, tier in stored:
            if tier is KVTier.REMOTE:
                now_remote.add(block_hash)
                if is_peer:
                    continue
            by_tier.setdefault(tier, []).append(block_hash)
        # what only moved to another node is gone for a peer, and not for a replica
        gone = [h for h, before in removed if (before is not KVTier.REMOTE if is_peer else h not in now_remote)]
        if not (by_tier or gone or is_cleared or is_first):
            return None
        self._members[member] = (number + 1, is_peer)
        return Send(member, TierEvent(number, by_tier, gone, is_cleared, self.generation))
