"""Urgent requests, shed ones and deadlines over several routers and replicas, in virtual time: all that the router adds
to the engine's rules.
"""

from __future__ import annotations

from cluster.simulation.records import SimRecord, SimRequest
from cluster.simulation.sim_cluster import SimCluster, SimConfig
from cluster.simulation.workloads import engine
from replica.fake_runner import CostModel
from replica.messages import FinishReason, RefusalReason

STEADY = CostModel(base_s=0.05, per_token_s=0, per_sequence_s=0, per_context_token_s=0)


def run(requests: list[SimRequest], *, cap: int = 4, num_replicas: int = 2, **scheduler: object) -> list[SimRecord]:
    """Two routers; each request ends exactly once and leaves nothing."""
    cluster = SimCluster(
        SimConfig(engine=engine(cap=cap, max_num_seqs=2, **scheduler), num_replicas=num_replicas, num_routers=2),
        STEADY,
    )
    records = cluster.run(requests)
    cluster.validate()
    assert all(record.num_ends == 1 for record in records)
    for router in cluster.routers.values():
        assert router.dispatcher.num_requests == router.dispatcher.num_held == 0
    for replica in cluster.replicas.values():
        assert replica.core.num_unfinished == 0
        assert replica.core.load(0.0).counters["max_queued"] <= cap
    return records


def flood(count: int, **fields: int) -> list[SimRequest]:
    return [SimRequest(f"f{i}", 0.001 * i, [i % 1000, 7], 40, router=i % 2, **fields) for i in range(count)]


def test_an_urgent_request_gets_in_though_every_queue_is_full() -> None:
    urgent = SimRequest("urgent", 0.5, [1, 2], 5, priority=0, router=1)
    *others, record = run([*flood(60, priority=5), urgent], policy="priority")
    assert record.finish_reason is FinishReason.LENGTH
    assert record.ttft_s is not None
    assert record.ttft_s < 0.2, "it takes the place of a running one as well"
    assert all(other.refusal in (None, RefusalReason.QUEUE_FULL, RefusalReason.SHED) for other in others)


def test_without_the_policy_it_is_refused_like_all_others() -> None:
    *_, record = run([*flood(60), SimRequest("late", 0.5, [1, 2], 5, router=1)])
    assert record.refusal is RefusalReason.QUEUE_FULL


def test_a_shed_request_finds_another_replica_with_room() -> None:
    """One replica is full, the other is not yet there: then the shed one goes to it."""
    records = run(
        [
            *[SimRequest(f"f{i}", 0.0, [i, 7], 40, priority=5) for i in range(6)],
            *[SimRequest(f"u{i}", 0.06, [i, 9], 5, priority=0) for i in range(3)],
        ],
        policy="priority",
        cap=3,
        max_preemptions=0,
    )
    assert all(record.finish_reason is FinishReason.LENGTH for record in records), (
        "somebody was refused beside a free place"
    )


def test_a_held_request_ends_at_its_deadline() -> None:
    requests = [*flood(12), SimRequest("late", 0.5, [1, 2], 5, deadline_s=0.55)]
    *_, record = run(requests, cap=4, num_replicas=2)
    assert record.refusal is RefusalReason.DEADLINE
    assert abs(record.ended_s - 0.55) < 1e-9
