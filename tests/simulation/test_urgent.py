"""Urgent requests, shed ones and deadlines over several routers and replicas, in virtual time: all that the router adds
to the engine's rules.
"""

from __future__ import annotations

from typing import Any

from cluster.simulation.records import SimRecord, SimRequest
from cluster.simulation.sim_cluster import SimCluster, SimConfig
from cluster.simulation.workloads import engine
from replica.fake_runner import CostModel
from replica.messages import DownMessage, FinishReason, RefusalReason, ReplicaId, RouterId, Submit

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


def flood(count: int, **fields: Any) -> list[SimRequest]:
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


class Wires(SimCluster):
    """Counts what routers submit."""

    num_submits = 0

    def _send_down(self, router_id: RouterId, replica_id: ReplicaId, message: DownMessage) -> None:
        self.num_submits += isinstance(message, Submit)
        super()._send_down(router_id, replica_id, message)


def count(requests: list[SimRequest], wait_s: float, cap: int, **scheduler: object) -> tuple[Wires, list[SimRecord]]:
    config = engine(cap=cap, max_num_seqs=2, **scheduler)
    cluster = Wires(SimConfig(engine=config, num_replicas=2, num_routers=2, admission_wait_s=wait_s), STEADY)
    records = cluster.run(requests)
    cluster.validate()
    assert all(record.num_ends == 1 for record in records)
    return cluster, records


def test_a_limit_on_queued_tokens_does_not_make_routers_ask_for_ever() -> None:
    """331,065 submissions and 11 s to a refusal, when each refusal counted as news of its replica."""
    cluster, records = count(flood(60), 0.1, 64, shed_above_queued_tokens=16)
    assert cluster.num_submits < 3 * len(records)
    refused = [record for record in records if record.refusal is not None]
    assert {record.refusal for record in refused} == {RefusalReason.SHED}, "no cap was reached"
    assert max(record.ended_s - record.request.arrival_s for record in refused) < 0.1 + 0.01
    assert sum(record.finish_reason is FinishReason.LENGTH for record in records) == 2 * (2 + 8), "every place is used"


def test_a_flood_of_equally_urgent_ones_costs_about_a_message_each() -> None:
    others = flood(12, priority=5)
    urgent = [SimRequest(f"u{i}", 0.5 + 1e-5 * i, [i % 1000, 9], 40, priority=0, router=i % 2) for i in range(200)]
    cluster, records = count([*others, *urgent], 0.3, 4, policy="priority")
    assert cluster.num_submits < 1.2 * len(records)
    done = [record for record in records if record.finish_reason is FinishReason.LENGTH]
    assert len([record for record in done if record.request.priority == 0]) >= 2 * 4


def test_requests_over_the_limit_on_tokens_get_in_when_it_is_free_again() -> None:
    """Feeling for the limit must not starve those who wait: all of them fit in time."""
    requests = [SimRequest(f"q{i}", 0.001 * i, [i % 1000, 3], 4, router=i % 2) for i in range(60)]
    cluster, records = count(requests, 30.0, 64, shed_above_queued_tokens=16)
    assert all(record.finish_reason is FinishReason.LENGTH for record in records)
    assert cluster.num_submits < 6 * len(records)
    # two replicas, two sequences each, four steps a request: 15 rounds of 0.2 s
    assert max(record.ended_s for record in records) < 1.25 * 15 * 4 * 0.05
