"""What is lost is found, and nothing else: in the books of a replica and of a router."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from replica import audit as replica_audit
from replica.messages import Ask, FinishReason, ReplicaId, ReplicaLoad, RequestId, RouterId, StepOutput, Wish
from replica.messages import SequenceOutput as Output
from router import audit as router_audit
from router import engine_metrics
from router.dispatcher import Dispatcher, DispatcherConfig
from router.placement import least_tokens
from router.replica_view import ReplicaView
from router.sequence_names import SequenceNames
from tests.unit.engine_harness import ROUTER, Harness

A = ReplicaId("a")


def busy_replica() -> Harness:
    """One runs, one is queued, and a router that is connected waits for a place."""
    h = Harness(cap=1, max_num_seqs=1)
    h.submit("runs", [1] * 8, 8)
    h.step()
    h.submit("waits", [2] * 8, 8)
    h.core.ask(RouterId("other"), Ask(1, 0, 0, [Wish(1, 0.0)]))
    return h


REPLICA_LOSSES: dict[str, Callable[[Harness], object]] = {
    "requests": lambda h: h.core.scheduler.abort(h.sequence("waits"), FinishReason.ABORT, 0.0),
    "routers": lambda h: h.core._requests.add((RouterId("gone"), RequestId("q")), [h.sequence("waits")]),
    "queue": lambda h: setattr(h.core._gate, "_most_taken", 0),
}


@pytest.mark.parametrize("what", REPLICA_LOSSES)
def test_what_a_replica_lost_is_found(what: str) -> None:
    h = busy_replica()
    connected = {ROUTER, RouterId("other")}
    assert replica_audit.audit(h.core, connected) == {}
    REPLICA_LOSSES[what](h)
    assert replica_audit.audit(h.core, connected)[what] == 1


def test_permits_of_a_router_that_is_gone_and_blocks_of_nobody_are_found() -> None:
    h = Harness()
    h.core.ask(RouterId("gone"), Ask(1, 0, 0, [Wish(1, 0.0)]))
    assert h.core.deal(0.0)
    assert replica_audit.audit(h.core, {RouterId("gone")}) == {}
    assert replica_audit.audit(h.core, {ROUTER}) == {"permits": 1}
    h.core.abort_router(RouterId("gone"), 0.0)
    h.submit("q", [1] * 8, 2)
    h.run()
    assert replica_audit.audit(h.core, {ROUTER}) == {}
    h.core.blocks._free.pop_front(1)
    assert replica_audit.audit(h.core, {ROUTER}) == {"blocks": 1}


def busy_router() -> Dispatcher:
    """`q0` is on its way to the replica, `q1` is held."""
    dispatcher = Dispatcher(DispatcherConfig(admission_wait_s=60.0), least_tokens)
    dispatcher.add_replica(ReplicaView(A, "address", "incarnation"))
    dispatcher.on_load(A, ReplicaLoad(queue_cap=1), 0.0)
    dispatcher.on_connected(A, 0.0)
    for number in range(2):
        dispatcher.submit(RequestId(f"q{number}"), 1, 10, 0.0)
    return dispatcher


def lost_by(dispatcher: Dispatcher, **other: Any) -> dict[str, int]:
    streams = other.get("streams", {RequestId("q0"), RequestId("q1")})
    return dict(router_audit.audit(dispatcher, streams, other.get("names", SequenceNames()), other.get("links", {A})))


def test_what_a_router_lost_is_found() -> None:
    dispatcher = busy_router()
    assert lost_by(dispatcher) == {}
    assert lost_by(dispatcher, streams={"q0", "q1", "q2"}) == {"streams": 1}
    assert lost_by(dispatcher, streams={"q0"}) == {"requests": 1}
    assert lost_by(dispatcher, links=()) == {"placed": 1}
    names = SequenceNames()
    names.expand(A, StepOutput("i", ReplicaLoad(), [Output(RequestId("old"), 0, [1], seq_id=3)]), {RequestId("old")})
    assert lost_by(dispatcher, names=names) == {"names": 1}
    dispatcher.views[A].unanswered_sequences = 3
    assert lost_by(dispatcher) == {"unanswered": 2}
    del dispatcher.views[A]
    assert lost_by(dispatcher) == {"placed": 1}


def test_a_held_request_without_an_end_is_found() -> None:
    dispatcher = busy_router()
    (held,) = dispatcher._held
    dispatcher._hold_times.remove(held)
    assert lost_by(dispatcher) == {"held": 1}


def test_each_loss_has_a_metric() -> None:
    assert engine_metrics._LEAKS == replica_audit.WHAT
