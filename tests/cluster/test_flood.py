"""A flood at four routers on real Ray: the cap is never passed, nobody hangs, and everything comes back, also when a
router is killed in the middle of it. How much of the cap is used is a claim (`benchmarks/claims_admission.py`): that
depends on the machine.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter

import aiohttp
import pytest

from tests.cluster.shoal_process import ShoalProcess, wait_until
from tests.cluster.test_serve import MODEL, is_at_baseline

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

CAP = 3
NUM_ROUTERS = 4
#: each sends so many requests, the next when the last one was answered
NUM_CLIENTS, NUM_EACH = 60, 4


async def flood(url: str, shoal: ShoalProcess, victim: int | None) -> Counter[int]:
    """Statuses of all answers; 0: the connection broke. The kill comes with the hundredth answer."""
    codes: Counter[int] = Counter()
    timeout = aiohttp.ClientTimeout(total=90)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

        async def client(number: int) -> None:
            body = {"model": MODEL, "prompt": [number + 3, 5, 6], "max_tokens": 30, "ignore_eos": True}
            for _ in range(NUM_EACH):
                try:
                    async with session.post(f"{url}/v1/completions", json=body) as response:
                        await response.read()
                        codes[response.status] += 1
                        if response.status == 503:
                            assert int(response.headers["Retry-After"]) >= 1
                except aiohttp.ClientError:
                    codes[0] += 1
                if victim is not None and sum(codes.values()) == 100:
                    os.kill(victim, signal.SIGKILL)

        await asyncio.gather(*map(client, range(NUM_CLIENTS)))
    return codes


@pytest.mark.parametrize("num_blocks", [4096, 6], ids=["room", "preemption"])
def test_the_cap_holds_in_a_flood_and_everything_comes_back(num_blocks: int) -> None:
    with ShoalProcess(
        "--replicas", "2", "--routers", str(NUM_ROUTERS),
        "--set", f"router.max_queued_requests_per_replica={CAP}",
        "--set", "scheduler.max_num_seqs=4",
        "--set", f"kv_cache.num_blocks={num_blocks}",
    ) as shoal:  # fmt: skip
        codes = asyncio.run(flood(shoal.url, shoal, victim=None))
        assert set(codes) == {200, 503}, codes
        assert codes.total() == NUM_CLIENTS * NUM_EACH
        check_replicas(shoal)
        if num_blocks < 100:
            assert sum(replica["counters"]["preemptions"] for replica in shoal.status()["replicas"]) > 0
            return
        wait_until(lambda: len(shoal.pids("Router")) == NUM_ROUTERS, 30, "four routers")
        codes = asyncio.run(flood(shoal.url, shoal, victim=shoal.pids("Router")[0]))
        assert codes.total() == NUM_CLIENTS * NUM_EACH, "a client hangs"
        assert codes[200] > 0
        # Serve's proxy answers 500 for those that the dead one had, and may find it for a moment longer
        assert set(codes) <= {0, 200, 500, 503}, codes
        check_replicas(shoal)


def check_replicas(shoal: ShoalProcess) -> None:
    """The replicas' own maxima, and nothing left: no sequence, no block, no permit."""
    wait_until(lambda: is_at_baseline(shoal), 15, "pools at baseline")
    wait_until(lambda: not any(r["permits"] for r in shoal.status()["replicas"]), 10, "permits back")
    for replica in shoal.status()["replicas"]:
        counters = replica["counters"]
        assert counters["max_queued"] == counters["max_queue_places"] == CAP, "passed, or never reached"
