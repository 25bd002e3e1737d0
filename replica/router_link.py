"""ASYNC. The way up to one router: a queue that the engine fills without ever waiting and a gRPC handler drains."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable

from replica.messages import RouterId, UpMessage, encode

logger = logging.getLogger(__name__)

#: a router with more unread messages than this does not read; it is cut off rather than buffered for ever
MAX_UNSENT_MESSAGES = 20_000


class RouterLink:
    """`on_cut` is called once if the link is cut: it has to end a write that may be blocked."""

    def __init__(self, router_id: RouterId, on_cut: Callable[[], object] = lambda: None) -> None:
        self.router_id = router_id
        self._on_cut = on_cut
        self._unsent: deque[bytes] = deque()
        self._ready = asyncio.Event()
        self._flushed = asyncio.Event()
        self._closed = False
        #: it ended in the middle; whoever writes has to tell the router
        self.is_cut = False

    def send(self, message: UpMessage) -> None:
        """Queue a message; never waits. Nothing happens on a closed link."""
        if self._closed:
            return
        self._unsent.append(encode(message))
        self._flushed.clear()
        if len(self._unsent) > MAX_UNSENT_MESSAGES:
            logger.warning("router %s does not read; its link is cut", self.router_id)
            self.cut()
        self._ready.set()

    def cut(self) -> None:
        """What was not sent is dropped, and the router opens a new stream."""
        self.is_cut = True
        self._unsent.clear()
        self.close()
        self._on_cut()

    def close(self) -> None:
        """No more messages; those that are queued still go out."""
        self._closed = True
        self._ready.set()

    async def wait_flushed(self) -> None:
        """Until the transport has taken everything there is."""
        await self._flushed.wait()

    async def messages(self) -> AsyncIterator[bytes]:
        """Encoded messages in order, until the link is closed and empty."""
        while True:
            while self._unsent:
                yield self._unsent.popleft()
            self._flushed.set()
            if self._closed:
                return
            self._ready.clear()
            await self._ready.wait()  # no deadline: the end of the stream closes the link
