"""PURE. The contract between a replica and the KVConnector of its node, and between connectors: `docs/kv_connector.md`.

Between a replica and its connector: a Unix socket, each frame a 4-byte little-endian length and a MessagePack map.
Block ids, slots and hashes travel; KV bytes never do, since both map the same arena.

    replica                                        connector
      Hello ───────────────────────────────────────> Welcome + descriptor of the arena | Unwelcome
      Acquire(hashes) ─────────────────────────────> brings the first of them into the arena, leases them
                     <──────────── Acquired(slots)   sealed: nobody writes them until Release
      ... copies slots into its pool; with `waits` more answers follow while others still compute ...
      Release(lease) ──────────────────────────────>
      Reserve(hashes) ─────────────────────────────> free slots for those that it does not have
                     <──────────── Reserved(slots)
      ... copies blocks of its pool into slots ...
      Seal(reservation, done) ─────────────────────> from now on others find them
      Beat ────────────────────────────────────────> every `lease_s / 3`; renews all that its holder has

Durations travel, never instants: clocks differ between nodes.
"""

from __future__ import annotations

import msgspec

from replica.kv_tier import KVTier as KVTier
from replica.stages import WireRecord

#: longest message: 100,000 hashes are 1.8 MB
MAX_KV_MESSAGE_BYTES = 16 << 20
#: a holder that is not heard for so long has lost what it leased and reserved
KV_LEASE_S = 10.0


class KVSpace(WireRecord, frozen=True):
    """What must be equal for KV bytes to be interchangeable. Hashes of blocks are only unique within one space."""

    #: model, revision, weights, dtype, RoPE setting (`RunnerInfo.model_fingerprint`)
    model_fingerprint: str
    block_size: int
    #: bytes of one block over all ranks
    block_bytes: int
    #: 1 where the degree divides the KV heads: then a block's bytes are in the same order at every degree, and equal
    #: within rounding; else the degree, since heads are held twice
    tensor_parallel_size: int
    #: order of the bytes in a block
    layout: str


class KVPeer(WireRecord, frozen=True):
    """Who somebody is: a name that may come again, and an incarnation that never does."""

    peer_id: str
    incarnation: str


class ArenaPlace(WireRecord, frozen=True):
    """Where whoever carries out copies gets the arena: connect, say Hello as another member of `holder`. Travels in a
    plan, so that every rank maps another arena between the same two copies.
    """

    socket_path: str
    holder: KVPeer
    space: KVSpace
    #: of the connector: another one in its place has another arena
    incarnation: str
    #: whose connector it is: `KVPeer.peer_id`
    node: str = ""


#: nothing is copied any more: whoever has an arena mapped closes it, after the copies that it knows of
NO_ARENA = ArenaPlace("", KVPeer("", ""), KVSpace("", 0, 0, 0, ""), "")


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First word of a process that wants to map the arena. All processes of a replica (its engine and its ranks) have
    the same `holder`; `member` tells them apart. What the holder has is taken back when the last of them is gone: until
    then one of them might still write.
    """

    holder: KVPeer
    member: str
    space: KVSpace
    #: wants `TierEvent`s; a rank has no use for them
    wants_events: bool = True


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The descriptor of the arena comes along: `num_slots` slabs of `slot_bytes`, the block's bytes at the start of
    each.
    """

    connector: KVPeer
    num_slots: int
    slot_bytes: int
    lease_s: float


class Unwelcome(msgspec.Struct, frozen=True, tag="unwelcome"):
    """Why not, in a sentence; the connection ends."""

    message: str


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """The holder lives."""


class Acquire(msgspec.Struct, frozen=True, tag="acquire"):
    """Lease the leading ones of these hashes, wherever they are: from disk and from other nodes they are brought into
    the arena first. Answered within `within_s`, with what is there by then; whatever arrives later stays as cache.

    With `waits` blocks that nobody has yet are waited for (another replica computes them), and the answer comes in
    pieces, as the run gets longer.
    """

    lease_id: int
    hashes: list[bytes]
    within_s: float
    #: connectors that are said to have them, asked before others: `peer_id`s
    sources: list[str] = []
    #: place of the first hash in its chain, and the hash before it: eviction goes by them, nothing else
    first: int = 0
    before: bytes = b""
    waits: bool = False


class Acquired(msgspec.Struct, frozen=True, tag="acquired"):
    """The first `len(slots)` hashes behind the `num_before` that were given before are in these slots, sealed, and stay
    until `Release`. Without any slots there is nothing to release.
    """

    lease_id: int
    slots: list[int]
    #: where each was found
    tiers: list[KVTier] = []
    #: the holder has more leased than it may: less was given than is there
    is_limited: bool = False
    #: an earlier piece of the same answer gave so many hashes
    num_before: int = 0
    #: False: more may come
    is_last: bool = True


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Leases that are not needed any more, also such as were not answered yet. Unknown ones are ignored."""

    lease_ids: list[int]


class Reserve(msgspec.Struct, frozen=True, tag="reserve"):
    """Room for these blocks, wanted in the arena. With `must_stay` the holder means to read them again soon (a sequence
    was put back): admission by reuse does not apply.
    """

    reservation_id: int
    hashes: list[bytes]
    must_stay: bool = False
    #: of each hash the one before it in its chain, and its place there; empty: not told, and then eviction does not
    #: know what hangs on what
    parents: list[bytes] = []
    positions: list[int] = []


class Reserved(msgspec.Struct, frozen=True, tag="reserved"):
    """For each hash a slot that the holder alone may write, or -1: it is there already, somebody else is writing it, or
    there is no room. End it with `Seal`.
    """

    reservation_id: int
    slots: list[int]


class Seal(msgspec.Struct, frozen=True, tag="seal"):
    """The holder will not write any more. Of the reservation's hashes those at `written` are complete; the slots of the
    others are free.
    """

    reservation_id: int
    written: list[int]


class Clear(msgspec.Struct, frozen=True, tag="clear"):
    """Forget every block of the space, on all tiers of the node, and tell other nodes to; what is leased can be read to
    its end, not found.
    """

    clear_id: int


class Cleared(msgspec.Struct, frozen=True, tag="cleared"):
    """Nothing that was stored before is found any more."""

    clear_id: int


class TierEvent(msgspec.Struct, frozen=True, tag="tier_event"):
    """To whoever is connected: changes of what the connector can give, in order. `number` counts them by one from 0 on
    each connection; the first holds everything (very much of it comes in several parts).
    """

    number: int
    stored: dict[KVTier, list[bytes]] = {}
    #: not on any tier any more
    removed: list[bytes] = []
    is_cleared: bool = False
    #: of who tells, the times that its blocks were forgotten (`Clear`), here or anywhere: connectors take over the
    #: highest that they hear of, and with it forget theirs
    generation: int = 0


class LostSlots(msgspec.Struct, frozen=True, tag="lost_slots"):
    """A lease is void before its time: a slab was found corrupt (each lease of it, of every holder, is told so), or the
    holder was not heard for too long. Its KV must not be used.
    """

    lease_id: int


class TierStats(msgspec.Struct, frozen=True, tag="tier_stats"):
    """What the connector counts, by name: each second to one of the replicas, which tells it as its own counters."""

    values: dict[str, float]


ToConnector = Hello | Beat | Acquire | Release | Reserve | Seal | Clear
FromConnector = Welcome | Unwelcome | Acquired | Reserved | Cleared | TierEvent | LostSlots | TierStats

_encoder = msgspec.msgpack.Encoder()
encode_kv = _encoder.encode
decode_to_connector = msgspec.msgpack.Decoder(ToConnector).decode
decode_from_connector = msgspec.msgpack.Decoder(FromConnector).decode
