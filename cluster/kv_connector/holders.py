"""PURE. Who has the arena mapped, and what each may read and write.

A holder is *given up* when it is not heard for the lease, when the connection that it asks through is gone, or when a
newer incarnation of it says Hello. Then its reservations are void, and their slots wait in quarantine until its last
connection is gone, since any of its processes might still write. What it leases stays until then, or until the lease is
over.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from cluster.kv_connector.host_tier import Block
from cluster.kv_connector.instructions import MemberId
from replica.kv_messages import Acquire, Hello, KVPeer, KVSpace, KVTier

_MOST_SUPERSEDED = 1024


class Lease:
    """Leading blocks of what was asked for. Pinned are those that are sealed; the others are on their way."""

    __slots__ = (
        "before",
        "blocks",
        "first",
        "hashes",
        "holder",
        "is_answered",
        "is_limited",
        "lease_id",
        "member",
        "num_missing",
        "num_told",
        "sources",
        "tiers",
        "waits",
        "within_s",
    )

    def __init__(self, holder: Holder, member: MemberId, message: Acquire) -> None:
        self.holder = holder
        self.member = member
        self.lease_id = message.lease_id
        #: the run that is wanted; of one that does not wait, what of it can be had
        self.hashes = list(message.hashes)
        self.first, self.before = message.first, message.before
        self.sources = [] if holder.is_peer else message.sources
        #: what follows on `blocks` may still be stored by somebody, and the answer comes in pieces
        self.waits = message.waits
        self.within_s = message.within_s
        self.blocks: list[Block] = []
        self.tiers: list[KVTier] = []
        #: of `blocks`, those that are on their way
        self.num_missing = 0
        #: leading ones that the holder knows of
        self.num_told = 0
        #: to the end
        self.is_answered = False
        self.is_limited = False

    @property
    def num_hoped(self) -> int:
        """Hashes that nobody has, as far as is known."""
        return len(self.hashes) - len(self.blocks)

    @property
    def is_open(self) -> bool:
        """More may come."""
        return self.num_missing > 0 or self.num_hoped > 0

    def chain(self, i: int) -> tuple[bytes, int]:
        """Parent and position of the i-th hash."""
        return self.hashes[i - 1] if i else self.before, self.first + i


class Reservation:
    """Blocks that a holder writes, by their place in its question."""

    __slots__ = ("blocks", "must_stay")

    def __init__(self, blocks: dict[int, Block], must_stay: bool) -> None:
        self.blocks = blocks
        #: somebody waits for them, here or on another node
        self.must_stay = must_stay


class Holder:
    """One incarnation of a replica, or of a connector that fetches."""

    def __init__(self, peer: KVPeer, is_peer: bool, now: float) -> None:
        self.peer = peer
        #: it is another connector
        self.is_peer = is_peer
        self.members: set[MemberId] = set()
        #: those that have asked for something: when one is gone, nobody knows any more what is read and written
        self.askers: set[MemberId] = set()
        self.heard_at = now
        self.is_given_up = False
        self.leases: dict[int, Lease] = {}
        self.reservations: dict[int, Reservation] = {}
        #: slots that it might still write
        self.quarantine: list[int] = []
        #: blocks by how many of its leases they are in
        self.leased: Counter[Block] = Counter()
        self.num_reserved = 0

    @property
    def num_leased(self) -> int:
        """Blocks of all leases, one of two leases counts twice."""
        return self.leased.total()

    @property
    def num_hoped(self) -> int:
        """Hashes that its leases wait for, as if each took a slot more."""
        return sum(lease.num_hoped for lease in self.leases.values())

    def is_living(self, now: float, lease_s: float) -> bool:
        return not self.is_given_up and now - self.heard_at <= lease_s


class Holders:
    """By identity and by connection."""

    def __init__(self) -> None:
        self._holders: dict[KVPeer, Holder] = {}
        self._by_member: dict[MemberId, Holder] = {}
        #: identities that a newer incarnation took the place of, the last of them
        self._superseded: OrderedDict[KVPeer, None] = OrderedDict()

    def all(self) -> list[Holder]:
        return list(self._holders.values())

    def of(self, member: MemberId) -> Holder | None:
        return self._by_member.get(member)

    def why_not(self, hello: Hello, space: KVSpace, is_peer: bool) -> str | None:
        """Why it is not welcome, in a sentence; None: it is."""
        if (why := mismatch(space, hello.space)) is not None:
            return why
        if hello.holder in self._superseded:
            return f"{_name(hello.holder)} is not welcome: a newer incarnation of it has taken its place"
        holder = self._holders.get(hello.holder)
        if holder is not None and holder.is_given_up:
            return (
                f"{_name(hello.holder)} was given up and {len(holder.members)} of its connections are still open; "
                "close them and come again"
            )
        if holder is not None and holder.is_peer is not is_peer:
            return f"{_name(hello.holder)} is a {'connector' if holder.is_peer else 'replica'} already"
        return None

    def join(self, member: MemberId, peer: KVPeer, is_peer: bool, now: float) -> None:
        holder = self._holders.setdefault(peer, Holder(peer, is_peer, now))
        holder.members.add(member)
        holder.heard_at = now
        self._by_member[member] = holder

    def supersede(self, peer: KVPeer) -> list[Holder]:
        """Other incarnations of it, which are to be given up; they are not welcome again."""
        older = [h for h in self._holders.values() if h.peer.peer_id == peer.peer_id and h.peer != peer]
        for holder in older:
            self._superseded[holder.peer] = None
        while len(self._superseded) > _MOST_SUPERSEDED:
            self._superseded.popitem(last=False)
        return [holder for holder in older if not holder.is_given_up]

    def leave(self, member: MemberId) -> Holder | None:
        """Whose connection it was; None: nobody's."""
        holder = self._by_member.pop(member, None)
        if holder is not None:
            holder.members.discard(member)
        return holder

    def remove(self, holder: Holder) -> None:
        del self._holders[holder.peer]

    def hear_all(self, now: float) -> None:
        """Nobody counts as silent."""
        for holder in self._holders.values():
            holder.heard_at = now

    def silent(self, since: float) -> list[Holder]:
        """Not heard since then."""
        return [holder for holder in self._holders.values() if holder.heard_at < since]

    def validate(self) -> None:
        """Raises AssertionError."""
        by_member = {member: holder for holder in self._holders.values() for member in holder.members}
        assert by_member == self._by_member, "a connection of nobody"
        for holder in self._holders.values():
            assert holder.members, f"{holder.peer} is kept without a connection"
            assert not (holder.is_given_up and holder.reservations), f"{holder.peer} was given up, and may write"
            assert holder.is_given_up or not holder.quarantine, f"{holder.peer} is in quarantine, and lives"


def _name(peer: KVPeer) -> str:
    return f"{peer.peer_id}, incarnation {peer.incarnation},"


def mismatch(ours: KVSpace, theirs: KVSpace) -> str | None:
    """The first field in which KV bytes are not interchangeable, in a sentence; None: they are."""
    for field in KVSpace.__struct_fields__:
        mine, other = getattr(ours, field), getattr(theirs, field)
        if mine != other:
            return (
                f"{field} is {other!r} at your side and {mine!r} here: the bytes of a block do not mean the same, "
                "so they are not shared; start both with the same model, dtype, kv_cache.block_size and "
                "tensor_parallel_size, or as two applications"
            )
    return None
