"""Claims of `docs/findings.md` that are cheap to measure again, in virtual time."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from benchmarks.claims import Measured, claim
from benchmarks.findings_runs import CHUNKING, order_of_service, scenario_a


@claim("engine.findings")
def findings(full: bool) -> Iterator[tuple[str, Measured]]:
    """Scenario B: mean TTFT under sjf over fcfs. Scenario A: a question's TTFT with threshold 64 over without."""
    seeds = range(10 if full else 3)
    ratios = [
        order_of_service({"policy": "sjf"}, seed)["all_ttft_mean"] / order_of_service({}, seed)["all_ttft_mean"]
        for seed in seeds
    ]
    yield "sjf", Measured(statistics.median(ratios), "of the mean TTFT under fcfs", 0.5, note="200 requests in 3 s")
    low, default = (
        [scenario_a(CHUNKING[name], seed)["question_ttft_p50"] for seed in seeds]
        for name in ("threshold 64", "budget 256 (default)")
    )
    share = statistics.median(low) / statistics.median(default)
    yield "threshold", Measured(share, "of a question's TTFT without", 0.05, note="beside an 8,000-token document")
