"""PURE. Whether a fresh request may come in: asked before anything is done for it, since most that come in a flood are
refused, and again when it is submitted.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from replica.messages import OrderKey, RefusalReason
from router.eligibility import Eligibility
from router.held_requests import HeldRequests
from router.instructions import Refuse
from router.last_word import retry_after_s
from router.live_settings import DispatcherConfig
from router.replica_view import ReplicaView
from router.tracked import Tracked
from router.waiting import Waiting

#: held at least, whatever the forecast says, which is a mean: a step may free several places at once. Each more is
#: 10 requests a second that are tokenized for a refusal
_ALWAYS_HELD = 4
#: held for each place that is foreseen to become free while it waits
_HELD_PER_PLACE = 2


class Door:
    """Looks at views and at who is held; changes neither. `config` may be exchanged."""

    def __init__(
        self, config: DispatcherConfig, held: HeldRequests, eligibility: Eligibility, waiting: Waiting
    ) -> None:
        self.config = config
        self._held = held
        self._eligibility = eligibility
        self._waiting = waiting

    def is_closed(
        self,
        views: Collection[ReplicaView],
        num_sequences: int,
        now: float,
        order_key: OrderKey,
        tenant: str,
        weight: float,
    ) -> bool:
        """True if a fresh request would be refused at once, or held in vain."""
        waiting = self._waiting
        if not waiting.has_room_for(num_sequences):
            if waiting.is_too_many(num_sequences):
                return False  # it is told so when it is submitted
            return not waiting.who_makes_way(num_sequences, order_key, tenant, weight)
        if len(self._held) < self.most_held(views, now):
            return False
        if self._held.weaker_than(order_key, tenant, weight) is not None:
            return False
        return not any(
            view.is_placeable(now)
            and (
                view.has_room_for(num_sequences, tenant)
                or self._eligibility.may_displace(order_key, num_sequences, view)
            )
            for view in views
        )

    def admit(self, request: Tracked, views: Collection[ReplicaView], now: float) -> Refuse | list[Tracked]:
        """A fresh request is here: why it may not come in, or who has to leave for it, nobody as a rule."""
        waiting, num_sequences = self._waiting, request.num_sequences
        caps = [view.load.queue_cap for view in views if view.is_placeable(now)]
        if caps and num_sequences > max(caps):
            why = (
                f"{num_sequences} sequences (prompts x n) in one request; allowed: {max(caps)}, the queue of a replica"
            )
            return Refuse(request.request_id, RefusalReason.TOO_MANY_SEQUENCES, 0.0, why)
        if waiting.has_room_for(num_sequences):
            return []
        if waiting.is_too_many(num_sequences):
            why = (
                f"{num_sequences} sequences (prompts x n) in one request; allowed: {waiting.most}, this router's part "
                "of router.max_num_queued_reqs"
            )
            return Refuse(request.request_id, RefusalReason.TOO_MANY_SEQUENCES, 0.0, why)
        whose = (request.order_key, request.tenant, request.tenant_weight)
        if leaving := waiting.who_makes_way(num_sequences, *whose):
            return leaving
        why = f"{waiting.num_sequences} sequences wait by this router, {num_sequences} wanted; allowed: {waiting.most}"
        return Refuse(request.request_id, RefusalReason.QUEUE_FULL, retry_after_s(views, now), why)

    def most_held(self, views: Collection[ReplicaView], now: float) -> int:
        """More requests than that need not begin to wait here: so many places will not become free in their time, by
        what the replicas foresee. Where they foresee nothing, `max_held_requests`.
        """
        config = self.config
        rate = sum(view.load.drain_rate for view in views if view.is_placeable(now))
        if rate <= 0:
            return config.max_held_requests
        if config.admission_wait_s <= 0:
            return 0
        num_places = math.ceil(rate * config.admission_wait_s)
        return min(config.max_held_requests, max(_ALWAYS_HELD, _HELD_PER_PLACE * num_places))
