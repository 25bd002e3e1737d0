"""Scenario A: nine short chats are talking when an 8,000-token document arrives. What do their readers notice?

`python -m examples.long_document` starts a cluster with chunked prefill and one without, and prints the worst gap
between two tokens of a short chat in each. `--url` measures a cluster that is already up instead.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from pathlib import Path

import aiohttp
import msgspec

from benchmarks import servers
from benchmarks.load import Answer, ask, percentiles

DOCUMENT_TOKENS = 8000


class Gaps(msgspec.Struct, frozen=True):
    """Milliseconds. Gaps of the nine chats while the document was there, and the document's own time to first token."""

    worst_gap_ms: float
    p50_gap_ms: float
    document_ttft_ms: float
    num_failed: int


async def measure(url: str, model: str, seed: int = 3, document_tokens: int = DOCUMENT_TOKENS) -> Gaps:
    """Nine chats of 30 to 60 tokens in and 200 out; the document (20 out) is sent once every chat is talking."""
    rng = random.Random(seed)

    def words(count: int) -> list[int]:
        return [rng.randrange(1000, 40000) for _ in range(count)]

    talking = asyncio.Event()
    num_talking = 0

    async def chat(session: aiohttp.ClientSession) -> Answer:
        nonlocal num_talking

        def on_first_token() -> None:
            nonlocal num_talking
            num_talking += 1
            if num_talking == 9:
                talking.set()

        return await ask(session, url, model, words(rng.randint(30, 60)), 200, on_first_token)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        chats = [asyncio.create_task(chat(session)) for _ in range(9)]
        await talking.wait()
        document = await ask(session, url, model, words(document_tokens), 20)
        answers = await asyncio.gather(*chats)
    summary = percentiles([gap for answer in answers for gap in answer.gaps_s])
    ttft_s = document.latencies.ttft_s
    ttft = float("nan") if ttft_s is None else 1000 * ttft_s
    failed = sum(bool(answer.error) for answer in [*answers, document])
    return Gaps(summary["max"], summary["p50"], ttft, failed)


def measure_both(*serve_args: str) -> dict[str, Gaps]:
    """A fresh cluster for each, one after the other: `chunked` and `whole`."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, switch in (("chunked", "true"), ("whole", "false")):
            setting = ("--set", f"scheduler.enable_chunked_prefill={switch}")
            with servers.shoal(Path(folder), *setting, *serve_args) as server:
                found[name] = asyncio.run(measure(server.url, server.model))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="a running cluster, e.g. http://127.0.0.1:8000")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    options = parser.parse_args()
    found = {options.url: asyncio.run(measure(options.url, options.model))} if options.url else measure_both()
    for name, gaps in found.items():
        print(
            f"{name}: worst gap of a short chat {gaps.worst_gap_ms:.0f} ms (p50 {gaps.p50_gap_ms:.1f}), "
            f"document's first token after {gaps.document_ttft_ms:.0f} ms, {gaps.num_failed} failed"
        )


if __name__ == "__main__":
    main()
