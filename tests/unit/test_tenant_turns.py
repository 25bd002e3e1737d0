"""Turns of tenants beside the rules that were there before them."""

from __future__ import annotations

import pytest

from replica.messages import FinishReason, RefusalReason
from replica.tenant_ledger import W_IN, W_OUT
from tests.unit.engine_harness import Harness


def order(h: Harness, num_steps: int) -> list[str]:
    """Who has ended after so many steps, in that order."""
    for _ in range(num_steps):
        h.step()
    return list(h.ends)


def test_tenants_take_turns_by_what_they_got() -> None:
    h = Harness(max_num_seqs=1, caching=False)
    for number in range(4):
        h.submit(f"a{number}", [number] * 10, 1, arrival=float(number), tenant="a")
    for number in range(2):
        h.submit(f"b{number}", [number] * 10, 1, arrival=9.0 + number, tenant="b")
    assert order(h, 6) == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_when_one_tenant_is_left_its_requests_are_in_their_old_order() -> None:
    h = Harness(max_num_seqs=1, caching=False)
    h.submit("runs", [1], 2, arrival=0.0, tenant="a")
    h.step()
    for number in range(4):
        h.submit(f"a{number}", [number] * 9, 1, arrival=2.0 + number, tenant="a")
    h.submit("b", [5] * 9, 1, arrival=1.0, tenant="b")
    assert order(h, 2) == ["runs", "b"]
    # it comes later than those that got a turn while two tenants waited, and must not pass them with none
    h.submit("later", [6] * 9, 1, arrival=50.0, tenant="a")
    assert order(h, 5) == ["runs", "b", "a0", "a1", "a2", "a3", "later"]
    h.core.validate()


def test_a_newcomer_without_a_turn_pushes_nobody_out_under_pressure() -> None:
    h = Harness(num_blocks=10, shed_above_queued_tokens=40, caching=False)
    h.submit("runs", [1] * 24, 16, arrival=0.0, tenant="a")  # there is a seat beside it, and no room for 18 tokens
    h.step()
    h.submit("a", [2] * 18, 1, arrival=1.0, tenant="a")
    h.submit("b", [3] * 18, 1, arrival=2.0, tenant="b")
    h.step()
    assert h.submit("late", [4] * 18, 1, arrival=3.0, tenant="a") is RefusalReason.SHED
    assert h.ends == {}


def test_a_tenant_takes_no_place_by_priority_that_ageing_has_saved() -> None:
    h = Harness(cap=2, num_blocks=10, policy="priority", priority_ageing_s=10, max_preemptions=0, caching=False)
    h.submit("runs", [9] * 24, 16, priority=-100, tenant="a")
    h.step()
    h.submit("a", [1] * 18, priority=2, arrival=100.0, tenant="a")
    h.submit("b", [2] * 18, priority=2, arrival=100.0, tenant="b")
    h.step()
    assert h.submit("late", [3], priority=1, arrival=111.0, tenant="b") is RefusalReason.QUEUE_FULL
    assert h.submit("in time", [3], priority=1, arrival=109.0, tenant="b") is None
    assert list(h.ends.values()) == [FinishReason.SHED]


def test_what_was_cached_is_not_paid_for() -> None:
    h = Harness(max_num_seqs=1)
    h.submit("first", list(range(100, 120)), 3, tenant="a")
    for _ in range(4):
        h.step()
    before = h.core.scheduler.ledger.counters["a"]
    assert before == pytest.approx(W_IN * 20 + W_OUT * 3)
    h.submit("again", list(range(100, 120)), 3, tenant="a")
    for _ in range(4):
        h.step()
    assert h.core.scheduler.ledger.counters["a"] - before < W_IN * 20
