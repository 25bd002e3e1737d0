"""No second of a request is unexplained, whatever happens to it: router and replica account for all of its time."""

from __future__ import annotations

import pytest

from cluster.simulation.records import SimRecord, SimRequest
from cluster.simulation.sim_cluster import SimCluster, SimConfig
from cluster.simulation.workloads import burst, engine
from replica.messages import Explain, FinishReason, ReplicaId, RequestId, WaitCause

DELAY_S = 0.0005


def run(cluster: SimCluster, requests: list[SimRequest]) -> list[SimRecord]:
    records = cluster.run(requests)
    cluster.validate()
    assert all(record.num_ends == 1 for record in records)
    return records


def placed_at(cluster: SimCluster, record: SimRecord) -> float:
    """When the attempt that came to its end was sent."""
    (entry,) = filter(
        None, (r.dispatcher.journal.of(RequestId(record.request.request_id)) for r in cluster.routers.values())
    )
    assert entry.opened_at == record.request.arrival_s
    assert entry.outcome in ("finished", "aborted", "refused")
    return [event.at for event in entry.events if event.what == "placed"][-1]


@pytest.mark.parametrize("policy", ["fcfs", "sjf"])
def test_stages_sum_to_the_whole_time_through_preemptions_holding_and_a_death(policy: str) -> None:
    shape = engine(cap=8, policy=policy, max_num_seqs=12, max_num_batched_tokens=64)
    cluster = SimCluster(SimConfig(engine=shape, num_replicas=2, num_routers=2, num_blocks=90, admission_wait_s=5.0))
    cluster.kill_at(0.9, ReplicaId("replica-0"), replace_after_s=0.5)
    records = run(cluster, burst(120, 1.5, seed=3, num_routers=2, abort_share=0.1))
    ended = [record for record in records if record.finish_reason is FinishReason.LENGTH]
    assert len(ended) > 80
    for record in ended:
        assert record.stages is not None
        seconds = sum(record.stages.by_stage().values())
        assert record.ended_s == pytest.approx(placed_at(cluster, record) + seconds + 2 * DELAY_S, abs=1e-9)
    stages = [record.stages for record in ended if record.stages is not None]
    assert sum(s.num_preemptions for s in stages) > 3
    assert all(s.put_back_s <= (s.prefill_s or 0) + (s.decode_s or 0) for s in stages)
    lacked: set[WaitCause] = set().union(*(s.waits for s in stages))
    assert lacked >= {WaitCause.BLOCKS, WaitCause.SEATS, WaitCause.BUDGET}
    for told in stages:
        assert sum(told.waits.values()) <= told.no_room_s + told.put_back_s + 1e-9, "it lacked something while it ran"
        assert all(p.by.startswith("q") and p.num_lost_tokens > 0 for p in told.preemptions)


def test_a_replica_tells_of_what_ended_there_and_of_aborts_too() -> None:
    cluster = SimCluster(SimConfig(engine=engine(cap=64)))
    records = run(cluster, burst(40, 0.2, seed=5, abort_share=0.5))
    (replica,) = cluster.replicas.values()
    for record in records:
        accounts = replica.core.explain(Explain("", record.request.request_id), 0.0).accounts
        assert len(accounts) == 1
        (account,) = accounts
        assert account.ended_at is not None
        assert account.finish_reason == ("abort" if record.aborted else "length")
        whole = account.ended_at - account.submitted_at
        assert sum(account.stages.by_stage().values()) == pytest.approx(whole, abs=1e-9)
