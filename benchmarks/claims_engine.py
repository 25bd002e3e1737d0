"""Claims of the engine's rules: what scheduling costs without a model, beside vLLM's scheduler where `PEERS` has it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.claims import Measured, claim
from benchmarks.engine_cost import admit_cost, best, churn_cost, decode_cost, describe
from benchmarks.servers import VLLM_ENV
from benchmarks.trace_soak import SCALE, TRACES, load_traces, run_phase

#: what was measured of vLLM 0.32 when the bounds were set: us per request and step; ms for 32,768 tokens
VLLM_STEP_US, VLLM_ADMIT_MS, VLLM_LOOKUP_MS = 8.2, 4.7, 0.98
PROMPT_TOKENS = 32768


class Rival:
    """`benchmarks/engine_rival.py` in vLLM's environment: one question a line, so that rounds can alternate."""

    def __init__(self, peers: str) -> None:
        script = Path(__file__).with_name("engine_rival.py")
        self._process = subprocess.Popen(
            [f"{peers}/venv/bin/python", str(script), f"{peers}/smollm2"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **VLLM_ENV},
            text=True,
        )

    def ask(self, **question: int) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        for line in self._process.stdout:  # it prints other things as well
            if line.startswith("RESULT "):
                found: dict[str, float] = json.loads(line.removeprefix("RESULT "))
                return found
        raise RuntimeError("vLLM's scheduler gave no figures; run benchmarks/engine_rival.py by hand to see why")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._process.communicate("", timeout=60)
        self._process.kill()


@contextlib.contextmanager
def rival() -> Iterator[Rival | None]:
    """None without `PEERS`."""
    peers = os.environ.get("PEERS")
    if not peers:
        yield None
        return
    process = Rival(peers)
    try:
        yield process
    finally:
        process.close()


@claim("engine.cost")
def cost(full: bool) -> Iterator[tuple[str, Measured]]:
    """Everything production does for a step but the model, per running sequence: 512-token prompts, all decode."""
    with rival() as other:
        for num_running in (256, 1024):
            ours, theirs = [], []
            for _ in range(7 if full else 2):
                ours.append(decode_cost(num_running))
                if other is not None:
                    theirs.append(other.ask(decode=num_running)["total"])
            found = min(ours, key=lambda one: one.total)
            yield f"{num_running}", Measured(found.total, "us a sequence and step", 2.0, note=describe(found))
            if theirs:
                share, note = found.total / min(theirs), f"vLLM {min(theirs):.1f} us in the same rounds"
                yield f"{num_running}.share", Measured(share, "of vLLM's", 2.0 / VLLM_STEP_US, note=note)
    churn = best(partial(churn_cost, 1024), 3)
    note = f"every 200th ends in each step and another one takes its place; {describe(churn)}"
    yield "1024.churn", Measured(churn.total, "us a sequence and step", note=note)


@claim("engine.admit")
def admit(full: bool) -> Iterator[tuple[str, Measured]]:
    """A 32,768-token prompt: checked, hashed, given blocks, planned, and its blocks registered."""
    yield from _admission(full, "total", 2.5, VLLM_ADMIT_MS, ("submit", "schedule", "update"))


@claim("engine.lookup")
def lookup(full: bool) -> Iterator[tuple[str, Measured]]:
    """The same prompt again: which of its blocks are cached."""
    yield from _admission(full, "lookup", 0.5, VLLM_LOOKUP_MS, ("lookup",))


@claim("engine.tpot")
def tpot(full: bool) -> Iterator[tuple[str, Measured]]:
    """Virtual time: a document of 8,000 tokens among nine chats, with and without a TPOT target."""
    from cluster.simulation.sim_cluster import SimCluster, SimConfig
    from cluster.simulation.workloads import document_among_chats, engine

    for target_ms in (0, 15, 20, 30, 40) if full else (0, 30):
        cluster = SimCluster(SimConfig(engine=engine(tpot_target_ms=target_ms), max_model_len=9000))
        *chats, document = cluster.run(document_among_chats(1))
        first = document.token_times_s[0]
        gaps = sorted(
            1000 * gap
            for chat in chats
            for gap, at in zip(chat.gaps_s, chat.token_times_s[1:], strict=True)
            if document.request.arrival_s < at < first
        )
        note = f"gap p50 {gaps[len(gaps) // 2]:.1f} ms; TTFT of the document {document.ttft_s or 0:.2f} s"
        bound = 1.1 * target_ms if target_ms else None
        yield f"{target_ms or 'off'}", Measured(gaps[int(0.99 * len(gaps))], "ms gap p99", bound, note=note)


@claim("engine.guess")
def guess(full: bool) -> Iterator[tuple[str, Measured]]:
    """Tokens per second with prompt lookup over without, real model, bfloat16; the output has to be the same."""
    from benchmarks import guessing

    streams = (1, 4, 16) if full else (1,)
    for found in guessing.measure(("copy", "free"), streams, rounds=5 if full else 3):
        note = (
            f"{found.lowest:.2f} to {found.highest:.2f}; {found.acceptance:.0%} of the guesses came true, "
            f"{found.tokens_per_step:.2f} tokens a stream and step"
        )
        bound = 1.2 if found.task == "copy" and found.num_streams == 1 else None
        name = f"{found.task}.c{found.num_streams}"
        yield name, Measured(found.gain, "x the speed", bound, at_most=False, note=note)
        yield f"{name}.equal", Measured(float(found.is_equal), "equal outputs", 1.0, at_most=False)


@claim("engine.soak")
def soak(full: bool) -> Iterator[tuple[str, Measured]]:
    """Requests of public traces through the engine core in virtual time; a phase raises if any is lost."""
    source, rows = load_traces(TRACES)
    num_phases = 4 if full else 1
    part = rows if full else random.Random(0).sample(rows, 10_000)
    started, num_requests, num_ends = time.perf_counter(), 0, 0
    for seed in range(num_phases):
        result = run_phase(seed, part, SCALE)[1]
        num_requests += result.num_requests
        num_ends += sum(result.ends.values())
    rate = num_requests / (time.perf_counter() - started)
    note = f"of {num_requests}, {rate:.0f} requests/s; {source}, lengths x {SCALE:g}"
    yield "", Measured(num_requests - num_ends, "requests lost", 0, note=note)


def _admission(
    full: bool, name: str, bound: float, vllm_then: float, parts: tuple[str, ...]
) -> Iterator[tuple[str, Measured]]:
    ours, theirs = [], []
    with rival() as other:
        for _ in range(7 if full else 2):
            ours.append(admit_cost(PROMPT_TOKENS))
            if other is not None:
                answer = other.ask(admit=PROMPT_TOKENS)
                theirs.append(sum(answer[part] for part in parts))
    found = min(ours, key=lambda one: float(getattr(one, name)))
    value = float(getattr(found, name))
    yield "", Measured(value, "ms", bound, note=describe(found))
    if theirs:
        note = f"vLLM {min(theirs):.2f} ms in the same rounds"
        yield "share", Measured(value / min(theirs), "of vLLM's", bound / vllm_then, note=note)
