"""`python -m benchmarks.findings_live`: one figure of each scenario of `docs/findings.md` with the real model.

A: worst gap of nine chats and first token of the document, with whole prompts, chunks, and a threshold. B: TTFT of the
short and the long ones of a mixed burst at one replica, fcfs beside sjf. A fresh cluster for each.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import aiohttp

from benchmarks import servers
from benchmarks.findings_runs import mean, mixed_burst, order_of_service
from benchmarks.load import Answer, ask
from examples import long_document

CHUNKING = {
    "no chunks": ("scheduler.enable_chunked_prefill=false",),
    "budget 256 (default)": (),
    "threshold 64": ("scheduler.long_prefill_token_threshold=64",),
}


def serve(folder: Path, *settings: str) -> servers.Server:
    return servers.shoal(folder, *(part for setting in settings for part in ("--set", setting)))


async def burst(url: str, model: str, seed: int) -> dict[str, float]:
    """Mean TTFT in seconds of the short and of the long ones, and of all."""
    requests = mixed_burst(seed, 100)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        loop = asyncio.get_running_loop()
        started = loop.time()

        async def one(number: int) -> Answer:
            request = requests[number]
            await asyncio.sleep(max(0.0, started + request.arrival_s - loop.time()))
            return await ask(session, url, model, request.prompt_token_ids, request.max_tokens)

        answers = await asyncio.gather(*(one(number) for number in range(len(requests))))
    assert not any(answer.error for answer in answers), [answer.error for answer in answers if answer.error][:3]
    found: dict[str, list[float]] = {"all": [], "short": [], "long": []}
    for request, answer in zip(requests, answers, strict=True):
        for name in ("all", "long" if request.priority else "short"):
            found[name].append(answer.token_times[0] - answer.started)
    return {name: mean(values) for name, values in found.items()}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, settings in CHUNKING.items():
            with serve(Path(folder), *settings) as server:
                gaps = asyncio.run(long_document.measure(server.url, server.model))
            worst, ttft = gaps.worst_gap_ms / 1000, gaps.document_ttft_ms / 1000
            print(f"A, {name}: worst gap {worst:.2f} s, document's first token after {ttft:.1f} s", flush=True)
        for policy in ("fcfs", "sjf"):
            settings = (f"scheduler.policy={policy}", "scheduler.max_num_seqs=8")
            with serve(Path(folder), *settings, "router.max_queued_requests_per_replica=1000") as server:
                live = asyncio.run(burst(server.url, server.model, seed=1))
            virtual = order_of_service({"policy": policy}, 1, num_replicas=1)
            parts = [f"{name} {live[name]:.2f} ({virtual[f'{name}_ttft_mean']:.2f})" for name in live]
            print(f"B, {policy}: mean TTFT in s, live (virtual): {', '.join(parts)}", flush=True)


if __name__ == "__main__":
    main()
