"""What a router remembers: every decision with its grounds, how each request ended, and never too much."""

from __future__ import annotations

from replica.messages import RefusalReason, ReplicaId, ReplicaLoad, RequestId, Stages
from router.dispatcher import Dispatcher, DispatcherConfig
from router.journal import REFUSED, Entry, Event, Journal
from router.placement import least_tokens
from router.replica_view import ReplicaView

A, B, R = ReplicaId("a"), ReplicaId("b"), RequestId("r")


def dispatcher(loads: dict[ReplicaId, ReplicaLoad], **config: float) -> Dispatcher:
    found = Dispatcher(DispatcherConfig(**config), least_tokens)  # type: ignore[arg-type]
    for replica_id, load in loads.items():
        found.add_replica(ReplicaView(replica_id, "address", "incarnation"))
        found.on_load(replica_id, load, 0.0)
        found.on_connected(replica_id, 0.0)
    return found


def load(queued: int = 0, cap: int = 4, tokens: int = 0) -> ReplicaLoad:
    return ReplicaLoad(num_queued=queued, queue_cap=cap, num_uncomputed_tokens=tokens)


def entry(router: Dispatcher, request_id: RequestId = R) -> Entry:
    found = router.journal.of(request_id)
    assert found is not None
    return found


def whats(router: Dispatcher) -> list[tuple[float, str]]:
    return [(event.at, event.what) for event in entry(router).events]


def last(router: Dispatcher) -> Event:
    return entry(router).events[-1]


def test_a_placement_is_written_down_with_what_it_saw() -> None:
    router = dispatcher({A: load(tokens=50), B: load(tokens=20)})
    router.submit(R, 1, 7, 1.0)
    placed = last(router)
    assert (placed.at, placed.what, placed.detail["replica"], placed.detail["attempt"]) == (1.0, "placed", B, 1)
    assert placed.detail["replicas"] == [
        {"replica": B, "outstanding_tokens": 20, "queued": 0, "cap": 4, "unanswered": 0, "placed": 0},
        {"replica": A, "outstanding_tokens": 50, "queued": 0, "cap": 4, "unanswered": 0, "placed": 0},
    ]


def test_who_could_not_be_chosen_is_there_with_the_reason() -> None:
    router = dispatcher({A: load(queued=4), B: load()})
    router.add_replica(ReplicaView(ReplicaId("c"), "address", "incarnation"))
    router.on_draining(B)
    router.submit(R, 1, 7, 1.0)
    held = last(router)
    assert held.what == "held"
    assert {seen["replica"]: seen["not"] for seen in held.detail["replicas"]} == {
        "a": "queue full",
        "b": "draining",
        "c": "not connected",
    }


def test_a_whole_life_with_a_refusal_a_loss_and_an_end() -> None:
    router = dispatcher({A: load(), B: load(queued=4)})
    router.submit(R, 1, 7, 1.0)
    router.on_reply(R, 1, RefusalReason.QUEUE_FULL, "full", 1.5)
    assert last(router).detail["replicas"][0]["not"] == "said no, and nothing has changed there"
    router.on_load(B, load(), 1.55)
    router.on_reply(R, 2, None, "", 1.6)
    router.on_lost(B, 3.0)
    assert entry(router).outcome is None
    router.on_load(A, load(), 3.5)
    router.finish(R)
    assert whats(router) == [
        (1.0, "submitted"),
        (1.0, "placed"),
        (1.5, "refused by the replica"),
        (1.5, "held"),
        (1.55, "placed"),
        (1.6, "accepted"),
        (3.0, "lost with its replica or its step"),
        (3.0, "held"),
        (3.5, "placed"),
    ]
    assert entry(router).outcome == "finished"
    assert router.journal.num_living == 0


def test_how_the_router_ended_it_is_told_with_its_sentence() -> None:
    router = dispatcher({A: load(queued=4)}, admission_wait_s=0.5)
    router.submit(R, 1, 7, 1.0)
    router.on_time(1.5)
    assert (last(router).at, last(router).detail) == (1.5, {"why": "the queue of every replica is full"})
    assert entry(router).outcome == "refused"


def test_a_client_that_leaves_is_no_failure() -> None:
    router = dispatcher({A: load()})
    router.submit(R, 1, 7, 1.0)
    router.abort(R)
    assert entry(router).outcome == "aborted"
    router.journal.note(R, 2.0, "the client left")
    assert last(router).at == 2.0, "what the edge has to say comes later"


def test_memory_is_bounded() -> None:
    journal = Journal(most_ended=3)
    for number in range(10):
        journal.open(RequestId(str(number)), 0.0)
        journal.end(RequestId(str(number)), "finished")
    for number in range(10):
        journal.open(RequestId(f"refused-{number}"), 0.0)
        journal.end(RequestId(f"refused-{number}"), REFUSED)
    assert (journal.num_ended, journal.num_refused) == (3, 3), "refusals, which may be many, push nobody else out"
    assert journal.of(RequestId("refused-6")) is None
    assert journal.of(RequestId("refused-7")) is not None
    assert journal.of(RequestId("6")) is None
    assert journal.of(RequestId("7")) is not None
    journal.open(R, 0.0)
    for number in range(100):
        journal.note(R, float(number), "held")
    found = journal.of(R)
    assert found is not None
    kept = [event.at for event in found.events]
    assert (kept[:32], kept[32:], found.num_dropped_events) == ([*range(32)], [*range(84, 100)], 52)
    journal.note(RequestId("unknown"), 0.0, "held")
    journal.told(RequestId("unknown"), 0, A, Stages())
    assert journal.of(RequestId("unknown")) is None


def test_a_request_is_found_under_the_header_of_its_answer_the_latest_first() -> None:
    journal = Journal()
    for number, header_id in enumerate(("mine", "other", "mine", "", "mine")):
        journal.open(RequestId(str(number)), float(number), header_id)
    journal.end(RequestId("0"), "finished")
    journal.end(RequestId("2"), REFUSED)
    assert [entry.request_id for entry in journal.under("mine")] == ["4", "2", "0"]
    assert journal.under("") == []
    journal.open(RequestId("4"), 9.0)
    assert journal.under("mine")[0].opened_at == 4.0, "the dispatcher opens it again, and changes nothing"


def test_the_first_outcome_counts() -> None:
    router = dispatcher({A: load(queued=4)}, admission_wait_s=0.0)
    router.submit(R, 1, 7, 1.0)
    router.journal.end(R, "finished")
    assert entry(router).outcome == "refused"
