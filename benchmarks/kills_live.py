"""`python -m benchmarks.kills_live --kills 30 --runner torch`: kill -9 of one of two replicas of a real cluster, again
and again as soon as both are up, while clients stream. Each stream's tokens are compared with an undisturbed run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import tempfile
import time
from pathlib import Path

import aiohttp
import msgspec

from benchmarks import servers
from benchmarks.kill import until_up
from benchmarks.load import percentiles
from cluster.process_sweep import serve_replicas

NUM_PROMPTS = 16


class Read(msgspec.Struct):
    """What one client read."""

    tokens: list[int]
    times: list[float] = []
    finish_reason: str | None = None
    error: str = ""

    def gap_over(self, instant: float) -> float | None:
        """Seconds between its last event before `instant` and the next; None if it was not streaming then."""
        if not self.times or not self.times[0] <= instant <= self.times[-1]:
            return None
        after = next(i for i, at in enumerate(self.times) if at >= instant)
        return self.times[after] - self.times[max(0, after - 1)]


class KillsOutcome(msgspec.Struct, frozen=True):
    """`gaps_s`: of all streams that ran at the moment of a kill; about half of them were on the killed replica."""

    num_kills: int
    num_streams: int
    faults: list[str]
    num_unhealthy: int
    gaps_s: list[float]
    replaced_s: list[float]
    duration_s: float

    def __str__(self) -> str:
        gaps, replaced = percentiles(self.gaps_s), percentiles(self.replaced_s)
        slower = percentiles(sorted(self.gaps_s)[len(self.gaps_s) // 2 :])
        return (
            f"{self.num_kills} kills in {self.duration_s:.0f} s, {self.num_streams} streams; {len(self.faults)} faults "
            f"{self.faults[:3]}, {self.num_unhealthy} looks at /health that were not 200; gap over the kill, "
            f"{len(self.gaps_s)} streams: p50 {gaps['p50']:.0f} ms, p99 {gaps['p99']:.0f}, max {gaps['max']:.0f}; "
            f"slower half p50 {slower['p50']:.0f}; replaced after p50 {replaced['p50']:.0f}, max {replaced['max']:.0f}"
        )


class _Clients:
    """`num_streams` clients that go on until `is_over`."""

    def __init__(self, session: aiohttp.ClientSession, server: servers.Server, output_len: int) -> None:
        self._session = session
        self._server = server
        self._output_len = output_len
        self.references: list[list[int]] = []
        self.reads: list[Read] = []
        self.faults: list[str] = []
        self.running: set[int] = set()
        self.is_over = False

    async def learn(self) -> None:
        """The undisturbed run."""
        reads = await asyncio.gather(*(self._read(number, Read([])) for number in range(NUM_PROMPTS)))
        self.references = [read.tokens for read in reads]
        assert all(len(tokens) == self._output_len for tokens in self.references), [read.error for read in reads]

    async def go_on(self, number: int) -> None:
        while not self.is_over:
            read = Read([])
            self.reads.append(read)
            await self._read(number % NUM_PROMPTS, read)
            self._judge(number % NUM_PROMPTS, read)
            number += 1

    def _judge(self, number: int, read: Read) -> None:
        expected = self.references[number]
        if read.error:
            self.faults.append(read.error)
        elif read.tokens != expected:
            right = next((i for i, (a, b) in enumerate(zip(read.tokens, expected, strict=False)) if a != b), -1)
            self.faults.append(f"{len(read.tokens)} of {len(expected)} tokens, first wrong at {right}")
        elif read.finish_reason != "length":
            self.faults.append(f"finish_reason {read.finish_reason}")

    async def _read(self, number: int, read: Read) -> Read:
        body = {
            "model": self._server.model,
            "prompt": [1000 + 37 * number + i for i in range(20)],
            "max_tokens": self._output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        try:
            async with self._session.post(f"{self._server.url}/v1/completions", json=body) as response:
                if response.status != 200:
                    read.error = f"{response.status}: {(await response.text())[:200]}"
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        self._take(read, json.loads(line[6:]))
        except aiohttp.ClientError as error:
            read.error = repr(error)
        return read

    def _take(self, read: Read, chunk: dict[str, object]) -> None:
        if "error" in chunk:
            read.error = str(chunk["error"])[:200]
            return
        for choice in chunk["choices"]:  # type: ignore[attr-defined]
            read.tokens += choice["token_ids"]
            read.finish_reason = choice["finish_reason"]
            read.times.append(time.monotonic())


async def _measure(
    server: servers.Server, num_kills: int, num_streams: int, output_len: int, seed: int
) -> KillsOutcome:
    draw, began = random.Random(seed), time.monotonic()
    killed_at: list[float] = []
    replaced_s: list[float] = []
    num_unhealthy = 0
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        up = await until_up(session, server.url)
        clients = _Clients(session, server, output_len)
        await clients.learn()
        tasks = [asyncio.create_task(clients.go_on(number)) for number in range(num_streams)]
        for _ in range(num_kills):
            await asyncio.sleep(draw.uniform(0.2, 1.2))
            os.kill(draw.choice(serve_replicas(server.process.pid, "Replica")), signal.SIGKILL)
            killed_at.append(time.monotonic())
            replacement = asyncio.create_task(until_up(session, server.url, besides=up))
            while not replacement.done():
                async with session.get(f"{server.url}/health") as response:
                    num_unhealthy += response.status != 200
                await asyncio.wait([replacement], timeout=0.05)
            up |= replacement.result()
            replaced_s.append(time.monotonic() - killed_at[-1])
        clients.is_over = True
        await asyncio.gather(*tasks)
    gaps = [gap for at in killed_at for read in clients.reads if (gap := read.gap_over(at)) is not None]
    duration_s = time.monotonic() - began
    return KillsOutcome(num_kills, len(clients.reads), clients.faults, num_unhealthy, gaps, replaced_s, duration_s)


def measure(
    num_kills: int, *, runner: str = "fake", num_streams: int = 16, output_len: int = 100, seed: int = 0
) -> KillsOutcome:
    """A fresh cluster of two replicas and one router."""
    shape = ("--replicas", "2", "--runner", runner)
    with tempfile.TemporaryDirectory() as folder, servers.shoal(Path(folder), *shape) as server:
        return asyncio.run(_measure(server, num_kills, num_streams, output_len, seed))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--runner", choices=["fake", "torch"], default="torch")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=60, help="of each stream")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and victims")
    options = parser.parse_args()
    outcome = measure(
        options.kills,
        runner=options.runner,
        num_streams=options.streams,
        output_len=options.tokens,
        seed=options.seed,
    )
    print(f"{options.runner}: {outcome}")
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
