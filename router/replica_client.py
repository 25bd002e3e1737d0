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

from replica.messages import (
    CHANNEL_OPTIONS,
    METHOD,
    DownMessage,
    ReplicaId,
    RouterId,
    UpMessage,
    decode_up,
    encode,
)
from replica.stream_proof import PROOF_KEY, proof

logger = logging.getLogger(__name__)

_OPTIONS = [
    *CHANNEL_OPTIONS,
    ("grpc.enable_http_proxy", 0),
    # one process may be both ends in tests; a subchannel shared with a dead peer's backoff would slow the reconnect
    ("grpc.use_local_subchannel_pool", 1),
]
#: pause before connecting again after a break, growing to the second figure
_RECONNECT_S = (0.05, 1.0)


class Outbox:
    """What one connection attempt has yet to send. A broken attempt's outbox is closed: it may not take the next
    one's.
    """

    def __init__(self) -> None:
        self._unsent: deque[bytes] = deque()
        self._ready = asyncio.Event()
        self._closed = False

    def put(self, data: bytes) -> None:
        self._unsent.append(data)
        self._ready.set()

    def close(self) -> None:
        self._closed = True
        self._unsent.clear()
        self._ready.set()

    async def drain(self) -> AsyncIterator[bytes]:
        """Everything put in, in order, until the outbox is closed."""
        while not self._closed:
            while self._unsent:
                yield self._unsent.popleft()
            self._ready.clear()
            await self._ready.wait()  # no deadline: whoever ends the attempt closes the outbox


class ReplicaClient:
    """Calls `on_message` for each message, and `on_broken` once per lost stream. Both on the event loop."""

    def __init__(
        self,
        replica_id: ReplicaId,
        address: str,
        incarnation: str,
        router_id: RouterId,
        on_message: Callable[[ReplicaId, UpMessage], None],
        on_broken: Callable[[ReplicaId], None],
        token: bytes = b"",
    ) -> None:
        self.replica_id = replica_id
        self._address = address
        self._metadata = [("router-id", router_id), ("incarnation", incarnation)]
        if token:
            self._metadata.append((PROOF_KEY, proof(token, router_id, incarnation)))
        self._was_refused = False
        self._on_message = on_message
        self._on_broken = on_broken
        self._outbox = Outbox()
        self._task = asyncio.create_task(self._run(), name=f"shoal-link-{replica_id}")
        #: False once the replica left the view: a broken stream then stays broken
        self.wants_reconnect = True

    def send(self, message: DownMessage) -> None:
        """Queue a message; never waits. What is unsent when the stream breaks is dropped: `on_broken` follows."""
        self._outbox.put(encode(message))

    async def close(self) -> None:
        """End the stream and its task."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        pause = _RECONNECT_S[0]
        while True:
            self._outbox = Outbox()
            try:
                heard = await self._connect(self._outbox)
            finally:
                self._outbox.close()
            self._on_broken(self.replica_id)
            if not self.wants_reconnect:
                return
            pause = _RECONNECT_S[0] if heard else min(2 * pause, _RECONNECT_S[1])
            await asyncio.sleep(pause)

    async def _connect(self, outbox: Outbox) -> bool:
        """One stream from open to broken. True if the replica said anything."""
        heard = False
        async with grpc.aio.insecure_channel(self._address, options=_OPTIONS) as channel:
            connect: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(METHOD)
            call = connect(outbox.drain(), metadata=tuple(self._metadata))
            try:
                # no deadline: gRPC's keep-alive breaks a stream whose far side is gone, and the dispatcher leaves a
                # replica that says nothing, whatever its stream does
                async for data in call:
                    heard = True
                    self._on_message(self.replica_id, decode_up(data))
            except grpc.aio.AioRpcError as error:
                logger.debug("stream to %s broke: %s", self.replica_id, error.code())
                if error.code() is grpc.StatusCode.UNAUTHENTICATED and not self._was_refused:
                    self._was_refused = True  # it will go on: once is enough
                    logger.error("replica %s at %s knows another cluster token", self.replica_id, self._address)
            except msgspec.DecodeError:
                logger.exception("replica %s sent something that is no message", self.replica_id)
            except Exception:  # a mistake of ours must not leave requests waiting behind a dead task
                logger.exception(
                    "a message of replica %s could not be handled; its stream is opened anew", self.replica_id
                )
        return heard
