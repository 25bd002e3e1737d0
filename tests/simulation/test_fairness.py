"""Nobody starves: each policy under arrivals made to starve somebody, in virtual time, with the bound in the
assertion.
"""

from __future__ import annotations

from typing import Any

import pytest

from cluster.simulation.records import SimRecord, SimRequest
from cluster.simulation.sim_cluster import SimCluster, SimConfig
from cluster.simulation.workloads import engine
from replica.fake_runner import CostModel, expected_output
from replica.messages import FinishReason, RefusalReason

#: every step takes so long, whatever is in it
STEP_S = 0.05
STEADY = CostModel(base_s=STEP_S, per_token_s=0, per_sequence_s=0, per_context_token_s=0)
#: for messages both ways
NETWORK_S = 0.001


def run(
    requests: list[SimRequest], *, num_blocks: int = 4096, cap: int = 100_000, **scheduler: object
) -> dict[str, SimRecord]:
    """What became of each; it ended exactly once, and with the right tokens."""
    cluster = SimCluster(SimConfig(engine=engine(cap=cap, **scheduler), num_blocks=num_blocks), STEADY)
    found = {record.request.request_id: record for record in cluster.run(requests)}
    cluster.validate()
    (replica,) = cluster.replicas.values()
    assert replica.core.blocks.num_free == num_blocks
    for record in found.values():
        assert record.num_ends == 1
        prompt, count = record.request.prompt_token_ids, len(record.token_ids)
        assert record.token_ids == expected_output(prompt, count, vocab_size=49152, eos=frozenset({2}))
        if record.finish_reason is FinishReason.LENGTH:
            assert count == record.request.max_tokens
    return found


def first_token(record: SimRecord) -> float:
    assert record.token_times_s, record
    return record.token_times_s[0]


def overtakers(found: dict[str, SimRecord], name: str) -> list[SimRequest]:
    """Who came later and began earlier."""
    victim = found[name]
    return [
        record.request
        for record in found.values()
        if record.token_times_s
        and record.request.arrival_s > victim.request.arrival_s
        and first_token(record) < first_token(victim)
    ]


def flow(every_s: float, until_s: float, num_tokens: int, **fields: Any) -> list[SimRequest]:
    """Equal requests at equal distances."""
    return [
        SimRequest(f"flow-{i}", i * every_s, [i % 1000, 7], num_tokens, **fields) for i in range(int(until_s / every_s))
    ]


@pytest.mark.parametrize("ageing_s", [1.0, 5.0])
def test_c_10_a_patient_request_starts_within_its_bound_under_more_urgent_work_than_can_be_done(
    ageing_s: float,
) -> None:
    """There is more urgent work than can be done. Nobody who comes 9 levels of ageing later may pass, and what came
    before that takes 1 s for each 0.9 s.
    """
    urgent = flow(0.9, 120.0, 20)
    patient = SimRequest("patient", 0.01, [1, 2, 3], 20, priority=9)
    found = run([*urgent, patient], policy="priority", priority_ageing_s=ageing_s, max_num_seqs=1)
    assert all(request.arrival_s <= patient.arrival_s + 9 * ageing_s for request in overtakers(found, "patient"))
    assert len(overtakers(found, "patient")) >= 9 * ageing_s / 0.9 - 2, "until then the urgent ones do come first"
    assert first_token(found["patient"]) <= (9 * ageing_s / 0.9 + 2) * 1.0 + 0.05
    assert all(record.finish_reason is FinishReason.LENGTH for record in found.values())


def test_without_ageing_to_speak_of_it_waits_for_all_of_them() -> None:
    """So the test above is about ageing."""
    patient = SimRequest("patient", 0.01, [1, 2, 3], 20, priority=9)
    found = run([*flow(0.9, 120.0, 20), patient], policy="priority", priority_ageing_s=1e6, max_num_seqs=1)
    assert len(overtakers(found, "patient")) == 132


def test_c_10_one_that_runs_is_displaced_so_often_and_then_runs_to_its_end() -> None:
    patient = SimRequest("patient", 0.0, [1, 2, 3], 100, priority=9)
    urgent = [SimRequest(f"urgent-{i}", 0.5 + 2.0 * i, [i, 7], 10, priority=0) for i in range(60)]
    found = run([patient, *urgent], policy="priority", priority_ageing_s=1e6, max_num_seqs=1, max_preemptions=3)
    # 100 steps of its own, three urgent ones before it, and after each the tokens so far once more in one step
    assert found["patient"].ended_s <= (100 + 3 * 10 + 3) * STEP_S + 3 * 0.5 + NETWORK_S
    assert found["urgent-0"].ended_s < 1.5, "the first urgent one did not wait"


def test_an_urgent_request_waits_for_a_step_and_not_for_a_place() -> None:
    patient = [SimRequest(f"patient-{i}", 0.0, [i], 400, priority=5) for i in range(4)]
    urgent = [SimRequest(f"urgent-{i}", 1.0 + i, [i, 7], 5, priority=0) for i in range(8)]
    found = run([*patient, *urgent], policy="priority", max_num_seqs=4)
    assert max(found[u.request_id].ttft_s or 99 for u in urgent) <= 2 * STEP_S + NETWORK_S
    fcfs = run([*patient, *urgent], policy="fcfs", max_num_seqs=4)
    assert min(fcfs[u.request_id].ttft_s or 99 for u in urgent) > 10, "under fcfs it waits for a place"


@pytest.mark.parametrize("rate", [50.0, 200.0])
def test_sjf_lets_a_long_request_start_within_its_bound(rate: float) -> None:
    """Nobody who comes work / rate later may pass it; until then shorter ones do."""
    long = SimRequest("long", 0.01, list(range(500)), 500)
    short = flow(0.9, 120.0, 20)
    found = run([*short, long], policy="sjf", sjf_ageing_tokens_per_s=rate, max_num_seqs=1, max_num_batched_tokens=600)
    bound_s = (500 + 500) / rate
    passed = overtakers(found, "long")
    assert all(request.arrival_s <= long.arrival_s + bound_s for request in passed)
    assert len(passed) >= bound_s / 0.9 - 2
    assert first_token(found["long"]) <= (bound_s / 0.9 + 2) * 1.0 + 0.05


def test_sjf_makes_the_mean_wait_shorter_than_fcfs() -> None:
    """What it is for: a burst of mixed lengths, served one after the other."""
    burst = [SimRequest(f"q{i}", 0.001 * i, [i, 1], 200 if i % 4 == 0 else 10) for i in range(40)]
    mean = {}
    for policy in ("fcfs", "sjf"):
        found = run(burst, policy=policy, max_num_seqs=1)
        mean[policy] = sum(record.ttft_s or 0 for record in found.values()) / len(found)
    assert mean["sjf"] < 0.5 * mean["fcfs"]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "sjf"])
@pytest.mark.parametrize("passes", [0, 4])
def test_a_head_that_does_not_fit_is_passed_so_often_and_no_more(policy: str, passes: int) -> None:
    """Small requests without end would keep the pool half full for ever: the head wants nearly all of it."""
    small = [SimRequest(f"flow-{i}", 0.1 * i, [i % 1000] * 40, 20) for i in range(600)]
    head = SimRequest("head", 10.0, list(range(460)), 10)
    found = run(
        [*small, head],
        num_blocks=32,
        policy=policy,
        max_head_passes=passes,
        sjf_ageing_tokens_per_s=1e6,
        max_num_batched_tokens=2000,
    )
    assert len(overtakers(found, "head")) <= passes
    # those that came before it, and those that passed it: each runs for 20 steps, eight at a time
    waiting = sum(first_token(r) > 10.0 for r in found.values() if r.request.arrival_s < 10.0)
    assert first_token(found["head"]) <= 10.0 + ((waiting + passes) / 8 + 3) * 20 * STEP_S


def test_long_prompts_without_end_do_not_hold_up_short_ones_and_the_other_way_round() -> None:
    """Eight long prompts at once, a short one every second; beside it the lane has half of 64 tokens."""
    long = [SimRequest(f"long-{i}", 0.001 * i, [i, *range(1599)], 3) for i in range(8)]
    short = [SimRequest(f"short-{i}", 1.0 + i, [i, *range(500, 519)], 3) for i in range(60)]
    knobs: dict[str, object] = {"max_num_batched_tokens": 64, "num_blocks": 2000}
    lanes = run(
        [*long, *short],
        long_prefill_token_threshold=64,
        max_long_partial_prefills=1,
        **knobs,  # type: ignore[arg-type]
    )
    plain = run([*long, *short], **knobs)  # type: ignore[arg-type]
    worst = {
        name: max(found[request.request_id].ttft_s or 99 for request in short)
        for name, found in (("lanes", lanes), ("plain", plain))
    }
    assert worst["lanes"] <= 3 * STEP_S, "one step that had begun, and its own"
    assert worst["plain"] > 5
    # all tokens of the long ones at half a step each, beside the few of the short ones
    assert max(lanes[request.request_id].ended_s for request in long) <= 8 * (1600 / 32 + 5) * STEP_S
    assert all(record.finish_reason is FinishReason.LENGTH for record in lanes.values())


def test_a_long_prompt_gets_on_under_a_flood_of_short_ones() -> None:
    """The flood alone would take every token of every step."""
    flood = [SimRequest(f"flood-{i}", 0.01 * i, [i, *range(100, 119)], 1) for i in range(3000)]
    long = SimRequest("long", 1.0, list(range(1600)), 1)
    found = run(
        [long, *flood],
        max_num_batched_tokens=64,
        long_prefill_token_threshold=32,
        max_long_partial_prefills=1,
        policy="priority",
        priority_ageing_s=1e-3,
        max_num_seqs=1000,
    )
    begun = sum(first_token(r) < 1.0 for r in found.values() if r.request.arrival_s < 1.0)
    ahead = sum(r.request.arrival_s < 1.0 for r in found.values()) - begun
    assert first_token(found["long"]) <= 1.0 + (ahead * 20 / 32 + 1600 / 32 + 3) * STEP_S


@pytest.mark.parametrize("policy", ["fcfs", "priority", "sjf"])
def test_deadlines_are_answered_when_they_pass_and_before_any_token(policy: str) -> None:
    """Twice the work that can be done."""
    requests = [
        SimRequest(f"q{i}", 0.25 * i, [i % 1000, 3], 20, priority=i % 3, deadline_s=0.25 * i + 2.0) for i in range(200)
    ]
    found = run(requests, policy=policy, max_num_seqs=2)
    late = [record for record in found.values() if record.finish_reason is FinishReason.DEADLINE]
    assert len(late) > 50
    for record in late:
        assert record.token_ids == []
        assert record.request.deadline_s is not None
        assert 0 <= record.ended_s - record.request.deadline_s <= NETWORK_S
    served = [record for record in found.values() if record.finish_reason is FinishReason.LENGTH]
    assert len(served) + len(late) == 200
    assert max(record.ttft_s or 99 for record in served) <= 2.0 + STEP_S + NETWORK_S


def test_under_pressure_the_least_urgent_are_shed_and_every_request_is_answered_once() -> None:
    """Two and a half times the work that can be done; sixteen tokens are eight requests."""
    requests = [SimRequest(f"q{i}", 0.2 * i, [i % 1000, 3], 20, priority=i % 4) for i in range(200)]
    found = run(requests, policy="priority", priority_ageing_s=1e6, max_num_seqs=2, shed_above_queued_tokens=16)
    shed = [record for record in found.values() if record.refusal is RefusalReason.SHED]
    assert shed
    assert 0 not in {record.request.priority for record in shed}
    assert all(record.token_ids == [] for record in shed)
    assert all(found[f"q{i}"].finish_reason is FinishReason.LENGTH for i in range(0, 200, 4)), "not all urgent ones"
    assert {r.finish_reason for r in found.values() if not r.refusal} == {FinishReason.LENGTH}
    assert {r.refusal for r in found.values() if r.refusal} == {RefusalReason.SHED}
