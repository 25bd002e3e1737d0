"""ASYNC. A process of a replica and the connector of its node: connect, map the arena, beat, connect again.

A connector that dies takes only cache along. Whoever is connected next is another incarnation with another arena;
nothing of the old one (leases, reservations, answers that were waited for) counts there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable

import msgspec

from replica.arena_map import ArenaError, ArenaMap
from replica.frame_socket import FrameSocket
from replica.kv_messages import (
    MAX_KV_MESSAGE_BYTES,
    Beat,
    FromConnector,
    Hello,
    ToConnector,
    Unwelcome,
    Welcome,
    decode_from_connector,
    encode_kv,
)

#: from the look for the connector to its welcome
CONNECT_S = 10.0
#: between two attempts: the first, and the longest
FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 2.0
#: after a refusal: it will say the same until somebody changes something
REFUSED_WAIT_S = 30.0
logger = logging.getLogger(__name__)


class KVLinkHandler:
    """What a KVLink tells, on the loop. All do nothing here."""

    def on_connected(self, welcome: Welcome, arena: ArenaMap) -> None:
        """The arena is mapped; its user closes it, when nothing reads or writes it any more."""

    def on_message(self, message: FromConnector) -> None:
        """Everything after the welcome."""

    def on_lost(self, reason: str) -> None:
        """It is gone. What was asked and not answered never will be; what was leased may be read to its end."""

    def on_refused(self, message: str) -> None:
        """The connector does not want this process."""


class KVLink:
    """Keeps one connection. `find` gives the name of the socket, or raises OSError; it is asked before each attempt."""

    def __init__(self, hello: Hello, find: Callable[[], Awaitable[str]], handler: KVLinkHandler) -> None:
        self._hello = hello
        self._find = find
        self._handler = handler
        self._link: FrameSocket | None = None
        self._task: asyncio.Task[None] | None = None
        #: of whom it is connected to
        self.welcome: Welcome | None = None

    @property
    def is_connected(self) -> bool:
        return self.welcome is not None

    def start(self) -> None:
        """Begin to connect, and never stop before `close`."""
        assert self._task is None, "started twice"
        self._task = asyncio.get_running_loop().create_task(self._run())

    def send(self, message: ToConnector) -> bool:
        """False: nobody is connected. True promises nothing: `on_lost` may follow."""
        if self.welcome is None or self._link is None:
            return False
        self._link.send(encode_kv(message))
        return True

    async def close(self) -> None:
        """Idempotent; `on_lost` is not called."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._drop()

    def _drop(self) -> None:
        self.welcome = None
        if self._link is not None:
            self._link.close()
            self._link = None

    async def _run(self) -> None:
        wait_s = FIRST_WAIT_S
        while True:
            lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(CONNECT_S):
                    answer = await self._connect(lost)
            except (OSError, TimeoutError, ArenaError, msgspec.DecodeError) as error:
                logger.debug("no KV connector yet: %s", error)
                was_connected = self.is_connected
                self._drop()
                if was_connected:  # the time was over in the moment of the welcome
                    self._handler.on_lost(str(error))
            else:
                if isinstance(answer, Welcome):
                    wait_s = FIRST_WAIT_S
                    reason = await self._stay(answer, lost)
                    self._drop()
                    self._handler.on_lost(reason)
                else:
                    self._drop()
                    self._handler.on_refused(answer.message)
                    wait_s = REFUSED_WAIT_S
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, max(wait_s, LONGEST_WAIT_S))

    async def _connect(self, lost: asyncio.Future[str]) -> Welcome | Unwelcome:
        name = await self._find()
        peer = socket.socket(socket.AF_UNIX)
        peer.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(peer, name)
        except BaseException:
            peer.close()
            raise
        link = self._link = FrameSocket(peer, MAX_KV_MESSAGE_BYTES)
        first: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def on_frame(frame: bytes) -> None:
            """The first frame is waited for; what comes right behind it must not overtake it."""
            if not first.done():
                first.set_result(frame)
                self._accept(link, frame, lost)
            elif not lost.done():
                self._on_frame(frame, lost)

        def on_closed(reason: str) -> None:
            if not first.done():
                first.set_exception(ConnectionError(reason))
            if not lost.done():
                lost.set_result(reason)

        link.on_frame, link.on_closed = on_frame, on_closed
        link.send(encode_kv(self._hello))
        answer = decode_from_connector(await first)
        if isinstance(answer, Welcome) and self.welcome is None:
            raise ArenaError("the connector's arena cannot be mapped")
        if not isinstance(answer, Welcome | Unwelcome):
            raise ConnectionError(f"{type(answer).__name__} is no answer to a hello")
        return answer

    def _accept(self, link: FrameSocket, frame: bytes, lost: asyncio.Future[str]) -> None:
        try:
            welcome = decode_from_connector(frame)
        except msgspec.DecodeError:
            return  # `_connect` finds it again
        descriptor = link.take_descriptor()
        if not isinstance(welcome, Welcome) or descriptor is None:
            return
        try:
            arena = ArenaMap(descriptor, welcome.num_slots, welcome.slot_bytes)
        except ArenaError as error:
            logger.warning("%s", error)
            return
        finally:
            os.close(descriptor)
        self.welcome = welcome
        self._handler.on_connected(welcome, arena)

    def _on_frame(self, frame: bytes, lost: asyncio.Future[str]) -> None:
        try:
            message = decode_from_connector(frame)
        except msgspec.DecodeError as error:
            if not lost.done():
                lost.set_result(f"not a message of ours: {error}")
            return
        self._handler.on_message(message)

    async def _stay(self, welcome: Welcome, lost: asyncio.Future[str]) -> str:
        """Until the connection is lost; why."""
        while not lost.done():
            await asyncio.wait([lost], timeout=welcome.lease_s / 3)
            self.send(Beat())
        return lost.result()
