"""Throughput over the number of replicas, with the fake runner: steps sleep, so what is measured is everything else."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

import aiohttp
import msgspec

from benchmarks import servers
from benchmarks.cpu_time import cpu_time
from benchmarks.load import Workload, run_load

#: few, so that eight replicas ask no more of a router than it can do on half a core
STREAMS_PER_REPLICA = 4


class Scaling(msgspec.Struct, frozen=True):
    """One number of replicas. CPU in seconds per second."""

    num_replicas: int
    tokens_per_s: float
    num_failed: int
    router_cores: float
    all_cores: float

    @property
    def router_us_per_token(self) -> float:
        return 1e6 * self.router_cores / self.tokens_per_s


def measure(num_replicas: int, output_len: int, rounds: int, is_streamed: bool) -> Scaling:
    """A fresh cluster, a short run to warm it up, then the one that counts. Streamed, each token is an event through
    router and proxy, which is most of the work; else an answer comes in one piece.
    """
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--replicas", str(num_replicas), "--runner", "fake")
        with servers.shoal(Path(folder), *flags) as server:
            streams = STREAMS_PER_REPLICA * num_replicas
            load = _streamed if is_streamed else _whole
            asyncio.run(load(server, Workload(20, 20, streams, streams, seed=9)))
            before = cpu_time(server.process.pid)
            tokens_per_s, num_failed, seconds = asyncio.run(
                load(server, Workload(20, output_len, streams, rounds * streams))
            )
            used = cpu_time(server.process.pid).since(before)
    router_s = sum(cpu_s for name, cpu_s in used.by_process.items() if ":Router" in name)
    return Scaling(num_replicas, tokens_per_s, num_failed, router_s / seconds, (used.other_s + used.model_s) / seconds)


async def _streamed(server: servers.Server, workload: Workload) -> tuple[float, int, float]:
    """Tokens per second, failures, seconds."""
    result = await run_load(server.url, server.model, workload)
    return result.output_tokens_per_s, result.num_failed, result.duration_s


async def _whole(server: servers.Server, workload: Workload) -> tuple[float, int, float]:
    """The same with answers in one piece."""
    prompts = iter(workload.prompts())
    num_tokens = num_failed = 0
    body = {"model": server.model, "max_tokens": workload.output_len, "temperature": 0, "ignore_eos": True}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def client() -> None:
            nonlocal num_tokens, num_failed
            for prompt in prompts:
                async with session.post(f"{server.url}/v1/completions", json={**body, "prompt": prompt}) as response:
                    if response.status == 200:
                        num_tokens += (await response.json())["usage"]["completion_tokens"]
                    else:
                        num_failed += 1

        started = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(workload.concurrency)))
        seconds = time.perf_counter() - started
    return num_tokens / seconds, num_failed, seconds
