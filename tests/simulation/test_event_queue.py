"""Order of events at one instant is part of the contract: a simulator with an accidental order lies quietly."""

from __future__ import annotations

import random
from functools import partial

import pytest

from cluster.simulation.event_queue import EventQueue, Rank


def test_events_of_one_instant_run_by_rank_then_by_order_of_scheduling() -> None:
    ranks = list(Rank) * 3
    random.Random(3).shuffle(ranks)
    events = EventQueue()
    seen: list[tuple[Rank, int]] = []
    for number, rank in enumerate(ranks):
        events.at(1.0, rank, partial(seen.append, (rank, number)))
    events.run()
    assert seen == sorted(seen)
    assert [rank for rank, _ in seen[::3]] == list(Rank)


def test_what_a_step_frees_is_seen_by_what_arrives_at_the_same_instant() -> None:
    assert (
        Rank.STEP_END < Rank.MESSAGE_UP < Rank.MESSAGE_DOWN < Rank.ARRIVAL < Rank.FAULT < Rank.TIMER < Rank.STEP_START
    )


def test_an_event_scheduled_now_runs_after_those_of_its_rank_that_wait() -> None:
    events, seen = EventQueue(), []

    def first() -> None:
        seen.append("first")
        events.after(0.0, Rank.ARRIVAL, lambda: seen.append("nested"))

    events.at(1.0, Rank.ARRIVAL, first)
    events.at(1.0, Rank.ARRIVAL, lambda: seen.append("second"))
    events.at(1.0, Rank.STEP_END, lambda: seen.append("end"))
    events.run()
    assert seen == ["end", "first", "second", "nested"]


def test_the_clock_never_goes_back_and_stops_where_it_is_told() -> None:
    events, seen = EventQueue(), []
    for time_s in (3.0, 1.0, 2.0):
        events.at(time_s, Rank.TIMER, lambda: seen.append(events.now))
    events.run(until_s=2.0)
    assert seen == [1.0, 2.0]
    assert not events.is_empty
    with pytest.raises(ValueError, match=r"cannot schedule at 1\.5: it is 2\.0"):
        events.at(1.5, Rank.TIMER, lambda: None)
    events.run()
    assert seen == [1.0, 2.0, 3.0]
