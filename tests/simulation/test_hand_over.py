"""Prefill and decode replicas in virtual time: the tokens are those of an undisturbed run, whatever dies."""

from __future__ import annotations

import pytest

from benchmarks import pd_decision
from cluster.simulation.records import SimRecord
from cluster.simulation.sim_cluster import SimCluster, SimConfig
from cluster.simulation.workloads import burst, engine
from replica.fake_runner import expected_output
from replica.messages import ReplicaId
from router.disaggregation import Decision


def _cluster(decision: Decision, **fields: object) -> SimCluster:
    shape = {"num_replicas": 0, "num_prefill": 1, "num_decode": 2, **fields}
    config = SimConfig(
        engine=engine(cap=1000), decision=decision, kv_bytes_per_token=46080, transfer_bytes_s=2e8, **shape
    )
    return SimCluster(config)


def _check(cluster: SimCluster, records: list[SimRecord]) -> None:
    cluster.validate()
    for record in records:
        request = record.request
        assert record.num_ends == 1
        seed = request.seed if request.temperature else 0
        expected = expected_output(
            request.prompt_token_ids, request.max_tokens, seed=seed, vocab_size=49152, eos=frozenset({2})
        )
        assert record.token_ids == expected[: len(record.token_ids)], request.request_id
        assert record.aborted or record.failure or len(record.token_ids) == request.max_tokens
    for replica in cluster.replicas.values():
        assert replica.core.num_unfinished == 0
        assert len(replica.core.scheduler.remote) == 0
        assert replica.core.blocks.num_free == 4096, "stranded blocks"
    for router in cluster.routers.values():
        assert len(router.dispatcher.desk) == 0


@pytest.mark.parametrize("decision", ["auto", "always", "never"])
@pytest.mark.parametrize("shape", [{}, {"num_prefill": 2, "num_decode": 1}, {"num_replicas": 1, "num_decode": 1}])
def test_the_tokens_are_the_same(decision: Decision, shape: dict[str, int]) -> None:
    cluster = _cluster(decision, **shape)
    records = cluster.run(burst(60, 4.0, seed=1, prompt=(5, 500), output=(1, 30), num_routers=1, abort_share=0.15))
    _check(cluster, records)
    num_remote = sum(record.num_remote for record in records)
    assert (num_remote > 0) == (decision != "never")
    assert (cluster.transfers.num_blocks > 0) == (decision != "never")


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_a_loss_costs_a_pause(victim: str) -> None:
    cluster = _cluster("always", num_routers=2)
    for number in range(3):
        cluster.kill_at(0.4 + number, ReplicaId(victim + "'" * number), replace_after_s=0.5)
    records = cluster.run(burst(60, 4.0, seed=2, prompt=(5, 500), output=(1, 30), num_routers=2, abort_share=0.1))
    _check(cluster, records)
    assert sum(record.num_remote for record in records) > 0


def test_without_a_prefill_replica_decode_replicas_do_all() -> None:
    cluster = _cluster("always", num_prefill=0)
    records = cluster.run(burst(20, 1.0, seed=3, prompt=(5, 300), output=(1, 20)))
    _check(cluster, records)
    assert not sum(record.num_remote for record in records)


def test_a_link_that_is_too_slow_is_not_waited_for() -> None:
    """Blocks that are late are computed."""
    cluster = _cluster("always")
    cluster.transfers._block_s = 1e3
    records = cluster.run(burst(10, 1.0, seed=4, prompt=(100, 300), output=(2, 20)))
    _check(cluster, records)


@pytest.mark.parametrize("trace", list(pd_decision.FILES))
def test_auto_is_about_as_good_as_the_better_of_both(trace: str) -> None:
    """A slice of claim pd.decision."""
    try:
        rows = pd_decision.rows_of(trace, pd_decision.FOLDER, 16)
    except OSError:
        pytest.skip("the trace is not here")
    requests = pd_decision.requests_at(rows, pd_decision.SCALES[trace], 0.6)
    found = {
        decision: sum(record.ttft_s or 0.0 for record in pd_decision.run(requests, decision))
        for decision in pd_decision.DECISIONS
    }
    assert found["auto"] <= 1.05 * min(found["always"], found["never"]), found
