"""What is known of ranks, and what follows."""

from __future__ import annotations

import pytest

from replica.group_health import (
    ASK_AFTER_S,
    BEAT_S,
    FIRST_STEP_S,
    LEAST_STEP_S,
    LOOK_S,
    STARVED_AT_START_S,
    STARVED_S,
    STEP_FACTOR,
    LossCause,
    RankSign,
    StepLimits,
    StepSign,
    culprits,
    lost_ranks,
)


def test_a_rank_that_ended_is_lost_at_once() -> None:
    assert lost_ranks([RankSign(0), RankSign(1, ended="is gone: its socket closed")], None) == {
        1: (LossCause.GONE, "is gone: its socket closed")
    }


def test_stopped_and_starved_are_told_apart() -> None:
    silent = ASK_AFTER_S + 0.01
    assert lost_ranks([RankSign(0, silent_s=silent)], None) == {}
    stopped = lost_ranks([RankSign(0, silent_s=silent, is_stopped=True)], None)[0]
    assert stopped.cause is LossCause.STOPPED
    assert "is stopped" in stopped.why
    assert lost_ranks([RankSign(0, silent_s=0.01, is_stopped=True)], None) == {}, "it may be woken again at once"
    silent_for_long = lost_ranks([RankSign(0, silent_s=STARVED_S + 1)], None)[0]
    assert silent_for_long.cause is LossCause.SILENT
    assert "no sign of life" in silent_for_long.why
    assert lost_ranks([RankSign(0, silent_s=STARVED_S + 1, is_starting=True)], None) == {}
    assert lost_ranks([RankSign(0, silent_s=STARVED_AT_START_S + 1, is_starting=True)], None) != {}


def test_a_stopped_rank_is_noticed_within_a_second() -> None:
    assert BEAT_S + ASK_AFTER_S + LOOK_S < 1


@pytest.mark.parametrize(
    ("signs", "expected"),
    [
        ([RankSign(0, owes_step=True, waits_for_peers=True), RankSign(1, owes_step=True)], [1]),
        ([RankSign(0, owes_step=True, waits_for_peers=True), RankSign(1)], [0]),
        ([RankSign(r, owes_step=True, waits_for_peers=True) for r in range(3)], [0, 1, 2]),
        ([RankSign(0), RankSign(1)], [0]),
    ],
    ids=["one computes, one waits", "the other has ended it", "all wait", "the result is lost"],
)
def test_who_holds_up_a_step(signs: list[RankSign], expected: list[int]) -> None:
    assert culprits(signs) == expected
    assert lost_ranks(signs, StepSign(4.9, 5.0)) == {}
    lost = lost_ranks(signs, StepSign(5.1, 5.0))
    assert list(lost) == expected
    assert all(loss.cause is LossCause.HUNG and "hangs in a step: 5.1 s" in loss.why for loss in lost.values())


def test_who_is_known_to_be_dead_is_blamed_before_who_waits_for_it() -> None:
    signs = [RankSign(0, owes_step=True), RankSign(1, ended="is gone")]
    assert lost_ranks(signs, StepSign(99, 5)) == {1: (LossCause.GONE, "is gone")}


def test_a_limit_is_learned_by_size_and_never_less_than_some_seconds() -> None:
    limits = StepLimits()
    assert limits.limit_s(1) == FIRST_STEP_S
    limits.learn(8, 0.02)
    assert limits.limit_s(8) == LEAST_STEP_S
    limits.learn(8, 2.0)
    assert limits.limit_s(8) == STEP_FACTOR * 2.0
    # 8,192 tokens were never seen: 1,024 times as many, a third of an hour
    assert limits.limit_s(8192) == STEP_FACTOR * 2.0 * 1024
    assert limits.limit_s(1) == STEP_FACTOR * 2.0, "nothing smaller was seen either"
    limits.learn(8192, 5.0)
    assert limits.limit_s(8192) == STEP_FACTOR * 5.0
    for _ in range(200):
        limits.learn(8, 0.02)
    assert limits.limit_s(8) == LEAST_STEP_S, "one slow step is forgotten"
    assert limits.limit_s(8192) == STEP_FACTOR * 5.0, "and large ones are not, while only small ones come"
