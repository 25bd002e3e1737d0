"""A tenant beside another that sends ten times as much, on a live cluster: its time to the first token, in rounds that
alternate with rounds in which it is alone.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path

import aiohttp
import msgspec

from benchmarks import servers
from benchmarks.load import Answer, ask, percentiles
from replica.fake_runner import CostModel
from router.tenants import hashed

VICTIM, AGGRESSOR = "key-of-the-small-one", "key-of-the-large-one"
#: requests a second that one replica of eight places does (prompts of 20 to 60 tokens, outputs of 5 to 60)
CAPACITY = 24.0
NUM_SEATS = 8


class FairOutcome(msgspec.Struct, frozen=True):
    """TTFT in ms: of the small tenant alone and beside the large one, and of the large one."""

    solo_ms: float
    beside_ms: float
    large_ms: float
    num_victims: int
    num_refused: int
    #: of the small tenant's requests
    errors: list[str]


def unavoidable_s() -> float:
    """What a request may have to wait beside others whatever the order is: the step that runs when it comes, and what
    other streams add to its own.
    """
    cost = CostModel()
    of_stream = cost.per_token_s + cost.per_sequence_s
    return cost.base_s + (2 * NUM_SEATS - 1) * of_stream


async def _arrivals(url: str, model: str, key: str, per_s: float, span_s: float, seed: int) -> list[Answer]:
    """Poisson arrivals; each request on its way as soon as its time has come, whatever became of the others."""
    rng = random.Random(seed)
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as session:
        loop = asyncio.get_running_loop()
        at, end = loop.time(), loop.time() + span_s
        tasks = []
        while (at := at + rng.expovariate(per_s)) < end:
            prompt = [rng.randrange(1000, 40000) for _ in range(rng.randint(20, 60))]
            due, length = loop.create_future(), rng.randint(5, 60)
            loop.call_at(at, due.set_result, None)
            await due
            tasks.append(asyncio.create_task(ask(session, url, model, prompt, length)))
        return list(await asyncio.gather(*tasks))


def measure(share: float, rounds: int, round_s: float, weight: float = 1.0) -> FairOutcome:
    """`share`: of the capacity that the small tenant asks for; the other asks for ten times as much."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tenants.yaml"
        path.write_text(
            f"small: {{keys: ['{hashed(VICTIM)}'], weight: {weight}}}\nlarge: {{keys: ['{hashed(AGGRESSOR)}']}}\n"
        )
        shape = ("--runner", "fake", "--set", f"tenants.file={path}", "--set", f"scheduler.max_num_seqs={NUM_SEATS}")
        with servers.shoal(Path(folder), *shape) as server:
            return asyncio.run(_measure(server, share * CAPACITY, rounds, round_s))


async def _measure(server: servers.Server, per_s: float, rounds: int, round_s: float) -> FairOutcome:
    solo: list[Answer] = []
    beside: list[Answer] = []
    large: list[Answer] = []
    for number in range(rounds):
        solo += await _arrivals(server.url, server.model, VICTIM, per_s, round_s, 2 * number)
        flood = _arrivals(server.url, server.model, AGGRESSOR, 10 * per_s, round_s + 1.0, 1000 + number)
        flooding = asyncio.create_task(flood)
        await asyncio.sleep(1.0)  # until every place and the queue are taken
        beside += await _arrivals(server.url, server.model, VICTIM, per_s, round_s, 2 * number + 1)
        large += await flooding
    return FairOutcome(
        _ttft_ms(solo),
        _ttft_ms(beside),
        _ttft_ms(large),
        len(solo) + len(beside),
        sum(bool(answer.error) for answer in large),
        [answer.error for answer in (*solo, *beside) if answer.error],
    )


def _ttft_ms(answers: list[Answer]) -> float:
    return percentiles([t for a in answers if not a.error and (t := a.latencies.ttft_s) is not None])["p50"]
