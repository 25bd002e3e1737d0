"""Scenario A with a TPOT target, in virtual time: what the streams keep, and what it costs the document."""

from __future__ import annotations

import pytest

from cluster.simulation.sim_cluster import SimCluster, SimConfig
from cluster.simulation.workloads import document_among_chats, engine


def worst_gap_and_ttft(target_ms: float) -> tuple[float, float, float]:
    """Milliseconds: 99th percentile and median of the chats' gaps while the document is computed; its TTFT."""
    cluster = SimCluster(SimConfig(engine=engine(tpot_target_ms=target_ms), max_model_len=9000))
    records = {record.request.request_id: record for record in cluster.run(document_among_chats(1))}
    cluster.validate()
    document = records.pop("document")
    assert document.ttft_s is not None
    first = document.token_times_s[0]
    gaps = sorted(
        1000 * gap
        for record in records.values()
        for gap, at in zip(record.gaps_s, record.token_times_s[1:], strict=True)
        if 0.5 < at < first
    )
    assert all(record.num_ends == 1 for record in records.values())
    return gaps[int(0.99 * len(gaps))], gaps[len(gaps) // 2], 1000 * document.ttft_s


@pytest.mark.parametrize("target_ms", [15, 20, 30, 40])
def test_streams_keep_their_target_and_the_document_gets_what_is_left(target_ms: float) -> None:
    p99, p50, ttft = worst_gap_and_ttft(target_ms)
    assert p99 <= 1.1 * target_ms
    assert p50 > 0.8 * target_ms, "the target is not used"
    assert ttft < 1.6 * worst_gap_and_ttft(0)[2]


def test_a_target_that_cannot_be_kept_does_not_stop_the_document() -> None:
    p99, _, ttft = worst_gap_and_ttft(5)
    assert p99 < 20, "one step with the least of prompt tokens"
    assert ttft < 10_000
