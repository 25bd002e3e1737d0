"""Replicas drain in virtual time: nothing is lost, doubled or refused, and nobody waits for the longest stream."""

from __future__ import annotations

import pytest

from cluster.simulation.records import SimRecord, SimRequest
from cluster.simulation.sim_cluster import SimCluster, SimConfig
from cluster.simulation.workloads import burst, engine
from replica.messages import FinishReason, ReplicaId
from tests.simulation.test_cluster import assert_clean

A, B, C = (ReplicaId(f"replica-{number}") for number in range(3))


def streams(count: int, length: int = 400, prompt: int = 40) -> list[SimRequest]:
    """Long ones that begin together, each with a prompt of its own."""
    return [SimRequest(f"s{n}", 0.01 * n, [n + 3] * prompt, length, router=n) for n in range(count)]


def run(cluster: SimCluster, requests: list[SimRequest]) -> list[SimRecord]:
    records = cluster.run(requests)
    assert_clean(cluster, records)
    for record in records:
        assert record.refusal is None, record
        assert record.failure == "", record
        assert record.aborted or record.finish_reason is FinishReason.LENGTH
    return records


def emptied_at(records: list[SimRecord], since: float) -> float:
    """When the last of the streams that moved had its first token elsewhere."""
    return max(r.token_times_s[k] for r in records if r.num_moves for k in [_first_after(r, since)])


def _first_after(record: SimRecord, since: float) -> int:
    gaps = [
        (b - a, k + 1) for k, (a, b) in enumerate(zip(record.token_times_s, record.token_times_s[1:], strict=False))
    ]
    return max((gap, k) for gap, k in gaps if record.token_times_s[k] > since)[1]


def test_two_of_three_drain_at_once_and_long_streams_leave_early() -> None:
    cluster = SimCluster(SimConfig(engine=engine(), num_replicas=3, num_routers=2))
    for replica_id in (A, B):
        cluster.drain_at(1.0, replica_id, drain_s=30.0)
    records = run(cluster, streams(32))
    moved = [record for record in records if record.num_moves]
    assert len(moved) > 10
    assert {record.num_moves for record in moved} == {1}
    assert emptied_at(records, 1.0) < 6.0, "the streams take 15 s and more"
    assert max(gap for record in records for gap in record.gaps_s) < 0.6, (
        "a pause is one's own prefill, not that of all"
    )


def test_what_ends_within_the_grace_is_not_moved() -> None:
    cluster = SimCluster(SimConfig(engine=engine(), num_replicas=2))
    cluster.drain_at(0.5, A, drain_s=30.0)
    records = run(cluster, streams(8, length=60))
    assert [record.num_moves for record in records] == [0] * 8


def test_what_is_queued_goes_at_once_where_there_is_room() -> None:
    """One place in the batch: at A wait four, all before their first token; they do not wait for what runs there."""
    cluster = SimCluster(SimConfig(engine=engine(max_num_seqs=1, cap=8), num_replicas=2, move_after_s=100.0))
    cluster.drain_at(0.2, A, drain_s=200.0)
    records = run(cluster, streams(10, length=100))
    moved = [record for record in records if record.num_moves]
    assert len(moved) == 4
    assert all(record.token_times_s[0] > 0.2 for record in moved)


def test_no_other_replica_has_a_place_and_nobody_is_refused() -> None:
    """What is left after `drain_s` waits where it returns, whatever the cap there is."""
    cluster = SimCluster(SimConfig(engine=engine(max_num_seqs=4, cap=2), num_replicas=2, admission_wait_s=60.0))
    cluster.drain_at(1.0, A, drain_s=3.0)
    records = run(cluster, streams(12, length=400))
    assert sum(record.num_moves > 0 for record in records) >= 4


def test_the_only_replica_drains_and_its_streams_go_on_until_another_is_there() -> None:
    cluster = SimCluster(SimConfig(engine=engine()))
    cluster.drain_at(1.0, A, drain_s=30.0, replace_after_s=5.0)
    records = run(cluster, streams(8, length=1500))
    assert {record.num_moves for record in records} == {1}
    assert max(gap for record in records for gap in record.gaps_s) < 0.6, "somebody waited for the other replica"


def test_the_only_replica_has_drained_before_another_is_there() -> None:
    cluster = SimCluster(SimConfig(engine=engine()))
    cluster.drain_at(1.0, A, drain_s=2.0, replace_after_s=10.0)
    records = run(cluster, streams(8, length=600))
    assert {record.num_moves for record in records} == {1}


def test_clients_leave_while_their_streams_move() -> None:
    cluster = SimCluster(SimConfig(engine=engine(), num_replicas=3, num_routers=2, move_after_s=0.0))
    cluster.drain_at(1.0, A, drain_s=5.0)
    cluster.drain_at(1.5, B, drain_s=0.0)
    run(cluster, burst(100, 2.0, seed=4, output=(60, 200), num_routers=2, abort_share=0.6))


@pytest.mark.parametrize("after_s", [0.001, 0.05, 0.5])
def test_the_replica_to_which_streams_move_dies(after_s: float) -> None:
    cluster = SimCluster(SimConfig(engine=engine(), num_replicas=2, move_after_s=0.0))
    cluster.drain_at(1.0, A, drain_s=30.0)
    cluster.kill_at(1.0 + after_s, B, replace_after_s=2.0)
    run(cluster, streams(16))


def test_one_replica_after_the_other_is_replaced_under_a_steady_load() -> None:
    """A rolling update: the replacement is there a second after the old one was told to stop."""
    cluster = SimCluster(SimConfig(engine=engine(cap=16), num_replicas=3, num_routers=2))
    for number, replica_id in enumerate((A, B, C)):
        cluster.drain_at(2.0 + 4 * number, replica_id, drain_s=30.0, replace_after_s=1.0)
    steady = burst(300, 16.0, seed=9, output=(20, 60), num_routers=2)
    records = run(cluster, [*streams(32, length=500), *steady])
    assert max(record.num_moves for record in records) <= 3
