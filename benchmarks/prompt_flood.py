"""Very long text prompts, one after the other, until told to stop. In a process of its own, so that the client whose
gaps are measured has nothing to do with them. Prints how many were answered how.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

#: common English words are one token each in the vocabularies that matter here
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother"
)


def long_prompt(num_tokens: int, seed: int) -> str:
    """About `num_tokens` tokens of text."""
    rng = random.Random(seed)
    return " ".join(rng.choices(_WORDS.split(), k=num_tokens))


async def flood(url: str, num_tokens: int, period_s: float) -> Counter[int]:
    """One prompt every `period_s`, also while earlier ones are on their way. Returns statuses by count."""
    body = json.dumps({"prompt": long_prompt(num_tokens, 5), "max_tokens": 1}).encode()
    statuses: Counter[int] = Counter()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers={"content-type": "application/json"}) as session:

        async def one() -> None:
            async with session.post(f"{url}/v1/completions", data=body) as response:
                statuses[response.status] += 1
                await response.read()

        tasks: set[asyncio.Task[None]] = set()
        print("ready", flush=True)
        while not stop.is_set():
            tasks.add(asyncio.create_task(one()))
            try:
                await asyncio.wait_for(stop.wait(), period_s)
            except TimeoutError:
                continue
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        statuses[0] = len(tasks) - sum(statuses.values())
    return statuses


@asynccontextmanager
async def running(url: str, num_tokens: int, period_s: float, told: Counter[int]) -> AsyncIterator[None]:
    """The flood, as long as the block lasts. `told` gets the statuses; 0: sent and not answered yet."""
    command = ["-m", "benchmarks.prompt_flood", url, str(num_tokens), str(period_s)]
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"ready\n"
        yield
    finally:
        process.terminate()
        text = await process.stdout.read()
        await process.wait()
        told.update({int(status): count for status, count in json.loads(text or b"{}").items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("num_tokens", type=int)
    parser.add_argument("period_s", type=float)
    options = parser.parse_args()
    statuses = asyncio.run(flood(options.url, options.num_tokens, options.period_s))
    print(json.dumps(statuses))


if __name__ == "__main__":
    main()
