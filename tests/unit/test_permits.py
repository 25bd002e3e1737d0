"""Permits where messages come late: what was reserved is honoured, and nothing old is taken for new."""

from __future__ import annotations

from replica.messages import Ask, Grant, Permit, RouterId, Wish
from replica.permits import LEASE_S, PermitDesk
from replica.places import Places
from router.permit_stock import ASK_AGAIN_S, PermitStock

A, B = RouterId("a"), RouterId("b")


def wish(n: int = 1, value: float = 0.0) -> Wish:
    return Wish(n, value)


def deal(desk: PermitDesk, num_free: int, cap: int, now: float) -> dict[RouterId, Grant]:
    return dict(desk.deal(num_free, cap, Places({}), now))


def first_wish(desk: PermitDesk) -> Wish | None:
    first = desk.first(Places({}), 9)
    return None if first is None else first.wish


def test_places_go_out_in_one_order_over_all_routers() -> None:
    desk = PermitDesk()
    desk.ask(A, Ask(1, 0, 0, [wish(value=1), wish(value=4)]))
    desk.ask(B, Ask(1, 0, 0, [wish(value=2), wish(value=3)]))
    assert deal(desk, 3, 9, 0.0) == {A: Grant(1, 1), B: Grant(2, 2)}
    assert desk.num_outstanding == 3
    assert first_wish(desk) == wish(value=4)
    assert deal(desk, 3, 9, 0.0) == {}, "all that is free is reserved"


def test_a_request_gets_all_of_its_places_or_none_and_is_not_passed() -> None:
    desk = PermitDesk()
    desk.ask(A, Ask(1, 0, 0, [wish(n=3, value=1)]))
    desk.ask(B, Ask(1, 0, 0, [wish(n=1, value=2)]))
    assert deal(desk, 2, 4, 0.0) == {}
    assert deal(desk, 4, 4, 0.0) == {A: Grant(1, 3), B: Grant(2, 1)}


def test_a_wish_beyond_a_lowered_cap_holds_nobody_up() -> None:
    desk = PermitDesk()
    desk.ask(A, Ask(1, 0, 0, [wish(n=3, value=1), wish(n=1, value=3)]))
    assert deal(desk, 2, 2, 0.0) == {A: Grant(1, 1)}


def test_a_lease_that_ended_takes_the_term_with_it() -> None:
    desk, stock = PermitDesk(), PermitStock()
    desk.ask(A, Ask(1, 0, 0, [wish(n=2)]))
    late = deal(desk, 2, 2, 0.0)[A]
    assert deal(desk, 2, 2, LEASE_S) == {}
    assert desk.num_outstanding == 0
    stock.hear(late)
    permit = stock.spend(2)
    assert permit == Permit(1, 2)
    assert desk.redeem(A, "", permit, 2) == 0, "others may have the places now"
    desk.ask(A, Ask(2, 1, 2, [wish(n=2)]))
    stock.hear(deal(desk, 2, 2, LEASE_S)[A])
    stock.hear(Grant(1, 5))
    assert stock.num_available == 2
    assert desk.redeem(A, "", permit, 2) == 0, "it is of the old term still"
    assert desk.redeem(A, "", stock.spend(2), 2) == 2


def test_what_is_late_or_double_changes_nothing() -> None:
    desk, stock = PermitDesk(), PermitStock()
    first = stock.next_ask([wish(value=1)], 0, 0.0)
    second = stock.next_ask([wish(value=0.5)], 0, 0.0)
    assert first is not None
    assert second is not None
    desk.ask(A, second)
    desk.ask(A, first)
    assert first_wish(desk) == wish(value=0.5)
    one = deal(desk, 1, 9, 0.0)[A]
    desk.ask(A, Ask(3, 1, 0, [wish(value=2)]))
    two = deal(desk, 2, 9, 0.0)[A]
    for grant in (two, one):
        stock.hear(grant)
    assert stock.num_available == 2
    permit = stock.spend(1)
    assert desk.redeem(A, "", permit, 1) == 1
    assert desk.redeem(A, "", permit, 1) == 0
    assert desk.num_outstanding == 1


def test_the_permits_of_a_router_that_is_gone_are_free_at_once() -> None:
    desk = PermitDesk()
    desk.ask(A, Ask(1, 0, 0, [wish()]))
    deal(desk, 1, 1, 0.0)
    desk.forget(A)
    desk.ask(B, Ask(1, 0, 0, [wish()]))
    assert deal(desk, 1, 1, 0.0) == {B: Grant(2, 1)}


def test_a_claim_to_more_than_was_granted_is_not_believed() -> None:
    desk = PermitDesk()
    desk.ask(A, Ask(1, 0, 0, [wish()]))
    deal(desk, 1, 9, 0.0)
    assert desk.redeem(A, "", Permit(1, 7), 7) == 1
    desk.validate()


def test_a_router_asks_once_for_the_same_and_does_not_ask_in_circles() -> None:
    stock = PermitStock()
    assert stock.next_ask([], 0, 0.0) is None
    assert stock.next_ask([wish(value=2)], 0, 0.0) == Ask(1, 0, 0, [wish(value=2)])
    assert stock.next_ask([wish(value=2), wish(value=3)], 0, 0.5) is None
    assert stock.next_ask([wish(value=1), wish(value=2)], 0, 0.5) is not None, "somebody comes before them"
    assert stock.next_ask([wish(value=1)], 0, 0.5 + ASK_AGAIN_S) is not None, "the answer may be lost"
    stock.hear(Grant(1, 1))
    assert stock.next_ask([wish(value=1)], 5, 0.6) == Ask(4, 1, 1, []), "what was of no use goes back"
    assert stock.next_ask([wish(value=1)], 5, 0.6) is None, "it would be granted and given back for ever"
    assert stock.next_ask([wish(value=1)], 6, 0.6) is not None
