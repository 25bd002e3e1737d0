"""What comes back beside tokens, over the real data plane: emptied caches, sequences that cannot go on, where time
went.
"""

from __future__ import annotations

import pytest

from replica.errors import InvalidRequestError
from replica.messages import FinishReason
from router.backend import TokenEvent
from router.live_stream import LiveStream
from tests.cluster.harness import ClusterUnderTest, cluster, collect, request, until

pytestmark = pytest.mark.anyio

PROMPT = list(range(1, 41))


async def events_of(stream: LiveStream) -> list[TokenEvent]:
    return [event async for events in stream for event in events]


async def num_cached(c: ClusterUnderTest, name: str) -> int:
    return (await events_of(await c.routers[0].generate(request(name, PROMPT, 2))))[0].num_cached_tokens


async def test_a_reset_empties_every_replica_and_disturbs_nobody() -> None:
    async with cluster(2, num_routers=2) as c:
        for name in "ab":
            await num_cached(c, name)
        assert await num_cached(c, "warm") > 0
        running = await c.routers[0].generate(request("running", [7] * 30, 20))
        assert await c.routers[1].reset_prefix_cache(5) == 2
        assert [replica.engine.core.load(0.0).counters["prefix_cache_resets"] for replica in c.replicas] == [1, 1]
        assert await num_cached(c, "cold") == 0
        assert len((await collect(running))[0]) == 20
        assert b"shoal_prefix_cache_resets_total" in c.routers[0].metrics_text()


async def test_a_sequence_that_cannot_go_on_ends_its_request_for_good() -> None:
    async with cluster(2, is_open=False) as c:
        for replica in c.replicas:
            replica.runner.gate.release(8)
        wrong = await c.routers[0].generate(request("wrong", PROMPT, 50, n=3))
        good = await c.routers[0].generate(request("good", [9] * 9, 50))
        admitted = [replica.engine.core.scheduler.counters.admitted for replica in c.replicas]
        assert sorted(admitted) == [1, 3]
        at = c.replicas[admitted.index(3)]
        at.runner.invalid = "the grammar has no way on"
        for replica in c.replicas:
            replica.runner.open()
        with pytest.raises(InvalidRequestError, match=r"^the grammar has no way on$"):
            await collect(wrong)
        assert len((await collect(good))[0]) == 50
        await until(lambda: all(r.engine.core.num_unfinished == 0 for r in c.replicas))
        assert [r.engine.core.scheduler.counters.admitted for r in c.replicas] == admitted, "it was tried again"
        assert at.engine.core.scheduler.counters.finished[FinishReason.ABORT] == 2
        assert c.routers[0].load() == 0


async def test_where_the_time_went_is_told_with_the_first_and_the_last_token() -> None:
    async with cluster() as c:
        events = await events_of(await c.routers[0].generate(request("q", PROMPT, 4)))
        told = [event.stages for event in events if event.stages is not None]
        assert told[0].decode_s is None or len(events) == 1
        last = events[-1].stages
        assert last is not None
        assert last.queued_s is not None
        assert last.prefill_s is not None
        assert last.decode_s is not None
        assert last.num_preemptions == 0
