"""`make bench`: the default model through the whole cluster at concurrency 1, 8 and 32, beside vLLM where `PEERS` names
it.

Model SmolLM2-135M-Instruct in bfloat16, 128 random tokens in and 128 out, greedy, end token ignored, closed loop, seed
in the table. Servers stay up and take turns, round by round, because these machines are noisy; the verdict is a ratio
of medians.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks import servers
from benchmarks.cpu_time import cpu_time
from benchmarks.load import LoadResult, Workload, run_load


class Round(msgspec.Struct, frozen=True):
    """One server, one workload, one turn."""

    server: str
    result: LoadResult
    #: microseconds of CPU per output token outside the model, over all processes of the server; NaN for rivals
    overhead_us: float


def workloads(input_len: int, output_len: int, concurrencies: Sequence[int], seed: int) -> list[Workload]:
    """Enough requests for each client to send three or four, at least six in all."""
    return [Workload(input_len, output_len, c, max(6, 3 * c), seed=seed) for c in concurrencies]


def measure(server: servers.Server, workload: Workload) -> Round:
    """One turn. CPU outside the model is known for our own server only: its model threads have a name."""
    before = cpu_time(server.process.pid)
    result = asyncio.run(run_load(server.url, server.model, workload))
    spent = cpu_time(server.process.pid).since(before)
    overhead = 1e6 * spent.other_s / max(1, result.num_output_tokens) if server.name == "shoal" else float("nan")
    return Round(server.name, result, overhead)


def compare(
    running: Sequence[servers.Server], loads: Sequence[Workload], rounds: int, report: bool = True
) -> dict[tuple[str, int], list[Round]]:
    """All servers take turns on each workload. Keys: (server, concurrency)."""
    found: dict[tuple[str, int], list[Round]] = {}
    for server in running:
        asyncio.run(run_load(server.url, server.model, Workload(128, 16, 8, 8, seed=99)))  # warm
    for number in range(rounds):
        for load in loads:
            # fresh prompts each round, the same for every server: a prefix cache must not answer the second round
            load = msgspec.structs.replace(load, seed=load.seed + 1000 * number)
            for server in running:
                turn = measure(server, load)
                found.setdefault((server.name, load.concurrency), []).append(turn)
                if report:
                    print(line(turn), flush=True)
    return found


def line(turn: Round) -> str:
    """One turn as a table row."""
    r = turn.result
    overhead = (
        "" if turn.overhead_us != turn.overhead_us else f"  {turn.overhead_us:5.0f} us CPU/token outside the model"
    )
    failed = f"  {r.num_failed} FAILED" if r.num_failed else ""
    return (
        f"{turn.server:<6} c{r.workload.concurrency:<3} {r.output_tokens_per_s:7.1f} tok/s  "
        f"{r.requests_per_s:6.2f} req/s  TTFT p50 {r.ttft_ms['p50']:7.1f} p99 {r.ttft_ms['p99']:7.1f}  "
        f"gap p50 {r.gap_ms['p50']:6.1f} p99 {r.gap_ms['p99']:6.1f} max {r.gap_ms['max']:6.1f} ms{overhead}{failed}"
    )


def summary(found: dict[tuple[str, int], list[Round]]) -> list[str]:
    """Medians and ranges, and our ratio to each rival in the same rounds."""
    lines = []
    for (name, concurrency), turns in found.items():
        rates = [turn.result.output_tokens_per_s for turn in turns]
        text = f"{name:<6} c{concurrency:<3} median {statistics.median(rates):7.1f} tok/s"
        text += f"  [{min(rates):.1f} .. {max(rates):.1f}]"
        ours = found.get(("shoal", concurrency))
        if ours and name != "shoal":
            text += f"   shoal / {name}: {ratio(ours, turns):.2f}"
        lines.append(text)
    return lines


def ratio(ours: Sequence[Round], theirs: Sequence[Round]) -> float:
    """Median over rounds of the quotient within each round."""
    return statistics.median(
        a.result.output_tokens_per_s / b.result.output_tokens_per_s for a, b in zip(ours, theirs, strict=True)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--peer", choices=["vllm"], help="measure a rival beside ours (needs PEERS)")
    parser.add_argument("serve_args", nargs="*", help="after --: arguments for shoal serve")
    options = parser.parse_args()
    loads = workloads(options.input_len, options.output_len, options.concurrency, options.seed)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        running = [stack.enter_context(servers.shoal(Path(folder), *options.serve_args))]
        if options.peer:
            rival = servers.vllm(Path(folder))
            if rival is None:
                print("PEERS is not set: no rival is installed", file=sys.stderr)
                return 2
            running.append(stack.enter_context(rival))
        print(
            f"{options.input_len} in / {options.output_len} out, seed {options.seed}, {options.rounds} rounds",
            flush=True,
        )
        found = compare(running, loads, options.rounds)
        print("\n".join(summary(found)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
