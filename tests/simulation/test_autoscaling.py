"""The scaling policy in virtual time: a steady load does not oscillate, a step is followed, nothing is lost on the way
down. The figures against Serve's default policy are claims (`benchmarks/scaling.py`).
"""

from __future__ import annotations

import random

from cluster.autoscaling import AutoscalingConfig, ScalingPolicy
from cluster.simulation.records import SimRecord, SimRequest
from cluster.simulation.sim_cluster import SimCluster, SimConfig
from cluster.simulation.sim_scaling import OurPolicy, SimScaler
from cluster.simulation.workloads import engine
from replica.fake_runner import CostModel, expected_output
from replica.messages import FinishReason

#: slow steps make few events: 0.2 s and 10 ms a stream, so about 20 streams within 0.4 s a token
COST = CostModel(base_s=0.2, per_token_s=2e-3, per_sequence_s=8e-3, per_context_token_s=0)
CONFIG = AutoscalingConfig(max_replicas=6, tpot_target_ms=400)


def poisson(rates: list[tuple[float, float]], seed: int) -> list[SimRequest]:
    """`rates`: (seconds, requests a second), one after the other."""
    rng = random.Random(seed)
    found: list[SimRequest] = []
    start = 0.0
    for span, rate in rates:
        now = start + rng.expovariate(rate)
        while now < start + span:
            prompt = [rng.randrange(1000) for _ in range(rng.randint(10, 50))]
            found.append(SimRequest(f"q{len(found)}", now, prompt, rng.randint(20, 100)))
            now += rng.expovariate(rate)
        start += span
    return found


def follow(requests: list[SimRequest]) -> tuple[SimScaler, list[SimRecord]]:
    cluster = SimCluster(SimConfig(engine=engine()), COST)
    scaler = SimScaler(cluster, OurPolicy(ScalingPolicy(CONFIG, fewest=1)), start_s=20.0)
    records = cluster.run(requests, follow=scaler.follow)
    cluster.validate()
    for record in records:
        assert record.finish_reason is FinishReason.LENGTH, record
        request = record.request
        assert record.token_ids == expected_output(
            request.prompt_token_ids, request.max_tokens, vocab_size=49152, eos=frozenset({2})
        )
    return scaler, records


def test_a_steady_load_does_not_oscillate() -> None:
    for seed in range(2):
        scaler, _ = follow(poisson([(1200, 2.0)], seed))
        late = [count for at, count in scaler.changes if at > 500]
        assert len(late) <= 1, scaler.changes
        assert 3 <= scaler.target <= 5, scaler.changes


def test_a_step_is_followed_up_and_down_and_nothing_is_lost() -> None:
    scaler, records = follow(poisson([(300, 0.4), (400, 2.0), (500, 0.4)], seed=1))
    at_step = [count for at, count in scaler.changes if 300 < at < 400]
    assert max(at_step) >= 3
    before, after = [max(n for at, n in scaler.changes if at <= until) for until in (300, 1200)]
    assert before <= 2
    assert after <= 6
    assert scaler.changes[-1][1] <= 2, "it came down again"
    assert any(record.num_moves for record in records), "nobody drained with a stream on it"
