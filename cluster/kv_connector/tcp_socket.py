"""ASYNC. One TCP connection between connectors: the handshake on the event loop, then blocking calls on a thread.

On a thread a slab is one `recv_into` of its full length, straight into the arena, without the interpreter's lock.
Every wait has an end, set in the kernel (SO_RCVTIMEO, SO_SNDTIMEO).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
import struct
from collections.abc import Sequence

import msgspec

from cluster.kv_connector.tcp_wire import (
    LENGTH,
    MAX_HANDSHAKE_BYTES,
    NONCE_BYTES,
    PROTOCOL_VERSION,
    SLABS,
    Accept,
    Challenge,
    Greet,
    Handshake,
    Introduce,
    PeerError,
    Refuse,
    decode_handshake,
    encode,
    giver_proof,
    introduction_mismatch,
    protocol_mismatch,
    reader_proof,
)
from cluster.kv_connector.transport import PeerAddress
from replica.kv_messages import KVPeer, KVSpace


class Identity(msgspec.Struct, frozen=True):
    """What a connector shows to others."""

    me: KVPeer
    space: KVSpace
    slab_bytes: int
    #: the cluster's secret
    token: bytes


# ---- on the event loop ----


async def read_frame(peer: socket.socket, limit: int) -> bytes:
    """Raises PeerError. Deadlines are the caller's."""
    (length,) = LENGTH.unpack(await _read(peer, LENGTH.size))
    if length > limit:
        raise PeerError(f"a frame of {length} bytes; allowed are {limit}")
    return await _read(peer, length)


async def write_frame(peer: socket.socket, frame: bytes) -> None:
    """Raises PeerError."""
    try:
        await asyncio.get_running_loop().sock_sendall(peer, LENGTH.pack(len(frame)) + frame)
    except OSError as error:
        raise PeerError(error.strerror or str(error)) from None


async def _read(peer: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        try:
            more = await asyncio.get_running_loop().sock_recv(peer, length - len(data))
        except OSError as error:
            raise PeerError(error.strerror or str(error)) from None
        if not more:
            raise PeerError("it closed the connection")
        data += more
    return bytes(data)


async def _read_handshake(peer: socket.socket) -> Handshake:
    try:
        return decode_handshake(await read_frame(peer, MAX_HANDSHAKE_BYTES))
    except msgspec.DecodeError as error:
        raise PeerError(f"it does not speak our protocol: {error}") from None


async def connect(address: PeerAddress, identity: Identity, within_s: float, wants: str = SLABS) -> socket.socket:
    """To a connector that let us in; the socket does not block. Raises PeerError."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    peer = socket.socket(family, socket.SOCK_STREAM)
    try:
        peer.setblocking(False)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        async with asyncio.timeout(within_s):
            await asyncio.get_running_loop().sock_connect(peer, (address.host, address.port))
            await _introduce(peer, address.peer, identity, wants)
    except BaseException as error:
        peer.close()
        if isinstance(error, TimeoutError):
            raise PeerError(f"no answer within {within_s:.1f} s") from None
        if isinstance(error, OSError):
            raise PeerError(error.strerror or str(error)) from None
        raise
    return peer


async def _introduce(peer: socket.socket, giver: KVPeer, identity: Identity, wants: str) -> None:
    nonce = secrets.token_bytes(NONCE_BYTES)
    await write_frame(peer, encode(Greet(PROTOCOL_VERSION, nonce)))
    challenge = await _read_handshake(peer)
    if isinstance(challenge, Refuse):
        raise PeerError(challenge.message)
    if not isinstance(challenge, Challenge):
        raise PeerError(f"{type(challenge).__name__} where a challenge was expected")
    if mismatch := protocol_mismatch(challenge.protocol):
        raise PeerError(mismatch)
    if not hmac.compare_digest(challenge.proof, giver_proof(identity.token, nonce, challenge.nonce)):
        raise PeerError("it does not know this cluster's token")
    proof = reader_proof(identity.token, nonce, challenge.nonce)
    introduce = Introduce(proof, identity.me, giver, identity.space, identity.slab_bytes, wants)
    await write_frame(peer, encode(introduce))
    answer = await _read_handshake(peer)
    if not isinstance(answer, Accept):
        raise PeerError(answer.message if isinstance(answer, Refuse) else f"{type(answer).__name__} is no answer")


async def admit(peer: socket.socket, identity: Identity) -> Introduce:
    """Let somebody in who may be; tell the others why not. Raises PeerError."""
    greet = await _read_handshake(peer)
    if not isinstance(greet, Greet) or len(greet.nonce) != NONCE_BYTES:
        raise PeerError("it did not greet")
    if mismatch := protocol_mismatch(greet.protocol):
        await _refuse(peer, mismatch)
    nonce = secrets.token_bytes(NONCE_BYTES)
    proof = giver_proof(identity.token, greet.nonce, nonce)
    await write_frame(peer, encode(Challenge(PROTOCOL_VERSION, nonce, proof)))
    said = await _read_handshake(peer)
    if not isinstance(said, Introduce):
        raise PeerError("it did not introduce itself")
    if not hmac.compare_digest(said.proof, reader_proof(identity.token, greet.nonce, nonce)):
        await _refuse(peer, "you do not know this cluster's token")
    if mismatch := introduction_mismatch(said, identity.me, identity.space, identity.slab_bytes):
        await _refuse(peer, mismatch)
    await write_frame(peer, encode(Accept()))
    return said


async def _refuse(peer: socket.socket, message: str) -> None:
    await write_frame(peer, encode(Refuse(message)))
    raise PeerError(f"refused: {message}")


# ---- on a thread ----


def set_limits(peer: socket.socket, read_s: float | None = None, write_s: float | None = None) -> None:
    """A read or write that takes longer ends in part."""
    for option, seconds in ((socket.SO_RCVTIMEO, read_s), (socket.SO_SNDTIMEO, write_s)):
        if seconds is not None:
            micros = max(1, int(seconds * 1e6))  # 0 would be for ever
            peer.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", micros // 1_000_000, micros % 1_000_000))


def receive_into(peer: socket.socket, view: memoryview, within_s: float) -> None:
    """Fill it. Raises PeerError."""
    if within_s <= 0:
        raise PeerError("the time is over")
    set_limits(peer, read_s=within_s)
    try:
        got = peer.recv_into(view, len(view), socket.MSG_WAITALL)
    except BlockingIOError:
        raise PeerError(f"it sent nothing for {within_s:.1f} s") from None
    except OSError as error:
        raise PeerError(error.strerror or str(error)) from None
    if got < len(view):
        raise PeerError(f"it stopped after {got} of {len(view)} bytes")


def send_all(peer: socket.socket, parts: Sequence[memoryview | bytes]) -> None:
    """In one call, if the kernel takes it. Raises PeerError."""
    views = [memoryview(part) for part in parts]
    while views:
        try:
            sent = peer.sendmsg(views)
        except BlockingIOError:
            raise PeerError("it does not read") from None
        except OSError as error:
            raise PeerError(error.strerror or str(error)) from None
        while views and sent >= len(views[0]):
            sent -= len(views.pop(0))
        if views and sent:
            views[0] = views[0][sent:]


def cut(peer: socket.socket) -> None:
    """Whoever waits on it, on any thread, comes back."""
    with contextlib.suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)
