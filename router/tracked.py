"""PURE. What the dispatcher knows of one unfinished request."""

from __future__ import annotations

import enum

from replica.messages import OrderKey, ReplicaId, RequestId


class State(enum.Enum):
    """Where a request is, seen from the router."""

    HELD = "held"
    SENT = "sent"
    ACCEPTED = "accepted"


class Tracked:
    """One unfinished request. Times are in the dispatcher's clock."""

    __slots__ = (
        "awaits_place",
        "deadline_at",
        "epoch",
        "has_begun",
        "held_key",
        "held_until",
        "hold_ends",
        "hold_left_s",
        "is_moving",
        "is_returning",
        "num_losses",
        "num_sequences",
        "num_tokens",
        "order_key",
        "replica_id",
        "request_id",
        "resume_by",
        "state",
        "tenant",
        "tenant_weight",
        "tried",
        "was_shed",
    )

    def __init__(
        self,
        request_id: RequestId,
        num_sequences: int,
        num_tokens: int,
        order_key: OrderKey,
        deadline_at: float | None,
        hold_left_s: float,
        tenant: str = "",
        tenant_weight: float = 1.0,
    ) -> None:
        self.request_id = request_id
        self.num_sequences = num_sequences
        self.num_tokens = num_tokens
        self.order_key = order_key
        self.tenant = tenant
        self.tenant_weight = tenant_weight
        #: when it must have begun
        self.deadline_at = deadline_at
        #: how long it may still be held, before any replica has begun it
        self.hold_left_s = hold_left_s
        self.state = State.HELD
        self.replica_id: ReplicaId | None = None
        self.epoch = 0
        #: a token reached the client: no refusal any more
        self.has_begun = False
        #: it began at a replica: no cap applies any more, and no deadline
        self.is_returning = False
        #: taken away from a replica that drains, after its first token, and has had none since
        self.is_moving = False
        #: a replica gave its place to a more urgent one
        self.was_shed = False
        self.held_until: float | None = None
        #: of its entry in `HoldTimes`; None: it has none
        self.hold_ends: float | None = None
        #: it is held because it lost its replica
        self.awaits_place = False
        #: it lost its replica, and has to have its next token by then
        self.resume_by: float | None = None
        #: its place among the held of its tenant; set while it is one of them
        self.held_key: tuple[float, int] = (0.0, 0)
        #: replicas that said no, with the number of their news at that moment: not again before there is newer news
        self.tried: dict[ReplicaId, int] = {}
        self.num_losses = 0

    @property
    def priority(self) -> int:
        return self.order_key[1]

    def is_overdue(self, now: float) -> bool:
        """Its deadline has passed, and as far as is known it has not begun."""
        return self.deadline_at is not None and self.deadline_at <= now and not self.is_returning

    def stop_holding(self, now: float) -> None:
        """A replica took it. If it is given back without having begun, it is held only for what is left of its time."""
        if self.held_until is not None and not self.is_returning:
            # never more than before: after a loss it was held for a replacement, which is another allowance
            self.hold_left_s = min(self.hold_left_s, max(0.0, self.held_until - now))
        self.held_until = None
