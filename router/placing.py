"""PURE. The steps that a request's life is made of: sent to a replica, held, given up, forgotten. Each keeps all books.

`router/dispatcher.py` says when; whatever takes a request from one state to another is here.
"""

from __future__ import annotations

from replica.messages import ReplicaId, RequestId
from router.eligibility import Eligibility
from router.held_requests import HeldRequests
from router.hold_times import HoldTimes
from router.instructions import Dispatch, Fail, Instruction, Refuse, SendAbort
from router.journal import FAILED, REFUSED, Journal, grounds
from router.last_word import last_word
from router.live_settings import DispatcherConfig
from router.patience import Patience
from router.placement import Policy
from router.replica_view import ReplicaView
from router.tracked import State, Tracked
from router.waiting import Waiting


class Placing:
    """The unfinished requests of one router, and its views of replicas."""

    def __init__(self, config: DispatcherConfig, policy: Policy) -> None:
        self.config = config
        self.policy = policy
        self.views: dict[ReplicaId, ReplicaView] = {}
        self.requests: dict[RequestId, Tracked] = {}
        self.held = HeldRequests(config.priority_ageing_s)
        self.eligibility = Eligibility(self.held)
        self.waiting = Waiting(self.held, config.max_waiting)
        self.patience = Patience(config)
        self.hold_times = HoldTimes(self.patience)
        #: what was decided, for `shoal why`; nothing is decided by it
        self.journal = Journal()

    def place_or_hold(self, request: Tracked, now: float, is_replaced: bool = False) -> list[Instruction]:
        """To the replica that the policy chooses, or held until there is one, or until its time is up."""
        if request.is_overdue(now):
            return self.give_up(request, now)
        view = self.eligibility.choose(request, self.views.values(), self.policy, now)
        if view is not None:
            return [self.send(request, view, now)]
        instructions: list[Instruction] = []
        if request not in self.held:
            if len(self.held) >= self.config.max_held_requests and not request.is_returning:
                weaker = self.held.weaker_than(request.order_key, request.tenant, request.tenant_weight)
                if weaker is None:
                    return self.give_up(request, now)
                instructions = self.make_way(weaker, now)
            request.state = State.HELD
            self.held.push(request)
            self._note_grounds(request, now, "held")
        self.patience.begin(request, now, is_replaced)
        if (ends_at := self.hold_times.add(request)) is not None and ends_at <= now:
            instructions += self.give_up(request, now)
        return instructions

    def send(self, request: Tracked, view: ReplicaView, now: float) -> Dispatch:
        """A new attempt, there."""
        self._note_grounds(request, now, "placed", replica=view.replica_id)
        self.held.discard(request)
        self.hold_times.remove(request)
        request.state = State.SENT
        request.replica_id = view.replica_id
        request.epoch += 1
        permit = None if request.is_returning else view.permits.spend(request.tenant, request.num_sequences)
        view.sent(request.num_sequences, request.num_tokens)
        return Dispatch(request.request_id, view.replica_id, request.epoch, request.is_returning, permit)

    def answered(self, request: Tracked) -> None:
        """Its replica need not answer any more: it has, or the request leaves it."""
        view = self.views.get(request.replica_id) if request.replica_id is not None else None
        if view is not None and request.state is State.SENT:
            view.answered(request.num_sequences, request.num_tokens)

    def make_way(self, request: Tracked, now: float) -> list[Instruction]:
        """Nothing of it has begun, and another one takes its place."""
        replica_id, request.was_shed = request.replica_id, True
        told: list[Instruction] = [] if replica_id is None else [SendAbort(request.request_id, replica_id)]
        return [*told, *self.give_up(request, now)]

    def give_up(self, request: Tracked, now: float) -> list[Instruction]:
        """It ends, with the reason."""
        word = last_word(request, self.views.values(), self.config.max_losses, now, self.patience.is_stopping)
        return self.end_with(word, now)

    def end_with(self, word: Refuse | Fail, now: float) -> list[Instruction]:
        """It ends with this word."""
        self.journal.note(word.request_id, now, "ended by the router", why=word.message)
        self.forget(word.request_id, REFUSED if isinstance(word, Refuse) else FAILED)
        return [word]

    def forget(self, request_id: RequestId, outcome: str) -> Tracked | None:
        """It is over, whatever the reason. None: it was before."""
        self.journal.end(request_id, outcome)
        request = self.requests.pop(request_id, None)
        if request is not None:
            self.answered(request)
            self.held.discard(request)
            self.waiting.discard(request)
            self.hold_times.remove(request)
        return request

    def validate(self) -> None:
        """Raises AssertionError if the books do not agree."""
        for request in self.requests.values():
            assert (request.state is State.HELD) == (request in self.held), f"{request.request_id}: held or not?"
            assert (request.replica_id is None) == (request.state is State.HELD), (
                f"{request.request_id}: placed or not?"
            )
        self.held.validate()
        self.waiting.validate()
        self.hold_times.validate(self.held)
        for view in self.views.values():
            view.validate(
                r for r in self.requests.values() if r.state is State.SENT and r.replica_id == view.replica_id
            )

    def _note_grounds(self, request: Tracked, now: float, what: str, **detail: str) -> None:
        seen = grounds(self.views.values(), request.tried, request.num_sequences, now)
        self.journal.note(request.request_id, now, what, **detail, attempt=request.epoch + 1, replicas=seen)
