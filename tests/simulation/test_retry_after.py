"""`Retry-After` of a flood against what then happens: within a factor of two, from the first refusal to the last."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cluster.simulation.records import SimRecord, SimRequest
from cluster.simulation.sim_cluster import SimCluster, SimConfig
from cluster.simulation.workloads import burst, engine


def in_queue(record: SimRecord) -> tuple[float, float]:
    """When it came into the queue and when it left it."""
    stages = record.stages
    assert stages is not None
    assert stages.queued_s is not None
    assert stages.prefill_s is not None
    admitted_at = record.token_times_s[0] - stages.prefill_s
    return admitted_at - stages.queued_s, admitted_at


def later(requests: list[SimRequest], by_s: float) -> list[SimRequest]:
    return [
        msgspec.structs.replace(r, request_id=f"{r.request_id}+{by_s}", arrival_s=r.arrival_s + by_s) for r in requests
    ]


SHORT = burst(300, 1.0, seed=2, prompt=(5, 30), output=(10, 40))
LONG = burst(80, 1.0, seed=3, prompt=(20, 200), output=(300, 600))
EIGHT = {"max_num_seqs": 8}
FLOODS: dict[str, tuple[list[SimRequest], dict[str, Any]]] = {
    "short": (SHORT, {"engine": engine(cap=128, **EIGHT)}),
    "long": (LONG, {"engine": engine(cap=24, **EIGHT)}),
    "short, for long": (
        burst(1000, 10.0, seed=2, prompt=(5, 30), output=(10, 40)),
        {"engine": engine(cap=64, **EIGHT)},
    ),
    "long behind short": ([*SHORT, *later(LONG, 1.0)], {"engine": engine(cap=64, **EIGHT)}),
    "short behind long": ([*LONG[:20], *later(SHORT, 12.0)], {"engine": engine(cap=32, **EIGHT)}),
    "long prompts": (
        burst(80, 2.0, seed=6, prompt=(1000, 3000), output=(2, 10)),
        {"engine": engine(cap=24, max_num_seqs=32)},
    ),
    "few blocks": (
        burst(120, 2.0, seed=7, prompt=(100, 300), output=(100, 200)),
        {"engine": engine(cap=24, max_num_seqs=64), "num_blocks": 120},
    ),
    "two of each": (
        burst(400, 2.0, seed=9, prompt=(20, 100), output=(20, 60), num_routers=2),
        {"engine": engine(cap=48, **EIGHT), "num_replicas": 2, "num_routers": 2},
    ),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_the_promised_time_is_within_a_factor_of_two_of_the_true_one(flood: str) -> None:
    """True: the last of those who are queued at the moment of the refusal leaves the queue. Promises are whole seconds,
    so what takes less than one is not looked at.
    """
    requests, config = FLOODS[flood]
    records = SimCluster(SimConfig(**config)).run(requests)
    served = [in_queue(r) for r in records if r.token_times_s]
    num_looked_at = 0
    for record in records:
        if record.refusal is None:
            continue
        now, promised_s = record.ended_s, record.retry_after_s
        assert 1 <= promised_s <= 60
        drained_at = max((end for begin, end in served if begin < now - 0.001 and end > now), default=now)
        if (true_s := drained_at - now) >= 1:
            num_looked_at += 1
            assert true_s / 2 <= promised_s <= 2 * true_s, f"{record.request.request_id} at {now:.2f} s"
    assert num_looked_at > 30, "nobody was refused"
