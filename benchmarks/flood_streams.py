"""What a flood costs those who were let in: gaps and TTFT of steady streams, and CPU for each refused request.

One replica and one router. Eight streams and one short request after the other fill all places that run; then the same
beside clients that send as fast as the server answers, from a process of its own at lower priority. The batch is the
same in both phases, so what differs is the flood. `is_direct`: past Serve's proxy, at the router's own port.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import sys
from collections import Counter

import aiohttp
import msgspec

from benchmarks import servers
from benchmarks.cpu_time import CpuTime, cpu_time
from benchmarks.flood import Shape, cluster
from benchmarks.load import Answer, ask, percentiles

NUM_STREAMS = 8
#: connections that flood
NUM_CLIENTS = 64
SHAPE = Shape(num_routers=1, num_replicas=1, max_num_seqs=NUM_STREAMS + 1, cap=16)
#: below the servers, whose cores the flooding process shares
_NICE = 10
_SHORT_LEN = 10


class Phase(msgspec.Struct, frozen=True):
    """Of the streams; CPU of all processes meanwhile. `ttft_s` and the others are means over all requests that ended
    in the phase, as the router tells them.
    """

    gap_ms: dict[str, float]
    num_failed: int
    ttft_s: float
    queue_s: float
    prefill_s: float
    by_process: dict[str, float]


class Outcome(msgspec.Struct, frozen=True):
    """`codes`: what the flood was answered."""

    quiet: Phase
    flooded: Phase
    codes: dict[int, int]

    @property
    def gap_ratio(self) -> float:
        return self.flooded.gap_ms["p99"] / self.quiet.gap_ms["p99"]

    @property
    def unexplained_s(self) -> float:
        """Of the mean TTFT, what is neither queue nor prefill: held, on its way, written down."""
        return self.flooded.ttft_s - self.flooded.queue_s - self.flooded.prefill_s

    def cpu_us(self, process: str) -> float:
        """CPU of a refused request, by what the process used above the quiet phase."""

        def used(phase: Phase) -> float:
            return sum(seconds for name, seconds in phase.by_process.items() if process in name)

        return 1e6 * (used(self.flooded) - used(self.quiet)) / max(1, self.codes.get(503, 0))


def measure(is_direct: bool = False, output_len: int = 600, num_clients: int = NUM_CLIENTS) -> Outcome:
    """A fresh cluster, a short run to warm it up, then both phases."""
    with cluster(msgspec.structs.replace(SHAPE, one_router=is_direct)) as (server, urls):
        return asyncio.run(_measure(server, urls[0], output_len, num_clients))


async def _measure(server: servers.Server, url: str, output_len: int, num_clients: int) -> Outcome:
    await _phase(server, url, output_len // 10)
    quiet = await _phase(server, url, output_len)
    codes: Counter[int] = Counter()
    flooded = await _phase(server, url, output_len, num_clients, codes)
    return Outcome(quiet, flooded, dict(sorted(codes.items())))


async def _phase(
    server: servers.Server, url: str, output_len: int, num_clients: int = 0, codes: Counter[int] | None = None
) -> Phase:
    before, sums = cpu_time(server.process.pid), await _sums(url)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        all_begun = asyncio.Event()
        num_begun = 0

        def on_first() -> None:
            nonlocal num_begun
            num_begun += 1
            if num_begun == NUM_STREAMS:
                all_begun.set()

        streams = [
            asyncio.create_task(ask(session, url, server.model, [1000 + n] * 20, output_len, on_first))
            for n in range(NUM_STREAMS)
        ]
        await all_begun.wait()
        flood = await _start_flood(url, num_clients or 1)
        answers: list[Answer] = await asyncio.gather(*streams)
        told = await _end_flood(flood)
    if codes is not None:
        codes.update(told)
    used: CpuTime = cpu_time(server.process.pid).since(before)
    ttft, queue, prefill = (
        (late - early) / max(1, num_late - num_early)
        for (early, num_early), (late, num_late) in zip(sums, await _sums(url), strict=True)
    )
    gaps = [gap for answer in answers for gap in answer.gaps_s]
    num_failed = sum(bool(answer.error) for answer in answers)
    return Phase(percentiles(gaps), num_failed, ttft, queue, prefill, used.by_process)


async def _sums(url: str) -> list[tuple[float, float]]:
    """Sum and count of TTFT, queue time, prefill time, over all models."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        text = await response.text()
    names = ("time_to_first_token", "request_queue_time", "request_prefill_time")
    found = []
    for name in names:
        values = [
            sum(map(float, re.findall(rf"^vllm:{name}_seconds_{what}{{.*}} (.*)$", text, re.MULTILINE)))
            for what in ("sum", "count")
        ]
        found.append((values[0], values[1]))
    return found


async def _start_flood(url: str, num_clients: int) -> asyncio.subprocess.Process:
    command = ["-m", "benchmarks.flood_streams", "--flood", url, "--clients", str(num_clients)]
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    return process


async def _end_flood(process: asyncio.subprocess.Process) -> dict[int, int]:
    process.terminate()
    text, _ = await process.communicate()
    return {int(status): count for status, count in json.loads(text or b"{}").items()}


async def flood(url: str, num_clients: int) -> Counter[int]:
    """Until SIGTERM each connection sends its next request when the last one is answered. Statuses by count."""
    os.nice(_NICE)
    words = "time year people way day man thing woman life child world school state family student group country "
    body = json.dumps({"prompt": words * 4, "max_tokens": _SHORT_LEN, "ignore_eos": True}).encode()
    statuses: Counter[int] = Counter()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers={"content-type": "application/json"}) as session:

        async def client() -> None:
            while True:
                async with session.post(f"{url}/v1/completions", data=body) as response:
                    await response.read()
                    statuses[response.status] += 1

        tasks = [asyncio.create_task(client()) for _ in range(num_clients)]
        print("ready", flush=True)
        await stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return statuses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flood", metavar="URL", help="be the flooding process")
    parser.add_argument("--clients", type=int, default=NUM_CLIENTS)
    parser.add_argument("--direct", action="store_true", help="past Serve's proxy")
    parser.add_argument("--tokens", type=int, default=600, help="of each stream")
    options = parser.parse_args()
    if options.flood:
        print(json.dumps(asyncio.run(flood(options.flood, options.clients))))
        return
    found = measure(options.direct, options.tokens, options.clients)
    print(found)
    print(f"gap p99 x {found.gap_ratio:.2f}; TTFT not explained {1000 * found.unexplained_s:.0f} ms")
    for process in (":Router", "ProxyActor", ":Replica"):
        print(f"{process}: {found.cpu_us(process):.0f} us a refused request")


if __name__ == "__main__":
    main()
