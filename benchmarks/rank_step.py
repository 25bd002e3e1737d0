"""What a step costs beyond the runner thread when its ranks are processes: null runner, alternating rounds."""

from __future__ import annotations

import asyncio
import statistics
import time

import msgspec

from benchmarks.rank_processes import NullRunner, Processes
from replica.messages import SamplingParams
from replica.rank_group import RankGroup
from replica.runner_thread import RunnerThread
from replica.step import NewSequence, StepPlan
from replica.step_runner import StepRunner

IDLE_S = 5.0


class StepCost(msgspec.Struct, frozen=True):
    """Medians in microseconds, and what an idle group takes of a core."""

    thread_us: float
    group_us: float
    #: the same group with frames over sockets instead of shared memory
    sockets_us: float
    p99_us: float
    idle_share: float

    @property
    def extra_us(self) -> float:
        return self.group_us - self.thread_us


async def measure(num_ranks: int, batch: int, num_rounds: int, num_steps: int) -> StepCost:
    """`num_rounds` of `num_steps` for each way, in turn; the median of the rounds' medians counts."""
    launched = Processes(num_ranks), Processes(num_ranks)
    runners: list[StepRunner] = [
        RunnerThread(NullRunner),
        RankGroup(launched[0], num_ranks, "here"),
        RankGroup(launched[1], num_ranks, "here", use_shared_memory=False),
    ]
    for runner in runners:
        await runner.start()
    medians: list[list[float]] = [[] for _ in runners]
    all_of_group: list[float] = []
    for _ in range(num_rounds):
        for runner, found in zip(runners, medians, strict=True):
            times = await _steps(runner, batch, num_steps)
            found.append(statistics.median(times))
            if runner is runners[1]:
                all_of_group += times
    before = launched[0].cpu_s()
    await asyncio.sleep(IDLE_S)
    idle_share = (launched[0].cpu_s() - before) / IDLE_S
    for runner in runners:
        await runner.close()
    thread, group, sockets = (1e6 * statistics.median(found) for found in medians)
    p99 = 1e6 * sorted(all_of_group)[int(0.99 * len(all_of_group))]
    return StepCost(thread, group, sockets, p99, idle_share)


async def _steps(runner: StepRunner, batch: int, num_steps: int) -> list[float]:
    seq_ids, times = list(range(batch)), []
    new = [NewSequence(i, [5] * 64, 64, [0, 1, 2, 3], SamplingParams(100)) for i in seq_ids]
    await runner.execute(StepPlan(0, seq_ids, [0] * batch, [64] * batch, new))
    for step in range(num_steps):
        plan = StepPlan(step, seq_ids, [100 + step] * batch, [1] * batch)
        began = time.perf_counter()
        await runner.execute(plan)
        times.append(time.perf_counter() - began)
    return times
