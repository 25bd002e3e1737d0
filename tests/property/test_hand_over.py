"""Hand-overs under arbitrary messages, losses and time: any party crashes, any message comes late, twice, never or out
of order. Each request ends once, and every reservation at D and every submission at P is ended by somebody.
"""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replica.messages import (
    FinishReason,
    RefusalReason,
    ReplicaId,
    ReplicaLoad,
    RequestId,
    Role,
    Seated,
    SequenceOutput,
)
from router.disaggregation import HandOverConfig
from router.dispatcher import DispatcherConfig
from router.instructions import Dispatch, DispatchPrefill, Fail, Instruction, Refuse, SendAbort, SendContinue
from router.pairing import PairingDispatcher
from router.placement import least_tokens
from router.replica_view import ReplicaView

DECODES = [ReplicaId("d0"), ReplicaId("d1")]
PREFILLS = [ReplicaId("p0"), ReplicaId("p1"), ReplicaId("p2")]
RULES = HandOverConfig("always", prefill_timeout_s=4.0)
CONFIG = DispatcherConfig(admission_wait_s=1.0, resume_wait_s=3.0, resume_limit_s=6.0)
MAX_TOKENS = 5
NUM_SEQUENCES = 2


class HandOverMachine(RuleBasedStateMachine):
    """The world keeps what each replica was told and not told to drop: `reserved` at D, `legs` at P."""

    def __init__(self) -> None:
        super().__init__()
        self.dispatcher = PairingDispatcher(CONFIG, least_tokens, RULES, "r")
        self.now = 0.0
        self.count = 0
        self.frozen: set[ReplicaId] = set()
        self.alive: set[RequestId] = set()
        #: request -> index -> tokens that its client has
        self.tokens: dict[RequestId, dict[int, int]] = {}
        self.over: dict[RequestId, set[int]] = {}
        #: (D, request) -> index -> was continued, of hand-over `name`
        self.reserved: dict[tuple[ReplicaId, RequestId], dict[int, bool]] = {}
        self.names: dict[tuple[ReplicaId, RequestId], str] = {}
        #: (P, leg) -> its indices; (P, leg) that were ever there
        self.legs: dict[tuple[ReplicaId, RequestId], set[int]] = {}
        self.old_legs: list[tuple[ReplicaId, RequestId]] = []
        self.old_seats: list[tuple[ReplicaId, Seated]] = []
        self.epochs: dict[RequestId, tuple[ReplicaId, int]] = {}
        for name in (*DECODES, *PREFILLS):
            self.start(name)

    # ---- the world ----

    def start(self, name: ReplicaId) -> None:
        role = Role.PREFILL if name in PREFILLS else Role.DECODE
        self.dispatcher.add_replica(ReplicaView(name, "", name, role))
        self.carry_out(self.dispatcher.on_load(name, ReplicaLoad(queue_cap=8), self.now))
        self.carry_out(self.dispatcher.on_connected(name, self.now))

    def carry_out(self, instructions: list[Instruction]) -> None:
        for order in [*instructions, *self.dispatcher.take_orders()]:
            match order:
                case Dispatch(request_id=request_id, replica_id=replica_id):
                    assert request_id in self.alive
                    assert replica_id in DECODES, "a prefill replica gets a whole request"
                    self.epochs[request_id] = (replica_id, order.epoch)
                    open_ = set(range(NUM_SEQUENCES)) - self.over[request_id]
                    self.reserved[replica_id, request_id] = dict.fromkeys(open_, order.kv_source is None)
                    self.names[replica_id, request_id] = order.kv_source.hand_over if order.kv_source else ""
                case DispatchPrefill(replica_id=replica_id, leg_id=leg_id):
                    assert (replica_id, leg_id) not in self.old_legs, "the id of a leg comes again"
                    assert order.request_id in self.alive
                    self.legs[replica_id, leg_id] = set(order.indices)
                    self.old_legs.append((replica_id, leg_id))
                case SendContinue(request_id=request_id, replica_id=replica_id):
                    told = self.reserved.get((replica_id, request_id), {})
                    if self.names.get((replica_id, request_id)) != order.hand_over:
                        continue
                    for index, token_ids in order.tokens.items():
                        if index in told:
                            assert not told[index], "continued twice"
                            assert len(token_ids) == self.tokens[request_id][index], "D and the client disagree"
                            told[index] = True
                case SendAbort(request_id=request_id, replica_id=replica_id, indices=indices):
                    self.legs.pop((replica_id, request_id), None)
                    told = self.reserved.get((replica_id, request_id), {})
                    for index in list(told) if indices is None else indices:
                        told.pop(index, None)
                case Refuse(request_id=request_id) | Fail(request_id=request_id):
                    self.end(request_id)

    def end(self, request_id: RequestId) -> None:
        assert request_id in self.alive, "ended twice"
        self.alive.discard(request_id)

    def lose(self, name: ReplicaId) -> None:
        self.reserved = {key: value for key, value in self.reserved.items() if key[0] != name}
        self.legs = {key: value for key, value in self.legs.items() if key[0] != name}

    def deliver(self, request_id: RequestId, index: int, reason: FinishReason | None) -> None:
        """One token for the client."""
        assert request_id in self.alive
        assert index not in self.over[request_id], "a token after the end"
        self.tokens[request_id][index] += 1
        self.dispatcher.began(request_id, index)
        self.dispatcher.progressed(request_id)
        if reason is not None:
            self.over[request_id].add(index)
            if len(self.over[request_id]) == NUM_SEQUENCES:
                self.dispatcher.finish(request_id)
                self.end(request_id)

    # ---- rules ----

    @rule()
    def submit(self) -> None:
        request_id = RequestId(f"q{self.count}")
        self.count += 1
        self.alive.add(request_id)
        self.tokens[request_id], self.over[request_id] = dict.fromkeys(range(NUM_SEQUENCES), 0), set()
        self.carry_out(self.dispatcher.submit(request_id, NUM_SEQUENCES, 100, self.now))

    @precondition(lambda self: self.epochs)
    @rule(data=st.data(), refusal=st.sampled_from([None, None, None, RefusalReason.QUEUE_FULL, RefusalReason.DRAINING]))
    def reply(self, data: st.DataObject, refusal: RefusalReason | None) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.epochs)))
        replica_id, epoch = self.epochs[request_id]
        if replica_id not in self.dispatcher.views:
            return
        if refusal is not None and self.dispatcher.replica_of(request_id) == replica_id:
            if self.dispatcher.is_working_on(request_id, replica_id):
                return  # it was accepted already
            self.reserved.pop((replica_id, request_id), None)
        self.carry_out(self.dispatcher.on_reply(request_id, epoch, refusal, "", self.now))

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), is_waiting=st.sampled_from([True, True, True, False]), cached=st.sampled_from([0, 48]))
    def seat(self, data: st.DataObject, is_waiting: bool, cached: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.reserved)))
        waiting = [index for index, was_continued in self.reserved[key].items() if not was_continued]
        if not waiting or not self.names[key]:
            return
        self.say_seated(key, data.draw(st.sampled_from(waiting)), cached, is_waiting)

    def say_seated(self, key: tuple[ReplicaId, RequestId], index: int, cached: int, is_waiting: bool) -> None:
        replica_id, request_id = key
        seated = Seated(request_id, self.names[key], index, cached, is_waiting)
        if not is_waiting:
            self.reserved[key][index] = True
        self.old_seats.append((replica_id, seated))
        self.carry_out([])
        self.dispatcher.on_seated(replica_id, seated, self.now)
        self.carry_out([])

    @precondition(lambda self: self.old_seats)
    @rule(data=st.data())
    def seat_again(self, data: st.DataObject) -> None:
        """Late, or twice."""
        replica_id, seated = data.draw(st.sampled_from(self.old_seats))
        if seated.is_waiting:
            is_of_now = self.names.get((replica_id, RequestId(seated.request_id))) == seated.hand_over
            self.dispatcher.on_seated(replica_id, seated, self.now)
            orders = self.dispatcher.take_orders()
            assert is_of_now or not orders, "an earlier hand-over's seat counts"
            self.carry_out(orders)

    @precondition(lambda self: self.old_legs)
    @rule(
        data=st.data(),
        index=st.integers(0, NUM_SEQUENCES - 1),
        reason=st.sampled_from([FinishReason.LENGTH] * 4 + [FinishReason.STOP, FinishReason.MOVED, FinishReason.ERROR]),
    )
    def first_token(self, data: st.DataObject, index: int, reason: FinishReason) -> None:
        """Of any leg there ever was."""
        known = sorted(key for key, indices in self.legs.items() if index in indices)
        replica_id, leg_id = data.draw(st.sampled_from(known * 4 + self.old_legs))
        self.say_first(replica_id, leg_id, index, reason)

    def say_first(self, replica_id: ReplicaId, leg_id: RequestId, index: int, reason: FinishReason) -> None:
        gave_back = reason in (FinishReason.MOVED, FinishReason.ERROR)
        output = SequenceOutput(leg_id, index, [] if gave_back else [7], reason)
        self.legs.get((replica_id, leg_id), set()).discard(index)
        first = self.dispatcher.first_token(replica_id, output, MAX_TOKENS)
        if first is None:
            self.dispatcher.leg_failed(replica_id, output, self.now)
            self.carry_out([])
            return
        request_id = first.request_id
        assert self.tokens[request_id][index] == 0, "two first tokens"
        ended = set() if first.finish_reason is None else {index}
        # the client has it when D hears of it
        self.tokens[request_id][index] += 1
        self.dispatcher.prefilled(leg_id, {index: [7]}, ended, self.now)
        self.carry_out([])
        self.tokens[request_id][index] -= 1
        self.deliver(request_id, index, first.finish_reason)
        self.carry_out([])

    @rule(how_far=st.integers(1, 6), reason=st.sampled_from([FinishReason.LENGTH] * 3 + [FinishReason.STOP]))
    def go_well(self, how_far: int, reason: FinishReason) -> None:
        """A request, and what usually follows, up to some point."""
        self.submit()
        request_id = RequestId(f"q{self.count - 1}")
        replica_id = self.dispatcher.replica_of(request_id)
        if replica_id is None or not self.names[replica_id, request_id]:
            return
        self.carry_out(self.dispatcher.on_reply(request_id, self.epochs[request_id][1], None, "", self.now))
        for index in range(min(how_far, 2)):
            self.say_seated((replica_id, request_id), index, 0, True)
        for index in range(max(0, how_far - 2)):
            for prefill_id, leg_id in sorted(self.legs):
                if index in self.legs[prefill_id, leg_id] and leg_id.startswith(f"{request_id}@"):
                    self.say_first(prefill_id, leg_id, index, reason)

    @precondition(lambda self: self.old_legs)
    @rule(data=st.data(), refusal=st.sampled_from([None, None, RefusalReason.QUEUE_FULL]))
    def leg_reply(self, data: st.DataObject, refusal: RefusalReason | None) -> None:
        replica_id, leg_id = data.draw(st.sampled_from(self.old_legs))
        if refusal is not None:
            self.legs.pop((replica_id, leg_id), None)
        self.carry_out(self.dispatcher.on_reply(leg_id, 0, refusal, "", self.now))

    @precondition(lambda self: any(any(told.values()) for told in self.reserved.values()))
    @rule(data=st.data(), reason=st.sampled_from([None, None, FinishReason.STOP]))
    def decode(self, data: st.DataObject, reason: FinishReason | None) -> None:
        """D says a token of a sequence that may go on."""
        keys = sorted(key for key, told in self.reserved.items() if any(told.values()))
        replica_id, request_id = key = data.draw(st.sampled_from(keys))
        index = data.draw(st.sampled_from([i for i, may_go_on in self.reserved[key].items() if may_go_on]))
        if not self.dispatcher.is_working_on(request_id, replica_id) or request_id not in self.alive:
            return
        if reason is not None:
            del self.reserved[key][index]
        self.deliver(request_id, index, reason)
        self.carry_out([])

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        """D has heard no `Continue` for too long, or drains."""
        replica_id, request_id = key = data.draw(st.sampled_from(sorted(self.reserved)))
        if self.dispatcher.is_working_on(request_id, replica_id) and self.reserved[key]:
            self.reserved.pop(key)
            self.carry_out(self.dispatcher.on_moved(request_id, self.now))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def client_leaves(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.alive)))
        self.end(request_id)
        self.carry_out(self.dispatcher.abort(request_id))

    @rule(name=st.sampled_from([*DECODES, *PREFILLS]))
    def crash(self, name: ReplicaId) -> None:
        if self.dispatcher.view_of(name) is not None:
            self.lose(name)
            self.carry_out(self.dispatcher.on_lost(name, self.now))

    @rule()
    def come_back(self) -> None:
        for name in [*DECODES, *PREFILLS]:
            if self.dispatcher.view_of(name) is None:
                self.start(name)

    @rule(name=st.sampled_from([*DECODES, *PREFILLS]))
    def freeze(self, name: ReplicaId) -> None:
        """It says nothing until it is frozen no more."""
        self.frozen ^= {name}

    def hear(self, name: ReplicaId, running: int) -> None:
        load = ReplicaLoad(num_running=running, queue_cap=8)
        self.carry_out(self.dispatcher.on_load(name, load, self.now))

    @rule(seconds=st.sampled_from([0.01, 0.5, 2.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for name in set(DECODES + PREFILLS) - self.frozen:
            self.hear(name, 0)
        self.carry_out(self.dispatcher.on_time(self.now))

    # ---- what holds ----

    @invariant()
    def books_agree(self) -> None:
        self.dispatcher.validate()

    @invariant()
    def nothing_is_stranded(self) -> None:
        """What waits at D is waited for here, and what P was given is still wanted."""
        desk = self.dispatcher.desk
        for (replica_id, request_id), told in self.reserved.items():
            if told and not all(told.values()):
                assert request_id in self.alive, "a seat of a request that is over"
                assert self.dispatcher.replica_of(request_id) == replica_id, "a seat that the request has left"
                assert request_id in desk, "a seat that nobody will continue"
        for (replica_id, leg_id), indices in self.legs.items():
            if indices:
                wanted = {i: desk.request_of(leg_id, replica_id, i) for i in range(NUM_SEQUENCES)}
                assert any(wanted.values()), "P works for nobody"
                for index, whose in wanted.items():
                    if whose is not None:
                        assert self.tokens[whose][index] == 0, "another first token is waited for"

    def teardown(self) -> None:
        """Time alone, without a word of any replica, ends every hand-over and every held request."""
        for _ in range(8):
            self.now += 5.0
            for name in DECODES + PREFILLS:
                self.hear(name, 0)
            self.carry_out(self.dispatcher.on_time(self.now))
        seating = [key for key, told in self.reserved.items() if told and not all(told.values())]
        assert all(not indices for indices in self.legs.values()), "a leg without an end"
        assert len(self.dispatcher.desk) <= len(seating), "a hand-over that waits for nobody"


TestHandOver = HandOverMachine.TestCase
TestHandOver.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
