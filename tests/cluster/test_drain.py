"""Replicas go and come under open streams on a real Ray: every token is checked, times are not."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks import drain
from benchmarks.checked_streams import Load
from benchmarks.two_nodes import two_nodes
from tests.cluster.shoal_process import ShoalProcess

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def load(shoal: ShoalProcess, long_tokens: int) -> Load:
    return Load(shoal.url, num_long=12, long_tokens=long_tokens, per_s=4.0, short_tokens=5)


def test_fewer_replicas_more_and_all_of_them_new() -> None:
    with ShoalProcess("--replicas", "2", "--routers", "2") as shoal:

        async def run() -> None:
            await drain.until_up(shoal.url, 2)
            before = await drain.replicas(shoal.url)
            down = await drain.scale(shoal.port, 1, load(shoal, 700))
            assert down.errors == []
            (left,) = await drain.replicas(shoal.url)
            assert left in before, "who stays was replaced"
            up = await drain.scale(shoal.port, 2, load(shoal, 300))
            assert up.errors == []
            await drain.until_up(shoal.url, 2)
            both = await drain.replicas(shoal.url)
            assert left in both, "who stays was replaced"
            assert all(replica["counters"]["admitted"] for replica in both.values()), "the new one got nothing"
            rolled = await drain.redeploy(shoal.process.pid, shoal.port, load(shoal, 500))
            assert rolled.errors == []
            await drain.until_up(shoal.url, 2)
            assert not (await drain.replicas(shoal.url)).keys() & both.keys()

        asyncio.run(run())


def test_a_node_is_drained() -> None:
    with (
        two_nodes(3) as nodes,
        ShoalProcess("--replicas", "2", "--set", "num_cpus_per_replica=2", env=nodes.env) as shoal,
    ):

        async def run() -> None:
            await drain.until_up(shoal.url, 2)
            under = load(shoal, 300)
            async with under:
                # there is no room for a replacement
                nodes.drain(20)
                await drain.until_up(shoal.url, 1)
            assert under.errors == []
            assert len(await drain.replicas(shoal.url)) == 1

        asyncio.run(run())
