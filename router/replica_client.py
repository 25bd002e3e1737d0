"""ASYNC. One router's stream to one replica: connects, reconnects while the replica is in the view, reports what comes.

The far side is `replica/service.py`. A broken stream is the quickest sign of death there is: 10 to 15 ms after a `kill
-9`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable

import grpc
import msgspec

from replica.messages import DownMessage, ReplicaId, RouterId, UpMessage, decode_up, encode

logger = logging.getLogger(__name__)

METHOD = "/shoal.Replica/Connect"
MAX_MESSAGE_BYTES = 64 << 20
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.enable_http_proxy", 0),
    # one process may be both ends in tests; a subchannel shared with a dead peer's backoff would slow the reconnect
    ("grpc.use_local_subchannel_pool", 1),
]
#: pause before connecting again after a break, growing to the second figure
_RECONNECT_S = (0.05, 1.0)


class ReplicaClient:
    """Calls `on_message` for each message, and `on_broken` once per lost stream. Both on the event loop."""

    def __init__(
        self,
        replica_id: ReplicaId,
        address: str,
        router_id: RouterId,
        on_message: Callable[[ReplicaId, UpMessage], None],
        on_broken: Callable[[ReplicaId], None],
    ) -> None:
        self.replica_id = replica_id
        self._address = address
        self._router_id = router_id
        self._on_message = on_message
        self._on_broken = on_broken
        self._unsent: deque[bytes] = deque()
        self._ready = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"shoal-link-{replica_id}")
        #: False once the replica left the view: a broken stream then stays broken
        self.wants_reconnect = True

    def send(self, message: DownMessage) -> None:
        """Queue a message; never waits. What is unsent when the stream breaks is dropped: `on_broken` follows."""
        self._unsent.append(encode(message))
        self._ready.set()

    async def close(self) -> None:
        """End the stream and its task."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        pause = _RECONNECT_S[0]
        while True:
            heard = False
            async with grpc.aio.insecure_channel(self._address, options=_OPTIONS) as channel:
                connect: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(METHOD)
                call = connect(self._outgoing(), metadata=(("router-id", self._router_id),))
                try:
                    async for data in call:
                        heard = True
                        self._on_message(self.replica_id, decode_up(data))
                except grpc.aio.AioRpcError as error:
                    logger.debug("stream to %s broke: %s", self.replica_id, error.code())
                except msgspec.DecodeError:
                    logger.exception("replica %s sent something that is no message", self.replica_id)
            self._unsent.clear()
            self._on_broken(self.replica_id)
            if not self.wants_reconnect:
                return
            pause = _RECONNECT_S[0] if heard else min(2 * pause, _RECONNECT_S[1])
            await asyncio.sleep(pause)

    async def _outgoing(self) -> AsyncIterator[bytes]:
        while True:
            while self._unsent:
                yield self._unsent.popleft()
            self._ready.clear()
            await self._ready.wait()
