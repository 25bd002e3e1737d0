"""Router to replica over real gRPC in one process: no Ray, and every order of events forced by a gate instead of a
sleep.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from replica.errors import (
    EngineError,
    NeverFitsError,
    NoReplicaError,
    QueueFullError,
    ReplicaLostError,
    TooManySequencesError,
)
from replica.fake_runner import expected_output
from replica.messages import Draining, RouterId
from replica.router_link import MAX_UNSENT_MESSAGES, RouterLink
from router.dispatcher import DispatcherConfig
from router.live_backend import LiveBackend
from router.pairing import PairingDispatcher
from router.placement import least_tokens
from tests.cluster.harness import ClusterUnderTest, cluster, collect, request, until

pytestmark = pytest.mark.anyio

VOCAB = 49152
EOS = frozenset({2})


def reference(prompt: list[int], num_tokens: int) -> list[int]:
    return expected_output(prompt, num_tokens, vocab_size=VOCAB, eos=EOS)


def at_baseline(under_test: ClusterUnderTest) -> bool:
    return all(
        replica.engine.core.num_unfinished == 0
        and replica.engine.core.blocks.num_free == replica.engine.core.blocks.num_blocks
        for replica in under_test.replicas
    ) and all(router.load() == 0 and not router._streams and not len(router._names) for router in under_test.routers)


async def test_many_requests_over_two_replicas_and_two_routers_give_the_reference_tokens() -> None:
    async with cluster(2, 2) as c:
        prompts = [[i, *range(i * 3 % 50)] for i in range(40)]
        streams = await asyncio.gather(
            *(c.routers[i % 2].generate(request(f"q{i}", prompt, 10 + i % 7)) for i, prompt in enumerate(prompts))
        )
        outputs = await asyncio.gather(*(collect(stream) for stream in streams))
        for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            assert output == {0: reference(prompt, 10 + i % 7)}
        admitted = [r.engine.core.scheduler.counters.admitted for r in c.replicas]
        assert min(admitted) > 0, f"one replica got nothing: {admitted}"
        await until(lambda: at_baseline(c))


async def test_all_samples_of_a_request_go_to_one_replica_and_end_once() -> None:
    async with cluster(2) as c:
        stream = await c.routers[0].generate(request("q", [1, 2, 3], 9, n=4))
        assert await collect(stream) == {index: reference([1, 2, 3], 9) for index in range(4)}
        assert sorted(r.engine.core.scheduler.counters.admitted for r in c.replicas) == [0, 4]


async def test_a_client_that_leaves_frees_its_blocks_within_two_steps() -> None:
    async with cluster(is_open=False) as c:
        replica = c.replicas[0]
        opening = asyncio.create_task(c.routers[0].generate(request("q", list(range(20)), 1000)))
        replica.runner.gate.release(3)
        stream = await opening
        await until(lambda: len(replica.runner.plans) == 4)  # the fourth step is in the runner's hands
        stream.abort()
        stream.abort()  # twice is once
        await until(lambda: c.routers[0].load() == 0)
        await until(lambda: any(s.abort_reason for s in replica.engine.core.scheduler.living()))
        replica.runner.gate.release(1)  # the step ends ...
        await until(lambda: at_baseline(c))  # ... and with it the sequence
        replica.runner.open()
        await until(lambda: replica.runner._runner.num_known == 0)
        assert len(replica.runner.plans) <= 5, "at most one more plan, the one that tells the runner to forget"


async def test_a_request_abandoned_before_its_first_token_never_runs() -> None:
    """Case B-04."""
    async with cluster(is_open=False, max_num_seqs=1) as c:
        backend, replica = c.routers[0], c.replicas[0]
        first = asyncio.create_task(backend.generate(request("r1", [1], 5, arrival=0)))
        await until(lambda: replica.runner.plans)
        queued = [asyncio.create_task(backend.generate(request(f"r{i}", [i] * 9, 5, arrival=i))) for i in range(2, 12)]
        await until(lambda: len(replica.engine.core.scheduler.queued) == 10)
        for task in queued[:-1]:
            task.cancel()
        await until(lambda: len(replica.engine.core.scheduler.queued) == 1)
        replica.runner.open()
        await collect(await first)
        assert await collect(await queued[-1]) == {0: reference([11] * 9, 5)}
        counters = replica.engine.core.scheduler.counters
        assert counters.prompt_tokens == 1 + 9
        await until(lambda: at_baseline(c))


async def test_a_burst_at_an_idle_replica_is_held_until_the_first_step_makes_room() -> None:
    wait_long = DispatcherConfig(admission_wait_s=30.0)
    async with cluster(cap=4, max_num_seqs=64, dispatcher=wait_long) as c:
        streams = await asyncio.gather(*(c.routers[0].generate(request(f"q{i}", [i], 3)) for i in range(40)))
        assert len(await asyncio.gather(*(collect(s) for s in streams))) == 40
        assert c.replicas[0].engine.core.load(0.0).counters["max_queued"] <= 4


async def test_a_full_cluster_refuses_with_a_reason_and_tries_the_other_replica_first() -> None:
    async with cluster(2, is_open=False, cap=2, max_num_seqs=1, dispatcher=DispatcherConfig(admission_wait_s=0.0)) as c:
        backend = c.routers[0]
        tasks: list[asyncio.Task[object]] = []
        for i in range(6):  # one running and two queued on each
            tasks.append(asyncio.create_task(backend.generate(request(f"q{i}", [i], 2, arrival=i))))
            await until(lambda i=i: sum(r.engine.core.num_unfinished for r in c.replicas) == i + 1)
            await until(
                lambda: all(
                    len(r.engine.core.scheduler.running) or not r.engine.core.num_unfinished for r in c.replicas
                )
            )
        with pytest.raises(QueueFullError) as caught:
            await backend.generate(request("too-many", [9], 2))
        assert caught.value.retry_after_s >= 1
        assert [len(r.engine.core.scheduler.queued) for r in c.replicas] == [2, 2]
        for replica in c.replicas:
            replica.runner.open()
        for task in tasks:
            await collect(await task)  # type: ignore[arg-type]
        await until(lambda: at_baseline(c))


async def test_what_can_never_fit_is_refused_with_numbers() -> None:
    async with cluster(num_blocks=4) as c:
        with pytest.raises(NeverFitsError, match=r"40 tokens.*32"):
            await c.routers[0].generate(request("q", [1] * 40, 2))
        stream = await c.routers[0].generate(request("short", [1] * 10, 2))
        assert await collect(stream) == {0: reference([1] * 10, 2)}


async def test_without_a_replica_the_answer_is_no_replica_and_health_says_so() -> None:
    async with cluster(1, dispatcher=DispatcherConfig(admission_wait_s=0.0)) as c:
        assert c.routers[0].health().ok
        await c.replicas[0].die()
        await until(lambda: not c.routers[0].health().ok)
        with pytest.raises(NoReplicaError):
            await c.routers[0].generate(request("q", [1], 2))


async def test_streams_of_a_dead_replica_continue_elsewhere_with_the_same_tokens() -> None:
    async with cluster(2, is_open=False) as c:
        prompts = [[i, 7, 7] for i in range(8)]
        tasks = [asyncio.create_task(c.routers[0].generate(request(f"q{i}", p, 40))) for i, p in enumerate(prompts)]
        await until(lambda: sum(r.engine.core.num_unfinished for r in c.replicas) == 8)
        for replica in c.replicas:
            replica.runner.gate.release(6)  # some tokens are out everywhere
        streams = await asyncio.gather(*tasks)
        await until(lambda: all(len(r.runner.plans) == 7 for r in c.replicas))
        await c.replicas[0].die()
        c.publish_view("replica-0")
        c.replicas[1].runner.open()
        outputs = await asyncio.gather(*(collect(stream) for stream in streams))
        assert outputs == [{0: reference(prompt, 40)} for prompt in prompts]
        assert c.routers[0].load() == 0
        assert c.replicas[1].engine.core.num_unfinished == 0


async def test_a_stream_that_can_not_be_continued_ends_with_an_error() -> None:
    async with cluster(1, is_open=False, dispatcher=DispatcherConfig(resume_wait_s=0.0)) as c:
        task = asyncio.create_task(c.routers[0].generate(request("q", [1], 40)))
        c.replicas[0].runner.gate.release(3)
        stream = await task
        await c.replicas[0].die()
        with pytest.raises(ReplicaLostError):
            await collect(stream)
        assert c.routers[0].load() == 0


async def test_drain_lets_nothing_in_and_moves_what_is_left() -> None:
    async with cluster(2, is_open=False) as c:
        prompts = [[i, 3] for i in range(6)]
        tasks = [asyncio.create_task(c.routers[0].generate(request(f"q{i}", p, 30))) for i, p in enumerate(prompts)]
        await until(lambda: sum(r.engine.core.num_unfinished for r in c.replicas) == 6)
        for replica in c.replicas:
            replica.runner.gate.release(4)
        streams = await asyncio.gather(*tasks)
        for replica in c.replicas:
            replica.runner.open()
        moving = c.replicas[0].engine.core.num_unfinished
        await c.replicas[0].engine.drain(0.0)
        assert c.replicas[0].engine.core.num_unfinished == 0
        outputs = await asyncio.gather(*(collect(stream) for stream in streams))
        assert outputs == [{0: reference(prompt, 30)} for prompt in prompts]
        late = await c.routers[0].generate(request("late", [5], 3))
        assert await collect(late) == {0: reference([5], 3)}
        assert c.replicas[1].engine.core.scheduler.counters.admitted >= 6 - moving + 1
        await until(lambda: at_baseline(c))


async def test_a_step_that_fails_costs_its_sequences_another_try_and_nobody_else_anything() -> None:
    async with cluster(is_open=False, max_num_seqs=1) as c:
        tasks = [asyncio.create_task(c.routers[0].generate(request(f"q{i}", [i], 20, arrival=i))) for i in range(3)]
        await until(lambda: c.replicas[0].engine.core.num_unfinished == 3)
        c.replicas[0].runner.gate.release(5)
        await until(lambda: len(c.replicas[0].runner.plans) == 6)
        c.replicas[0].runner.num_failures = 1
        c.replicas[0].runner.open()
        streams = await asyncio.gather(*tasks)
        outputs = await asyncio.gather(*(collect(stream) for stream in streams))
        assert outputs == [{0: reference([i], 20)} for i in range(3)]
        c.replicas[0].engine.check_health()
        await until(lambda: at_baseline(c))


async def test_a_broken_runner_gives_everything_back_and_the_other_replica_takes_it() -> None:
    async with cluster(2, is_open=False, max_num_seqs=2) as c:
        tasks = [asyncio.create_task(c.routers[0].generate(request(f"q{i}", [i], 20, arrival=i))) for i in range(12)]
        await until(lambda: sum(r.engine.core.num_unfinished for r in c.replicas) == 12)
        c.replicas[0].runner.num_failures = 1000
        for replica in c.replicas:
            replica.runner.open()
        streams = await asyncio.gather(*tasks)
        outputs = await asyncio.gather(*(collect(stream) for stream in streams))
        assert outputs == [{0: reference([i], 20)} for i in range(12)]
        with pytest.raises(EngineError, match="steps failed"):
            c.replicas[0].engine.check_health()
        assert c.replicas[0].engine.core.num_unfinished == 0
        await asyncio.wait_for(c.replicas[0].engine.drain(30.0), 5)
        late = await c.routers[0].generate(request("late", [5], 3))
        assert await collect(late) == {0: reference([5], 3)}


async def test_a_request_that_breaks_every_runner_ends_with_an_error() -> None:
    async with cluster(1, dispatcher=DispatcherConfig(resume_wait_s=0.0)) as c:
        c.replicas[0].runner.num_failures = 1000
        with pytest.raises((ReplicaLostError, NoReplicaError, QueueFullError)):
            await collect(await c.routers[0].generate(request("q", [1], 20)))
        assert c.routers[0].load() == 0


async def test_a_link_that_breaks_while_both_ends_live_loses_nothing_however_often() -> None:
    # five breaks within milliseconds leave no time for a token in between, which is what forgives a loss
    async with cluster(is_open=False, dispatcher=DispatcherConfig(max_losses=10)) as c:
        tasks = [asyncio.create_task(c.routers[0].generate(request(f"q{i}", [i, 8], 30))) for i in range(6)]
        engine = c.replicas[0].engine
        await until(lambda: engine.core.num_unfinished == 6)
        for number in range(5):
            c.replicas[0].runner.gate.release(3)
            await until(lambda number=number: len(c.replicas[0].runner.plans) >= 3 * number + 1)
            (link,) = engine._links.values()
            engine.disconnect(link)  # in the middle of a step
            await until(lambda link=link: engine._links and link not in engine._links.values())
            await until(lambda: c.routers[0].health().ok)
        c.replicas[0].runner.open()
        streams = await asyncio.gather(*tasks)
        outputs = await asyncio.gather(*(collect(stream) for stream in streams))
        assert outputs == [{0: reference([i, 8], 30)} for i in range(6)]
        more = await asyncio.gather(*(c.routers[0].generate(request(f"m{i}", [i, 9], 5)) for i in range(8)))
        assert await asyncio.gather(*(collect(s) for s in more)) == [{0: reference([i, 9], 5)} for i in range(8)]
        await until(lambda: at_baseline(c))


async def test_samples_that_had_not_begun_go_along_when_their_replica_dies() -> None:
    """n=3 with one running: after the loss all are returning, whatever the queue cap says."""
    async with cluster(2, is_open=False, cap=3, max_num_seqs=1) as c:
        task = asyncio.create_task(c.routers[0].generate(request("q", [1, 2], 12, n=3)))
        await until(lambda: any(r.runner.plans for r in c.replicas))
        dying, other = sorted(c.replicas, key=lambda r: not r.runner.plans)
        fill = [asyncio.create_task(c.routers[0].generate(request(f"f{i}", [i], 3, arrival=9.0 + i))) for i in range(4)]
        await until(lambda: dying.engine.core.num_unfinished + other.engine.core.num_unfinished == 7)
        dying.runner.gate.release(4)
        stream = await task
        await dying.die()
        c.publish_view(dying.name)
        other.runner.open()
        assert await collect(stream) == {index: reference([1, 2], 12) for index in range(3)}
        for each in fill:
            await collect(await each)
        assert other.engine.core.load(0.0).counters["max_queued"] <= 3


async def test_a_replica_that_left_the_view_for_a_moment_keeps_its_streams() -> None:
    async with cluster(is_open=False) as c:
        task = asyncio.create_task(c.routers[0].generate(request("q", [3], 10)))
        c.replicas[0].runner.gate.release(2)
        stream = await task
        c.publish_view("replica-0")
        c.publish_view()
        c.replicas[0].runner.open()
        assert await collect(stream) == {0: reference([3], 10)}
        assert c.replicas[0].engine.core.scheduler.counters.admitted == 1, "it ran on, nothing was sent again"
        assert await collect(await c.routers[0].generate(request("next", [4], 3))) == {0: reference([4], 3)}


async def test_more_samples_than_the_queue_holds_are_a_mistake_and_not_an_overload() -> None:
    async with cluster(cap=3) as c:
        with pytest.raises(TooManySequencesError, match="4 sequences"):
            await c.routers[0].generate(request("q", [1], 2, n=4))


async def test_a_router_that_does_not_read_is_cut_and_its_memory_freed() -> None:
    cut: list[bool] = []
    link = RouterLink(RouterId("r"), lambda: cut.append(True))
    for _ in range(MAX_UNSENT_MESSAGES + 1000):
        link.send(Draining(0.0))
    assert cut == [True]
    assert [message async for message in link.messages()] == []


async def test_a_router_that_dies_takes_its_requests_with_it_and_nobody_elses() -> None:
    async with cluster(1, 2, is_open=False) as c:
        mine = asyncio.create_task(c.routers[0].generate(request("same-id", [1], 30)))
        other = asyncio.create_task(c.routers[1].generate(request("same-id", [2], 30)))
        await until(lambda: c.replicas[0].engine.core.num_unfinished == 2)
        await c.routers[0].close()
        mine.cancel()
        c.replicas[0].runner.open()
        assert await collect(await other) == {0: reference([2], 30)}
        await until(lambda: c.replicas[0].engine.core.num_unfinished == 0)
        assert c.replicas[0].engine.core.scheduler.counters.generation_tokens < 60


async def test_garbage_on_the_wire_cuts_the_link_and_nothing_else() -> None:
    import grpc

    async with cluster() as c:
        async with grpc.aio.insecure_channel(c.replicas[0].address) as channel:

            async def garbage():  # type: ignore[no-untyped-def]
                yield b"\xc1 not a message"

            connect: Any = channel.stream_stream("/shoal.Replica/Connect")
            call = connect(garbage(), metadata=(("router-id", "stranger"),))
            assert len([message async for message in call]) >= 1  # the load on connect, then the end
        stream = await c.routers[0].generate(request("q", [1], 5))
        assert await collect(stream) == {0: reference([1], 5)}


async def test_a_router_whose_link_is_cut_hears_of_it_and_comes_back() -> None:
    """A handler that is cancelled sends no status: the router waited for that stream for ever, and used the replica
    no more.
    """
    async with cluster(is_open=False) as c:
        (replica,) = c.replicas
        task = asyncio.create_task(c.routers[0].generate(request("q", [4, 8], 20)))
        await until(lambda: replica.engine.core.num_unfinished == 1)
        replica.runner.gate.release(3)
        stream = await task
        (link,) = replica.engine._links.values()
        for _ in range(MAX_UNSENT_MESSAGES + 1):  # as long as this loop runs nobody reads
            link.send(Draining(0.0))
        assert link.is_cut
        replica.runner.open()
        assert await collect(stream) == {0: reference([4, 8], 20)}
        assert list(replica.engine._links.values()) != [link]
        await until(lambda: at_baseline(c))


async def test_a_router_that_was_stopped_itself_does_not_take_its_replicas_for_dead() -> None:
    """SIGSTOP of a router for 20 s: the first thing it does is to look at the clock, before it reads what came."""
    skipped = [0.0]
    async with cluster(is_open=False) as c:
        (replica,) = c.replicas
        clock = lambda: time.monotonic() + skipped[0]  # noqa: E731
        router = LiveBackend(
            PairingDispatcher(DispatcherConfig(), least_tokens), RouterId("sleeper"), "fake", clock=clock
        )
        c.routers.append(router)
        c.publish_view()
        await until(lambda: router.health().ok)
        task = asyncio.create_task(router.generate(request("q", [4, 8], 20)))
        await until(lambda: replica.engine.core.num_unfinished == 1)
        replica.runner.gate.release(3)
        stream = await task
        skipped[0] = 20.0
        router._on_time()
        assert router.dispatcher.replica_of(stream.request.request_id) == replica.name
        replica.runner.open()
        assert await collect(stream) == {0: reference([4, 8], 20)}
        assert replica.engine.core.scheduler.counters.admitted == 1, "nothing was sent again"
