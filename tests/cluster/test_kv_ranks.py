"""KV tiers with ranks that map the arena each for itself, and with a runner in a process of its own: equal tokens from
memory, from disk and after a loss, and `kill -9` of one of them in the middle of copies.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from benchmarks.kv_engines import ask, counters, engine, forget, node, num_known, submit, until
from benchmarks.rank_processes import Processes
from cluster.kv_connector.connector import Connector
from replica.arena_client import open_arena
from replica.engine import Engine
from replica.fake_runner import CostModel, FakeModelRunner
from replica.kv_events import KV_LAYOUT
from replica.kv_messages import KVSpace, KVTier
from replica.rank_group import RankGroup
from replica.runner_process import RunnerProcess

pytestmark = pytest.mark.anyio
PROMPT = list(range(100, 300))
NUM_BLOCKS = 12  # of 16; the last 8 tokens and the answer fill none
Opened = AbstractAsyncContextManager[tuple[Engine, list[int]]]
Open = Callable[[Connector, str], Opened]


@asynccontextmanager
async def two_ranks(find: Connector, name: str) -> AsyncIterator[tuple[Engine, list[int]]]:
    """And their pids."""
    launcher = Processes(2, "node")
    group = RankGroup(launcher, 2, "here", host="127.0.0.1")
    async with engine(find, name, steps=group, num_ranks=2) as one:
        yield one, [launcher.started[rank].process.pid for rank in range(2)]


@asynccontextmanager
async def own_process(find: Connector, name: str) -> AsyncIterator[tuple[Engine, list[int]]]:
    """And its pid."""
    steps = RunnerProcess(partial(FakeModelRunner, num_blocks=64, cost=CostModel(0, 0, 0, 0), open_arena=open_arena))
    async with engine(find, name, steps=steps) as one:
        assert steps._process.pid is not None
        yield one, [steps._process.pid]


def space(num_ranks: int) -> KVSpace:
    return KVSpace("fake", 16, 128 * num_ranks, num_ranks, KV_LAYOUT)


@pytest.mark.parametrize(("opened", "num_ranks"), [(two_ranks, 2), (own_process, 1)])
async def test_memory_a_second_replica_and_disk_after_a_restart(opened: Open, num_ranks: int, tmp_path: Path) -> None:
    tier = partial(node, space=space(num_ranks), folder=tmp_path, num_disk_slots=64)
    async with tier() as one, opened(one, "a") as (first, _), opened(one, "b") as (second, _):
        await ask(first, PROMPT)
        await until(lambda: num_known(second) == NUM_BLOCKS)
        forget(first)
        for each in (first, second):
            await ask(each, PROMPT)
            assert counters(each)["kv_blocks_loaded"] == NUM_BLOCKS
        await until(lambda: one.core.stats(one.now).num_on_disk == NUM_BLOCKS)
    async with tier() as again, opened(again, "c") as (third, _):
        await until(lambda: num_known(third) == NUM_BLOCKS)
        await ask(third, PROMPT)
        assert again.core.stats(again.now).loads.given == {KVTier.DISK: NUM_BLOCKS}
        assert counters(third)["kv_blocks_loaded"] == NUM_BLOCKS


def held(one: Connector) -> tuple[int, ...]:
    stats = one.core.stats(one.now)
    return stats.num_leased, stats.num_reserved, stats.num_quarantined, stats.num_stranded


@pytest.mark.parametrize("when", ["load", "store"])
@pytest.mark.parametrize("victim", [0, 1])
async def test_a_rank_that_is_killed_in_the_middle_of_copies(victim: int, when: str) -> None:
    """It stands still with copies before it, and never gets to their end. The others have done theirs."""
    async with node(space=space(2)) as one, two_ranks(one, "a") as (first, pids):
        if when == "load":
            await ask(first, PROMPT)
            await until(lambda: num_known(first) == NUM_BLOCKS and held(one) == (0, 0, 0, 0))
            forget(first)
            os.kill(pids[victim], signal.SIGSTOP)
            told, _ = submit(first, PROMPT)
            await until(lambda: counters(first)["kv_loading"] == 1 and held(one)[0] == NUM_BLOCKS)
        else:
            told, _ = submit(first, PROMPT, 40)
            await until(lambda: told.num_output_tokens > 1)
            os.kill(pids[victim], signal.SIGSTOP)
            await until(lambda: counters(first)["kv_storing"] > 0 or one.core.stats(one.now).stores.stored > 0)
        os.kill(pids[victim], signal.SIGKILL)
        await until(lambda: told.finish_reason is not None)  # given back to its router
        await until(lambda: first.core.load(0).is_ready)
        await until(lambda: held(one) == (0, 0, 0, 0))
        await ask(first, PROMPT[3:])
        await until(lambda: num_known(first) >= NUM_BLOCKS)
        forget(first)
        loaded = counters(first)["kv_blocks_loaded"]
        await ask(first, PROMPT[3:])
        assert counters(first)["kv_blocks_loaded"] > loaded
        await until(lambda: held(one) == (0, 0, 0, 0) and first.core.blocks.num_free == first.core.blocks.num_blocks)
        first.core.validate()


async def test_a_runner_process_that_is_killed_in_the_middle_of_copies() -> None:
    """Its replica ends with it, and what it held comes back."""
    async with node(space=space(1)) as one, own_process(one, "other") as (other, _):
        await ask(other, PROMPT)
        async with own_process(one, "a") as (first, (pid,)):
            await until(lambda: num_known(first) == NUM_BLOCKS)
            await ask(first, [1, 2, 3])  # no step is under way
            os.kill(pid, signal.SIGSTOP)
            submit(first, PROMPT)
            await until(lambda: counters(first)["kv_loading"] == 1 and held(one)[0] == NUM_BLOCKS)
            os.kill(pid, signal.SIGKILL)
            await until(lambda: first.core.num_unfinished == 0 or first._num_failed_steps > 0)
        await until(lambda: held(one) == (0, 0, 0, 0))
        await ask(other, PROMPT)
