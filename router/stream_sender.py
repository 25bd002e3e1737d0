"""ASYNC. An answer's bytes on their way to a client who may be slow: how much may wait where we do not see it.

An ASGI server of its own (uvicorn) lets `send` wait when 64 KiB are not written yet. Under Ray Serve `send` never
waits: its messages lie in an unbounded queue of our process until Serve pickles them for its proxy, which it does once
the proxy has taken what came before; the proxy in turn waits for the client. So that queue is where the chunks of a
slow reader would pile up, and nothing tells its length. Worse, Serve sends all of it as one gRPC message, of at most
4 MiB: measured, readers who paused while 20 MB came had their streams cut, and the router grew by 700 MiB for eight of
them; now they lose nothing, and it grows by 2. For both servers show when they have taken a message: one pickles it,
the other lets go of it. Every `MARK_BYTES` one message watches for that, and the next of its kind is not sent before.

Bound, a connection: 2 x `MARK_BYTES` and one piece wait in the queue, as much again is on its way to the proxy. Tokens
that come meanwhile wait as ids (`event_buffer.py`). The proxy itself takes about 4 MiB, gRPC's window.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from starlette.types import Send

#: bytes between two watched messages; a stream of plain chunks has one every 150 tokens, a short one has none
MARK_BYTES = 32 << 10
#: longest message
PIECE_BYTES = 64 << 10


class _Watched(dict[str, object]):
    """An ASGI message that tells, once, that it was pickled or dropped. Unpickled it is a plain dict."""

    __slots__ = ("_on_taken",)

    def __init__(self, message: dict[str, object], on_taken: Callable[[], None]) -> None:
        super().__init__(message)
        self._on_taken: Callable[[], None] | None = on_taken

    def _taken(self) -> None:
        on_taken, self._on_taken = self._on_taken, None
        if on_taken is not None:
            on_taken()

    def __reduce__(self) -> tuple[object, ...]:
        self._taken()
        return dict, (dict(self),)

    def __del__(self) -> None:
        self._taken()


class StreamSender:
    """Writes the body of one response."""

    __slots__ = ("_loop", "_num_bytes", "_send", "_taken")

    def __init__(self, send: Send) -> None:
        self._send = send
        #: since the last watched message
        self._num_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._taken: asyncio.Event | None = None

    def write(self, data: bytes) -> Awaitable[None]:
        """Send these bytes, with more to come. Waits while the server has not taken those before."""
        if len(data) > PIECE_BYTES:
            return self._write_pieces(data)
        message: dict[str, object] = {"type": "http.response.body", "body": data, "more_body": True}
        self._num_bytes += len(data)
        if self._num_bytes < MARK_BYTES:
            return self._send(message)
        self._num_bytes = 0
        return self._send_watched(message)

    def end(self, data: bytes = b"") -> Awaitable[None]:
        """Send these bytes as the last ones."""
        if len(data) > PIECE_BYTES:
            return self._end_pieces(data)
        return self._send({"type": "http.response.body", "body": data})

    async def _end_pieces(self, data: bytes) -> None:
        await self._write_pieces(data)
        await self.end()

    async def _write_pieces(self, data: bytes) -> None:
        for start in range(0, len(data), PIECE_BYTES):
            await self.write(data[start : start + PIECE_BYTES])

    async def _send_watched(self, message: dict[str, object]) -> None:
        if self._taken is not None:
            # no deadline: a client may read as slowly as it likes; if it leaves, we are cancelled
            await self._taken.wait()
        self._taken = taken = asyncio.Event()

        def on_taken() -> None:
            # the garbage collector may come in any thread, and after the loop was closed
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(taken.set)

        await self._send(_Watched(message, on_taken))
