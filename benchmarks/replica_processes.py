"""Replica processes of our own, without Ray and Serve: engine, gRPC service and a fake runner in each, for kill -9 and
SIGSTOP by the hundred. They are forked from a server that has imported everything, so a replacement is soon up.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from replica.config import AdmissionConfig, CacheConfig, EngineConfig, SchedulerConfig
from replica.engine import Engine
from replica.fake_runner import CostModel, FakeModelRunner
from replica.runner_thread import PacedRunner, RunnerThread
from replica.service import ReplicaService

VOCAB_SIZE = 49152
EOS = 2


def _main(name: str, connection: Connection, step_s: float, scheduler: Mapping[str, Any]) -> None:
    asyncio.run(_serve(name, connection, step_s, scheduler))


async def _serve(name: str, connection: Connection, step_s: float, scheduler: Mapping[str, Any]) -> None:
    """Until the other end of `connection` is closed: nothing is left behind when the parent dies."""
    config = EngineConfig(
        cache=CacheConfig(block_size=16),
        scheduler=SchedulerConfig(**{"max_num_batched_tokens": 256, **scheduler}),
        admission=AdmissionConfig(max_queued_requests=256),
    )
    runner = FakeModelRunner(
        num_blocks=4096, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,), cost=CostModel(step_s, 0, 0, 0)
    )
    engine = Engine(config, RunnerThread(lambda: PacedRunner(runner)), incarnation=name)
    await engine.start()
    service = ReplicaService(engine)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(connection.fileno(), ended.set)
    connection.send(await service.start("127.0.0.1"))
    await ended.wait()
    os._exit(0)


class ReplicaProcess:
    """One replica. `address` is there after `await started()`."""

    def __init__(self, number: int, step_s: float, scheduler: Mapping[str, Any]) -> None:
        self.name = f"replica-{number}"
        self.address = ""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=_main, args=(self.name, theirs, step_s, dict(scheduler)), daemon=True)
        self.process.start()
        theirs.close()

    async def started(self) -> None:
        """Wait until it listens."""
        loop = asyncio.get_running_loop()
        self.address = await loop.run_in_executor(None, self._connection.recv)

    def signal(self, number: signal.Signals) -> None:
        """To this process and no other."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def close(self) -> None:
        """It ends by itself when its connection is closed; one that is stopped or slow is killed."""
        self._connection.close()
        self.process.kill()
        self.process.join()


class ReplicaProcesses:
    """Those that are up, as Serve's membership would tell routers of them. `on_view` hears of each change."""

    def __init__(self, step_s: float, scheduler: Mapping[str, Any] | None = None) -> None:
        self._step_s = step_s
        self._scheduler = scheduler or {}
        self._num_made = 0
        self.up: list[ReplicaProcess] = []
        self.on_view: list[Any] = []

    async def add(self) -> ReplicaProcess:
        """One more, told to the routers when it listens."""
        replica = ReplicaProcess(self._num_made, self._step_s, self._scheduler)
        self._num_made += 1
        await replica.started()
        self.up.append(replica)
        self._tell()
        return replica

    def kill(self, replica: ReplicaProcess) -> None:
        """kill -9. Routers are not told: they find out by themselves, and Serve would tell them a second later."""
        self.up.remove(replica)
        replica.signal(signal.SIGKILL)
        replica.process.join()

    def forget(self) -> None:
        """Serve's word that those who were killed are gone."""
        self._tell()

    def close(self) -> None:
        """End all of them."""
        for replica in self.up:
            replica.close()
        self.up.clear()

    def _tell(self) -> None:
        view = {r.name: {"address": r.address, "incarnation": r.name} for r in self.up}
        for tell in self.on_view:
            tell(view)
