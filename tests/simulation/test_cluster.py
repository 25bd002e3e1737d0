"""Whole clusters in virtual time, made of the production dispatcher and engine core."""

from __future__ import annotations

import msgspec
import pytest

from cluster.simulation.records import SimRecord, SimRequest
from cluster.simulation.sim_cluster import SimCluster, SimConfig
from cluster.simulation.workloads import burst, document_among_chats, engine
from replica.fake_runner import expected_output
from replica.messages import FinishReason, RefusalReason, ReplicaId

VOCAB = 49152
EOS = frozenset({2})


def assert_reference_tokens(record: SimRecord) -> None:
    request = record.request
    seed = request.seed if request.temperature > 0 else 0
    reference = expected_output(request.prompt_token_ids, request.max_tokens, seed=seed, vocab_size=VOCAB, eos=EOS)
    assert record.token_ids == reference[: len(record.token_ids)]
    if record.finish_reason is not None:
        assert len(record.token_ids) == request.max_tokens


def assert_clean(cluster: SimCluster, records: list[SimRecord]) -> None:
    """Every request ended exactly once with the right tokens, and every pool is back at baseline."""
    cluster.validate()
    for record in records:
        assert record.num_ends == 1, record
        assert_reference_tokens(record)
    for replica in cluster.replicas.values():
        assert replica.core.num_unfinished == 0
        assert replica.core.blocks.num_free == replica.core.blocks.num_blocks
        assert replica.runner.num_known == 0
    for router in cluster.routers.values():
        assert router.dispatcher.num_requests == 0
        assert len(router._names) == 0, "a request that is over has a name"


@pytest.mark.parametrize("num_routers", [1, 3])
def test_scenario_b_two_hundred_requests_in_three_seconds_at_two_replicas_with_a_cap(num_routers: int) -> None:
    cap = 8
    cluster = SimCluster(SimConfig(engine=engine(cap=cap, max_num_seqs=16), num_replicas=2, num_routers=num_routers))
    records = cluster.run(burst(200, 3.0, seed=5, output=(40, 200), num_routers=num_routers))
    assert_clean(cluster, records)
    loads = [replica.core.load(cluster.events.now) for replica in cluster.replicas.values()]
    # the replica counts at every submission, so this is the true maximum and not a sample
    assert [load.counters["max_queued"] for load in loads] == [cap, cap], "the cap was never reached or was passed"
    refused = [record for record in records if record.refusal]
    assert refused
    assert {record.refusal for record in refused} == {RefusalReason.QUEUE_FULL}
    assert all(1 <= record.retry_after_s <= 60 and not record.token_ids for record in refused)
    # a request is held at most admission_wait before it is refused
    assert max(record.ended_s - record.request.arrival_s for record in refused) < 0.1 + 0.01
    assert all(r.finish_reason is FinishReason.LENGTH for r in records if not r.refusal)


def test_same_seed_same_bytes() -> None:
    def run() -> bytes:
        cluster = SimCluster(
            SimConfig(engine=engine(cap=4, max_num_seqs=4), num_replicas=2, num_routers=2, num_blocks=64)
        )
        cluster.kill_at(0.7, ReplicaId("replica-0"), replace_after_s=0.5)
        return msgspec.json.encode(cluster.run(burst(150, 2.0, seed=9, num_routers=2, abort_share=0.2)))

    assert run() == run()


@pytest.mark.parametrize("seed", range(8))
def test_kills_aborts_and_a_tiny_pool_lose_nothing(seed: int) -> None:
    cluster = SimCluster(
        SimConfig(
            engine=engine(cap=16, max_num_seqs=6, max_num_batched_tokens=48),
            num_replicas=3,
            num_routers=2,
            num_blocks=24,
        )
    )
    for number in range(3):
        cluster.kill_at(0.4 + 0.5 * number, ReplicaId(f"replica-{number}"), replace_after_s=0.3)
    records = cluster.run(burst(120, 2.0, seed=seed, num_routers=2, abort_share=0.3))
    assert_clean(cluster, records)
    assert not any(record.failure for record in records), "three kills, each survived"
    preemptions = sum(r.core.scheduler.counters.preemptions for r in cluster.replicas.values())
    assert preemptions > 0, "the pool was not tiny enough to mean anything"


@pytest.mark.parametrize("seed", range(3))
def test_with_a_window_prompts_longer_than_the_pool_survive_kills_too(seed: int) -> None:
    """What was given back is computed again where a stream goes on."""
    cluster = SimCluster(
        SimConfig(
            engine=engine(cap=32, max_num_seqs=6, max_num_batched_tokens=48),
            num_replicas=2,
            num_blocks=14,
            window=40,
        )
    )
    cluster.kill_at(0.6, ReplicaId("replica-0"), replace_after_s=0.3)
    records = cluster.run(burst(40, 2.0, seed=seed, prompt=(5, 700), abort_share=0.2))
    assert_clean(cluster, records)
    assert not any(record.failure for record in records)
    assert any(r.token_ids and len(r.request.prompt_token_ids) > 14 * 16 for r in records)


def test_when_the_last_replica_stays_dead_streams_fail_and_newcomers_are_refused() -> None:
    cluster = SimCluster(SimConfig(engine=engine()))
    cluster.kill_at(0.5, ReplicaId("replica-0"))
    records = cluster.run(burst(40, 1.0, seed=2, output=(100, 200)))
    assert all(record.num_ends == 1 for record in records)
    begun = [record for record in records if record.token_ids]
    assert begun
    assert all(record.failure for record in begun)
    late = [record for record in records if record.request.arrival_s > 0.6]
    assert late
    assert {record.refusal for record in late} == {RefusalReason.NO_REPLICA}


def test_scenario_a_chunks_keep_the_gaps_of_short_chats_small() -> None:
    worst = {}
    for chunked in (True, False):
        config = SimConfig(engine=engine(enable_chunked_prefill=chunked), num_blocks=1024)
        cluster = SimCluster(config)
        records = cluster.run(document_among_chats())
        assert_clean(cluster, records)
        worst[chunked] = max(max(r.gaps_s) for r in records if r.request.request_id.startswith("chat"))
    cost_of_document = 8000 * 2.2e-4
    assert worst[False] > cost_of_document, "without chunks everybody waits for the whole document"
    assert worst[True] < 0.1, "with chunks a gap is one step of 256 tokens"


def test_least_tokens_sees_a_long_prompt_where_counting_requests_does_not() -> None:
    """One replica has a single 6,000-token prompt, the other three short ones: newcomers belong to the second."""
    long = SimRequest("long", 0.0, list(range(6000)), 5)
    short = [SimRequest(f"short-{i}", 0.01 + 0.001 * i, [i] * 20, 5) for i in range(3)]
    late = [SimRequest(f"late-{i}", 0.1 + 0.001 * i, [i] * 20, 5) for i in range(3)]
    ttft = {}
    for policy in ("least-tokens", "round-robin"):
        cluster = SimCluster(SimConfig(engine=engine(), num_replicas=2, policy=policy))
        records = cluster.run([long, *short, *late])
        ttft[policy] = max(r.ttft_s or 0 for r in records if r.request.request_id.startswith("late"))
    assert ttft["least-tokens"] < 0.1
    assert ttft["round-robin"] > 5 * ttft["least-tokens"]


def test_first_tokens_come_in_order_of_arrival() -> None:
    """Invariant 5: fcfs, equal lengths, ample memory."""
    cluster = SimCluster(SimConfig(engine=engine(max_num_seqs=4)))
    records = cluster.run([SimRequest(f"q{i}", 0.01 * i, [i] * 50, 10) for i in range(30)])
    first = [record.token_times_s[0] for record in records]
    assert first == sorted(first)
