"""Named cases of the router's decisions; `tests/property/test_dispatcher.py` has the arbitrary ones."""

from __future__ import annotations

from collections.abc import Iterator

from replica.messages import Ask, RefusalReason, ReplicaId, ReplicaLoad, RequestId
from router.dispatcher import Dispatcher, DispatcherConfig
from router.instructions import Dispatch, Fail, Refuse, SendAbort
from router.placement import least_tokens, round_robin
from router.replica_view import MAX_SILENCE_S, ReplicaView

A, B = ReplicaId("a"), ReplicaId("b")
ROOM = ReplicaLoad(queue_cap=4)
FULL = ReplicaLoad(num_queued=4, queue_cap=4, drain_rate=0.5)


def make(*replicas: ReplicaId, **config: float) -> Dispatcher:
    dispatcher = Dispatcher(DispatcherConfig(**config), least_tokens)  # type: ignore[arg-type]
    for replica_id in replicas:
        dispatcher.add_replica(ReplicaView(replica_id, "address", "incarnation"))
        dispatcher.on_load(replica_id, ROOM, 0.0)
        dispatcher.on_connected(replica_id, 0.0)
    return dispatcher


def rid(number: int) -> RequestId:
    return RequestId(f"q{number}")


def test_a_refused_request_tries_the_others_and_then_waits_for_news() -> None:
    dispatcher = make(A, B)
    (sent,) = dispatcher.submit(rid(0), 1, 10, 0.0)
    assert sent == Dispatch(rid(0), A, 1)
    (again,) = dispatcher.on_reply(rid(0), 1, RefusalReason.QUEUE_FULL, "", 0.0)
    assert again == Dispatch(rid(0), B, 2), "not the one that refused just now, though it is believed to have room"
    assert dispatcher.on_reply(rid(0), 2, RefusalReason.QUEUE_FULL, "", 0.0) == []
    assert dispatcher.num_held == 1
    assert dispatcher.on_load(A, ROOM, 0.01) == [Dispatch(rid(0), A, 3)]


def test_held_requests_are_refused_when_their_time_is_up_with_the_measured_rate() -> None:
    dispatcher = make(A, admission_wait_s=0.1)
    dispatcher.on_load(A, FULL, 0.0)
    assert dispatcher.submit(rid(0), 1, 10, 1.0) == []
    assert dispatcher.next_deadline() == 1.1
    assert dispatcher.on_time(1.05) == []
    (refused,) = dispatcher.on_time(1.1)
    assert isinstance(refused, Refuse)
    assert (refused.reason, refused.retry_after_s) == (RefusalReason.QUEUE_FULL, 8.0)
    assert dispatcher.num_requests == 0


def test_what_was_sent_counts_until_it_is_answered() -> None:
    dispatcher = make(A)
    for number in range(4):
        assert len(dispatcher.submit(rid(number), 1, 10, 0.0)) == 1
    assert dispatcher.submit(rid(4), 1, 10, 0.0) == [], "four unanswered fill a queue of four"
    view = dispatcher.views[A]
    assert view.outstanding_tokens == 40
    for number in range(4):
        dispatcher.on_load(A, ReplicaLoad(num_queued=number + 1, queue_cap=4), 0.0)
        assert dispatcher.on_reply(rid(number), 1, None, "", 0.0) == []
    assert view.outstanding_tokens == view.unanswered_sequences == 0


def test_nothing_is_held_beyond_the_limit() -> None:
    dispatcher = make(A, max_held_requests=1)
    dispatcher.on_load(A, FULL, 0.0)
    dispatcher.submit(rid(0), 1, 1, 0.0)
    assert dispatcher.is_certainly_full(1, 0.0)
    assert not make(A, max_held_requests=0).is_certainly_full(1, 0.0), "nothing is held, but there is room"
    (refused,) = dispatcher.submit(rid(1), 1, 1, 0.0)
    assert isinstance(refused, Refuse)


def test_a_silent_replica_gets_nothing_new() -> None:
    dispatcher = make(A)
    assert dispatcher.submit(rid(0), 1, 1, MAX_SILENCE_S) == [Dispatch(rid(0), A, 1)]
    assert dispatcher.submit(rid(1), 1, 1, MAX_SILENCE_S + 0.1) == []


def test_a_lost_stream_that_began_ignores_caps() -> None:
    dispatcher = make(A, B)
    dispatcher.on_load(B, FULL, 0.0)
    dispatcher.submit(rid(0), 1, 10, 0.0)
    dispatcher.on_reply(rid(0), 1, None, "", 0.0)
    dispatcher.progressed(rid(0))
    assert dispatcher.on_lost(A, 1.0) == [Dispatch(rid(0), B, 2, is_returning=True)]


def test_a_lost_request_that_did_not_begin_waits_longer_than_a_fresh_one() -> None:
    dispatcher = make(A, admission_wait_s=0.1, resume_wait_s=20.0)
    dispatcher.submit(rid(0), 1, 10, 0.0)
    dispatcher.on_reply(rid(0), 1, None, "", 0.0)
    assert dispatcher.on_lost(A, 1.0) == []
    assert dispatcher.on_time(20.9) == []
    (refused,) = dispatcher.on_time(21.0)
    assert isinstance(refused, Refuse)
    assert refused.reason is RefusalReason.NO_REPLICA


def test_late_output_of_a_replica_that_was_left_is_not_ours() -> None:
    dispatcher = make(A, B)
    dispatcher.submit(rid(0), 1, 10, 0.0)
    assert not dispatcher.is_working_on(rid(0), A), "not accepted yet"
    dispatcher.on_reply(rid(0), 1, None, "", 0.0)
    assert dispatcher.is_working_on(rid(0), A)
    dispatcher.on_draining(A)
    assert dispatcher.on_moved(rid(0), 0.0) == [Dispatch(rid(0), B, 2, is_returning=True)]
    assert not dispatcher.is_working_on(rid(0), A)
    assert dispatcher.replica_of(rid(0)) == B


def test_an_abort_reaches_the_replica_that_has_it() -> None:
    dispatcher = make(A)
    dispatcher.submit(rid(0), 1, 10, 0.0)
    assert dispatcher.abort(rid(0)) == [SendAbort(rid(0), A)]
    dispatcher.validate()


def test_more_sequences_than_any_queue_holds_are_refused_for_good() -> None:
    (refused,) = make(A, B).submit(rid(0), 5, 10, 0.0)
    assert isinstance(refused, Refuse)
    assert refused.reason is RefusalReason.TOO_MANY_SEQUENCES
    assert "5 sequences" in refused.message


def test_a_refusal_is_no_news_for_the_request_it_refused() -> None:
    """Else it would be sent again at once, for ever, as one with a cap on its mind and no room did."""
    dispatcher = make(A)
    dispatcher.submit(rid(0), 1, 10, 0.0)
    assert dispatcher.on_load(A, ROOM, 0.0) == []
    assert dispatcher.on_reply(rid(0), 1, RefusalReason.QUEUE_FULL, "", 0.0) == []
    assert dispatcher.num_held == 1


def test_what_a_silent_replica_did_not_answer_goes_elsewhere_and_later_what_it_works_on() -> None:
    dispatcher = make(A, B)
    dispatcher.submit(rid(0), 1, 10, 0.0)
    dispatcher.on_reply(rid(0), 1, None, "", 0.0)
    dispatcher.progressed(rid(0))
    assert dispatcher.submit(rid(1), 1, 5, 0.0) == [Dispatch(rid(1), B, 1)]
    dispatcher.on_load(A, ROOM, 3.5)
    dispatcher.on_load(B, ROOM, 0.2)
    assert dispatcher.on_time(3.5) == [SendAbort(rid(1), B), Dispatch(rid(1), A, 2)]
    dispatcher.on_load(B, ROOM, 13.6)  # now the other one says nothing any more
    dispatcher.on_reply(rid(1), 2, None, "", 13.6)
    begun = [Dispatch(rid(0), B, 2, is_returning=True), Dispatch(rid(1), B, 3)]
    instructions = dispatcher.on_time(13.6)
    assert [i for i in instructions if isinstance(i, Dispatch)] == begun
    dispatcher.validate()


def test_with_everybody_silent_the_reason_is_that_nobody_is_up() -> None:
    dispatcher = make(A, admission_wait_s=0.1)
    dispatcher.submit(rid(0), 1, 10, 9.0)
    (refused,) = dispatcher.on_time(9.2)
    assert isinstance(refused, Refuse)
    assert refused.reason is RefusalReason.NO_REPLICA


def test_failures_in_a_row_end_a_request_and_progress_forgives_them() -> None:
    dispatcher = make(A, max_losses=3)
    dispatcher.submit(rid(0), 1, 10, 0.0)
    for attempt in range(1, 7):
        dispatcher.on_reply(rid(0), attempt, None, "", 0.0)
        if attempt == 2:
            dispatcher.progressed(rid(0))
        instructions = dispatcher.on_failed(rid(0), 0.0)
        if attempt == 4:
            break
        assert instructions == [], "not there again without news"
        (sent,) = dispatcher.on_load(A, ROOM, 0.0)
        assert isinstance(sent, Dispatch)
    (word,) = instructions
    assert isinstance(word, Fail)
    assert word.message.startswith("3 replicas died or failed under this request")


def test_a_newcomer_does_not_get_everything_under_round_robin() -> None:
    dispatcher = Dispatcher(DispatcherConfig(), round_robin)
    for replica_id in (A, B):
        dispatcher.add_replica(ReplicaView(replica_id, "address", "incarnation"))
        dispatcher.views[replica_id].num_placed = 1000
    newcomer = ReplicaView(ReplicaId("c"), "address", "incarnation")
    dispatcher.add_replica(newcomer)
    assert newcomer.num_placed == 1000


def full_of(priority: int, arrival: float = 0.0) -> ReplicaLoad:
    return ReplicaLoad(num_queued=4, queue_cap=4, drain_rate=0.5, last_queued=(priority, 60.0 * priority + arrival))


def test_an_urgent_request_is_offered_to_a_full_queue_with_somebody_less_urgent_in_it() -> None:
    dispatcher = make(A, B, priority_ageing_s=60.0)
    dispatcher.on_load(A, full_of(0), 0.0)
    dispatcher.on_load(B, full_of(5), 0.0)
    assert dispatcher.submit(rid(0), 1, 1, 1.0, (0.0, 5, 1.0)) == [], "as urgent as the last one there"
    assert dispatcher.submit(rid(1), 1, 1, 1.0, (0.0, 2, 1.0)) == [Dispatch(rid(1), B, 1)]
    assert dispatcher.on_reply(rid(1), 1, RefusalReason.QUEUE_FULL, "", 1.0) == [], "not again without news"
    assert dispatcher.on_load(A, full_of(1), 1.01) == []
    assert dispatcher.on_load(B, full_of(4), 1.02) == [Dispatch(rid(1), B, 2)]


def test_nobody_is_pushed_out_while_there_is_room_elsewhere() -> None:
    dispatcher = make(A, B, priority_ageing_s=60.0)
    dispatcher.on_load(A, full_of(5), 0.0)
    dispatcher.on_load(B, ReplicaLoad(num_queued=3, queue_cap=4, num_uncomputed_tokens=10**6), 0.0)
    assert dispatcher.submit(rid(0), 1, 1, 1.0, (0.0, 0, 1.0)) == [Dispatch(rid(0), B, 1)]


def test_a_flood_of_equals_costs_no_messages() -> None:
    dispatcher = make(A, B, priority_ageing_s=60.0, max_held_requests=10)
    for replica_id in (A, B):
        dispatcher.on_load(replica_id, full_of(3), 0.0)
    told = [dispatcher.submit(rid(i), 1, 1, 1.0, (0.0, 3, 1.0)) for i in range(100)]
    assert sum(map(len, told)) == 90, "ten are held, the others refused at once"
    assert all(isinstance(instruction, Refuse) for one in told for instruction in one)
    assert dispatcher.is_certainly_full(1, 1.0, (0.0, 3, 1.0))
    assert not dispatcher.is_certainly_full(1, 1.0, (0.0, 2, 1.0))


def test_without_the_policy_priorities_change_nothing() -> None:
    dispatcher = make(A, max_held_requests=1)
    dispatcher.on_load(A, full_of(5), 0.0)
    assert dispatcher.submit(rid(0), 1, 1, 1.0, (0.0, 0, 1.0)) == []
    (refused,) = dispatcher.submit(rid(1), 1, 1, 1.0, (0.0, -9, 1.0))
    assert isinstance(refused, Refuse)


def test_held_requests_are_offered_in_the_order_of_the_policy() -> None:
    dispatcher = make(A, priority_ageing_s=60.0)
    dispatcher.on_load(A, FULL, 0.0)
    for number, priority in enumerate((3, 1, 2)):
        assert dispatcher.submit(rid(number), 1, 1, 1.0, (0.0, priority, 1.0)) == []
    sent = dispatcher.on_load(A, ROOM, 1.01)
    assert [instruction.request_id for instruction in sent] == [rid(1), rid(2), rid(0)]


def test_a_held_request_makes_way_for_a_more_urgent_one_when_no_more_may_be_held() -> None:
    dispatcher = make(A, priority_ageing_s=60.0, max_held_requests=2)
    dispatcher.on_load(A, FULL, 0.0)
    dispatcher.submit(rid(0), 1, 1, 1.0, (0.0, 5, 1.0))
    dispatcher.submit(rid(1), 1, 1, 1.0, (0.0, 3, 1.0))
    (shed,) = dispatcher.submit(rid(2), 1, 1, 1.01, (0.0, 4, 1.01))
    assert isinstance(shed, Refuse)
    assert (shed.request_id, shed.reason) == (rid(0), RefusalReason.SHED)
    assert shed.retry_after_s >= 1
    (refused,) = dispatcher.submit(rid(3), 1, 1, 1.02, (0.0, 4, 1.02))
    assert isinstance(refused, Refuse)
    assert (refused.request_id, refused.reason) == (rid(3), RefusalReason.QUEUE_FULL)
    assert dispatcher.num_held == 2


def test_a_shed_request_tries_the_others_then_waits_for_what_is_left_of_its_time() -> None:
    dispatcher = make(A, B, admission_wait_s=0.1)
    dispatcher.submit(rid(0), 1, 10, 0.0)
    dispatcher.on_reply(rid(0), 1, None, "", 0.0)
    assert dispatcher.on_shed(rid(0), 5.0 - 3.0) == [Dispatch(rid(0), B, 2)]
    dispatcher.on_reply(rid(0), 2, None, "", 2.0)
    assert dispatcher.on_shed(rid(0), 2.5) == [], "both have shed it and have no news"
    assert dispatcher.next_deadline() == 2.6
    (refused,) = dispatcher.on_time(2.6)
    assert isinstance(refused, Refuse)
    assert refused.reason is RefusalReason.SHED
    assert dispatcher.on_shed(rid(0), 3.0) == [], "it is over"


def test_held_time_is_one_sum() -> None:
    dispatcher = make(A, admission_wait_s=0.1)
    dispatcher.on_load(A, FULL, 0.0)
    dispatcher.submit(rid(0), 1, 10, 1.0)
    assert dispatcher.on_load(A, ROOM, 1.07) == [Dispatch(rid(0), A, 1)]
    dispatcher.on_reply(rid(0), 1, None, "", 1.08)
    assert dispatcher.on_shed(rid(0), 2.0) == []
    assert dispatcher.next_deadline() == 2.0 + (1.1 - 1.08)


def test_a_deadline_ends_a_held_request_at_once_and_no_other() -> None:
    dispatcher = make(A, admission_wait_s=10.0, resume_wait_s=20.0)
    (refused,) = dispatcher.submit(rid(0), 1, 1, 5.0, deadline_at=5.0)
    assert isinstance(refused, Refuse)
    assert (refused.reason, refused.retry_after_s) == (RefusalReason.DEADLINE, 0.0)
    dispatcher.on_load(A, FULL, 5.0)
    dispatcher.submit(rid(1), 1, 1, 5.0, deadline_at=5.5)
    dispatcher.submit(rid(2), 1, 1, 5.0, deadline_at=50.0)
    assert dispatcher.next_deadline() == 5.5
    (refused,) = dispatcher.on_time(5.5)
    assert isinstance(refused, Refuse)
    assert (refused.request_id, refused.reason) == (rid(1), RefusalReason.DEADLINE)
    dispatcher.on_load(A, ROOM, 6.0)
    dispatcher.on_reply(rid(2), 1, None, "", 6.0)
    dispatcher.progressed(rid(2))
    assert dispatcher.on_lost(A, 49.0) == []
    assert dispatcher.next_deadline() == 49.0 + 20.0, "what has begun is brought to its end"


def crowded(queued: int, priority: int, tokens: int = 0) -> ReplicaLoad:
    """Of 64 places `queued` are taken, the last by somebody of that priority."""
    last = (priority, 60.0 * priority)
    return ReplicaLoad(num_queued=queued, queue_cap=64, num_queued_prompt_tokens=tokens, last_queued=last)


def test_who_was_shed_is_told_so_though_another_queue_was_full() -> None:
    dispatcher = make(A, B, admission_wait_s=0.1)
    dispatcher.submit(rid(0), 1, 10, 0.0)
    dispatcher.on_reply(rid(0), 1, None, "", 0.0)
    assert dispatcher.on_shed(rid(0), 1.0) == [Dispatch(rid(0), B, 2)]
    dispatcher.on_load(A, FULL, 1.0)
    dispatcher.on_load(B, FULL, 1.0)
    assert dispatcher.on_reply(rid(0), 2, RefusalReason.QUEUE_FULL, "", 1.0) == []
    (refused,) = dispatcher.on_time(1.1)
    assert isinstance(refused, Refuse)
    assert refused.reason is RefusalReason.SHED


def test_what_was_lost_before_it_began_is_not_held_longer_for_it_later() -> None:
    dispatcher = make(A, admission_wait_s=0.1, resume_wait_s=20.0)
    dispatcher.submit(rid(0), 1, 1, 0.0)
    dispatcher.on_reply(rid(0), 1, None, "", 0.0)
    assert dispatcher.on_lost(A, 0.5) == []
    assert dispatcher.next_deadline() == 0.5 + 20.0, "a replacement may be coming"
    dispatcher.add_replica(ReplicaView(A, "address", "incarnation"))
    dispatcher.on_load(A, ROOM, 0.6)
    assert dispatcher.on_connected(A, 0.6) == [Dispatch(rid(0), A, 2)]
    dispatcher.add_replica(ReplicaView(B, "address", "incarnation"))
    dispatcher.on_load(B, ReplicaLoad(is_ready=False), 0.7)  # it is not that what it waits for later
    dispatcher.on_load(A, FULL, 0.7)
    dispatcher.on_reply(rid(0), 2, None, "", 0.7)
    assert dispatcher.on_shed(rid(0), 0.8) == []
    assert dispatcher.next_deadline() == 0.8 + 0.1


def test_one_who_waited_long_does_not_keep_an_urgent_one_behind_it_from_a_full_queue() -> None:
    dispatcher = make(A, priority_ageing_s=60.0, admission_wait_s=60.0)
    dispatcher.on_load(A, FULL, 299.0)
    assert dispatcher.submit(rid(0), 1, 1, 299.0, (0.0, 5, 0.0)) == []
    dispatcher.on_load(A, FULL, 301.0)
    assert dispatcher.submit(rid(1), 1, 1, 301.0, (0.0, 0, 301.0)) == []
    last = ReplicaLoad(num_queued=4, queue_cap=4, last_queued=(3, 380.0))
    assert dispatcher.on_load(A, last, 301.5) == [Dispatch(rid(1), A, 1)], "the first is ahead, but it outranks nobody"


def test_a_shed_request_displaces_a_held_one_behind_a_younger_equal() -> None:
    dispatcher = make(A, priority_ageing_s=60.0, max_held_requests=2)
    dispatcher.submit(rid(0), 1, 1, 0.0, (0.0, 1, 0.0))
    dispatcher.on_reply(rid(0), 1, None, "", 0.0)
    dispatcher.on_load(A, FULL, 400.0)
    dispatcher.submit(rid(1), 1, 1, 400.0, (0.0, 5, 90.0))
    dispatcher.submit(rid(2), 1, 1, 400.0, (0.0, 0, 400.0))
    (shed,) = dispatcher.on_shed(rid(0), 400.0)
    assert isinstance(shed, Refuse)
    assert (shed.request_id, shed.reason) == (rid(1), RefusalReason.SHED)
    assert dispatcher.num_held == 2


def test_held_urgent_ones_go_to_a_full_queue_one_at_a_time() -> None:
    """Two hundred wait, one place may be taken: one message, and none for who would be refused like the one before."""
    dispatcher = make(A, priority_ageing_s=60.0, max_held_requests=200, admission_wait_s=60.0)
    dispatcher.on_load(A, crowded(64, 0), 1.0)
    for number in range(200):
        assert dispatcher.submit(rid(number), 2, 1, 1.0, (0.0, 2, 1.0)) == []
    sent = dispatcher.on_load(A, crowded(64, 5), 2.0)
    for attempt in range(50):
        assert len(sent) == 1, f"answer {attempt} sent more than one"
        again = dispatcher.on_load(A, crowded(64, 5), 2.0)
        assert again == [], "one is on its way"
        sent = dispatcher.on_reply(sent[0].request_id, 1, RefusalReason.QUEUE_FULL, "", 2.0)
        if not sent:
            break
    assert attempt == 0, "the others ask for as much"
    assert dispatcher.on_load(A, crowded(64, 5), 2.1) == [], "the same queue is no news"
    assert len(dispatcher.on_load(A, crowded(63, 5), 2.2)) == 1


def test_a_limit_on_tokens_is_felt_for_and_costs_a_message_a_change() -> None:
    """The cap has room for all, the replica's limit on queued tokens for nobody."""
    dispatcher = make(A, max_held_requests=200, admission_wait_s=60.0)
    dispatcher.on_load(A, FULL, 0.0)
    for number in range(100):
        dispatcher.submit(rid(number), 1, 10, 0.0, (0.0, 0, float(number)))
    assert len(dispatcher.on_load(A, crowded(9, 0, 90), 1.0)) == 55, "as many as the cap has room for, once"
    for number in range(55):
        dispatcher.on_load(A, crowded(9, 0, 90), 1.0)
        assert dispatcher.on_reply(rid(number), 1, RefusalReason.SHED, "", 1.0) == []
    epochs = {rid(number): 1 for number in range(55)}
    for change in range(8):
        load = crowded(8 - change % 2, 0, 80 + change)
        (sent,) = dispatcher.on_load(A, load, 2.0 + change)
        assert isinstance(sent, Dispatch)
        assert sent.request_id == rid(0), "the first in order, and nobody beside it"
        epochs[sent.request_id] = sent.epoch
        assert dispatcher.on_load(A, load, 2.0 + change) == []
        assert dispatcher.on_reply(sent.request_id, sent.epoch, RefusalReason.SHED, "", 2.0 + change) == []
    (sent,) = dispatcher.on_load(A, crowded(2, 0, 20), 20.0)
    assert isinstance(sent, Dispatch)
    assert len(dispatcher.on_reply(sent.request_id, sent.epoch, None, "", 20.0)) == 2, "let in: twice as many"


def test_a_deadline_ends_what_a_silent_replica_has_not_begun() -> None:
    dispatcher = make(A, B)
    (one,) = dispatcher.submit(rid(0), 1, 1, 0.0, deadline_at=2.0)
    (two,) = dispatcher.submit(rid(1), 1, 1, 0.0, deadline_at=2.0)
    assert isinstance(one, Dispatch)
    assert isinstance(two, Dispatch)
    for sent in (one, two):
        dispatcher.on_reply(sent.request_id, 1, None, "", 0.0)
    dispatcher.progressed(rid(0))
    later = MAX_SILENCE_S + 0.5
    abort, refused = dispatcher.on_time(later)
    assert abort == SendAbort(rid(1), two.replica_id)
    assert isinstance(refused, Refuse)
    assert (refused.request_id, refused.reason) == (rid(1), RefusalReason.DEADLINE)
    assert dispatcher.num_requests == 1, "what has begun is brought to its end"


def test_who_was_refused_for_queued_tokens_does_not_come_back_to_push_without_news() -> None:
    """Two sequences at a queue with one place: urgent enough to push, and refused by the limit on tokens."""
    dispatcher = make(A)
    queue = ReplicaLoad(num_queued=3, queue_cap=4, last_queued=(1, 60.0))
    dispatcher.on_load(A, queue, 0.0)
    assert dispatcher.submit(rid(0), 2, 10, 0.0, (0.0, 0, 0.0)) == []
    urgent = make(A, priority_ageing_s=60.0)
    urgent.on_load(A, queue, 0.0)
    assert urgent.submit(rid(0), 2, 10, 0.0, (0.0, 0, 0.0)) == [Dispatch(rid(0), A, 1)]
    assert urgent.on_reply(rid(0), 1, RefusalReason.SHED, "", 0.0) == []
    assert urgent.on_load(A, queue, 0.0) == [], "the same queue again is no news"
    assert len(urgent.on_load(A, ReplicaLoad(num_queued=2, queue_cap=4), 0.0)) == 1


def test_a_message_of_one_replica_asks_no_other() -> None:
    """Each is asked once about who is held; again when there is news of it or of who is held, or after a second."""
    dispatcher = make(A, B, admission_wait_s=60.0)
    for replica_id in (A, B):
        dispatcher.on_load(replica_id, FULL, 0.0)
    dispatcher.submit(rid(0), 1, 10, 0.0)
    assert [replica_id for replica_id, _ in dispatcher.asks(0.0)] == [A, B]
    looked_at: list[ReplicaId] = []
    asks = dispatcher._eligibility.asks

    def watched(view: ReplicaView, now: float) -> Iterator[Ask]:
        looked_at.append(view.replica_id)
        return asks(view, now)

    dispatcher._eligibility.asks = watched  # type: ignore[method-assign]
    dispatcher.on_load(B, FULL, 0.1)
    assert dispatcher.asks(0.1) == []
    assert looked_at == [B]
    dispatcher.on_time(1.1)
    assert [replica_id for replica_id, _ in dispatcher.asks(1.1)] == [A, B], "the ask may have been lost"
    dispatcher.submit(rid(1), 1, 10, 1.2, order_key=(0.0, 0, -1.0))
    assert [replica_id for replica_id, _ in dispatcher.asks(1.2)] == [A, B], "it comes before the first"
    dispatcher.abort(rid(0))
    dispatcher.abort(rid(1))
    looked_at.clear()
    dispatcher.on_load(A, FULL, 1.3)
    dispatcher.asks(1.3)
    assert looked_at == [A]


def test_the_next_to_be_given_up_is_known_whoever_leaves_before() -> None:
    dispatcher = make(A, admission_wait_s=1.0)
    dispatcher.on_load(A, FULL, 0.0)
    for number in range(4):
        dispatcher.submit(rid(number), 1, 10, 0.1 * number, deadline_at=0.9 if number == 3 else None)
    assert dispatcher.next_deadline() == 0.9
    dispatcher.abort(rid(3))
    dispatcher.abort(rid(0))
    dispatcher.validate()
    assert dispatcher.next_deadline() == 1.1
    assert dispatcher.on_time(1.05) == []
    (refused,) = dispatcher.on_time(1.1)
    assert refused.request_id == rid(1)
    assert dispatcher.next_deadline() == 1.2
    dispatcher.abort(rid(2))
    assert dispatcher.next_deadline() is None


def accepted(dispatcher: Dispatcher, number: int, has_begun: bool) -> None:
    """One more request, at the replica that the dispatcher chose for it."""
    (sent,) = dispatcher.submit(rid(number), 1, 10, 0.0)
    assert isinstance(sent, Dispatch)
    dispatcher.on_reply(rid(number), 1, None, "", 0.0)
    if has_begun:
        dispatcher.progressed(rid(number))


def test_streams_leave_a_draining_replica_after_a_while_and_two_at_a_time() -> None:
    dispatcher = make(A, move_after_s=2.0)
    for number in range(3):
        accepted(dispatcher, number, has_begun=True)
    dispatcher.add_replica(ReplicaView(B, "address", "incarnation"))
    dispatcher.on_load(B, ROOM, 0.0)
    dispatcher.on_connected(B, 0.0)
    dispatcher.on_draining(A)
    assert dispatcher.on_load(B, ROOM, 0.0) == []
    assert dispatcher.on_load(B, ROOM, 1.9) == []
    moves = [SendAbort(rid(0), A), Dispatch(rid(0), B, 2, True), SendAbort(rid(1), A), Dispatch(rid(1), B, 2, True)]
    assert dispatcher.on_load(B, ROOM, 2.0) == moves
    assert not dispatcher.is_working_on(rid(0), A), "what A says of it is not delivered any more"
    dispatcher.on_reply(rid(0), 2, None, "", 2.1)
    assert dispatcher.on_load(B, ROOM, 2.1) == [], "two are still on their way"
    dispatcher.progressed(rid(0))
    assert dispatcher.on_load(B, ROOM, 2.2) == [SendAbort(rid(2), A), Dispatch(rid(2), B, 2, True)]
    dispatcher.validate()


def test_what_has_not_begun_leaves_a_draining_replica_at_once_if_there_is_room() -> None:
    dispatcher = make(A)
    accepted(dispatcher, 0, has_begun=False)
    dispatcher.add_replica(ReplicaView(B, "address", "incarnation"))
    dispatcher.on_load(B, FULL, 0.0)
    dispatcher.on_connected(B, 0.0)
    dispatcher.on_draining(A)
    assert dispatcher.on_load(B, FULL, 0.1) == [], "it goes on where it is"
    assert dispatcher.on_load(B, ROOM, 0.2) == [SendAbort(rid(0), A), Dispatch(rid(0), B, 2, True)]


def test_nothing_is_moved_when_all_replicas_drain() -> None:
    dispatcher = make(A, B, move_after_s=0.0)
    accepted(dispatcher, 0, has_begun=True)
    dispatcher.on_draining(A)
    dispatcher.on_draining(B)
    assert dispatcher.on_load(B, ROOM, 1.0) == []
    assert dispatcher.is_working_on(rid(0), A)
