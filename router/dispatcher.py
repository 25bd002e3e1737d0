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

import enum
import math

import msgspec

from replica.messages import RefusalReason, ReplicaId, ReplicaLoad, RequestId
from router.placement import Policy
from router.replica_view import ReplicaView


class Dispatch(msgspec.Struct, frozen=True):
    """Submit the request to this replica, as attempt `epoch`."""

    request_id: RequestId
    replica_id: ReplicaId
    epoch: int


class Refuse(msgspec.Struct, frozen=True):
    """Answer the client: not now. Only ever before the first byte."""

    request_id: RequestId
    reason: RefusalReason
    retry_after_s: float
    message: str


class Fail(msgspec.Struct, frozen=True):
    """End a stream that had begun and cannot be continued."""

    request_id: RequestId
    message: str


class SendAbort(msgspec.Struct, frozen=True):
    """Tell the replica that nobody wants this request any more."""

    request_id: RequestId
    replica_id: ReplicaId


Instruction = Dispatch | Refuse | Fail | SendAbort


class DispatcherConfig(msgspec.Struct, frozen=True):
    """Limits of holding and retrying."""

    admission_wait_s: float = 0.1
    max_held_requests: int = 1024
    #: how long a request that lost its replica may wait for another: a replacement takes 1.2 to 1.7 s plus loading
    resume_wait_s: float = 20.0
    #: replicas that may die under one request before it fails
    max_losses: int = 3


class State(enum.Enum):
    """Where a request is, seen from the router."""

    HELD = "held"
    SENT = "sent"
    ACCEPTED = "accepted"


class Tracked:
    """One unfinished request."""

    __slots__ = (
        "epoch",
        "has_begun",
        "held_until",
        "num_losses",
        "num_sequences",
        "num_tokens",
        "replica_id",
        "request_id",
        "state",
        "tried",
    )

    def __init__(self, request_id: RequestId, num_sequences: int, num_tokens: int) -> None:
        self.request_id = request_id
        self.num_sequences = num_sequences
        self.num_tokens = num_tokens
        self.state = State.HELD
        self.replica_id: ReplicaId | None = None
        self.epoch = 0
        #: a token reached the client: no refusal any more, and no cap applies
        self.has_begun = False
        self.held_until: float | None = None
        self.num_losses = 0
        #: replicas that refused since the request was last held
        self.tried: set[ReplicaId] = set()


class Dispatcher:
    """Owns the views and the unfinished requests of one router. Knows no socket and no clock."""

    def __init__(self, config: DispatcherConfig, policy: Policy) -> None:
        self._config = config
        self._policy = policy
        self.views: dict[ReplicaId, ReplicaView] = {}
        self._requests: dict[RequestId, Tracked] = {}
        #: held requests in the order they came
        self._held: dict[RequestId, Tracked] = {}

    @property
    def num_held(self) -> int:
        return len(self._held)

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

    def is_certainly_full(self) -> bool:
        """True if a fresh request would be refused at once: ask before doing work for it, such as tokenization."""
        return len(self._held) >= self._config.max_held_requests

    def retry_after_s(self) -> float:
        """Seconds until the queues in front of a new request have drained, from their measured rates; 1 to 60."""
        placeable = [view.load for view in self.views.values() if view.is_open]
        rate = sum(load.drain_rate for load in placeable)
        if rate <= 0:
            return 1.0
        return float(min(60, max(1, math.ceil(sum(load.num_queued for load in placeable) / rate))))

    # ---- requests ----

    def submit(self, request_id: RequestId, num_sequences: int, num_tokens: int, now: float) -> list[Instruction]:
        """A fresh request. Exactly one `Refuse`, `Fail`, `finish` or `abort` ends it."""
        assert request_id not in self._requests, f"{request_id} is already there"
        request = self._requests[request_id] = Tracked(request_id, num_sequences, num_tokens)
        return self._place_or_hold(request, now)

    def begun(self, request_id: RequestId) -> None:
        """The first token of the request is here."""
        self._requests[request_id].has_begun = True

    def finish(self, request_id: RequestId) -> None:
        """Its last sequence ended."""
        self._forget(request_id)

    def abort(self, request_id: RequestId) -> list[Instruction]:
        """The client is gone. Unknown requests are ignored: they ended in the meantime."""
        request = self._forget(request_id)
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
        self._answered(request)
        if refusal is None:
            request.state = State.ACCEPTED
            request.held_until = None
            return []
        request.replica_id = None
        if refusal is RefusalReason.NEVER_FITS:
            self._forget(request_id)
            return [Refuse(request_id, refusal, 0.0, message)]
        if refusal is RefusalReason.DRAINING:
            self.views[replica_id].is_draining = True
        request.tried.add(replica_id)
        return self._place_or_hold(request, now)

    def on_load(self, replica_id: ReplicaId, load: ReplicaLoad, now: float) -> list[Instruction]:
        """Fresh figures of a replica; held requests get a new chance there."""
        view = self.views.get(replica_id)
        if view is None:
            return []
        view.load, view.load_at = load, now
        if not self._held:
            return []
        for request in self._held.values():
            request.tried.discard(replica_id)
        return self._retry_held(now)

    def on_moved(self, request_id: RequestId, now: float) -> list[Instruction]:
        """The replica drains and gave the request back: continue elsewhere. Not counted as a loss."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        request.replica_id = None
        request.tried.clear()
        return self._place_or_hold(request, now, self._config.resume_wait_s)

    # ---- who is there ----

    def add_replica(self, view: ReplicaView) -> None:
        """A replica is in the view, not connected yet."""
        self.views[view.replica_id] = view

    def on_connected(self, replica_id: ReplicaId, now: float) -> list[Instruction]:
        self.views[replica_id].is_connected = True
        return self._retry_held(now)

    def on_draining(self, replica_id: ReplicaId) -> None:
        """Place nothing there any more; what runs there goes on."""
        if replica_id in self.views:
            self.views[replica_id].is_draining = True

    def on_lost(self, replica_id: ReplicaId, now: float) -> list[Instruction]:
        """Its stream broke: whatever it worked on continues elsewhere, or waits for another replica."""
        if self.views.pop(replica_id, None) is None:
            return []
        instructions: list[Instruction] = []
        for request in [r for r in self._requests.values() if r.replica_id == replica_id]:
            request.replica_id = None
            request.num_losses += 1
            request.tried.clear()
            if request.num_losses >= self._config.max_losses:
                instructions += self._give_up(request, f"{request.num_losses} replicas died under this request")
            else:
                instructions += self._place_or_hold(request, now, self._config.resume_wait_s)
        return instructions

    # ---- time ----

    def next_deadline(self) -> float | None:
        """When `on_time` has something to do, in the caller's clock."""
        return min((r.held_until for r in self._held.values() if r.held_until is not None), default=None)

    def on_time(self, now: float) -> list[Instruction]:
        """Give up on requests that were held too long."""
        instructions: list[Instruction] = []
        for request in list(self._held.values()):
            if request.held_until is not None and request.held_until <= now:
                instructions += self._give_up(request, "no place became free in time")
        return instructions

    def validate(self) -> None:
        """Raises AssertionError if the books do not agree."""
        for request in self._requests.values():
            assert (request.state is State.HELD) == (request.request_id in self._held), (
                f"{request.request_id}: held or not?"
            )
            assert (request.replica_id is None) == (request.state is State.HELD), (
                f"{request.request_id}: placed or not?"
            )
        for view in self.views.values():
            sent = [r for r in self._requests.values() if r.state is State.SENT and r.replica_id == view.replica_id]
            assert view.unanswered_sequences == sum(r.num_sequences for r in sent), f"{view.replica_id}: unanswered"
            assert view.unanswered_tokens == sum(r.num_tokens for r in sent), f"{view.replica_id}: unanswered tokens"

    # ---- inside ----

    def _place_or_hold(self, request: Tracked, now: float, wait_s: float | None = None) -> list[Instruction]:
        view = self._choose(request, now)
        if view is not None:
            return [self._send(request, view)]
        if request.request_id not in self._held:
            if len(self._held) >= self._config.max_held_requests and not request.has_begun:
                return self._give_up(request, "the router holds as many requests as it may")
            request.state = State.HELD
            self._held[request.request_id] = request
        if request.held_until is None:
            request.held_until = now + (self._config.admission_wait_s if wait_s is None else wait_s)
        return []

    def _choose(self, request: Tracked, now: float) -> ReplicaView | None:
        candidates = [
            view
            for view in self.views.values()
            if view.is_placeable(now)
            and view.replica_id not in request.tried
            and (request.has_begun or view.has_room_for(request.num_sequences))
        ]
        return self._policy(candidates)[0] if candidates else None

    def _send(self, request: Tracked, view: ReplicaView) -> Dispatch:
        self._held.pop(request.request_id, None)
        request.state = State.SENT
        request.replica_id = view.replica_id
        request.epoch += 1
        view.num_placed += 1
        view.unanswered_sequences += request.num_sequences
        view.unanswered_tokens += request.num_tokens
        return Dispatch(request.request_id, view.replica_id, request.epoch)

    def _answered(self, request: Tracked) -> None:
        view = self.views.get(request.replica_id) if request.replica_id is not None else None
        if view is not None and request.state is State.SENT:
            view.unanswered_sequences -= request.num_sequences
            view.unanswered_tokens -= request.num_tokens

    def _retry_held(self, now: float) -> list[Instruction]:
        if not any(view.is_placeable(now) for view in self.views.values()):
            return []
        instructions: list[Instruction] = []
        for request in list(self._held.values()):
            instructions += self._place_or_hold(request, now)
        return instructions

    def _give_up(self, request: Tracked, why: str) -> list[Instruction]:
        self._forget(request.request_id)
        if request.has_begun:
            return [Fail(request.request_id, f"the replica that generated this answer is gone, and {why}")]
        if not any(view.is_open for view in self.views.values()):
            return [Refuse(request.request_id, RefusalReason.NO_REPLICA, 2.0, "no replica is up")]
        return [
            Refuse(
                request.request_id,
                RefusalReason.QUEUE_FULL,
                self.retry_after_s(),
                f"the queue of every replica is full, and {why}",
            )
        ]

    def _forget(self, request_id: RequestId) -> Tracked | None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._answered(request)
            self._held.pop(request_id, None)
        return request
