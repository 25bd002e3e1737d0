"""Requests that leave the queue without a token: for a more urgent one, under pressure, or because it is too late."""

from __future__ import annotations

from copy import copy
from typing import Any

from replica.deadlines import Deadlines
from replica.messages import FinishReason, RefusalReason, RequestId
from replica.sequence import Status
from tests.unit.engine_harness import ROUTER, Harness, reference


def busy(cap: int = 3, **knobs: Any) -> Harness:
    """One runs, so whoever comes is queued."""
    h = Harness(cap=cap, max_num_seqs=1, max_preemptions=0, **{"policy": "priority", **knobs})
    h.submit("runs", [9], 200, priority=-100)
    h.step()
    return h


def test_at_a_full_cap_an_urgent_request_takes_the_place_of_the_least_urgent() -> None:
    h = busy()
    for name, priority in (("b", 2), ("c", 3), ("a", 1)):
        assert h.submit(name, [ord(name)], priority=priority) is None
    assert h.submit("urgent", [1], priority=2) is None
    assert h.ends == {"c": FinishReason.SHED}
    assert h.names(h.core.scheduler.queued) == ["a", "b", "urgent"]
    assert h.tokens["c"] == []
    assert h.core.load(h.now).counters["finished_shed"] == 1


def test_it_takes_nothing_from_equals_nor_from_who_has_waited_long() -> None:
    h = busy(priority_ageing_s=10)
    for number in range(3):
        h.submit(f"q{number}", [number], priority=2, arrival=100.0)
    assert h.submit("equal", [1], priority=2, arrival=99.0) is RefusalReason.QUEUE_FULL
    assert h.submit("late", [1], priority=1, arrival=111.0) is RefusalReason.QUEUE_FULL
    assert h.submit("in time", [1], priority=1, arrival=109.0) is None
    assert list(h.ends) == ["q2"]


def test_under_other_policies_a_full_cap_refuses_the_newcomer() -> None:
    for policy in ("fcfs", "sjf"):
        h = busy(policy=policy)
        for number in range(3):
            h.submit(f"q{number}", [number] * 20, priority=9, arrival=50.0)
        assert h.submit("urgent", [1], 1, priority=0, arrival=1.0) is RefusalReason.QUEUE_FULL
        assert h.message == "3 of 3 places in the queue are taken, 1 wanted"
        assert h.ends == {}


def test_requests_are_shed_as_a_whole_and_only_if_that_makes_enough_room() -> None:
    h = busy()
    h.submit("pair", [1], priority=5, n=2)
    h.submit("single", [2], priority=1)
    assert h.submit("three", [3], priority=1, n=3) is RefusalReason.QUEUE_FULL
    assert h.ends == {}, "the pair would not have been enough, so it stays"
    assert h.submit("one", [3], priority=0) is None
    assert h.ends == {"pair": FinishReason.SHED}
    assert h.core.scheduler.num_queued == 2
    assert h.submit("pair", [1], priority=0) is None, "its id is free again"


def test_a_request_of_which_something_was_scheduled_is_not_shed() -> None:
    h = Harness(cap=3, max_num_seqs=1, policy="priority", max_preemptions=0)
    h.submit("begun", [1, 2], 30, priority=9, n=3)
    h.step()
    assert h.core.scheduler.num_queued == 2
    h.submit("q", [3], priority=1)
    assert h.submit("urgent", [4], priority=0) is None
    assert h.ends == {"q": FinishReason.SHED}, "less urgent than it, and not begun"
    assert h.submit("more urgent", [4], priority=-5) is None
    assert h.ends == {"q": FinishReason.SHED, "urgent": FinishReason.SHED}


def test_a_request_of_which_something_has_ended_is_not_shed() -> None:
    h = Harness(cap=2, max_num_seqs=1, policy="priority")
    h.submit("begun", [1, 2], 1, priority=9, n=2)
    h.step()
    assert (h.running(), h.core.scheduler.num_queued) == ([], 1)
    assert h.submit("urgent", [4], priority=0, n=2) is RefusalReason.QUEUE_FULL
    h.run()
    assert h.tokens["begun"] == reference([1, 2], 1) * 2


def test_one_that_waits_for_its_grammar_is_queued_and_can_be_shed() -> None:
    h = busy(cap=1)
    h.submit("compiling", [1], priority=5, grammar="g")
    assert h.submit("urgent", [2], priority=0) is None
    assert h.ends == {"compiling": FinishReason.SHED}
    assert h.core._grammars._waiting_for == {"g": []}, "nothing keeps it alive"
    assert h.core.grammar_compiled("g", None, h.now) == {}
    h.core.validate()


def test_above_the_limit_of_tokens_the_last_in_order_goes() -> None:
    h = busy(cap=64, policy="sjf", shed_above_queued_tokens=50)
    h.submit("middle", [1] * 20, 1)
    h.submit("long", [2] * 30, 1)
    assert h.submit("longer", [3] * 40, 1) is RefusalReason.SHED
    assert h.message == "50 tokens of more urgent requests are queued; with 40 more there would be more than 50"
    assert h.submit("short", [4] * 5, 1) is None
    assert h.ends == {"long": FinishReason.SHED}
    assert h.names(h.core.scheduler.queued) == ["short", "middle"]


def test_under_fcfs_the_newcomer_is_the_last_in_order() -> None:
    h = busy(cap=64, policy="fcfs", shed_above_queued_tokens=50)
    h.submit("first", [1] * 40, 1, arrival=10.0)
    assert h.submit("second", [2] * 11, 1, arrival=11.0) is RefusalReason.SHED
    assert h.submit("third", [2] * 10, 1, arrival=12.0) is None
    assert h.submit("was held", [3] * 10, 1, arrival=9.0) is None
    assert h.ends == {"third": FinishReason.SHED}


def test_one_that_is_longer_than_the_limit_is_taken_while_nobody_else_waits() -> None:
    h = busy(cap=64, shed_above_queued_tokens=50)
    assert h.submit("huge", [1] * 90, 1) is None
    assert h.submit("small", [2], 1) is RefusalReason.SHED
    assert h.submit("urgent", [2], 1, priority=-1) is None
    assert h.ends == {"huge": FinishReason.SHED}


def test_a_deadline_that_has_passed_is_refused_before_anything_else_is_done() -> None:
    h = Harness()
    h.now = 10.0
    assert h.submit("late", [1], deadline=9.5) is RefusalReason.DEADLINE
    assert h.message == "the deadline passed 0.500 s before the request came"
    assert h.core.num_unfinished == 0


def test_a_queued_request_is_given_up_when_its_deadline_passes_and_before_any_prefill() -> None:
    h = busy(cap=64)
    h.submit("patient", [1], 3, deadline=1000.0)
    h.submit("hasty", [2], 3, deadline=h.now + 2, n=2)
    assert h.core.next_deadline == h.now + 2
    h.step()
    h.step()
    assert "hasty" not in h.ends
    h.plan()
    assert h.ends == {"hasty": FinishReason.DEADLINE}
    assert h.names(h.core.scheduler.queued) == ["patient"]
    assert h.core.next_deadline == 1000.0
    assert h.core.load(h.now).counters["finished_deadline"] == 2


def test_a_deadline_is_noticed_in_the_middle_of_a_step_and_while_a_grammar_is_compiled() -> None:
    h = Harness()
    h.submit("compiling", [1], deadline=5.0, grammar="g")
    assert h.plan() is None
    h.core.end_overdue(5.0)
    h.hear(h.core.take_ended())
    assert h.ends == {"compiling": FinishReason.DEADLINE}
    assert h.core.num_unfinished == 0


def test_what_began_in_time_is_brought_to_its_end() -> None:
    h = Harness(max_num_seqs=1)
    h.submit("begun", [1, 2], 10, deadline=0.5, n=2)
    h.run()
    assert h.ends == {"begun": FinishReason.LENGTH}
    assert h.tokens["begun"] == reference([1, 2], 10) * 2


def test_an_aborted_request_has_no_deadline_any_more() -> None:
    h = busy(cap=64)
    h.submit("gone", [1], deadline=5.0)
    h.core.abort(ROUTER, RequestId("gone"), h.now)
    assert h.core.next_deadline is None
    h.now = 10.0
    h.step()
    assert h.ends == {}


def test_deadlines_of_those_who_began_are_forgotten() -> None:
    h = Harness()
    h.submit("q", [1])
    deadlines = Deadlines()
    for number in range(1000):
        sequence = copy(h.sequence("q"))
        deadlines.add(1e9 + number, sequence)
        sequence.status = Status.RUNNING
    assert len(deadlines) <= 65
    assert deadlines.next is None
    assert len(deadlines) == 0
