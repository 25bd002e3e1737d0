"""PURE. What two connectors say over TCP.

    reader                          giver
      Greet(nonce) ───────────────────>
                  <─────────────────── Challenge(nonce, proof)       it knows the cluster's token
      Introduce(proof, space, …) ─────>                              so does the reader
                  <─────────────────── Accept | Refuse(a sentence)
      Want(hashes) ───────────────────>
                  <─────────────────── for each hash, in order: SLAB header, then its bytes

Frames are a 4-byte little-endian length and MessagePack; slabs come raw behind a header of 64 bytes. The token is
proved by HMAC over both nonces and never sent. What follows is neither encrypted nor signed: xxh3 finds faults of wires
and memory, not of enemies between the two.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

import msgspec

from replica.kv_messages import KVPeer, KVSpace

PROTOCOL_VERSION = 1
NONCE_BYTES = 32
#: until both know each other: nobody makes us hold more
MAX_HANDSHAKE_BYTES = 64 << 10
#: 100,000 hashes
MAX_WANT_BYTES = 4 << 20
LENGTH = struct.Struct("<I")
#: magic, number of the request, length or ABSENT, xxh3; a whole cache line, since bytes that lie askew in the kernel's
#: buffers are slower to copy: both ends together took 0.80 CPU seconds a GiB behind heads of 20 bytes, 0.65 behind 64
SLAB_HEADER = struct.Struct("<IIIQ44x")
SLAB_MAGIC = 0x564B4853
ABSENT = 0xFFFFFFFF
#: what a connection is for
SLABS, EVENTS = "slabs", "events"


class Greet(msgspec.Struct, frozen=True, tag="greet"):
    """First word."""

    protocol: int
    nonce: bytes


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    """Prove it; here is my proof."""

    protocol: int
    nonce: bytes
    proof: bytes


class Introduce(msgspec.Struct, frozen=True, tag="introduce"):
    """Who I am, whom I mean, and what my slabs are."""

    proof: bytes
    reader: KVPeer
    giver: KVPeer
    space: KVSpace
    slab_bytes: int
    #: what the connection is for
    wants: str = SLABS


class Accept(msgspec.Struct, frozen=True, tag="accept"):
    """Go on."""


class Refuse(msgspec.Struct, frozen=True, tag="refuse"):
    """Why not; the connection ends."""

    message: str


class Want(msgspec.Struct, frozen=True, tag="want"):
    """Send these, or say that they are not there."""

    request_id: int
    hashes: list[bytes]
    within_s: float
    #: of the reader; a giver with an older one forgets what it has, and gives nothing
    generation: int = 0


Handshake = Greet | Challenge | Introduce | Accept | Refuse
encode = msgspec.msgpack.Encoder().encode
decode_handshake = msgspec.msgpack.Decoder(Handshake).decode
decode_want = msgspec.msgpack.Decoder(Want).decode


class PeerError(Exception):
    """The other side is gone, stalls, refuses, or is not one of ours; the text says which."""


def giver_proof(token: bytes, reader_nonce: bytes, giver_nonce: bytes) -> bytes:
    return hmac.digest(token, b"shoal-kv-giver" + reader_nonce + giver_nonce, hashlib.sha256)


def reader_proof(token: bytes, reader_nonce: bytes, giver_nonce: bytes) -> bytes:
    return hmac.digest(token, b"shoal-kv-reader" + reader_nonce + giver_nonce, hashlib.sha256)


def protocol_mismatch(theirs: int) -> str:
    """Empty if it fits."""
    if theirs == PROTOCOL_VERSION:
        return ""
    return f"KV protocol {theirs} is spoken there, {PROTOCOL_VERSION} here: both nodes need the same version of Shoal"


def introduction_mismatch(said: Introduce, me: KVPeer, space: KVSpace, slab_bytes: int) -> str:
    """Empty if the giver `me` may serve whoever said this; else one sentence."""
    if said.giver != me:
        return (
            f"connector {said.giver.peer_id} of incarnation {said.giver.incarnation} is gone; "
            f"here is {me.peer_id} of incarnation {me.incarnation}"
        )
    for field in KVSpace.__struct_fields__:
        theirs, ours = getattr(said.space, field), getattr(space, field)
        if theirs != ours:
            return f"KV cannot be exchanged: {field} is {theirs!r} there and {ours!r} here"
    if said.slab_bytes != slab_bytes:
        return f"KV cannot be exchanged: slabs have {said.slab_bytes} bytes there and {slab_bytes} here (compression?)"
    return ""


class LinkBudget:
    """A link of so many bytes a second, as far as the sender can make one: for experiments."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = float("-inf")

    def delay(self, num_bytes: int, now: float) -> float:
        """Seconds to wait before these bytes may be called sent."""
        self._free_at = max(self._free_at, now) + num_bytes / self._bytes_per_s
        return self._free_at - now
