"""Claims of the first line: a real model through a real cluster on one machine."""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import servers, serving
from benchmarks.claims import Measured, Skip, claim
from benchmarks.load import Workload, ask, run_load

if TYPE_CHECKING:
    from benchmarks.equality import Item

MODEL = "smollm2-135m-instruct"


@claim("line.start")
def start(full: bool) -> Iterator[tuple[str, Measured]]:
    """Everything installed: `shoal serve` to the first token of the first request, and what it says."""
    from examples.chat import ask as chat

    times: list[float] = []
    answer = ""
    for _ in range(3 if full else 1):
        began = time.monotonic()

        def on_first_token(began: float = began) -> None:
            times.append(time.monotonic() - began)

        with tempfile.TemporaryDirectory() as folder, servers.shoal(Path(folder)) as server:
            answer = chat(f"{server.url}/v1", "What is the capital of France?", MODEL, on_first_token=on_first_token)
    yield (
        "",
        Measured(statistics.median(times), "s to the first token", 20, note=f"{min(times):.1f} to {max(times):.1f}"),
    )
    yield "paris", Measured(float("Paris" in answer), "answers name Paris", 1, at_most=False, note=repr(answer))


@claim("line.equal")
def equal(full: bool) -> Iterator[tuple[str, Measured]]:
    """Requests whose tokens or logits differ in any bit between our own ways of computing."""
    from benchmarks.equality import make_items

    yield from differing(make_items(40, 64) if full else make_items(12, 12))


def differing(items: Sequence[Item]) -> Iterator[tuple[str, Measured]]:
    """How many of `items` differ between our ways of computing, in each number type."""
    from benchmarks.equality import measure_ways

    for dtype in ("bfloat16", "float32"):
        different, note = measure_ways(MODEL, dtype, items)
        yield dtype, Measured(len(different), "requests differ", 0, note="; ".join([note, *different[:3]]))


@claim("line.hf")
def hugging_face(full: bool) -> Iterator[tuple[str, Measured]]:
    """float32 against transformers: each of our tokens, teacher-forced, within 1e-3 of its best logit."""
    from benchmarks.equality import WAYS, make_items, run_way
    from benchmarks.hf_reference import Reference
    from cluster import model_store
    from replica.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
    from replica.model_runner import TorchModelRunner

    folder = model_store.resolve(MODEL)
    num_prompts, num_tokens = (40, 64) if full else (8, 32)
    items = make_items(2 * num_prompts, num_tokens)[::2]  # the even ones are greedy
    threads = len(os.sched_getaffinity(0))
    config = EngineConfig(
        model=ModelConfig(dtype="float32"),
        cache=CacheConfig(num_blocks=1500),
        parallel=ParallelConfig(num_threads=threads),
    )
    runner = TorchModelRunner(config, folder)
    traces, _ = run_way(WAYS[1], items, [runner])
    runner.close()
    reference = Reference(folder)
    verdicts = [reference.judge(item.prompt, trace.tokens) for item, trace in zip(items, traces, strict=True)]
    # every token is HF's own argmax given ours before it: then HF running freely gives the same sequence
    identical = sum(verdict.num_equal == verdict.num_tokens for verdict in verdicts)
    note = f"{len(items)} prompts x {num_tokens} tokens; {identical} free-running sequences identical"
    yield (
        "",
        Measured(max(verdict.worst_gap for verdict in verdicts), "worst distance to HF's best logit", 1e-3, note=note),
    )


@claim("line.scenario_a")
def scenario_a(full: bool) -> Iterator[tuple[str, Measured]]:
    """Worst gap of nine short chats while an 8,000-token document is computed, with chunks over without."""
    from examples.long_document import measure_both

    found = measure_both()
    chunked, whole = found["chunked"], found["whole"]
    note = (
        f"worst gap {chunked.worst_gap_ms:.0f} ms against {whole.worst_gap_ms:.0f} ms; "
        f"document's TTFT {chunked.document_ttft_ms:.0f} against {whole.document_ttft_ms:.0f} ms"
    )
    yield "", Measured(chunked.worst_gap_ms / whole.worst_gap_ms, "of the gap without chunks", 0.2, note=note)
    yield "failed", Measured(chunked.num_failed + whole.num_failed, "requests failed", 0)


@claim("line.scenario_b")
def scenario_b(full: bool) -> Iterator[tuple[str, Measured]]:
    """200 requests in 3 s at two replicas with a cap of 16: the true maximum of queued, refusals, pools."""
    from examples.burst import measure_with

    for num_routers in (1, 3):
        outcome = measure_with(num_routers)
        name = f"{num_routers}_routers"
        note = f"answers {outcome.codes}"
        yield f"{name}.queued", Measured(max(outcome.max_queued), "queued at most", outcome.cap, note=note)
        wrong = (
            outcome.wrong_answers
            + outcome.without_retry_after
            + sum(count for code, count in outcome.codes.items() if code not in (200, 503))
        )
        yield f"{name}.wrong", Measured(wrong, "answers wrong or without Retry-After", 0)
        yield f"{name}.baseline", Measured(float(outcome.at_baseline), "pools at baseline", 1, at_most=False)


@claim("line.kill")
def kill(full: bool) -> Iterator[tuple[str, Measured]]:
    """kill -9 of one of two replicas under 16 real-model streams: errors seen by clients, time to replacement."""
    from benchmarks.kill import measure

    errors, replaced, health = [], [], 0
    for _ in range(5 if full else 1):
        outcome = measure()
        errors.append(outcome.num_errors)
        replaced.append(outcome.replaced_after_s)
        health += outcome.num_unhealthy
    yield "", Measured(sum(errors), "client errors or wrong token counts", 0, note=f"{len(errors)} kills")
    yield "health", Measured(health, "health answers that were not 200", 0)
    yield "replaced", Measured(max(replaced), "s until the replacement takes requests")


@claim("line.bench")
def bench(full: bool) -> Iterator[tuple[str, Measured]]:
    """Throughput at 128 in / 128 out over vLLM's in the same rounds, through the whole cluster."""
    if not os.environ.get("PEERS"):
        raise Skip("PEERS names no folder with vLLM")
    loads = serving.workloads(128, 128, (1, 8, 32) if full else (8,), seed=1)
    with tempfile.TemporaryDirectory() as folder, servers.shoal(Path(folder)) as ours:
        rival = servers.vllm(Path(folder))
        assert rival is not None
        with rival:
            found = serving.compare([ours, rival], loads, rounds=3 if full else 1, report=full)
    for load in loads:
        us, them = found[("shoal", load.concurrency)], found[("vllm", load.concurrency)]
        rates = [statistics.median(turn.result.output_tokens_per_s for turn in turns) for turns in (us, them)]
        failed = sum(turn.result.num_failed for turn in [*us, *them])
        note = f"medians {rates[0]:.0f} against {rates[1]:.0f} tok/s, {failed} requests failed"
        yield f"c{load.concurrency}", Measured(serving.ratio(us, them), "x vLLM", 1.0, at_most=False, note=note)


@claim("line.overhead")
def overhead(full: bool) -> Iterator[tuple[str, Measured]]:
    """CPU outside the model per streamed token, all processes, fake runner, 32 streams."""
    with tempfile.TemporaryDirectory() as folder, servers.shoal(Path(folder), "--runner", "fake") as server:
        asyncio.run(run_load(server.url, server.model, Workload(128, 16, 8, 8)))
        turn = serving.measure(server, Workload(128, 128, 32, 128 if full else 64))
    yield "", Measured(turn.overhead_us, "us CPU per token outside the model")


@claim("line.abort")
def abort(full: bool) -> Iterator[tuple[str, Measured]]:
    """Clients that leave in the middle of a stream: blocks still held half a second later."""
    from examples.burst import settled_status

    async def leave(url: str, count: int) -> int:
        import aiohttp

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def one(number: int) -> None:
                left = asyncio.Event()
                task = asyncio.create_task(ask(session, url, MODEL, [number + 1000] * 20, 2000, left.set))
                await left.wait()
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

            for start_at in range(0, count, 20):
                await asyncio.gather(*(one(start_at + i) for i in range(20)))
            status = await settled_status(session, url)
        return sum(r["kv_blocks"] - r["kv_blocks_free"] + r["running"] + r["queued"] for r in status["replicas"])

    count = 1000 if full else 60
    with tempfile.TemporaryDirectory() as folder, servers.shoal(Path(folder), "--runner", "fake") as server:
        held = asyncio.run(leave(server.url, count))
    yield "", Measured(held, "blocks or sequences left behind", 0, note=f"{count} clients left")
