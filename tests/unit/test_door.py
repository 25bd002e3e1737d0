"""Who is refused before anything is done for it, the bound on all that wait, and how the use of the cap is counted."""

from __future__ import annotations

import pytest

from replica.cap_use import CapUse
from replica.messages import RefusalReason, ReplicaId, ReplicaLoad, RequestId
from router.dispatcher import Dispatcher, DispatcherConfig
from router.instructions import Dispatch, Instruction, Refuse, SendAbort
from router.placement import least_tokens
from router.replica_view import ReplicaView

A = ReplicaId("a")


def make(load: ReplicaLoad, **config: float | None) -> Dispatcher:
    dispatcher = Dispatcher(DispatcherConfig(**config), least_tokens)  # type: ignore[arg-type]
    dispatcher.add_replica(ReplicaView(A, "address", "incarnation"))
    dispatcher.on_load(A, load, 0.0)
    dispatcher.on_connected(A, 0.0)
    return dispatcher


def submit(dispatcher: Dispatcher, number: int, n: int = 1, priority: int = 0, tenant: str = "") -> list[Instruction]:
    return dispatcher.submit(RequestId(f"q{number}"), n, 10, 0.0, (0.0, priority, float(number)), tenant=tenant)


def accept(dispatcher: Dispatcher, number: int) -> None:
    dispatcher.on_reply(RequestId(f"q{number}"), 1, None, "", 0.0)


def refusals(instructions: list[Instruction]) -> list[tuple[RequestId, RefusalReason]]:
    return [(each.request_id, each.reason) for each in instructions if isinstance(each, Refuse)]


@pytest.mark.parametrize(
    ("drain_rate", "wait_s", "held"),
    [
        pytest.param(1.0, 0.1, 4, id="hardly a place in that time"),
        pytest.param(200.0, 0.1, 40, id="twenty places"),
        pytest.param(200.0, 60.0, 50, id="max_held_requests"),
        pytest.param(0.0, 0.1, 50, id="nothing is foreseen"),
    ],
)
def test_nobody_begins_to_wait_in_vain(drain_rate: float, wait_s: float, held: int) -> None:
    full = ReplicaLoad(num_queued=4, queue_cap=4, drain_rate=drain_rate)
    dispatcher = make(full, max_held_requests=50, admission_wait_s=wait_s)
    for number in range(held):
        assert not dispatcher.is_certainly_full(1, 0.0), number
        submit(dispatcher, number)
    assert dispatcher.num_held == held
    assert dispatcher.is_certainly_full(1, 0.0)
    assert not dispatcher.is_certainly_full(1, 0.0, tenant="another"), "it takes a place from the one who holds many"
    dispatcher.on_load(A, ReplicaLoad(num_queued=3, queue_cap=4, drain_rate=drain_rate), 0.0)
    assert dispatcher.num_held == held - 1, "a place was free"


def test_who_may_not_be_held_is_refused_before_anything_is_done_for_it() -> None:
    dispatcher = make(ReplicaLoad(num_queued=4, queue_cap=4, drain_rate=1.0), admission_wait_s=0.0)
    assert dispatcher.is_certainly_full(1, 0.0)
    dispatcher.on_load(A, ReplicaLoad(num_queued=3, queue_cap=4, drain_rate=1.0), 0.0)
    assert not dispatcher.is_certainly_full(1, 0.0)


def test_what_waits_is_counted_until_its_first_token_wherever_it_is() -> None:
    dispatcher = make(ReplicaLoad(queue_cap=4), max_waiting=3)
    assert isinstance(submit(dispatcher, 0, n=2)[0], Dispatch)
    accept(dispatcher, 0)
    assert not dispatcher.is_certainly_full(1, 0.0)
    submit(dispatcher, 1)
    assert dispatcher.is_certainly_full(1, 0.0), "the cap of the replica has room"
    (refused,) = submit(dispatcher, 2)
    assert isinstance(refused, Refuse)
    assert "3 sequences wait by this router, 1 wanted; allowed: 3" in refused.message
    assert refused.retry_after_s >= 1
    for _ in range(2):  # the second word is that of its end
        dispatcher.began(RequestId("q0"), 1)
    dispatcher.validate()
    assert refusals(submit(dispatcher, 3)) == []
    assert refusals(submit(dispatcher, 4)) == [("q4", RefusalReason.QUEUE_FULL)]
    dispatcher.abort(RequestId("q0"))
    dispatcher.abort(RequestId("q1"))
    dispatcher.validate()
    assert refusals(submit(dispatcher, 5, n=2)) == []


def test_more_sequences_than_may_ever_wait_are_the_clients_mistake() -> None:
    dispatcher = make(ReplicaLoad(queue_cap=100), max_waiting=3)
    assert not dispatcher.is_certainly_full(4, 0.0), "503 would be told again for ever"
    assert refusals(submit(dispatcher, 0, n=4)) == [("q0", RefusalReason.TOO_MANY_SEQUENCES)]


def test_a_lost_request_goes_on_counting_and_is_not_refused_for_it() -> None:
    dispatcher = make(ReplicaLoad(queue_cap=4), max_waiting=1)
    submit(dispatcher, 0)
    accept(dispatcher, 0)
    assert refusals(dispatcher.on_lost(A, 0.0)) == []
    assert refusals(submit(dispatcher, 1)) == [("q1", RefusalReason.QUEUE_FULL)]
    dispatcher.validate()


def test_at_the_bound_an_urgent_request_takes_the_place_of_one_that_has_not_begun() -> None:
    dispatcher = make(ReplicaLoad(queue_cap=9), max_waiting=2, priority_ageing_s=1000.0)
    for number, priority in enumerate((5, 7)):
        submit(dispatcher, number, priority=priority)
        accept(dispatcher, number)
    assert dispatcher.is_certainly_full(1, 0.0, (0.0, 7, 9.0))
    assert not dispatcher.is_certainly_full(1, 0.0, (0.0, 6, 9.0))
    told = submit(dispatcher, 9, priority=6)
    assert told[0] == SendAbort(RequestId("q1"), A)
    assert refusals(told) == [("q1", RefusalReason.SHED)]
    assert isinstance(told[-1], Dispatch)
    dispatcher.progressed(RequestId("q0"))
    dispatcher.began(RequestId("q0"), 0)
    submit(dispatcher, 10, priority=6)
    both = [("q10", RefusalReason.SHED), ("q9", RefusalReason.SHED)]
    assert refusals(submit(dispatcher, 11, n=2)) == both, "the last in order first; q0 has begun"
    dispatcher.validate()


def test_at_the_bound_tenants_share() -> None:
    dispatcher = make(ReplicaLoad(queue_cap=9), max_waiting=4)
    for number in range(4):
        submit(dispatcher, number, tenant="flood")
        accept(dispatcher, number)
    assert refusals(submit(dispatcher, 4, tenant="flood")) == [("q4", RefusalReason.QUEUE_FULL)]
    assert refusals(submit(dispatcher, 5, tenant="quiet")) == [("q3", RefusalReason.SHED)]
    assert refusals(submit(dispatcher, 6, tenant="quiet")) == [("q2", RefusalReason.SHED)]
    assert refusals(submit(dispatcher, 7, tenant="quiet")) == [("q7", RefusalReason.QUEUE_FULL)], "two and two"
    dispatcher.validate()


def test_the_use_of_the_cap_is_an_integral_and_its_most_a_true_maximum() -> None:
    use = CapUse()
    use.note(0, 0, 10.0)
    use.note(4, 2, 11.0)
    use.note(1, 0, 13.0)
    use.note(1, 0, 12.0)  # the clock was set back
    use.note(0, 0, 14.0)
    assert use.counters == {
        "max_queued": 4,
        "max_queue_places": 6,
        "queued_s": 4 * 2.0 + 1 * 2.0,
        "queue_places_s": 6 * 2.0 + 1 * 2.0,
        "queue_watched_s": 1.0 + 2.0 + 2.0,
    }
