"""The data plane refuses who does not know the cluster's token, before it reads anything that is sent."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import grpc
import pytest

from replica.errors import NoReplicaError
from replica.messages import METHOD, RouterId, Submit, encode
from replica.service import ReplicaService
from replica.stream_proof import PROOF_KEY, proof
from router.dispatcher import DispatcherConfig
from router.live_backend import LiveBackend
from router.pairing import PairingDispatcher
from router.placement import least_tokens
from tests.cluster.harness import ClusterUnderTest, cluster, collect, request, until

pytestmark = pytest.mark.anyio

TOKEN = b"the token of this cluster"


async def guarded(under_test: ClusterUnderTest) -> tuple[ReplicaService, str]:
    """Another door to the only replica, with a token."""
    service = ReplicaService(under_test.replicas[0].engine, TOKEN)
    return service, await service.start("127.0.0.1")


async def knock(address: str, *metadata: tuple[str, str]) -> tuple[grpc.StatusCode, str]:
    """What a stream that sends a request gets."""

    async def said() -> AsyncIterator[bytes]:
        yield encode(Submit(request("stolen", [1, 2], 3), 0))

    async with grpc.aio.insecure_channel(address) as channel:
        connect: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(METHOD)
        call = connect(said(), metadata=metadata)
        try:
            async for _ in call:
                return grpc.StatusCode.OK, ""
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


async def test_a_stranger_is_refused_before_anything_is_read(caplog: pytest.LogCaptureFixture) -> None:
    async with cluster() as under_test:
        service, address = await guarded(under_test)
        engine = under_test.replicas[0].engine
        links = len(engine._links)
        me = ("router-id", "stranger")
        of_another = proof(b"a token of another cluster", "stranger", engine.incarnation)
        stolen = proof(TOKEN, "somebody else", engine.incarnation)
        for shown in ((), ((PROOF_KEY, of_another),), ((PROOF_KEY, stolen),), ((PROOF_KEY, TOKEN.decode()),)):
            refused = await knock(address, me, ("incarnation", engine.incarnation), *shown)
            assert refused == (grpc.StatusCode.UNAUTHENTICATED, "you do not know this cluster's token")
        assert len(engine._links) == links, "a stranger became a router"
        assert engine.core.scheduler.counters.admitted == 0
        assert engine.core.num_unfinished == 0
        assert TOKEN.decode() not in caplog.text
        assert await knock(
            address, me, ("incarnation", engine.incarnation), (PROOF_KEY, proof(TOKEN, "stranger", engine.incarnation))
        ) == (grpc.StatusCode.OK, "")
        await service.stop(0)


async def test_a_router_that_knows_the_token_is_served_and_one_with_another_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with cluster() as under_test:
        service, address = await guarded(under_test)
        replica = under_test.replicas[0]
        view = {replica.name: {"address": address, "incarnation": replica.engine.incarnation}}
        dispatcher = PairingDispatcher(DispatcherConfig(), least_tokens)
        friend = LiveBackend(dispatcher, RouterId("friend"), "fake", token=TOKEN)
        friend.on_view(view)
        await until(lambda: friend.health().ok)
        assert len((await collect(await friend.generate(request("mine", [1, 2], 5))))[0]) == 5
        with caplog.at_level(logging.ERROR, "router.replica_client"):
            other = LiveBackend(
                PairingDispatcher(DispatcherConfig(), least_tokens),
                RouterId("other"),
                "fake",
                token=b"not this one, no",
            )
            other.on_view(view)
            with pytest.raises(NoReplicaError):
                await other.generate(request("refused", [1, 2], 5))
            await until(lambda: "knows another cluster token" in caplog.text)
        await friend.close()
        await other.close()
        await service.stop(0)
