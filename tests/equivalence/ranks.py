"""Several ranks of one model as processes that talk over gloo. Rank 0 drives and tells the others plans and results."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from benchmarks.servers import free_port
from replica.collective import GroupCollective
from replica.config import EngineConfig
from replica.model_runner import TorchModelRunner
from replica.shard import Shard
from replica.step import OpenArena, StepPlan, StepResult

#: what rank 0 does with its runner; returns something that can be pickled
Work = Callable[[Any], Any]


class Together:
    """Rank 0's runner with the others behind it: looks like a runner to whoever drives it."""

    def __init__(self, runner: TorchModelRunner) -> None:
        self.runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "runner":
            super().__setattr__(name, value)
        else:
            setattr(self.runner, name, value)

    def execute(self, plan: StepPlan) -> StepResult:
        """One step of all ranks."""
        _tell(plan)
        result = self.runner.execute(plan)
        _tell(result)
        return result


def run_on_ranks(
    size: int, config: EngineConfig, folders: Sequence[Path], work: Work, open_arena: OpenArena | None = None
) -> list[list[Any]]:
    """For each folder: what `work(rank 0's runner)` returned, and then each rank's (bytes of weights, of the pool).
    Everything that is passed on can be pickled.
    """
    context = multiprocessing.get_context("spawn")
    port = free_port()
    ends: list[Connection] = []
    processes: list[BaseProcess] = []
    for rank in range(size):
        ours, theirs = context.Pipe()
        args = (theirs, Shard(rank, size), port, config, folders, work, open_arena)
        process: BaseProcess = context.Process(target=_rank_main, args=args, daemon=True)
        process.start()
        theirs.close()
        ends.append(ours)
        processes.append(process)
    try:
        answers = [end.recv() for end in ends]
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    for answer in answers:
        if isinstance(answer, str):
            raise AssertionError(answer)
    return [[answers[0][i][0], *(answer[i][1] for answer in answers)] for i in range(len(folders))]


def _tell(message: object) -> None:
    torch.distributed.broadcast_object_list([message], 0)


def _hear() -> Any:
    box: list[Any] = [None]
    torch.distributed.broadcast_object_list(box, 0)
    return box[0]


def _rank_main(
    end: Connection,
    shard: Shard,
    port: int,
    config: EngineConfig,
    folders: Sequence[Path],
    work: Work,
    open_arena: OpenArena | None,
) -> None:
    try:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        torch.distributed.init_process_group("gloo", rank=shard.rank, world_size=shard.size)
        group = torch.distributed.group.WORLD
        assert group is not None
        answers = []
        for folder in folders:
            collective = GroupCollective(group)
            runner = TorchModelRunner(config, folder, shard=shard, collective=collective, open_arena=open_arena)
            answer = None
            if shard.rank == 0:
                answer = work(Together(runner))
                _tell(None)
            else:
                while (plan := _hear()) is not None:
                    runner.execute(plan)
                    if runner.copies is not None:
                        runner.copies.wait(10)  # rank 0 alone tells how far copies are
                    runner.adopt(_hear())
            answers.append((answer, runner.held_bytes))
        end.send(answers)
        torch.distributed.destroy_process_group()
    except BaseException:
        end.send(traceback.format_exc())
