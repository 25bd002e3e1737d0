"""Latency figures from named instants: one formula each, the same for the HTTP edge, the simulator and the load
generator.
"""

from __future__ import annotations

import pytest

from benchmarks.load import Answer, Workload, summarize
from cluster.simulation.records import SimRecord, SimRequest
from replica.messages import Stages
from router.http_metrics import HttpMetrics
from router.latency import Latencies, SequenceTimes, Timeline, latencies, replay

#: arrival, and four tokens
ARRIVAL_S = 10.0
TOKENS_S = [10.5, 10.75, 11.25, 13.5]


def noted(*notes: tuple[int, int, float]) -> Timeline:
    timeline = Timeline(ARRIVAL_S)
    for note in notes:
        timeline.note(*note)
    return timeline


def test_every_figure_from_its_instants() -> None:
    timeline, gaps = replay(ARRIVAL_S, TOKENS_S)
    assert gaps == [0.25, 0.5, 2.25]
    assert latencies(timeline) == Latencies(ttft_s=0.5, tpot_s=3.0 / 3, e2e_s=3.5)


def test_figures_that_are_undefined_are_none_and_not_zero() -> None:
    assert latencies(Timeline(ARRIVAL_S)) == Latencies()
    assert latencies(noted((0, 1, 11.0))) == Latencies(ttft_s=1.0, tpot_s=None, e2e_s=1.0)


def test_tokens_that_come_together_share_one_gap() -> None:
    timeline = Timeline(ARRIVAL_S)
    assert timeline.note(0, 2, 11.0) is None
    assert timeline.note(0, 3, 12.0) == 1.0
    assert latencies(timeline).tpot_s == 1.0 / 4


def test_several_sequences_have_a_first_and_a_last_token_but_no_tpot() -> None:
    timeline = noted((1, 1, 11.0), (0, 1, 12.0), (1, 1, 14.0))
    assert latencies(timeline) == Latencies(ttft_s=1.0, tpot_s=None, e2e_s=4.0)
    assert timeline.note(0, 1, 12.5) == 0.5


def test_stages_of_a_sequence_that_ended_at_the_replica() -> None:
    timeline = noted((0, 1, 12.0), (0, 1, 13.0))
    timeline.note_stages(0, Stages(0.5, 1.25))
    timeline.note_stages(0, Stages(0.5, 1.25, 0.75, 2))
    assert latencies(timeline).sequences == [SequenceTimes(0.5, 1.25, 0.75, 2.0, 2)]


def test_stages_of_a_sequence_that_a_stop_string_ended_here() -> None:
    """The replica told of the first token and heard of the end: decode is what was seen, preemptions are not known."""
    timeline = noted((0, 1, 12.0), (0, 1, 12.25), (0, 1, 14.0))
    timeline.note_stages(0, Stages(0.5, 1.25))
    assert latencies(timeline).sequences == [SequenceTimes(0.5, 1.25, 2.0, 3.25, None)]


def test_a_client_that_counts_chunks_gives_the_number_of_tokens() -> None:
    timeline, _ = replay(ARRIVAL_S, TOKENS_S)
    assert latencies(timeline, num_tokens=7).tpot_s == 3.0 / 6
    assert latencies(timeline, num_tokens=1).tpot_s is None


def test_edge_simulator_and_load_generator_agree() -> None:
    record = SimRecord(SimRequest("q", ARRIVAL_S, [1], 4), token_times_s=TOKENS_S)
    assert (record.ttft_s, record.gaps_s) == (0.5, [0.25, 0.5, 2.25])

    answer = Answer(ARRIVAL_S, TOKENS_S, num_tokens=4)
    result = summarize(Workload(1, 4, 1, 1), [answer, Answer(0.0, [], 0, error="refused")], 3.5)
    assert result.ttft_ms["max"] == pytest.approx(1000 * 0.5)
    assert result.gap_ms["max"] == pytest.approx(1000 * 2.25)
    assert result.tpot_ms["max"] == pytest.approx(1000 * 1.0)
    assert result.num_failed == 1

    metrics = HttpMetrics("vllm:")
    edge = metrics.start("m", ARRIVAL_S)
    for now_s in TOKENS_S:
        edge.tokens(0, 1, now_s)
    edge.end("length")
    sums = {
        line.split("{")[0]: float(line.rsplit(" ", 1)[1])
        for line in metrics.text().decode().splitlines()
        if line.split("{")[0].endswith("_sum")
    }
    assert sums["vllm:time_to_first_token_seconds_sum"] == record.ttft_s
    assert sums["vllm:inter_token_latency_seconds_sum"] == sum(record.gaps_s)
    assert sums["vllm:request_time_per_output_token_seconds_sum"] == record.latencies.tpot_s
    assert sums["vllm:e2e_request_latency_seconds_sum"] == record.latencies.e2e_s
