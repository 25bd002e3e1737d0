"""A replica whose ranks are lost: everything goes back, the door is closed for a while, nothing old is believed."""

from __future__ import annotations

from replica.messages import (
    FinishReason,
    GenerateRequest,
    RefusalReason,
    ReplicaId,
    ReplicaLoad,
    RequestId,
    SamplingParams,
    SequenceInput,
)
from router.dispatcher import Dispatcher
from router.instructions import Dispatch, Fail, Refuse
from router.journal import grounds
from router.replica_view import ReplicaView
from tests.unit.engine_harness import ROUTER, Harness, reference
from tests.unit.test_dispatcher import ROOM, A, B, make, rid

PROMPT = list(range(100, 112))


def lose(h: Harness) -> None:
    h.core.pause()
    h.hear(h.core.lose_runner(h.now))
    h.runner.begin_anew()
    h.core.validate()


def test_what_was_in_the_step_failed_and_the_rest_is_moved() -> None:
    h = Harness(max_num_seqs=1)
    h.submit("runs", PROMPT)
    h.submit("waits", PROMPT)
    h.submit("compiles", PROMPT, grammar="g")
    h.step()
    assert h.plan() is not None
    lose(h)
    assert h.ends == {"runs": FinishReason.ERROR, "waits": FinishReason.MOVED, "compiles": FinishReason.MOVED}
    assert h.core.num_unfinished == 0
    assert h.core.blocks.num_free == h.core.blocks.num_blocks


def test_between_two_steps_nobody_is_to_blame() -> None:
    h = Harness()
    h.submit("runs", PROMPT)
    h.step()
    lose(h)
    assert h.ends == {"runs": FinishReason.MOVED}


def test_whoever_was_aborted_meanwhile_is_not_told() -> None:
    h = Harness()
    h.submit("runs", PROMPT)
    assert h.plan() is not None
    h.core.abort(h.sequence("runs").router_id, RequestId("runs"), h.now)
    lose(h)
    assert h.ends == {}
    assert h.core.num_unfinished == 0


def test_the_door_is_closed_until_the_runner_is_whole() -> None:
    h = Harness()
    h.core.pause()
    assert not h.core.load(h.now).is_ready
    assert h.submit("early", PROMPT) is RefusalReason.NOT_READY
    h.core.resume()
    assert h.core.load(h.now).is_ready
    assert h.submit("again", PROMPT) is None


def test_a_draining_replica_takes_back_what_it_gave_away_until_its_time_is_up() -> None:
    h = Harness()
    h.core.stop_admission(takes_returning=True)
    h.core.pause()
    assert come_back(h, "early") is RefusalReason.NOT_READY
    h.core.resume()
    assert h.core.load(h.now).takes_returning
    assert h.submit("fresh", PROMPT) is RefusalReason.DRAINING
    assert come_back(h, "back") is None
    h.core.stop_admission()
    assert not h.core.load(h.now).takes_returning
    assert come_back(h, "late") is RefusalReason.DRAINING


def come_back(h: Harness, name: str) -> RefusalReason | None:
    sequence = SequenceInput(0, PROMPT, SamplingParams(8, temperature=0.0), [9])
    returning = GenerateRequest(RequestId(name), [sequence], is_returning=True)
    return h.core.submit(ROUTER, returning, 0, h.now).refusal


def test_no_prefix_is_believed_to_be_there_afterwards() -> None:
    """The fake runner's KV is empty after a loss, so a hit would change the tokens."""
    h = Harness()
    h.submit("first", PROMPT, 8)
    h.run()
    h.submit("second", PROMPT, 8)
    h.step()
    assert h.sequence("second").num_cached_tokens > 0
    lose(h)
    h.core.resume()
    h.submit("third", PROMPT, 8)
    h.run()
    assert h.tokens["third"] == reference(PROMPT, 8)


def test_grammars_are_compiled_anew() -> None:
    h = Harness()
    h.submit("a", PROMPT, grammar="g")
    assert h.core.take_wanted_grammars() == ["g"]
    h.hear(h.core.grammar_compiled("g", None, h.now))
    h.submit("b", PROMPT, grammar="g")
    assert h.core.take_wanted_grammars() == []
    lose(h)
    h.hear(h.core.grammar_failed("g", h.now))  # an answer that comes late finds nobody
    h.core.resume()
    h.submit("c", PROMPT, grammar="g")
    assert h.core.take_wanted_grammars() == ["g"]


# ---- the router ----

RESTARTING = ReplicaLoad(queue_cap=4, is_ready=False)


def test_nothing_is_placed_at_a_replica_that_mends_itself_and_it_is_not_dead() -> None:
    dispatcher = make(A, B)
    dispatcher.on_load(A, RESTARTING, 0.0)
    assert dispatcher.submit(rid(0), 1, 10, 0.0) == [Dispatch(rid(0), B, 1)]
    assert dispatcher.views[A].describe("", 0.0)["state"] == "restarting"
    seen = grounds(dispatcher.views.values(), {}, 1, 0.0)
    assert {"replica": A, "not": "restarting its ranks"} in seen
    dispatcher.on_load(A, ROOM, 0.1)
    assert dispatcher.views[A].describe("", 0.1)["state"] == "up"


def test_what_has_begun_waits_for_the_only_replica_and_goes_on_there() -> None:
    dispatcher = make(A, resume_wait_s=20.0, admission_wait_s=0.1)
    dispatcher.submit(rid(0), 1, 10, 0.0)
    dispatcher.on_reply(rid(0), 1, None, "", 0.0)
    dispatcher.progressed(rid(0))
    dispatcher.on_load(A, RESTARTING, 1.0)
    assert dispatcher.on_failed(rid(0), 1.0) == []
    (refused,) = [*dispatcher.submit(rid(1), 1, 10, 1.0), *dispatcher.on_time(1.2)]
    assert isinstance(refused, Refuse)
    assert refused.reason is RefusalReason.NO_REPLICA
    assert dispatcher.on_load(A, ROOM, 6.0) == [Dispatch(rid(0), A, 2, is_returning=True)]


def test_a_returning_request_that_meets_a_closed_door_has_time_to_find_another() -> None:
    """It was sent before the router heard: the refusal must not cut its time down to that of a fresh one."""
    dispatcher = make(A, B, resume_wait_s=20.0, admission_wait_s=0.1)
    dispatcher.submit(rid(0), 1, 10, 0.0)
    dispatcher.on_reply(rid(0), 1, None, "", 0.0)
    dispatcher.progressed(rid(0))
    assert dispatcher.on_moved(rid(0), 1.0) == [Dispatch(rid(0), B, 2, is_returning=True)]
    dispatcher.on_load(A, RESTARTING, 1.0)
    dispatcher.on_load(B, RESTARTING, 1.0)
    assert dispatcher.on_reply(rid(0), 2, RefusalReason.NOT_READY, "", 1.0) == []
    assert dispatcher.on_time(15.0) == []
    assert dispatcher.on_load(ReplicaId("b"), ROOM, 16.0) == [Dispatch(rid(0), B, 3, is_returning=True)]


def streaming(dispatcher: Dispatcher, number: int = 0, at: float = 0.0) -> None:
    """It runs at A, and the client has had tokens."""
    dispatcher.submit(rid(number), 1, 10, at)
    dispatcher.on_reply(rid(number), 1, None, "", at)
    dispatcher.progressed(rid(number))


def test_a_held_stream_waits_as_long_as_somebody_works_on_its_place() -> None:
    """Ranks that are killed again and again: 20 s count from the last sign, not from the loss."""
    dispatcher = make(A, resume_wait_s=20.0, resume_limit_s=300.0)
    streaming(dispatcher)
    dispatcher.on_load(A, RESTARTING, 1.0)
    assert dispatcher.on_failed(rid(0), 1.0) == []
    for second in range(2, 60):
        assert dispatcher.on_load(A, RESTARTING, float(second)) == []
        assert dispatcher.on_time(float(second)) == []
    assert dispatcher.on_lost(A, 60.0) == []  # three attempts in vain; Serve replaces it
    assert dispatcher.on_time(78.9) == []
    dispatcher.add_replica(ReplicaView(B, "address", "incarnation"))
    dispatcher.on_load(B, ROOM, 78.9)
    assert dispatcher.on_connected(B, 78.9) == [Dispatch(rid(0), B, 2, is_returning=True)]


def test_without_a_sign_a_held_stream_ends_after_resume_wait() -> None:
    dispatcher = make(A, resume_wait_s=20.0)
    streaming(dispatcher)
    dispatcher.on_load(A, RESTARTING, 1.0)
    dispatcher.on_failed(rid(0), 1.0)
    dispatcher.on_load(A, RESTARTING, 5.0)
    dispatcher.on_lost(A, 6.0)
    assert dispatcher.next_deadline() == 25.0
    assert dispatcher.on_time(24.9) == []
    (failed,) = dispatcher.on_time(25.0)
    assert isinstance(failed, Fail)


def test_mending_without_end_does_not_hold_a_stream_for_ever() -> None:
    """The bound counts from the loss to the next token; being taken in between, without one, does not begin it anew."""
    dispatcher = make(A, resume_wait_s=20.0, resume_limit_s=30.0)
    streaming(dispatcher)
    dispatcher.on_load(A, RESTARTING, 1.0)
    dispatcher.on_moved(rid(0), 1.0)
    for second in range(2, 15):
        dispatcher.on_load(A, RESTARTING, float(second))
    assert dispatcher.on_load(A, ROOM, 15.0) == [Dispatch(rid(0), A, 2, is_returning=True)]
    dispatcher.on_reply(rid(0), 2, None, "", 15.0)
    dispatcher.on_load(A, RESTARTING, 15.5)
    dispatcher.on_moved(rid(0), 15.5)
    for second in range(16, 31):
        dispatcher.on_load(A, RESTARTING, float(second))
        assert dispatcher.on_time(float(second)) == []
    (failed,) = dispatcher.on_time(31.0)
    assert isinstance(failed, Fail)


def test_a_token_begins_the_bound_anew() -> None:
    dispatcher = make(A, resume_wait_s=20.0, resume_limit_s=30.0)
    streaming(dispatcher)
    dispatcher.on_load(A, RESTARTING, 1.0)
    assert dispatcher.on_moved(rid(0), 1.0) == []
    dispatcher.on_load(A, ROOM, 10.0)
    dispatcher.on_reply(rid(0), 2, None, "", 10.0)
    dispatcher.progressed(rid(0))
    dispatcher.on_load(A, RESTARTING, 20.0)
    dispatcher.on_moved(rid(0), 20.0)
    assert dispatcher.next_deadline() == 40.0


def test_a_draining_replica_that_is_mended_takes_back_what_had_begun_and_nothing_else() -> None:
    dispatcher = make(A, admission_wait_s=5.0)
    streaming(dispatcher)
    dispatcher.on_draining(A)
    dispatcher.on_load(A, ReplicaLoad(queue_cap=4, is_ready=False, takes_returning=True), 1.0)
    dispatcher.on_moved(rid(0), 1.0)
    assert dispatcher.submit(rid(1), 1, 10, 1.0) == []
    back = ReplicaLoad(queue_cap=4, takes_returning=True)
    assert dispatcher.on_load(A, back, 3.0) == [Dispatch(rid(0), A, 2, is_returning=True)]
    assert not dispatcher.views[A].is_placeable(3.0)
    seen = grounds(dispatcher.views.values(), {}, 1, 3.0)
    assert "not" not in seen[0]


def test_while_another_replica_is_open_nothing_goes_back_to_one_that_drains() -> None:
    dispatcher = make(A, B)
    streaming(dispatcher)
    dispatcher.on_draining(A)
    dispatcher.on_load(A, ReplicaLoad(queue_cap=4, takes_returning=True), 1.0)
    assert dispatcher.on_moved(rid(0), 1.0) == [Dispatch(rid(0), B, 2, is_returning=True)]


def test_when_the_server_stops_nothing_is_held_beyond_its_drain() -> None:
    """Not for `resume_wait_s`, and not because a replica mends itself: `drain_s` wins."""
    dispatcher = make(A, resume_wait_s=20.0)
    streaming(dispatcher)
    dispatcher.on_load(A, RESTARTING, 1.0)
    dispatcher.on_moved(rid(0), 1.0)
    assert dispatcher.on_stopping(6.0, 1.0) == []
    assert dispatcher.next_deadline() == 6.0
    dispatcher.on_load(A, RESTARTING, 5.0)
    (failed,) = dispatcher.on_time(6.0)
    assert isinstance(failed, Fail)
    assert "the server stops" in failed.message


def test_what_is_given_back_after_the_drain_ends_at_once() -> None:
    dispatcher = make(A, resume_wait_s=20.0)
    streaming(dispatcher)
    dispatcher.on_draining(A)
    dispatcher.on_stopping(6.0, 1.0)
    (failed,) = dispatcher.on_moved(rid(0), 6.1)
    assert isinstance(failed, Fail)


def test_when_the_server_stops_nothing_is_held_for_a_replica_that_is_gone() -> None:
    dispatcher = make(A)
    streaming(dispatcher)
    dispatcher.on_draining(A)
    dispatcher.on_stopping(31.0, 1.0)
    dispatcher.on_load(A, ReplicaLoad(queue_cap=4, is_ready=False), 1.5)
    dispatcher.on_moved(rid(0), 1.5)
    assert dispatcher.on_time(2.0) == []
    assert dispatcher.on_lost(A, 2.5) == []
    (failed,) = dispatcher.on_time(3.0)
    assert isinstance(failed, Fail)
