"""A closed-loop load generator over HTTP: `concurrency` clients, each sends its next request when the last one ended.

Every server of a comparison gets the same token-id prompts from the same seed, and the same code reads every stream.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import msgspec

from router.latency import Latencies, latencies, replay


class Workload(msgspec.Struct, frozen=True):
    """`num_requests` random prompts of exactly `input_len` tokens, `output_len` tokens each, greedy, end token
    ignored.
    """

    input_len: int
    output_len: int
    concurrency: int
    num_requests: int
    seed: int = 1
    #: token ids are drawn from [low, high): ordinary words of the default model
    low: int = 1000
    high: int = 40000
    shared_prefix_len: int = 0

    def prompts(self) -> list[list[int]]:
        rng = random.Random(self.seed)
        prefix = [rng.randrange(self.low, self.high) for _ in range(self.shared_prefix_len)]
        own = self.input_len - self.shared_prefix_len
        return [prefix + [rng.randrange(self.low, self.high) for _ in range(own)] for _ in range(self.num_requests)]


class Answer(msgspec.Struct):
    """One request as its client saw it; times in seconds of one clock."""

    started: float
    token_times: list[float]
    num_tokens: int
    error: str = ""

    @property
    def latencies(self) -> Latencies:
        """Of a client that sees chunks: arrival is when it sent the request, a token's instant that of its chunk."""
        return latencies(replay(self.started, self.token_times)[0], self.num_tokens)

    @property
    def gaps_s(self) -> list[float]:
        return replay(self.started, self.token_times)[1]


class LoadResult(msgspec.Struct, frozen=True):
    """Figures of one run. TTFT and gaps in milliseconds; a gap is the time between two consecutive chunks of one
    stream.
    """

    workload: Workload
    duration_s: float
    num_failed: int
    output_tokens_per_s: float
    requests_per_s: float
    ttft_ms: dict[str, float]
    gap_ms: dict[str, float]
    tpot_ms: dict[str, float]
    num_output_tokens: int


async def run_load(url: str, model: str, workload: Workload, headers: dict[str, str] | None = None) -> LoadResult:
    """Send `workload` to an OpenAI-compatible server at `url` (without /v1)."""
    prompts = iter(workload.prompts())
    answers: list[Answer] = []
    timeout = aiohttp.ClientTimeout(total=None, sock_read=600)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=headers) as session:
        started = time.perf_counter()

        async def client() -> None:
            for prompt in prompts:  # one iterator for all clients: each takes the next
                answer = await ask(session, url, model, prompt, workload.output_len)
                answers.append(answer)

        await asyncio.gather(*(client() for _ in range(workload.concurrency)))
        duration = time.perf_counter() - started
    return summarize(workload, answers, duration)


def summarize(workload: Workload, answers: Sequence[Answer], duration_s: float) -> LoadResult:
    """Percentiles over all requests that did not fail."""
    good = [answer for answer in answers if not answer.error]
    figures = [answer.latencies for answer in good]
    tokens = sum(answer.num_tokens for answer in good)
    return LoadResult(
        workload=workload,
        duration_s=duration_s,
        num_failed=len(answers) - len(good),
        output_tokens_per_s=tokens / duration_s,
        requests_per_s=len(good) / duration_s,
        ttft_ms=percentiles([f.ttft_s for f in figures if f.ttft_s is not None]),
        gap_ms=percentiles([gap for answer in good for gap in answer.gaps_s]),
        tpot_ms=percentiles([f.tpot_s for f in figures if f.tpot_s is not None]),
        num_output_tokens=tokens,
    )


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p99 and max in milliseconds; nearest rank. Empty input gives NaN."""
    ordered = sorted(seconds)
    if not ordered:
        return {"p50": float("nan"), "p99": float("nan"), "max": float("nan")}

    def at(share: float) -> float:
        return 1000 * ordered[math.ceil(share * len(ordered)) - 1]

    return {"p50": at(0.5), "p99": at(0.99), "max": 1000 * ordered[-1]}


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    prompt: list[int],
    output_len: int,
    on_first_token: Callable[[], None] | None = None,
) -> Answer:
    """One streamed completion of exactly `output_len` tokens; anything else is an error in the answer."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = Answer(time.perf_counter(), [], 0)
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                answer.error = f"{response.status}: {(await response.text())[:200]}"
                return answer
            async for line in response.content:
                if line.startswith(b"data: {") and not _take(answer, json.loads(line[6:]), on_first_token):
                    return answer
    except aiohttp.ClientError as error:
        answer.error = repr(error)
    if not answer.error and answer.num_tokens != output_len:
        answer.error = f"{answer.num_tokens} tokens instead of {output_len}"
    return answer


def _take(answer: Answer, chunk: dict[str, Any], on_first_token: Callable[[], None] | None) -> bool:
    """Note one event. False: it was an error, the stream is over."""
    if "error" in chunk:
        answer.error = str(chunk["error"])[:200]
        return False
    if chunk["choices"]:
        answer.token_times.append(time.perf_counter())
        if len(answer.token_times) == 1 and on_first_token is not None:
            on_first_token()
    elif chunk.get("usage"):
        answer.num_tokens = chunk["usage"]["completion_tokens"]
    return True
