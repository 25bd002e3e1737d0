"""A burst at idle replicas, and who wakes those that are held: the real data plane in one process, without Ray."""

from __future__ import annotations

import asyncio

import pytest

from replica.errors import QueueFullError
from router.dispatcher import DispatcherConfig
from router.instructions import Instruction
from tests.cluster.harness import ClusterUnderTest, cluster, collect, request, until

pytestmark = pytest.mark.anyio

REPLICAS, CAP, BATCH = 8, 4, 8


def num_inside(c: ClusterUnderTest) -> int:
    return sum(replica.engine.core.num_unfinished for replica in c.replicas)


async def test_idle_replicas_take_a_burst_of_all_places_in_queues_and_batches_wholly() -> None:
    """At one instant, and nobody of it ends before all are in. Exactly one more is refused."""
    total = REPLICAS * (CAP + BATCH)
    wait = DispatcherConfig(admission_wait_s=60.0)
    async with cluster(REPLICAS, is_open=False, cap=CAP, max_num_seqs=BATCH, dispatcher=wait) as c:
        backend = c.routers[0]
        tasks = [asyncio.create_task(backend.generate(request(f"q{i}", [i], 40))) for i in range(total)]
        # a step is in each replica's hands, with whoever came first: queues fill, and the others are held
        await until(lambda: num_inside(c) == REPLICAS * (CAP + 1))
        for inside in (REPLICAS * (2 * CAP + 1), total):
            for replica in c.replicas:
                replica.runner.gate.release()  # that step ends, the queue moves into the batch
            await until(lambda inside=inside: num_inside(c) == inside)
        assert backend.dispatcher.num_held == 0
        for replica in c.replicas:
            assert replica.engine.core.load(0.0).counters["max_queued"] == CAP
        backend.dispatcher.configure(DispatcherConfig(admission_wait_s=0.0), backend.dispatcher._placing.policy)
        with pytest.raises(QueueFullError):
            await backend.generate(request("one more", [9], 2))
        for replica in c.replicas:
            replica.runner.open()
        outputs = await asyncio.gather(*(collect(stream) for stream in await asyncio.gather(*tasks)))
        assert [len(output[0]) for output in outputs] == [40] * total


async def test_nobody_polls_for_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router's clock and timers stand still: what wakes a held request is the permit for the place."""
    wait = DispatcherConfig(admission_wait_s=1e6)
    async with cluster(1, is_open=False, cap=1, max_num_seqs=1, dispatcher=wait) as c:
        backend, runner = c.routers[0], c.replicas[0].runner
        backend._ticker.cancel()
        tasks = [asyncio.create_task(backend.generate(request(f"q{i}", [i], 1, arrival=i))) for i in range(5)]
        await until(lambda: backend.dispatcher.num_held == 3)
        times: list[float] = []

        def on_time(now: float) -> list[Instruction]:
            times.append(now)
            return []

        monkeypatch.setattr(backend.dispatcher, "on_time", on_time)
        runner.open()
        for task in tasks:
            assert len((await collect(await task))[0]) == 1
        assert times == []
        refused = c.replicas[0].engine.core.load(0.0).counters["refused"]
        assert refused <= 3, "nobody knocks at a full queue again and again"
