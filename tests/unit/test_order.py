"""Who is served first under each policy, and that ageing needs no sorting again."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from replica.config import SchedulerConfig
from replica.order import ByPriority, FirstCome, ShortestFirst, make_policy, outranks
from tests.unit.engine_harness import Harness, reference

#: eighths, so that the arithmetic of the test is exact
SECONDS = st.integers(0, 80_000).map(lambda n: n / 8)


@given(st.integers(-50, 50), st.integers(-50, 50), SECONDS, SECONDS, SECONDS, st.sampled_from([0.5, 8.0, 64.0]))
def test_levels_at_any_time_sort_like_keys(
    first: int, second: int, arrival: float, other_arrival: float, later: float, ageing_s: float
) -> None:
    now = max(arrival, other_arrival) + later
    levels = [first - (now - arrival) / ageing_s, second - (now - other_arrival) / ageing_s]
    policy = ByPriority(ageing_s)
    keys = [policy.key((0.0, first, arrival), 0, 0), policy.key((0.0, second, other_arrival), 0, 0)]
    assert (levels[0] < levels[1]) == (keys[0][1] < keys[1][1])
    assert (levels[0] == levels[1]) == (keys[0][1] == keys[1][1])


@given(st.integers(1, 5000), st.integers(1, 5000), SECONDS, SECONDS, SECONDS, st.sampled_from([0.5, 8.0, 64.0]))
def test_work_less_waiting_at_any_time_sorts_like_keys(
    first: int, second: int, arrival: float, other_arrival: float, later: float, rate: float
) -> None:
    now = max(arrival, other_arrival) + later
    left = [first - (now - arrival) * rate, second - (now - other_arrival) * rate]
    policy = ShortestFirst(rate)
    keys = [policy.key((0.0, 0, arrival), first, 0), policy.key((0.0, 0, other_arrival), second, 0)]
    assert (left[0] < left[1]) == (keys[0][1] < keys[1][1])


def test_the_configuration_names_the_policy() -> None:
    assert isinstance(make_policy(SchedulerConfig()), FirstCome)
    assert isinstance(make_policy(SchedulerConfig(policy="priority")), ByPriority)
    assert isinstance(make_policy(SchedulerConfig(policy="sjf")), ShortestFirst)


def test_a_tenants_turn_comes_before_everything_else() -> None:
    for policy in (FirstCome(), ByPriority(1.0), ShortestFirst(1.0)):
        assert policy.key((1.0, 9, 99.0), 99, 9) < policy.key((2.0, 0, 0.0), 0, 0)


def test_only_a_smaller_priority_that_is_ahead_outranks() -> None:
    policy = ByPriority(10.0)

    def standing(priority: int, arrival: float) -> tuple[int, tuple[float, float, float, int]]:
        return priority, policy.key((0.0, priority, arrival), 0, 0)

    assert outranks(policy, standing(0, 100.0), standing(1, 95.0))
    assert not outranks(policy, standing(0, 100.0), standing(1, 89.0)), "it has waited for more than a level"
    assert not outranks(policy, standing(1, 0.0), standing(1, 5.0)), "earlier, but of the same class"
    assert not outranks(FirstCome(), standing(0, 0.0), standing(9, 0.0))


def order_of_service(h: Harness) -> list[str]:
    """Names in the order in which they were first scheduled."""
    order: list[str] = []
    while (plan := h.plan()) is not None:
        names = {s.seq_id: str(s.request_id) for s in h.core.scheduler.running}
        order += [names[new.seq_id] for new in plan.new if names[new.seq_id] not in order]
        h.finish(plan)
    return order


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("fcfs", ["big", "urgent", "small", "late"]),
        ("priority", ["urgent", "big", "small", "late"]),
        ("sjf", ["small", "urgent", "late", "big"]),
    ],
)
def test_order_of_service(policy: str, order: list[str]) -> None:
    h = Harness(max_num_seqs=1, policy=policy, priority_ageing_s=60, sjf_ageing_tokens_per_s=1, max_preemptions=0)
    h.submit("first", [9], 3, arrival=0.0)
    h.step()
    h.submit("big", [1] * 30, 20, arrival=1.0, priority=1)
    h.submit("urgent", [2] * 10, 4, arrival=2.0, priority=0)
    h.submit("small", [3] * 2, 2, arrival=3.0, priority=1)
    h.submit("late", [4] * 2, 2, arrival=30.0, priority=1)
    assert order_of_service(h) == order
    assert h.tokens["urgent"] == reference([2] * 10, 4)


def test_the_shortest_is_the_one_with_least_to_compute_after_cache_hits() -> None:
    h = Harness(max_num_seqs=1, policy="sjf")
    prompt = list(range(40))
    h.submit("before", prompt, 2)
    h.run()
    h.submit("running", [9], 3)
    h.step()
    h.submit("short", [7] * 12, 4, arrival=h.now)
    h.submit("long but cached", [*prompt, 1], 4, arrival=h.now)
    assert order_of_service(h) == ["long but cached", "short"]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "sjf"])
def test_a_preempted_sequence_keeps_its_place_before_fresh_ones(policy: str) -> None:
    h = Harness(num_blocks=9, policy=policy, caching=False)
    for number, name in enumerate("abc"):
        h.submit(name, [ord(name)] * 11, 30, arrival=float(number))
    h.step()
    h.submit("fresh", [1], 1, arrival=50.0)
    while not h.core.scheduler.counters.preemptions:
        h.core.scheduler.queued.validate()
        h.step()
    h.run()
    assert {name: h.tokens[name] for name in "abc"} == {name: reference([ord(name)] * 11, 25) for name in "abc"}
