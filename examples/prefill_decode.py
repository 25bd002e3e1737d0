"""One machine, one prefill and two decode replicas: who computed each prompt, and what crossed between them?

    shoal serve --prefill 1 --decode 2
    python -m examples.prefill_decode [--url http://127.0.0.1:8000] [--decision auto|always|never]

`--decision` is set in the running cluster first. Prompts are random words, each as long as twice the one before.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
from urllib.parse import urlsplit

import aiohttp
import msgspec

from benchmarks.load import ask

LENGTHS = (64, 128, 256, 512, 1024, 2048)


class Turn(msgspec.Struct, frozen=True):
    """One request. `num_loaded`: blocks that decode replicas took over."""

    num_tokens: int
    ttft_ms: float
    is_remote: bool
    num_loaded: int
    error: str


class Figures(msgspec.Struct, frozen=True):
    """What the cluster counted until now."""

    #: prompts given to a prefill replica
    num_remote: float
    num_loaded: float
    #: fetched by the nodes' connectors from one another
    remote_bytes: float

    def since(self, before: Figures) -> Figures:
        return Figures(
            self.num_remote - before.num_remote,
            self.num_loaded - before.num_loaded,
            self.remote_bytes - before.remote_bytes,
        )


async def figures(session: aiohttp.ClientSession, url: str) -> Figures:
    """From `/status`."""
    async with session.get(f"{url}/status") as response:
        replicas = (await response.json())["replicas"]
    up = [one for one in replicas if one["state"] == "up"]

    def total(name: str, *roles: str) -> float:
        return float(sum(one["counters"].get(name, 0) for one in up if not roles or one["role"] in roles))

    return Figures(
        total("prefix_cache_queries", "prefill"), total("kv_blocks_loaded", "decode"), total("tier_loaded_bytes_remote")
    )


async def settled(session: aiohttp.ClientSession, url: str, before: Figures, num_blocks: int) -> Figures:
    """A replica that does nothing tells of itself once a second, and a connector too: wait for `num_blocks`, at most
    three seconds.
    """
    found = (await figures(session, url)).since(before)
    for _ in range(30):
        if found.num_remote == 0 or found.num_loaded >= num_blocks:
            break
        await asyncio.sleep(0.1)
        found = (await figures(session, url)).since(before)
    return found


async def wait_ready(session: aiohttp.ClientSession, url: str) -> None:
    """Until all replicas are connected to the connector of their node. Raises TimeoutError after a minute."""
    for _ in range(600):
        async with session.get(f"{url}/status") as response:
            replicas = (await response.json())["replicas"]
        if replicas and all(one["counters"].get("kv_connected") == 1 for one in replicas if one["state"] == "up"):
            return
        await asyncio.sleep(0.1)
    raise TimeoutError("not all replicas were connected to a KV connector within a minute")


async def measure(url: str, model: str, lengths: tuple[int, ...] = LENGTHS, seed: int = 5) -> list[Turn]:
    """One request after the other."""
    rng, turns = random.Random(seed), []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        await wait_ready(session, url)
        for num_tokens in lengths:
            prompt = [rng.randrange(1000, 40000) for _ in range(num_tokens)]
            before = await figures(session, url)
            answer = await ask(session, url, model, prompt, 8)
            found = await settled(session, url, before, num_tokens // 16)
            ttft_s = answer.latencies.ttft_s
            ttft_ms = float("nan") if ttft_s is None else 1000 * ttft_s
            turns.append(Turn(num_tokens, ttft_ms, found.num_remote > 0, int(found.num_loaded), answer.error))
    return turns


def set_decision(url: str, decision: str) -> None:
    """`shoal set`: it holds for requests from now on."""
    port = str(urlsplit(url).port or 80)
    command = [sys.executable, "-m", "cluster.cli", "set", "--port", port, f"disaggregation.decision={decision}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--decision", choices=("auto", "always", "never"))
    options = parser.parse_args()
    if options.decision:
        set_decision(options.url, options.decision)
    for turn in asyncio.run(measure(options.url, options.model)):
        who = f"prefill replica, {turn.num_loaded} blocks taken over" if turn.is_remote else "decode replica"
        print(f"{turn.num_tokens:5} tokens: first token after {turn.ttft_ms:6.0f} ms; {who} {turn.error}".rstrip())


if __name__ == "__main__":
    main()
