"""A slice of `make soak`: requests with lengths and prefixes as in public traces through the production engine core."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import traces
from benchmarks.trace_soak import Tally, run
from benchmarks.traces import TraceRequest


def test_a_slice_of_the_soak_loses_nothing() -> None:
    """Without the public traces, so that it is the same everywhere."""
    total = Tally()
    for seed in range(4):
        total.add(run(300, seed, None, size=300, quiet=True))
    assert total.requests == 1200
    assert min(total.tokens, total.hit_tokens, total.preemptions, total.refused, total.aborted, total.overdue) > 0
    assert total.validations >= 4


def test_the_public_traces_are_read() -> None:
    folder = Path(__file__).parents[3] / "shared" / "traces"
    if not folder.exists():
        pytest.skip("the public traces are not here (../shared/traces)")
    found = traces.load(folder)
    assert {name: len(requests) for name, requests in found.items()} == {"mooncake": 12031, "azure": 19366}
    assert found["mooncake"][0] == TraceRequest(0.0, 6758 // 16, 500 // 16, list(range(14)))
    assert all(a.arrival_s <= b.arrival_s for a, b in zip(found["azure"], found["azure"][1:], strict=False))
