"""The router's decisions under arbitrary replies, loads, losses, drains, aborts and time: each request ends exactly
once.
"""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replica.messages import FINAL_REFUSALS, RefusalReason, ReplicaId, ReplicaLoad, RequestId
from router.dispatcher import Dispatcher, DispatcherConfig
from router.instructions import Dispatch, Fail, Instruction, Refuse, SendAbort
from router.placement import least_tokens
from router.replica_view import MAX_SILENCE_S, ReplicaView
from tests.property.lengths import examples

REPLICAS = [ReplicaId("x"), ReplicaId("y"), ReplicaId("z")]
CAP = 3
CONFIG = DispatcherConfig(
    admission_wait_s=1.0,
    max_held_requests=4,
    resume_wait_s=5.0,
    max_losses=3,
    priority_ageing_s=10.0,
    resume_limit_s=12.0,
    max_waiting=6,
)


def _queue(load: ReplicaLoad) -> tuple[object, ...]:
    return (load.num_queued, load.num_queued_prompt_tokens, load.queue_cap, load.last_queued)


class DispatcherMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.dispatcher = Dispatcher(CONFIG, least_tokens)
        self.now = 0.0
        self.count = 0
        #: request -> (replica, epoch) of the dispatch that has no answer yet, or None
        self.alive: dict[RequestId, tuple[ReplicaId, int] | None] = {}
        self.sizes: dict[RequestId, int] = {}
        self.begun: set[RequestId] = set()
        self.returning: set[RequestId] = set()
        self.accepted: dict[RequestId, ReplicaId] = {}
        self.losses: dict[RequestId, int] = {}
        self.lost: set[RequestId] = set()
        self.deadlines: dict[RequestId, float | None] = {}
        self.priorities: dict[RequestId, int] = {}
        #: a replica says so, who has a clock of its own
        self.told_deadline = False
        #: (replica, request) refused by a limit on tokens since that replica's queue last changed
        self.refused_by: set[tuple[ReplicaId, RequestId]] = set()
        #: of those that lost their replica: when, if there was no token since
        self.lost_at: dict[RequestId, float] = {}
        self.stops_at = float("inf")

    def carry_out(self, instructions: list[Instruction]) -> None:
        for number, instruction in enumerate(instructions):
            request_id = instruction.request_id
            match instruction:
                case Dispatch(replica_id=replica_id, epoch=epoch):
                    assert request_id in self.alive, "a request that ended is dispatched"
                    assert self.alive[request_id] is None, "dispatched twice without an answer"
                    assert request_id not in self.accepted
                    view = self.dispatcher.views[replica_id]
                    assert view.is_placeable(self.now) or (
                        view.takes_back(self.now) and request_id in self.returning | self.begun
                    )
                    if request_id not in self.returning | self.begun:
                        assert (replica_id, request_id) not in self.refused_by, "sent again without news"
                    if not view.has_room_for(0) and request_id not in self.returning | self.begun | self.lost:
                        assert view.load.last_queued is not None, "sent to a full queue"
                        assert self.priorities[request_id] < view.load.last_queued[0]
                    self.alive[request_id] = (replica_id, epoch)
                case Refuse():
                    assert request_id in self.alive
                    assert request_id not in self.begun, "a refusal after the first byte"
                    assert (instruction.retry_after_s >= 1) == (instruction.reason not in FINAL_REFUSALS)
                    if instruction.reason is RefusalReason.DEADLINE and not self.told_deadline:
                        deadline = self.deadlines[request_id]
                        assert deadline is not None
                        assert deadline <= self.now
                    self.end(request_id)
                case Fail():
                    assert request_id in self.begun or self.losses[request_id] >= CONFIG.max_losses
                    self.end(request_id)
                case SendAbort(replica_id=replica_id):
                    left = self.dispatcher.views.get(replica_id)
                    if request_id not in self.alive:
                        continue
                    if any(isinstance(following, Refuse) for following in instructions[number + 1 : number + 2]):
                        continue  # it made way for another one
                    if left is not None and left.is_draining and self.now - left.load_at <= MAX_SILENCE_S:
                        self.move(request_id, replica_id)
                    else:  # a silent replica is left; what follows sends it elsewhere or ends it
                        self.leave(request_id, replica_id)

    def move(self, request_id: RequestId, replica_id: ReplicaId) -> None:
        """The router takes it away from a replica that drains; what follows sends it elsewhere."""
        assert self.accepted.pop(request_id) == replica_id, "taken away before it was accepted"
        self.returning.add(request_id)

    def leave(self, request_id: RequestId, replica_id: ReplicaId) -> None:
        sent = self.alive[request_id]
        assert self.accepted.get(request_id) == replica_id or (sent is not None and sent[0] == replica_id)
        self.alive[request_id] = None
        self.accepted.pop(request_id, None)
        self.losses[request_id] += 1
        self.lost.add(request_id)
        self.lost_at.setdefault(request_id, self.now)

    def end(self, request_id: RequestId) -> None:
        del self.alive[request_id]
        self.accepted.pop(request_id, None)
        self.begun.discard(request_id)
        self.lost_at.pop(request_id, None)

    @rule(
        n=st.integers(1, 4),
        priority=st.integers(-1, 2),
        patience=st.none() | st.sampled_from([0.0, 0.3, 2.0]),
    )
    def submit(self, n: int, priority: int, patience: float | None) -> None:
        request_id = RequestId(str(self.count))
        self.count += 1
        self.alive[request_id] = None
        self.sizes[request_id] = n
        self.losses[request_id] = 0
        self.deadlines[request_id] = None if patience is None else self.now + patience
        order_key = (0.0, priority, self.now)
        self.priorities[request_id] = priority
        self.carry_out(self.dispatcher.submit(request_id, n, 10 * n, self.now, order_key, self.deadlines[request_id]))

    @rule(
        replica_id=st.sampled_from(REPLICAS),
        queued=st.integers(0, CAP),
        tokens=st.integers(0, 99),
        last=st.integers(-1, 3),
    )
    def load(self, replica_id: ReplicaId, queued: int, tokens: int, last: int = 0) -> None:
        load = ReplicaLoad(
            num_queued=queued,
            queue_cap=CAP,
            num_uncomputed_tokens=tokens,
            drain_rate=float(tokens),
            last_queued=(last, 10.0 * last + self.now) if queued else None,
        )
        before = self.dispatcher.views.get(replica_id)
        if before is None or _queue(before.load) != _queue(load):
            self.refused_by = {pair for pair in self.refused_by if pair[0] != replica_id}
        self.carry_out(self.dispatcher.on_load(replica_id, load, self.now))

    @rule(replica_id=st.sampled_from(REPLICAS))
    def say_it_again(self, replica_id: ReplicaId) -> None:
        """A message without news of the queue: it must not bring on what was refused."""
        if (view := self.dispatcher.views.get(replica_id)) is not None:
            self.carry_out(self.dispatcher.on_load(replica_id, view.load, self.now))

    @rule(replica_id=st.sampled_from(REPLICAS), is_whole=st.booleans())
    def mend(self, replica_id: ReplicaId, is_whole: bool) -> None:
        """Its ranks were lost, or are whole again; if it drains, what had begun may come back."""
        load = ReplicaLoad(queue_cap=CAP, is_ready=is_whole, takes_returning=True)
        self.refused_by = {pair for pair in self.refused_by if pair[0] != replica_id}
        self.carry_out(self.dispatcher.on_load(replica_id, load, self.now))

    @precondition(lambda self: self.count > 20)
    @rule(within_s=st.sampled_from([0.0, 3.0]))
    def stop(self, within_s: float) -> None:
        self.stops_at = min(self.stops_at, self.now + within_s)
        self.carry_out(self.dispatcher.on_stopping(self.now + within_s, self.now))

    @rule(replica_id=st.sampled_from(REPLICAS))
    def come_up(self, replica_id: ReplicaId) -> None:
        if replica_id not in self.dispatcher.views:
            self.dispatcher.add_replica(ReplicaView(replica_id, "a", "i"))
            self.load(replica_id, 0, 0)
            self.carry_out(self.dispatcher.on_connected(replica_id, self.now))

    @rule(replica_id=st.sampled_from(REPLICAS))
    def drain(self, replica_id: ReplicaId) -> None:
        self.dispatcher.on_draining(replica_id)

    @rule(replica_id=st.sampled_from(REPLICAS))
    def lose(self, replica_id: ReplicaId) -> None:
        for request_id, sent in list(self.alive.items()):
            if self.accepted.get(request_id) == replica_id or (sent is not None and sent[0] == replica_id):
                self.leave(request_id, replica_id)
        self.carry_out(self.dispatcher.on_lost(replica_id, self.now))

    @precondition(lambda self: any(self.alive.values()))
    @rule(
        data=st.data(), refusal=st.sampled_from([None, None, RefusalReason.SHED, *RefusalReason]), stale=st.booleans()
    )
    def reply(self, data: st.DataObject, refusal: RefusalReason | None, stale: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(r for r, sent in self.alive.items() if sent)))
        sent = self.alive[request_id]
        assert sent is not None
        if stale:  # an answer to an earlier attempt, delivered late
            assert self.dispatcher.on_reply(request_id, sent[1] - 1, refusal, "", self.now) == []
            return
        self.alive[request_id] = None
        if refusal is None:
            self.accepted[request_id] = sent[0]
        self.told_deadline = refusal is RefusalReason.DEADLINE
        if refusal is RefusalReason.SHED:
            self.refused_by.add((sent[0], request_id))
        self.carry_out(self.dispatcher.on_reply(request_id, sent[1], refusal, "", self.now))
        self.told_deadline = False
        if refusal is RefusalReason.SHED:
            self.say_it_again(sent[0])

    @precondition(lambda self: self.accepted)
    @rule(data=st.data(), what=st.sampled_from(["token", "finish", "moved", "failed", "shed"]))
    def progress(self, data: st.DataObject, what: str) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.accepted)))
        assert self.dispatcher.is_working_on(request_id, self.accepted[request_id])
        if what == "token":
            self.begun.add(request_id)
            self.losses[request_id] = 0
            self.lost_at.pop(request_id, None)
            self.dispatcher.progressed(request_id)
            for index in range(self.sizes[request_id]):
                self.dispatcher.began(request_id, index)
        elif what == "finish":
            self.dispatcher.finish(request_id)
            self.end(request_id)
        elif what == "shed":
            if request_id not in self.begun | self.returning | self.lost:
                del self.accepted[request_id]
                self.carry_out(self.dispatcher.on_shed(request_id, self.now))
        elif what == "moved":
            del self.accepted[request_id]
            self.returning.add(request_id)
            self.lost_at.setdefault(request_id, self.now)
            self.carry_out(self.dispatcher.on_moved(request_id, self.now))
        else:
            self.leave(request_id, self.accepted[request_id])
            self.carry_out(self.dispatcher.on_failed(request_id, self.now))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def client_leaves(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.alive)))
        self.end(request_id)
        self.carry_out(self.dispatcher.abort(request_id))
        assert self.dispatcher.abort(request_id) == [], "the second abort is a no-op"

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, MAX_SILENCE_S + 0.1]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.carry_out(self.dispatcher.on_time(self.now))
        deadline = self.dispatcher.next_deadline()
        assert deadline is None or deadline > self.now, "a deadline that passed was not acted on"
        for request_id, sent in self.alive.items():
            if sent is None and request_id not in self.accepted:
                lost_at = self.lost_at.get(request_id, self.now)
                assert self.now < min(lost_at + CONFIG.resume_limit_s, self.stops_at), "held beyond all bounds"

    @invariant()
    def books_agree(self) -> None:
        self.dispatcher.validate()
        assert self.dispatcher.num_requests == len(self.alive)
        waiting = [r for r, sent in self.alive.items() if sent is None and r not in self.accepted]
        assert self.dispatcher.num_held == len(waiting), "a request is neither held, sent nor accepted"
        fresh = [request_id for request_id in waiting if request_id not in self.begun | self.returning]
        assert len(fresh) <= CONFIG.max_held_requests
        unbegun = [request_id for request_id in self.alive if request_id not in self.begun]
        assert sum(self.sizes[request_id] for request_id in unbegun) <= (CONFIG.max_waiting or 0)

    def teardown(self) -> None:
        """Whatever is held ends by time alone: nothing hangs."""
        for replica_id in REPLICAS:
            self.lose(replica_id)
        for _ in range(3):
            self.time_passes(10.0)
        assert self.alive == {}
        assert self.dispatcher.num_requests == self.dispatcher.num_held == 0


TestDispatcherMachine = DispatcherMachine.TestCase
TestDispatcherMachine.settings = settings(max_examples=examples(200), stateful_step_count=50, deadline=None)
