"""Local or remote prefill in virtual time: mean TTFT of `auto`, `always` and `never` on one prefill and three decode
replicas, over ten loads, with the arrivals, lengths and shared prefixes of public traces.

    python -m benchmarks.pd_decision [--requests 800] [--trace azure|mooncake] [--folder ../shared/traces]

A load of 1 is what four replicas that do everything could just bear, by estimate. Everything follows from the seed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import msgspec

from cluster.simulation.records import SimRecord, SimRequest
from cluster.simulation.sim_cluster import SimCluster, SimConfig
from cluster.simulation.traces import PromptText, TraceRequest, read_azure, read_mooncake
from cluster.simulation.workloads import engine
from replica.fake_runner import CostModel
from router.disaggregation import Decision

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "traces"
FILES = {"azure": "AzureLLMInferenceTrace_conv_2023.csv", "mooncake": "mooncake_conversation_trace.jsonl"}
LOADS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
DECISIONS: tuple[Decision, ...] = ("auto", "always", "never")
NUM_DECODE = 3
VOCAB = 49152
#: about a mid-size model on one GPU: 40,000 prompt tokens/s, 8 ms for a step of 64 decodes; 128 KiB of KV a token, and
#: a link of 100 Gbit/s
COST = CostModel(base_s=5e-3, per_token_s=2.5e-5, per_sequence_s=3e-5, per_context_token_s=4e-9)
KV_BYTES_PER_TOKEN, LINK_BYTES_S = 131072.0, 12e9
#: Mooncake's prompts are ten times as long as Azure's: at full length some do not fit into a pool
SCALES = {"azure": 1.0, "mooncake": 0.25}
#: rows are taken from here on: the first minutes are an hour that begins
SKIP = 1000


class Point(msgspec.Struct, frozen=True):
    """One load: mean TTFT in seconds by decision."""

    load: float
    ttft_s: dict[Decision, float]
    remote_share: float

    @property
    def ratio(self) -> float:
        """Of `auto` over the better of the others."""
        return self.ttft_s["auto"] / min(self.ttft_s["always"], self.ttft_s["never"])


def rows_of(trace: str, folder: Path, num_requests: int) -> list[TraceRequest]:
    """A stretch of the trace. Raises OSError where it is absent."""
    with (folder / FILES[trace]).open() as lines:
        rows = read_azure(lines) if trace == "azure" else read_mooncake(lines)
    return rows[SKIP : SKIP + num_requests]


def requests_at(rows: list[TraceRequest], scale: float, load: float) -> list[SimRequest]:
    """The same arrivals, closer together or further apart."""
    work = [
        row.num_prompt_tokens * scale * COST.per_token_s
        + row.num_output_tokens * scale * (COST.per_sequence_s + COST.base_s / 32)
        for row in rows
    ]
    wanted_s = sum(work) / (load * (NUM_DECODE + 1))
    start, span = rows[0].arrival_s, rows[-1].arrival_s - rows[0].arrival_s
    text = PromptText(0, VOCAB)
    return [
        SimRequest(
            f"q{number}",
            (row.arrival_s - start) * wanted_s / span,
            text.prompt(number, row, scale),
            max(1, int(row.num_output_tokens * scale)),
        )
        for number, row in enumerate(rows)
    ]


def run(requests: list[SimRequest], decision: Decision) -> list[SimRecord]:
    config = SimConfig(
        engine=engine(cap=100_000, max_num_batched_tokens=2048, max_num_seqs=256),
        num_replicas=0,
        num_prefill=1,
        num_decode=NUM_DECODE,
        decision=decision,
        num_blocks=40_000,
        max_model_len=131_072,
        prefill_timeout_s=1e6,
        kv_bytes_per_token=KV_BYTES_PER_TOKEN,
        transfer_bytes_s=LINK_BYTES_S,
    )
    records = SimCluster(config, COST).run(requests)
    assert all(record.num_ends == 1 and record.ttft_s is not None for record in records), "a request had no token"
    return records


def points(rows: list[TraceRequest], scale: float) -> Iterator[Point]:
    """One for each load."""
    for load in LOADS:
        requests = requests_at(rows, scale, load)
        ttft_s: dict[Decision, float] = {}
        share = 0.0
        for decision in DECISIONS:
            records = run(requests, decision)
            ttft_s[decision] = mean(record.ttft_s or 0.0 for record in records)
            if decision == "auto":
                share = mean(record.num_remote for record in records)
        yield Point(load, ttft_s, share)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--trace", choices=list(FILES), default=None)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    for trace in [options.trace] if options.trace else FILES:
        rows = rows_of(trace, options.folder, options.requests)
        print(f"{trace}: {len(rows)} requests, mean TTFT in ms")
        print("  load      auto    always     never  auto/best  remote")
        for point in points(rows, SCALES[trace]):
            figures = "".join(f"{1000 * point.ttft_s[decision]:10.1f}" for decision in DECISIONS)
            print(f"  {point.load:4.1f}{figures}{point.ratio:11.3f}{100 * point.remote_share:7.0f} %", flush=True)


if __name__ == "__main__":
    main()
