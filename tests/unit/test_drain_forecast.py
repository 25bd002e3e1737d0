"""How long until who is queued has left the queue: steps counted by hand, at 10 ms a step."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

from replica.drain_forecast import DrainForecast, Room
from replica.messages import FinishReason
from replica.step_pace import StepPace
from tests.unit.engine_harness import Harness, reference

STEP_S = 0.01


def pace() -> StepPace:
    """Every step takes as long, whatever is in it."""
    found = StepPace(0)
    for _ in range(50):
        found.learn(0, 0, STEP_S)
    assert found.line == pytest.approx((STEP_S, 0.0, 0.0))
    return found


def drain_steps(h: Harness, forecast: DrainForecast | None = None, **room: Any) -> float:
    """Steps until the last one that is queued now is admitted."""
    scheduler, forecast = h.core.scheduler, forecast or DrainForecast()
    limits: dict[str, Any] = {
        "num_places": scheduler.max_num_seqs,
        "num_free_tokens": 10**6,
        "num_prompt_tokens": 10**6,
        **room,
    }
    waiting = chain(scheduler.returning, scheduler.queued, scheduler.blocked)
    num_queued = scheduler.num_queued
    forecast.make(scheduler.running, waiting, num_queued, Room(**limits), pace(), 0.0)
    return num_queued / forecast.rate / STEP_S


def one_runs(num_left: int, **queued: int) -> Harness:
    """A single place, taken by one that says `num_left` tokens more; behind it `queued` by name and output length."""
    h = Harness(max_num_seqs=1, num_blocks=1000)
    h.submit("runs", [1], num_left + 1)
    h.step()
    for name, max_tokens in queued.items():
        h.submit(name, [2, 3], max_tokens)
    return h


def test_nobody_leaves_as_long_as_nothing_is_known() -> None:
    h = Harness(max_num_seqs=1)
    h.submit("a", [1], 5)
    h.submit("b", [1], 5)
    assert h.core.load(h.now).drain_rate == 0.0, "no step was measured"
    h.run()
    assert h.core.load(h.now).drain_rate == 0.0, "nobody is queued"


def test_places_are_given_back_by_those_who_run_and_then_by_those_who_took_them() -> None:
    assert drain_steps(one_runs(100, a=50)) == pytest.approx(100, rel=0.01)
    assert drain_steps(one_runs(100, a=50, b=30, c=999)) == pytest.approx(180, rel=0.01)
    h = Harness(max_num_seqs=3, num_blocks=1000)
    for number, max_tokens in enumerate((11, 21, 31)):
        h.submit(f"r{number}", [1], max_tokens)
    h.step()
    for number in range(4):
        h.submit(f"q{number}", [2], 100)
    assert drain_steps(h) == pytest.approx(10 + 100, rel=0.01), "three places, and then the first of the new ones"


def test_with_a_window_nobody_takes_more_than_it_holds_at_once() -> None:
    """Of 20 free tokens who runs wants a hundred, and who waits 52; with a window each holds at most 8."""
    behind = one_runs(100, a=50)
    assert drain_steps(behind, num_places=2, num_free_tokens=20) == pytest.approx(100, rel=0.01)
    assert drain_steps(behind, num_places=2, num_free_tokens=20, max_held_tokens=8) == pytest.approx(1, rel=0.01)


def test_prompts_are_computed_one_after_the_other() -> None:
    h = Harness(max_num_seqs=8, num_blocks=1000)
    h.submit("talks", [1], 500)
    h.step()
    for number in range(5):
        h.submit(f"long{number}", [number + 2] * 200, 2)
    assert drain_steps(h, num_prompt_tokens=20) == pytest.approx(4 * 200 / 20, rel=0.01)


def test_blocks_that_are_not_free_are_waited_for() -> None:
    h = one_runs(100, a=30)
    assert drain_steps(h, num_places=8, num_free_tokens=1000) == pytest.approx(1)
    assert drain_steps(h, num_places=8, num_free_tokens=100 + 20) == pytest.approx(100, rel=0.01)


def test_what_sequences_say_of_what_they_may_is_learned_from_those_that_end() -> None:
    prompt = [5, 6, 7]
    tenth = reference(prompt, 10)[9]
    h = Harness(max_num_seqs=4, num_blocks=300)
    for number in range(12):
        h.submit(f"e{number}", prompt, 1000, stop_token_ids=(tenth,))
    h.run()
    assert set(h.ends.values()) == {FinishReason.STOP}
    learned = h.core._forecast
    h = one_runs(1000, a=1000, b=1000)
    assert drain_steps(h) == pytest.approx(2000, rel=0.01)
    assert drain_steps(h, learned) == pytest.approx(20, rel=0.2)


def test_the_walk_is_not_made_with_every_message() -> None:
    forecast = DrainForecast()
    assert not forecast.is_fresh(0, 0.0)
    drain_steps(one_runs(5, a=1, b=1), forecast)
    assert forecast.is_fresh(1, 0.05)
    assert forecast.is_fresh(4, 0.05)
    assert not forecast.is_fresh(5, 0.05), "a flood has begun"
    assert not forecast.is_fresh(2, 0.15)
