"""A group of ranks as real processes, without Ray: kill -9, SIGSTOP, a step that hangs, a second node (by TCP)."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from benchmarks.rank_processes import Processes
from replica import engine as engine_module
from replica import group_health, rank_group
from replica.config import CacheConfig, EngineConfig, SchedulerConfig
from replica.engine import Engine
from replica.errors import EngineError, RanksLostError
from replica.fake_runner import expected_output
from replica.kv_messages import ArenaPlace, KVPeer, KVSpace
from replica.messages import FinishReason, RequestId, RouterId, SamplingParams, Submit
from replica.rank_group import RankGroup
from replica.step import NewSequence, StepPlan, StepResult
from replica.step_channel import SLOT_BYTES, encode_step
from tests.cluster.harness import request, until
from tests.cluster.test_given_up import Listener

pytestmark = pytest.mark.anyio
ELSEWHERE = pytest.mark.parametrize("node", ["here", "there"])


@asynccontextmanager
async def group(size: int, kind: str = "fake", node: str = "here") -> AsyncIterator[tuple[RankGroup, Processes]]:
    """Started; ended whatever the test did, and no process left."""
    launcher = Processes(size, kind, node)
    ranks = RankGroup(launcher, size, "here", host="127.0.0.1")
    try:
        await ranks.start()
        yield ranks, launcher
    finally:
        await ranks.close()
        await until(lambda: all(one.process.poll() is not None for one in launcher.started.values()))


async def steps(ranks: RankGroup, first: int = 0) -> list[int]:
    """Twenty steps of one sequence."""
    new = NewSequence(first, [1, 2, 3], 3, [3, 1], SamplingParams(50, temperature=0.0, ignore_eos=True))
    tokens: list[int] = []
    result = await ranks.execute(StepPlan(first, [first], [0], [3], [new]))
    for position in range(3, 23):
        tokens += result.token_ids
        result = await ranks.execute(StepPlan(first + position, [first], [position], [1]))
    return tokens


REFERENCE = expected_output([1, 2, 3], 20, vocab_size=49152, eos=frozenset({2}))


@ELSEWHERE
async def test_three_ranks_give_the_reference_and_a_long_plan_arrives(node: str) -> None:
    async with group(3, node=node) as (ranks, _):
        assert await steps(ranks) == REFERENCE
        # more than a slot of shared memory holds: it comes through the sockets, and the next one does not again
        sampling = SamplingParams(5, temperature=0.0, ignore_eos=True)
        long = [NewSequence(100 + i, [70000] * 1000, 1000, list(range(63)), sampling) for i in range(60)]
        assert len(encode_step(StepPlan(1, [], [], [], long), None)) > SLOT_BYTES
        result = await ranks.execute(StepPlan(1, [100], [0], [1000], long))
        assert result.token_ids == expected_output([70000] * 1000, 1, vocab_size=49152, eos=frozenset({2}))
        assert await steps(ranks, 200) == REFERENCE


async def test_a_step_that_raises_begins_a_generation_and_keeps_the_processes() -> None:
    """With collectives the peers of a rank that raised wait for it in vain; so all leave the step."""
    async with group(2) as (ranks, launcher):
        before = [one.process.pid for one in launcher.started.values()]
        with pytest.raises(RanksLostError, match=r"rank \d of 2 failed in step 7: KeyError\(77\)"):
            await ranks.execute(StepPlan(7, [77], [0], [1]))
        await ranks.recover()
        assert [one.process.pid for one in launcher.started.values()] == before
        assert await steps(ranks, 200) == REFERENCE


async def test_who_raised_because_a_peer_is_gone_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its word comes before the socket of the dead one closes, now and then."""
    monkeypatch.setattr(rank_group, "_PEER_S", 30.0)
    async with group(2) as (ranks, launcher):
        future = ranks.execute(StepPlan(7, [77], [0], [1]))
        assert await ranks._wait(lambda: bool(ranks._seats[0].failed), 10)
        os.kill(launcher.started[1].process.pid, signal.SIGKILL)
        with pytest.raises(RanksLostError, match="rank 1 of 2 is gone"):
            await future
        assert ranks.counters["rank_losses_gone"] == 1
        assert not ranks.counters.get("rank_losses_failed")


async def test_each_rank_copies_its_part_and_the_slowest_counts(tmp_path: Path) -> None:
    """Through an arena that both map; a block is loaded when both have their parts, and equal tokens need both."""
    path = tmp_path / "arena"
    path.write_bytes(bytes(4 * 256))
    place = ArenaPlace(str(path), KVPeer("r", "1"), KVSpace("fake", 16, 256, 2, ""), "c")
    prompt = list(range(40, 57))
    sampling = SamplingParams(50, temperature=0.0, ignore_eos=True)

    async def until_copied(ranks: RankGroup, count: int) -> StepResult:
        while (result := await ranks.execute(StepPlan(9, [], [], [], waits_for_copies=True))).copied < count:
            pass
        return result

    async with group(2, kind="tier") as (ranks, _):
        first = await ranks.execute(StepPlan(0, [0], [0], [17], [NewSequence(0, prompt, 17, [3, 1], sampling)]))
        await ranks.execute(StepPlan(1, [], [], [], stores=[(3, 2)], first_copy=0, arena=place))
        assert (await until_copied(ranks, 1)).failed_below == 0
        slot = path.read_bytes()[512:768]
        assert slot[:128] == slot[128:] != bytes(128), "the fake ranks hold the same"
        await ranks.execute(StepPlan(2, [], [], [], loads=[(2, 7)], first_copy=1))
        await until_copied(ranks, 2)
        new = NewSequence(1, prompt, 17, [7, 8], sampling)
        again = await ranks.execute(StepPlan(3, [1], [16], [1], [new]))
        assert again.token_ids == first.token_ids == expected_output(prompt, 1, vocab_size=49152, eos=frozenset({2}))
        await ranks.execute(StepPlan(4, [1], [17], [1]))  # rank 1 raises if it would have chosen otherwise
        elsewhere = msgspec.structs.replace(place, socket_path=str(tmp_path / "nothing"), incarnation="d")
        await ranks.execute(StepPlan(5, [], [], [], loads=[(2, 9)], first_copy=2, arena=elsewhere))
        assert (await until_copied(ranks, 3)).failed_below == 3


@ELSEWHERE
@pytest.mark.parametrize("rank", [0, 2])
async def test_a_killed_rank_is_noticed_and_replaced_and_the_others_stay(node: str, rank: int) -> None:
    async with group(3, node=node) as (ranks, launcher):
        await steps(ranks)
        before = {r: one.process.pid for r, one in launcher.started.items()}
        lost = asyncio.Event()
        ranks.on_loss = lost.set
        killed = time.monotonic()
        os.kill(before[rank], signal.SIGKILL)
        await asyncio.wait_for(lost.wait(), 1)
        print(f"kill -9 of rank {rank}: noticed after {1000 * (time.monotonic() - killed):.1f} ms")
        with pytest.raises(RanksLostError, match=f"rank {rank} of 3 is gone"):
            await ranks.execute(StepPlan(9, [], [], []))
        await ranks.recover()
        print(f"whole again after {time.monotonic() - killed:.2f} s")
        after = {r: one.process.pid for r, one in launcher.started.items()}
        assert {r for r in after if after[r] != before[r]} == {rank}
        assert await steps(ranks, 50) == REFERENCE


async def test_a_stopped_rank_is_noticed_within_a_second() -> None:
    async with group(2) as (ranks, launcher):
        await steps(ranks)
        lost = asyncio.Event()
        ranks.on_loss = lost.set
        stopped = time.monotonic()
        os.kill(launcher.started[1].process.pid, signal.SIGSTOP)
        await asyncio.wait_for(lost.wait(), 1)
        print(f"SIGSTOP: noticed after {1000 * (time.monotonic() - stopped):.0f} ms")
        await ranks.recover()
        assert await steps(ranks, 50) == REFERENCE


async def test_a_step_that_hangs_ends_the_rank_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_health, "FIRST_STEP_S", 0.3)
    async with group(1, kind="deaf") as (ranks, launcher):
        first = launcher.started[0].process.pid
        with pytest.raises(RanksLostError, match="hangs in a step"):
            await asyncio.wait_for(ranks.execute(StepPlan(0, [0], [0], [1])), 5)
        await ranks.recover()
        assert launcher.started[0].process.pid != first


async def test_a_group_that_cannot_be_started_again_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async with group(2) as (ranks, launcher):
        monkeypatch.setattr(Processes, "__call__", dying(Processes.__call__))
        os.kill(launcher.started[1].process.pid, signal.SIGKILL)
        await until(lambda: ranks.is_lost)
        with pytest.raises(EngineError, match="could not be started again in 3 attempts"):
            await ranks.recover()


def dying(launch: Callable) -> Callable:
    def launch_and_kill(self: Processes, *arguments: object) -> object:
        launched = launch(self, *arguments)
        launched.process.kill()
        return launched

    return launch_and_kill


async def test_an_engine_gives_everything_back_and_takes_work_again() -> None:
    """What was in the step ends as a failed step's, the rest is moved; meanwhile the door is closed."""
    launcher = Processes(2, "fake")
    config = EngineConfig(
        cache=CacheConfig(block_size=16), scheduler=SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=1)
    )
    engine = Engine(config, RankGroup(launcher, 2, "here"), incarnation="one")
    await engine.start()
    listener = Listener(engine, "router")
    try:
        listener.submit(request("runs", [1, 2, 3], 900))
        listener.submit(request("waits", [4], 2))
        await until(lambda: engine.core.scheduler.counters.steps > 10)
        os.kill(launcher.started[1].process.pid, signal.SIGKILL)
        await until(lambda: not engine.core.load(0).is_ready)
        assert engine.core.submit(RouterId("x"), request("late", [1], 2), 0, 0.0).refusal == "not_ready"
        await until(lambda: len(listener.ends) == 2)
        assert listener.ends["waits"] is FinishReason.MOVED
        assert listener.ends["runs"] in (FinishReason.ERROR, FinishReason.MOVED)  # between two steps: moved
        engine.check_health()
        await until(lambda: engine.core.load(0).is_ready)
        listener.engine.handle(listener.link, Submit(request("again", [1, 2, 3], 5)))
        await until(lambda: listener.ends.get("again") is FinishReason.LENGTH)
        engine.core.validate()
    finally:
        await engine.close()
        await listener.task


@asynccontextmanager
async def engine_of_two() -> AsyncIterator[tuple[Engine, Processes, Listener]]:
    """With one request that runs."""
    launcher = Processes(2, "fake")
    config = EngineConfig(cache=CacheConfig(block_size=16), scheduler=SchedulerConfig(max_num_batched_tokens=64))
    engine = Engine(config, RankGroup(launcher, 2, "here"), incarnation="one")
    await engine.start()
    listener = Listener(engine, "router")
    try:
        listener.submit(request("runs", [1, 2, 3], 900))
        await until(lambda: engine.core.scheduler.counters.steps > 10)
        yield engine, launcher, listener
    finally:
        await engine.close()
        await listener.task


async def test_a_drain_waits_for_the_mending_and_takes_back_what_was_given_away() -> None:
    async with engine_of_two() as (engine, launcher, listener):
        os.kill(launcher.started[1].process.pid, signal.SIGKILL)
        await until(lambda: "runs" in listener.ends)
        drained = asyncio.create_task(engine.drain(20.0))
        await until(lambda: engine.core.load(0).is_ready)
        assert not drained.done()
        back = msgspec.structs.replace(request("back", [1, 2, 3], 5), is_returning=True)
        listener.engine.handle(listener.link, Submit(back))
        await drained
        assert listener.ends["back"] is FinishReason.LENGTH
        counters = engine.core.load(0).counters
        assert (counters["rank_losses_gone"], counters["group_restarts"], counters["ranks_alive"]) == (1, 1, 2)


async def test_a_loss_soon_after_another_one_is_waited_for_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was given back the first time has not come yet, and its time must not run out while ranks start again."""
    monkeypatch.setattr(engine_module, "COME_BACK_S", 0.05)
    async with engine_of_two() as (engine, launcher, _listener):
        os.kill(launcher.started[1].process.pid, signal.SIGKILL)
        await until(lambda: not engine.core.load(0).is_ready)
        await until(lambda: engine.core.load(0).is_ready)
        os.kill(launcher.started[1].process.pid, signal.SIGKILL)
        await until(lambda: not engine.core.load(0).is_ready)
        drained = asyncio.create_task(engine.drain(20.0))
        await until(lambda: engine.core.load(0).is_ready or drained.done())
        assert not drained.done()
        await drained


async def test_a_drain_does_not_wait_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine_of_two() as (engine, launcher, listener):
        monkeypatch.setattr(RankGroup, "recover", lambda self: asyncio.Event().wait())
        os.kill(launcher.started[1].process.pid, signal.SIGKILL)
        await until(lambda: "runs" in listener.ends)
        began = time.monotonic()
        await engine.drain(0.5)
        assert 0.5 <= time.monotonic() - began < 3.0


async def test_a_drain_of_an_idle_replica_waits_for_no_mending(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine_of_two() as (engine, launcher, listener):
        engine.core.abort(listener.link.router_id, RequestId("runs"), 0.0)
        await until(lambda: not engine.core.num_unfinished)
        monkeypatch.setattr(RankGroup, "recover", lambda self: asyncio.Event().wait())
        os.kill(launcher.started[1].process.pid, signal.SIGKILL)
        await until(lambda: not engine.core.load(0).is_ready)
        await asyncio.wait_for(engine.drain(60.0), 5)
