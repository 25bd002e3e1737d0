"""ASYNC. The data plane of a replica: one bidirectional gRPC stream per router, step-batched upwards.

Bytes in, bytes out (`replica.messages` is the codec), so there is no generated code. gRPC brings HTTP/2 flow control,
keep-alive and a death notice within 15 ms.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
import msgspec

from replica.engine import Engine
from replica.messages import CHANNEL_OPTIONS, METHOD, RouterId, decode_down
from replica.router_link import RouterLink
from replica.stream_proof import PROOF_KEY, is_proof

logger = logging.getLogger(__name__)

_OPTIONS = [
    *CHANNEL_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_pings_without_data", 0),
]


class ReplicaService:
    """Serves `METHOD` for one engine. A router names itself in the metadata key `router-id`, and where there is a
    `token` it proves in `cluster-proof` that it knows it, before anything that it sends is looked at.
    """

    def __init__(self, engine: Engine, token: bytes = b"") -> None:
        self._engine = engine
        self._token = token
        self._server = grpc.aio.server(options=_OPTIONS)
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self._connect)
        service, method = METHOD.strip("/").split("/")
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))

    async def start(self, host: str, port: int = 0) -> str:
        """Listen on `host`; port 0 picks a free one. Returns `host:port`."""
        bound = self._server.add_insecure_port(f"{host}:{port}")
        await self._server.start()
        return f"{host}:{bound}"

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)

    async def _connect(self, incoming: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        metadata = dict(context.invocation_metadata() or ())
        router_id, incarnation = metadata.get("router-id"), metadata.get("incarnation")
        if not router_id:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "metadata key router-id is missing")
        if self._token:
            shown = metadata.get(PROOF_KEY, "")
            if not is_proof(shown, self._token, str(router_id), str(incarnation or "")):
                logger.warning("%s was refused: it does not know this cluster's token", context.peer())
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "you do not know this cluster's token")
        if incarnation and incarnation != self._engine.incarnation:
            # the port of a dead replica was taken over by this one; the router means the dead one
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another incarnation listens here")
        task = asyncio.current_task()
        assert task is not None
        link = self._engine.connect(RouterId(str(router_id)), on_cut=task.cancel)
        reader = asyncio.create_task(self._read(link, incoming))
        try:
            async for data in link.messages():
                await context.write(data)
        except asyncio.CancelledError:
            if not link.is_cut:
                raise
            task.uncancel()
        finally:
            reader.cancel()
            self._engine.disconnect(link)
        if link.is_cut:
            # of a cancelled handler gRPC tells the far side nothing: the router would wait for this stream for ever
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "this router does not read what it is sent")

    async def _read(self, link: RouterLink, incoming: AsyncIterator[bytes]) -> None:
        try:
            async for data in incoming:
                self._engine.handle(link, decode_down(data))
        except msgspec.DecodeError as error:
            logger.warning("router %s sent something that is no message (%s); its link is cut", link.router_id, error)
        except Exception:  # a mistake of ours: nobody else would ever tell of it
            logger.exception("a message of router %s could not be handled; its link is cut", link.router_id)
        finally:
            link.close()
