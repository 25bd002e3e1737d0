"""kill -9 of one of two replicas with the real model under load, seen by the clients."""

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
from benchmarks.load import ask
from cluster.process_sweep import serve_replicas


class KillOutcome(msgspec.Struct, frozen=True):
    """`num_errors` counts streams with an error or a wrong number of tokens."""

    num_errors: int
    num_unhealthy: int
    replaced_after_s: float


def measure(num_streams: int = 16, output_len: int = 60, runner: str = "torch") -> KillOutcome:
    """A fresh cluster of two replicas; the kill comes when every stream has begun."""
    shape = ("--replicas", "2", "--runner", runner)
    with tempfile.TemporaryDirectory() as folder, servers.shoal(Path(folder), *shape) as server:
        return asyncio.run(_measure(server, num_streams, output_len))


async def _measure(server: servers.Server, num_streams: int, output_len: int) -> KillOutcome:
    victim = serve_replicas(server.process.pid, "Replica")[0]
    all_begun = asyncio.Event()
    num_begun = 0
    times: list[float] = []

    def on_first() -> None:
        nonlocal num_begun
        num_begun += 1
        if num_begun == num_streams:
            all_begun.set()

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        before = await until_up(session, server.url)
        streams = [
            asyncio.create_task(ask(session, server.url, server.model, [1000 + n] * 20, output_len, on_first))
            for n in range(num_streams)
        ]
        await all_begun.wait()
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        replacement = asyncio.create_task(until_up(session, server.url, besides=before))
        replacement.add_done_callback(lambda _: times.append(time.monotonic() - killed))
        unhealthy = 0
        while not all(stream.done() for stream in streams):
            async with session.get(f"{server.url}/health") as response:
                unhealthy += response.status != 200
            await asyncio.sleep(0.05)
        await replacement
    answers = [stream.result() for stream in streams]
    return KillOutcome(sum(bool(answer.error) for answer in answers), unhealthy, times[0])


async def until_up(session: aiohttp.ClientSession, url: str, besides: frozenset[str] = frozenset()) -> frozenset[str]:
    """Ids of the replicas that are up, once there are two and one of them is none of `besides`."""
    for _ in range(2400):
        async with session.get(f"{url}/status") as response:
            status = await response.json()
        up = frozenset(replica["replica_id"] for replica in status["replicas"] if replica["state"] == "up")
        if len(up) >= 2 and up - besides:
            return up
        await asyncio.sleep(0.05)
    raise TimeoutError("no new replica was up within two minutes")
