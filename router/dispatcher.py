"""PURE. The router's decisions: place, hold, try elsewhere, refuse, continue after a loss.

Events in, instructions out; the shell (`router/live_backend.py`) carries them out over gRPC, the simulator in virtual
time.

    submit ──> SENT ──accepted──> ACCEPTED ──finish──> gone
                │ ▲                  │ replica lost or moved
       refused  │ │ room appears     ▼
                └─> HELD ◄───────────┘
                     │ held too long
                     ▼ Refuse (no byte was sent) or Fail (the stream had begun)
"""

from __future__ import annotations

from replica.messages import FINAL_REFUSALS, Ask, Grant, OrderKey, RefusalReason, ReplicaId, ReplicaLoad, RequestId
from router.ask_round import AskRound
from router.door import Door
from router.early_moves import EarlyMoves
from router.instructions import Instruction, Refuse, SendAbort
from router.journal import ABORTED, FINISHED, GIVEN_BACK, LOST, TAKEN_AWAY
from router.last_word import retry_after_s
from router.live_settings import DispatcherConfig as DispatcherConfig
from router.placement import Policy
from router.placing import Placing
from router.replica_view import MAX_SILENCE_S, ReplicaView
from router.tracked import State, Tracked


class Dispatcher:
    """Owns the views and the unfinished requests of one router. Knows no socket and no clock."""

    def __init__(self, config: DispatcherConfig, policy: Policy, placing: Placing | None = None) -> None:
        self._placing = placing = placing or Placing(config, policy)
        self.views = placing.views
        self.journal = placing.journal
        self._config = config
        self._requests, self._held = placing.requests, placing.held
        self._eligibility, self._waiting = placing.eligibility, placing.waiting
        self._patience, self._hold_times = placing.patience, placing.hold_times
        self._door = Door(config, self._held, self._eligibility, self._waiting)
        self._ask_round = AskRound(self._held, self._eligibility)
        self._early_moves = EarlyMoves()

    def configure(self, config: DispatcherConfig, policy: Policy) -> None:
        """Other rules from now on. Nobody is refused for it: who is held already keeps the time he was given, and above
        a lowered `max_held_requests` nobody more is held until enough have left.
        """
        self._config = self._placing.config = self._patience.config = self._door.config = config
        self._waiting.most = config.max_waiting
        self._placing.policy = policy
        self._held.order_by(config.priority_ageing_s)
        self._hold_times.again(self._held)
        self._ask_round.all_again()

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def all_views(self) -> dict[ReplicaId, ReplicaView]:
        """Of replicas of all roles."""
        return self.views

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def replica_of(self, request_id: RequestId) -> ReplicaId | None:
        """Where the request is, or None while it is held or unknown."""
        request = self._requests.get(request_id)
        return None if request is None else request.replica_id

    def is_working_on(self, request_id: RequestId, replica_id: ReplicaId) -> bool:
        """False for late output of a replica that the request has left."""
        request = self._requests.get(request_id)
        return request is not None and request.replica_id == replica_id and request.state is State.ACCEPTED

    def is_certainly_full(
        self,
        num_sequences: int,
        now: float,
        order_key: OrderKey = (0.0, 0, 0.0),
        tenant: str = "",
        tenant_weight: float = 1.0,
    ) -> bool:
        """True if a fresh request would be refused at once, or held in vain: ask before doing work for it, such as
        tokenization.
        """
        return self._door.is_closed(self.views.values(), num_sequences, now, order_key, tenant, tenant_weight)

    def retry_after_s(self, now: float) -> float:
        """Seconds until the queues in front of a new request have drained, as foreseen; 1 to 60."""
        return retry_after_s(self.views.values(), now)

    # ---- requests ----

    def submit(
        self,
        request_id: RequestId,
        num_sequences: int,
        num_tokens: int,
        now: float,
        order_key: OrderKey = (0.0, 0, 0.0),
        deadline_at: float | None = None,
        tenant: str = "",
        tenant_weight: float = 1.0,
    ) -> list[Instruction]:
        """A fresh request, which must have begun by `deadline_at`. Exactly one `Refuse`, `Fail`, `finish` or `abort`
        ends it.
        """
        assert request_id not in self._requests, f"{request_id} is already there"
        request = self._requests[request_id] = Tracked(
            request_id,
            num_sequences,
            num_tokens,
            order_key,
            deadline_at,
            self._config.admission_wait_s,
            tenant,
            tenant_weight,
        )
        self.journal.open(request_id, now)
        self.journal.note(request_id, now, "submitted", sequences=num_sequences, prompt_tokens=num_tokens)
        if request.is_overdue(now) or self.is_stopping:
            return self._placing.give_up(request, now)
        verdict = self._door.admit(request, self.views.values(), now)
        if isinstance(verdict, Refuse):
            return self._placing.end_with(verdict, now)
        instructions = [instruction for other in verdict for instruction in self._placing.make_way(other, now)]
        self._waiting.add(request)
        return [*instructions, *self._placing.place_or_hold(request, now)]

    def began(self, request_id: RequestId, index: int) -> None:
        """A sequence of the request has its first token, or its end. Idempotent."""
        self._waiting.began(request_id, index)

    def progressed(self, request_id: RequestId) -> None:
        """Tokens of the request are here."""
        request = self._requests[request_id]
        request.has_begun = request.is_returning = True
        request.is_moving = False
        request.num_losses, request.resume_by = 0, None

    def finish(self, request_id: RequestId) -> None:
        """Its last sequence ended."""
        self._placing.forget(request_id, FINISHED)

    def abort(self, request_id: RequestId, outcome: str = ABORTED) -> list[Instruction]:
        """The client is gone, or an error is its answer. Unknown requests are ignored: they ended in the meantime."""
        request = self._placing.forget(request_id, outcome)
        if request is None or request.replica_id is None or request.replica_id not in self.views:
            return []
        return [SendAbort(request_id, request.replica_id)]

    # ---- what replicas say ----

    def on_reply(
        self, request_id: RequestId, epoch: int, refusal: RefusalReason | None, message: str, now: float
    ) -> list[Instruction]:
        """A replica answered a `Dispatch`. Answers to earlier attempts or to ended requests change nothing."""
        request = self._requests.get(request_id)
        if request is None or request.epoch != epoch or request.state is not State.SENT:
            return []
        replica_id = request.replica_id
        assert replica_id is not None
        view = self.views[replica_id]
        self._placing.answered(request)
        if refusal is None:
            self.journal.note(request_id, now, "accepted", replica=replica_id)
            request.state = State.ACCEPTED
            request.stop_holding(now)
            view.refusals.accepted(view.load.queue_cap)
            return self._offer(view, now)
        request.replica_id = None
        self.journal.note(request_id, now, "refused by the replica", replica=replica_id, reason=refusal, why=message)
        if refusal in FINAL_REFUSALS and not request.has_begun:
            return [*self._placing.end_with(Refuse(request_id, refusal, 0.0, message), now), *self._offer(view, now)]
        if refusal is RefusalReason.DRAINING:
            view.is_draining = True
        request.was_shed |= refusal is RefusalReason.SHED
        self._eligibility.refused(request, view, refusal)
        # who has begun somewhere has time to find another place, also if this one closed its door just now
        # those behind it waited for this answer
        return [*self._placing.place_or_hold(request, now, request.is_returning), *self._offer(view, now)]

    def on_shed(self, request_id: RequestId, now: float) -> list[Instruction]:
        """It had not begun, and its replica gave its place to a more urgent one: perhaps another one has room."""
        request = self._requests.get(request_id)
        if request is None or request.replica_id is None:
            return []
        assert not request.has_begun, f"{request_id} was shed after its first token"
        if (view := self.views.get(request.replica_id)) is not None:
            request.tried[view.replica_id] = view.num_news
        self.journal.note(request_id, now, "shed by the replica", replica=request.replica_id)
        request.replica_id = None
        request.was_shed = True
        return self._placing.place_or_hold(request, now)

    def on_load(self, replica_id: ReplicaId, load: ReplicaLoad, now: float) -> list[Instruction]:
        """Fresh figures of a replica; held requests get a new chance there, in their order, as far as the room goes.

        Of a message that both answers a request and carries a load, the load comes first: else the refused request
        would take its own refusal for news and be sent again at once, for ever.
        """
        view = self.views.get(replica_id)
        if view is None:
            return []
        view.hear(load, now)
        if not load.is_ready:
            self._patience.sign(now)
        return [*self._offer(view, now), *self._move_early(now)]

    def on_moved(self, request_id: RequestId, now: float) -> list[Instruction]:
        """The replica drains and gave the request back: continue elsewhere. Not counted as a loss."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        self.journal.note(request_id, now, GIVEN_BACK, replica=request.replica_id)
        request.replica_id = None
        request.is_returning = True
        return self._placing.place_or_hold(request, now, is_replaced=True)

    def on_failed(self, request_id: RequestId, now: float) -> list[Instruction]:
        """The replica lives but its step failed: as a loss of this request alone, and not there again without news."""
        request = self._requests.get(request_id)
        if request is None or request.replica_id is None:
            return []
        request.tried[request.replica_id] = self.views[request.replica_id].num_news
        return self._lose(request, now)

    def on_grant(self, replica_id: ReplicaId, grant: Grant, now: float) -> list[Instruction]:
        """A replica reserved places for who is held here."""
        if (view := self.views.get(replica_id)) is None:
            return []
        view.permits.of(grant.tenant).hear(grant)
        return self._offer(view, now)

    def asks(self, now: float) -> list[tuple[ReplicaId, Ask]]:
        """What to tell replicas of permits and of who is held: take it after each batch of instructions."""
        return self._ask_round.asks(self.views, now)

    # ---- who is there ----

    def add_replica(self, view: ReplicaView) -> None:
        """A replica is in the view, not connected yet."""
        # a newcomer starts level with the others: else round robin would send it everything until it has caught up
        view.num_placed = min((other.num_placed for other in self.views.values()), default=0)
        self.views[view.replica_id] = view

    def on_connected(self, replica_id: ReplicaId, now: float) -> list[Instruction]:
        view = self.views[replica_id]
        view.is_connected = True
        return self._offer(view, now)

    def on_draining(self, replica_id: ReplicaId) -> None:
        """Place nothing there any more; what runs there goes on."""
        if replica_id in self.views:
            self.views[replica_id].is_draining = True

    @property
    def is_stopping(self) -> bool:
        return self._patience.is_stopping

    def on_stopping(self, at: float, now: float) -> list[Instruction]:
        """The server stops, nothing will be replaced: nobody comes in, and all ends by `at`, whatever it waits for."""
        self._patience.stop(at)
        self._hold_times.again(self._held)
        return self.on_time(now)

    def on_lost(self, replica_id: ReplicaId, now: float) -> list[Instruction]:
        """Its stream broke: whatever it worked on continues elsewhere, or waits for another replica."""
        if self.views.pop(replica_id, None) is None:
            return []
        instructions: list[Instruction] = []
        for request in [r for r in self._requests.values() if r.replica_id == replica_id]:
            instructions += self._lose(request, now)
        return instructions

    # ---- time ----

    def next_deadline(self) -> float | None:
        """When somebody's time is up, in the caller's clock. For silence call `on_time` once a second."""
        held, stops_at = self._hold_times.next(), self._patience.stops_at if self._requests else None
        return held if stops_at is None else stops_at if held is None else min(held, stops_at)

    def on_time(self, now: float) -> list[Instruction]:
        """Give up on requests that were held too long, and on replicas that have been silent too long; and on all when
        the server has stopped.
        """
        instructions: list[Instruction] = []
        if self._patience.is_over(now):
            for request in list(self._requests.values()):
                if request.replica_id is not None:
                    instructions.append(SendAbort(request.request_id, request.replica_id))
                instructions += self._placing.give_up(request, now)
        is_vain = self._patience.is_stopping and not any(view.may_take_back(now) for view in self.views.values())
        self._ask_round.all_again()
        for request in self._held if is_vain else self._hold_times.due(now):
            instructions += self._placing.give_up(request, now)
        for view in self.views.values():
            silence = now - view.load_at
            if view.is_connected and silence > MAX_SILENCE_S:
                instructions += self._leave_silent(view, silence > self._config.give_up_silent_s, now)
        return instructions + self._move_early(now)

    def validate(self) -> None:
        """Raises AssertionError if the books do not agree."""
        self._placing.validate()

    # ---- inside ----

    def _offer(self, view: ReplicaView, now: float) -> list[Instruction]:
        """A replica has news: it takes held requests, the most urgent first, while it has room or they may push."""
        instructions: list[Instruction] = []
        self._ask_round.news(view.replica_id)
        takes_back = view.takes_back(now)
        if not self._held or not (takes_back or view.is_placeable(now)):
            return instructions
        # under overload this runs on every message of a full replica, so it must not look at every held request then
        last = view.load.last_queued
        draw = self._held.draw()
        for request in draw:
            if takes_back and not request.is_returning:
                break  # and so are all that follow
            if not (request.is_returning or view.has_room_for(1, request.tenant)):
                is_behind = last is None or self._held.value(request.order_key) >= last[1]
                if is_behind or view.unanswered_sequences > 0:
                    draw.close()  # so are all of its tenant that follow; the answer on its way brings them back here
                    continue
            if self._eligibility.may_send(request, view):
                instructions.append(self._placing.send(request, view, now))
        return instructions

    def _move_early(self, now: float) -> list[Instruction]:
        """Not counted as losses."""
        instructions: list[Instruction] = []
        for request, target in self._early_moves.due(
            self._requests.values(), self.views.values(), self._config, self._placing.policy, now
        ):
            assert request.replica_id is not None
            self.journal.note(request.request_id, now, TAKEN_AWAY, replica=request.replica_id)
            instructions.append(SendAbort(request.request_id, request.replica_id))
            request.is_returning, request.is_moving = True, request.has_begun
            instructions.append(self._placing.send(request, target, now))
        return instructions

    def _lose(self, request: Tracked, now: float) -> list[Instruction]:
        self._placing.answered(request)
        self.journal.note(request.request_id, now, LOST, replica=request.replica_id)
        request.replica_id = None
        request.num_losses += 1
        if request.num_losses >= self._config.max_losses:
            return self._placing.give_up(request, now)
        return self._placing.place_or_hold(request, now, is_replaced=True)

    def _leave_silent(self, view: ReplicaView, is_given_up: bool, now: float) -> list[Instruction]:
        """Take back what a silent replica has not answered, and after a while also what it works on. It may wake up
        later: the abort waits in its stream before anything new does, and output of the old attempt is not ours any
        more.
        """
        instructions: list[Instruction] = []
        for request in [r for r in self._requests.values() if r.replica_id == view.replica_id]:
            if request.state is State.SENT or is_given_up or request.is_overdue(now):
                instructions.append(SendAbort(request.request_id, view.replica_id))
                instructions += self._lose(request, now)
        return instructions
