"""ASYNC. The door of a connector for the replicas of its node: a Unix socket that speaks `replica/kv_messages.py`.

Knows nothing of slots. An abstract name belongs to the socket, so a kill leaves no file; only processes of the same
user are let in, by the kernel's word.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import struct
from typing import Protocol

import msgspec

from replica.frame_socket import FrameSocket
from replica.kv_messages import (
    MAX_KV_MESSAGE_BYTES,
    FromConnector,
    Hello,
    KVPeer,
    ToConnector,
    Unwelcome,
    Welcome,
    decode_to_connector,
    encode_kv,
)

#: whoever connects has so long to say who it is
HELLO_S = 10.0
logger = logging.getLogger(__name__)


class Member:
    """One connected process of a holder."""

    def __init__(self, door: KVService, link: FrameSocket) -> None:
        self._door = door
        self._link = link
        self.hello: Hello | None = None

    @property
    def holder(self) -> KVPeer:
        assert self.hello is not None, "who has not said hello is nobody's member"
        return self.hello.holder

    @property
    def is_connected(self) -> bool:
        return self._link.is_open

    def send(self, message: FromConnector) -> None:
        """Never blocks; lost if the process is gone, which `on_gone` tells."""
        self._link.send(encode_kv(message))

    def finish(self) -> None:
        """It is told nothing more; `on_gone` follows when it has closed, and so does not touch the arena any more."""
        self._link.finish()

    def disconnect(self) -> None:
        """It is told nothing more, and `on_gone` is not called."""
        self._link.close()
        self._door.members.discard(self)


class KVHandler(Protocol):
    """What stands behind the door. Called on the loop, one at a time, and never blocks."""

    def on_hello(self, member: Member, hello: Hello) -> Welcome | Unwelcome:
        """With a Welcome the descriptor of the arena goes along."""

    def on_message(self, member: Member, message: ToConnector) -> None:
        """Never a Hello."""

    def on_gone(self, member: Member) -> None:
        """Its process ended, or was cut off. Once for each that was welcome."""


class KVService:
    """Opens the door at once. `name` is where to connect: an abstract Unix socket."""

    def __init__(self, handler: KVHandler, arena: int, name: str | None = None) -> None:
        """`arena`: the descriptor that members get."""
        self._handler = handler
        self._arena = arena
        self._loop = asyncio.get_running_loop()
        self.name = name or f"\0shoal-kv-{secrets.token_hex(8)}"
        self.members: set[Member] = set()
        self._strangers: set[FrameSocket] = set()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.name)
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Idempotent. Members find their sockets closed; `on_gone` is not called."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
        for member in list(self.members):
            member.disconnect()
        for link in self._strangers:
            link.close()
        self._strangers.clear()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            peer, _ = self._listener.accept()
            if _user_of(peer) not in (os.getuid(), 0):
                peer.close()
                return
            link = FrameSocket(peer, MAX_KV_MESSAGE_BYTES)
            member = Member(self, link)
            link.on_frame = lambda frame: self._on_frame(member, link, frame)
            link.on_closed = lambda reason: self._on_closed(member, link, reason)
            self._strangers.add(link)
            self._loop.call_later(HELLO_S, self._shut_out, link)

    def _on_frame(self, member: Member, link: FrameSocket, frame: bytes) -> None:
        try:
            message = decode_to_connector(frame)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            self._end(member, link, f"not a message of ours: {error}")
            return
        if isinstance(message, Hello):
            if member.hello is not None:
                self._end(member, link, "a second hello")
                return
            self._welcome(member, link, message)
        elif member.hello is None:
            self._end(member, link, f"{type(message).__name__} before hello")
        else:
            self._handler.on_message(member, message)

    def _welcome(self, member: Member, link: FrameSocket, hello: Hello) -> None:
        answer = self._handler.on_hello(member, hello)
        if isinstance(answer, Unwelcome):
            link.send(encode_kv(answer))
            self._strangers.discard(link)
            link.close()
            return
        member.hello = hello
        self._strangers.discard(link)
        self.members.add(member)
        link.send(encode_kv(answer), [self._arena])

    def _end(self, member: Member, link: FrameSocket, reason: str) -> None:
        link.close()
        self._on_closed(member, link, reason)

    def _on_closed(self, member: Member, link: FrameSocket, reason: str) -> None:
        self._strangers.discard(link)
        if member in self.members:
            logger.info("%s of %s is gone: %s", member.hello and member.hello.member, member.holder.peer_id, reason)
            self.members.discard(member)
            self._handler.on_gone(member)

    def _shut_out(self, link: FrameSocket) -> None:
        if link in self._strangers:
            self._strangers.discard(link)
            link.close()


def _user_of(peer: socket.socket) -> int:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    user: int = struct.unpack("3i", credentials)[1]
    return user
