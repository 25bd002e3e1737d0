"""Claims of the API: what clients send is answered right, and what it costs."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks import prompt_flood, servers
from benchmarks.claims import Measured, Skip, claim
from benchmarks.claims_line import MODEL, differing
from benchmarks.load import Answer, ask, percentiles


@claim("api.equal")
def equal(full: bool) -> Iterator[tuple[str, Measured]]:
    """Penalised, biased, banned and grammar-constrained requests: how many differ between our ways of computing."""
    from benchmarks.equality import make_ruled_items

    yield from differing(make_ruled_items(48, 64) if full else make_ruled_items(12, 12))


@claim("api.cases")
def cases(full: bool) -> Iterator[tuple[str, Measured]]:
    """The cases of groups A and B, and raw malformed HTTP, each through HTTP."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/api"]
    done = subprocess.run(command, cwd=servers.ROOT, capture_output=True, text=True, check=False)
    verdict = (done.stdout.strip().splitlines() or ["pytest said nothing"])[-1]
    yield "", Measured(float(done.returncode != 0), "runs with a failing case", 0, note=verdict)


def _people(name: dict[str, Any]) -> dict[str, Any]:
    """A list that is always longer than any max_tokens here, so that requests with and without give as many tokens."""
    person = {"type": "object", "properties": {"name": name, "age": {"type": "integer"}}, "required": ["name", "age"]}
    schema = {"type": "array", "items": person, "minItems": 500}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "people", "schema": schema}}}


@claim("api.grammar")
def grammar(full: bool) -> Iterator[tuple[str, Measured]]:
    """Time per token with a JSON schema over without, alternating rounds on one server. `bounded`: with a length limit
    on a string, whose masks take llguidance 100 us instead of 14.
    """
    plain, bounded = _people({"type": "string"}), _people({"type": "string", "maxLength": 12})
    with tempfile.TemporaryDirectory() as folder, servers.shoal(Path(folder)) as server:
        for name, concurrency, more in (("c1", 1, plain), ("c32", 32, plain), ("c32_bounded", 32, bounded)):
            ratios, without_ms = [], []
            asyncio.run(_time_per_token(server.url, concurrency, more, 8))
            for _ in range(5 if full else 2):
                without = asyncio.run(_time_per_token(server.url, concurrency, {"ignore_eos": True}))
                constrained = asyncio.run(_time_per_token(server.url, concurrency, more))
                ratios.append(constrained / without)
                without_ms.append(1000 * without)
            note = f"{statistics.median(without_ms):.1f} ms without; {min(ratios):.3f} to {max(ratios):.3f}"
            bound = None if name == "c32_bounded" else 1.1
            yield name, Measured(statistics.median(ratios), "x the time without", bound, note=note)


async def _time_per_token(url: str, concurrency: int, more: dict[str, Any], num_tokens: int = 96) -> float:
    """Seconds for `num_tokens` steps of `concurrency` chats at once, per step; each chat gives all its tokens."""
    body = {"messages": [{"role": "user", "content": "List some names."}], "max_tokens": num_tokens, "temperature": 0}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one() -> int:
            async with session.post(f"{url}/v1/chat/completions", json={**body, **more}) as response:
                answer = await response.json()
                assert response.status == 200, answer
                return int(answer["usage"]["completion_tokens"])

        started = time.perf_counter()
        counts = await asyncio.gather(*(one() for _ in range(concurrency)))
        assert set(counts) == {num_tokens}, counts
        return (time.perf_counter() - started) / num_tokens


_FLOOD_CONFIG = """
runner: fake
max_model_len: {context}
kv_cache: {{num_blocks: 60000}}
scheduler: {{long_prefill_token_threshold: 2}}
"""


@claim("api.flood")
def flood(full: bool) -> Iterator[tuple[str, Measured]]:
    """64 streams, and beside them 100,000-token text prompts: how much the streams' gap p99 rises. The fake runner
    computes two tokens of each prompt a step: measured is reading, tokenizing and refusing or admitting them.
    """
    for name, context in (("refused", 8192), ("accepted", 131072)):
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder) / "config.yaml"
            config.write_text(_FLOOD_CONFIG.format(context=context))
            with servers.shoal(Path(folder), "--config", str(config)) as server:
                rises, told, base = asyncio.run(_rises(server.url, rounds=5 if full else 2))
        note = f"{base:.1f} ms without; {min(rises):.1f} to {max(rises):.1f}; answers {dict(told)}"
        yield name, Measured(statistics.median(rises), "ms more at the gaps' p99", 5, note=note)


async def _rises(url: str, rounds: int) -> tuple[list[float], Counter[int], float]:
    told: Counter[int] = Counter()
    await _streams(url, 16)
    rises, bases = [], []
    for _ in range(rounds):
        before = percentiles([gap for answer in await _streams(url, 200) for gap in answer.gaps_s])
        async with prompt_flood.running(url, 100_000, 1.0, told):
            during = percentiles([gap for answer in await _streams(url, 200) for gap in answer.gaps_s])
        rises.append(during["p99"] - before["p99"])
        bases.append(before["p99"])
    return rises, told, statistics.median(bases)


async def _streams(url: str, num_tokens: int) -> list[Answer]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        prompts = [[1000 + number] * 32 for number in range(64)]
        answers = await asyncio.gather(*(ask(session, url, MODEL, prompt, num_tokens) for prompt in prompts))
    assert not [answer.error for answer in answers if answer.error], answers[0].error
    return list(answers)


@claim("api.clients")
def clients(full: bool) -> Iterator[tuple[str, Measured]]:
    """openai, langchain-openai, litellm and instructor, unchanged, against the default model."""
    with tempfile.TemporaryDirectory() as folder, servers.shoal(Path(folder)) as server:
        done = _in_clients_environment("drive.py", "--url", f"{server.url}/v1")
    failed = [line for line in done.stdout.splitlines() if "FAILED" in line]
    note = (done.stdout.strip().splitlines() or [done.stderr[-200:]])[-1]
    yield "", Measured(len(failed) or float(done.returncode != 0), "checks fail", 0, note=note)


def _in_clients_environment(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script of tests/clients in the environment that scripts/clients made. Raises Skip where there is none."""
    python = Path(os.environ.get("CLIENTS_VENV", servers.ROOT / ".venv-clients")) / "bin" / "python"
    if not python.exists():
        raise Skip("no environment for the clients: scripts/clients makes it")
    command = [str(python), str(servers.ROOT / "tests" / "clients" / script), *arguments]
    return subprocess.run(command, cwd=servers.ROOT, capture_output=True, text=True, check=False)


@claim("api.fuzz")
def fuzz(full: bool) -> Iterator[tuple[str, Measured]]:
    """schemathesis against /openapi.json: answers of 5xx or off the description, and what is left behind."""
    options = ("--runner", "fake", "--max-model-len", "64", "--set", "http.admin_endpoints=true")
    with tempfile.TemporaryDirectory() as folder, servers.shoal(Path(folder), *options) as server:
        done = _in_clients_environment("fuzz.py", "--url", server.url, "--examples", "400" if full else "25")
        if done.returncode not in (0, 1):
            raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
        found = json.loads(done.stdout.strip().splitlines()[-1])
        yield "", Measured(found["failures"], "failures", 0, note=f"{found['calls']} calls; {found['note']}")
        yield "left", Measured(found["left"], "requests, sequences or blocks left behind", 0)
