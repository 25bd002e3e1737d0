"""The token budget that follows measured step time."""

from __future__ import annotations

import random

import pytest

from replica.step_pace import LEAST_PROMPT_TOKENS, StepPace


def drive(pace: StepPace, num_steps: int, num_decodes: int, most: int, duration: object) -> list[tuple[int, float]]:
    """Steps with as many prompt tokens as allowed; what they had and took."""
    seen = []
    for _ in range(num_steps):
        tokens = pace.limit(num_decodes, most)
        took = duration(num_decodes, tokens)  # type: ignore[operator]
        pace.learn(num_decodes, tokens, took)
        seen.append((tokens, took))
    return seen


def line(num_decodes: int, num_tokens: int) -> float:
    return 0.008 + 0.0002 * num_decodes + 0.0002 * num_tokens


def test_off_or_alone_there_is_no_limit() -> None:
    assert StepPace(0.0).limit(10, 256) == 256
    assert StepPace(0.01).limit(0, 256) == 256


def test_it_begins_with_the_least_and_comes_near_the_target_without_passing_it() -> None:
    pace = StepPace(0.04)
    seen = drive(pace, 100, 8, 1000, line)
    assert seen[0][0] <= LEAST_PROMPT_TOKENS * 5 // 4
    assert max(took for _, took in seen) <= 0.04 * 1.25
    assert sum(took > 0.04 for _, took in seen) <= 3
    assert all(0.8 * 0.04 < took <= 0.04 for _, took in seen[-20:])


def test_where_decodes_alone_are_too_slow_prompts_still_get_the_least() -> None:
    seen = drive(StepPace(0.005), 50, 8, 256, line)
    assert {tokens for tokens, _ in seen[5:]} == {LEAST_PROMPT_TOKENS}


def test_a_generous_target_gives_the_whole_budget() -> None:
    assert drive(StepPace(1.0), 60, 8, 256, line)[-1][0] == 256


def test_one_slow_step_is_forgotten_a_slow_machine_is_learned() -> None:
    pace = StepPace(0.04)
    before = drive(pace, 100, 8, 1000, line)[-1][0]
    pace.learn(8, before, 5.0)
    again = drive(pace, 60, 8, 1000, line)
    assert again[-1][0] > 0.8 * before
    slower = drive(pace, 200, 8, 1000, lambda d, n: 2 * line(d, n))
    assert all(took <= 0.04 for _, took in slower[-20:])
    assert slower[-1][0] > LEAST_PROMPT_TOKENS


def test_it_follows_the_number_of_streams() -> None:
    rng = random.Random(1)
    pace = StepPace(0.03)
    late = []
    for number in range(400):
        decodes = 4 if number % 100 < 50 else 40
        tokens = pace.limit(decodes, 512) if rng.random() < 0.7 else 0
        took = line(decodes, tokens) * rng.uniform(0.98, 1.05)
        pace.learn(decodes, tokens, took)
        if number > 100:
            late.append(took)
    assert sorted(late)[int(0.97 * len(late))] <= 0.03 * 1.1


@pytest.mark.parametrize("duration", [0.0, -1.0])
def test_a_step_without_a_duration_teaches_nothing(duration: float) -> None:
    pace = StepPace(0.04)
    drive(pace, 50, 8, 1000, line)
    before = pace.limit(8, 1000)
    pace.learn(8, 100, duration)
    assert pace.limit(8, 1000) == before
