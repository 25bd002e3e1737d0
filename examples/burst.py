"""Scenario B: 200 requests in three seconds at two replicas with a cap. Who is served, who is refused, and is anything
left behind?

`python -m examples.burst` starts a cluster with one router and one with three. `--url` uses a cluster that is already
up.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from benchmarks import servers

CAP = 16


class Outcome(msgspec.Struct, frozen=True):
    """`max_queued` is kept by each replica itself at every submission: a true maximum, not a sample."""

    codes: dict[int, int]
    max_queued: list[int]
    cap: int
    without_retry_after: int
    wrong_answers: int
    at_baseline: bool


async def measure(url: str, model: str, num_requests: int = 200, span_s: float = 3.0, max_tokens: int = 40) -> Outcome:
    """Send the burst, then wait until the replicas report that nothing is left."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        loop = asyncio.get_running_loop()
        started = loop.time()

        async def one(number: int) -> tuple[int, bool, bool]:
            await asyncio.sleep(max(0.0, started + span_s * number / num_requests - loop.time()))
            body = {"model": model, "prompt": [number + 1000, 2000, 3000] * 8, "max_tokens": max_tokens}
            body |= {"temperature": 0, "ignore_eos": True}
            async with session.post(f"{url}/v1/completions", json=body) as response:
                answer = await response.json()
                right = response.status != 200 or answer["usage"]["completion_tokens"] == max_tokens
                polite = response.status != 503 or int(response.headers.get("Retry-After", 0)) >= 1
                return response.status, polite, right

        results = await asyncio.gather(*(one(number) for number in range(num_requests)))
        status = await settled_status(session, url)
    replicas = status["replicas"]
    return Outcome(
        codes=dict(Counter(code for code, _, _ in results)),
        max_queued=[int(replica["counters"]["max_queued"]) for replica in replicas],
        cap=replicas[0]["queue_cap"],
        without_retry_after=sum(not polite for _, polite, _ in results),
        wrong_answers=sum(not right for _, _, right in results),
        at_baseline=all(_is_idle(replica) for replica in replicas),
    )


async def settled_status(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """The status once everything is idle, or after five seconds whatever it is."""
    status: dict[str, Any] = {}
    for _ in range(100):
        async with session.get(f"{url}/status") as response:
            status = await response.json()
        if all(_is_idle(replica) for replica in status["replicas"]):
            break
        await asyncio.sleep(0.05)
    return status


def _is_idle(replica: dict[str, Any]) -> bool:
    busy = replica["queued"] + replica["returning"] + replica["running"]
    return bool(busy == 0 and replica["kv_blocks_free"] == replica["kv_blocks"])


def measure_with(num_routers: int, *serve_args: str) -> Outcome:
    """Two replicas with a cap of 16 behind `num_routers` routers."""
    cap = ("--set", f"router.max_queued_requests_per_replica={CAP}", "--set", "scheduler.max_num_seqs=16")
    with tempfile.TemporaryDirectory() as folder:
        shape = ("--replicas", "2", "--routers", str(num_routers))
        with servers.shoal(Path(folder), *shape, *cap, *serve_args) as server:
            return asyncio.run(measure(server.url, server.model))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="a running cluster, e.g. http://127.0.0.1:8000")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    options = parser.parse_args()
    if options.url:
        print(asyncio.run(measure(options.url, options.model)))
        return
    for num_routers in (1, 3):
        outcome = measure_with(num_routers)
        print(
            f"{num_routers} router(s): answers {outcome.codes}; most queued at each replica {outcome.max_queued} "
            f"(cap {outcome.cap}); 503 without Retry-After: {outcome.without_retry_after}; "
            f"pools at baseline: {outcome.at_baseline}"
        )


if __name__ == "__main__":
    main()
