"""A rank, or a whole replica with its ranks, is killed or stopped under load; seen by clients and by `/status`."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from pathlib import Path

import aiohttp
import msgspec

from benchmarks import servers
from benchmarks.load import Answer, ask
from cluster.process_sweep import rank_workers, serve_replicas, start_time

POLL_S = 0.02
LONG_S = 120.0


class LossOutcome(msgspec.Struct, frozen=True):
    """Seconds since the signal. `errors`: what went wrong with streams; `num_unhealthy`: looks at `/health` that did
    not say 200; `num_orphans`: ranks of a killed replica that were still there after `gone_s`.
    """

    errors: list[str]
    num_streams: int
    num_unhealthy: int
    noticed_s: float
    whole_s: float
    gone_s: float = 0.0
    num_orphans: int = 0


class Cluster:
    """Replicas of `num_ranks` ranks behind one router, streams that go on, and what happens to them."""

    def __init__(
        self, server: servers.Server, num_replicas: int, num_ranks: int, num_streams: int, output_len: int
    ) -> None:
        self.server, self.num_replicas, self.num_ranks = server, num_replicas, num_ranks
        self._output_len = output_len
        self._to_begin = num_streams
        self._all_begun = asyncio.Event()
        self._answers: list[Answer] = []
        self._is_over = False

    async def lose(self, number: signal.Signals, of_replica: bool) -> LossOutcome:
        """Send `number` to a rank, or to a replica, while all clients stream; until all is whole again."""
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await self._until_whole(session)
            clients = [asyncio.create_task(self._client(session, n)) for n in range(self._to_begin)]
            await self._all_begun.wait()
            before = await self._up(session)
            ranks = self._ranks()
            victims = serve_replicas(self.server.process.pid, "Replica") if of_replica else list(ranks)
            began = time.monotonic()
            os.kill(victims[-1], number)
            gone = asyncio.create_task(self._until_gone(ranks, began)) if of_replica else None
            outcome = await self._watch(session, before, began)
            gone_s, num_orphans = (0.0, 0) if gone is None else await gone
            self._is_over = True
            await asyncio.gather(*clients)
        errors = [answer.error for answer in self._answers if answer.error]
        return LossOutcome(errors, len(self._answers), *outcome, gone_s, num_orphans)

    async def _watch(
        self, session: aiohttp.ClientSession, before: frozenset[str], began: float
    ) -> tuple[int, float, float]:
        num_unhealthy, noticed_s = 0, 0.0
        while time.monotonic() - began < LONG_S:
            async with session.get(f"{self.server.url}/health") as response:
                num_unhealthy += response.status != 200
            up = await self._up(session)
            now = time.monotonic() - began
            if not noticed_s and not before <= up:
                noticed_s = now
            if noticed_s and len(up) == self.num_replicas and len(self._ranks()) == self.num_replicas * self.num_ranks:
                return num_unhealthy, noticed_s, now
            await asyncio.sleep(POLL_S)
        raise TimeoutError(f"not whole again within {LONG_S:.0f} s (noticed after {noticed_s:.2f} s)")

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        while not self._is_over:
            self._answers.append(
                await ask(
                    session, self.server.url, self.server.model, [1000 + number] * 20, self._output_len, self._note
                )
            )

    def _note(self) -> None:
        self._to_begin -= 1
        if self._to_begin == 0:
            self._all_begun.set()

    def _ranks(self) -> dict[int, int | None]:
        return {pid: start_time(pid) for pid in rank_workers(self.server.process.pid)}

    async def _until_gone(self, ranks: dict[int, int | None], began: float) -> tuple[float, int]:
        """Of the old ranks, those of the other replicas stay."""
        staying = (self.num_replicas - 1) * self.num_ranks
        while time.monotonic() - began < 10:
            left = sum(start_time(pid) == at for pid, at in ranks.items())
            if left == staying:
                break
            await asyncio.sleep(0.005)
        return time.monotonic() - began, left - staying

    async def _up(self, session: aiohttp.ClientSession) -> frozenset[str]:
        async with session.get(f"{self.server.url}/status") as response:
            status = await response.json()
        return frozenset(replica["replica_id"] for replica in status["replicas"] if replica["state"] == "up")

    async def _until_whole(self, session: aiohttp.ClientSession) -> None:
        for _ in range(2400):
            if len(await self._up(session)) == self.num_replicas:
                return
            await asyncio.sleep(0.05)
        raise TimeoutError("the replicas were not up within two minutes")


def measure(
    losses: list[tuple[str, signal.Signals, bool]],
    *,
    runner: str = "fake",
    num_ranks: int = 2,
    num_replicas: int = 2,
    num_streams: int = 16,
    output_len: int = 60,
) -> dict[str, LossOutcome]:
    """One cluster; `losses` (name, signal, to a replica and not to a rank) one after the other."""
    shape = ("--replicas", str(num_replicas), "--runner", runner, "--tensor-parallel-size", str(num_ranks))
    found = {}
    with tempfile.TemporaryDirectory() as folder, servers.shoal(Path(folder), *shape) as server:
        for name, number, of_replica in losses:
            cluster = Cluster(server, num_replicas, num_ranks, num_streams, output_len)
            found[name] = asyncio.run(cluster.lose(number, of_replica))
    return found


RANK_KILLED = ("rank_killed", signal.SIGKILL, False)
RANK_STOPPED = ("rank_stopped", signal.SIGSTOP, False)
REPLICA_KILLED = ("replica_killed", signal.SIGKILL, True)
REPLICA_STOPPED = ("replica_stopped", signal.SIGSTOP, True)
EVERYTHING = [RANK_KILLED, RANK_STOPPED, REPLICA_KILLED, REPLICA_STOPPED]
