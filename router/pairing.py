"""PURE. A dispatcher whose requests may have two replicas: one that decodes, placed as any other, and one that computes
the prompt (`router/prefill_desk.py`). Prefill replicas are unknown to the dispatcher itself, so nothing of holding,
caps and losses changes.
"""

from __future__ import annotations

import msgspec

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
from router.dispatcher import Dispatcher, DispatcherConfig
from router.instructions import Dispatch, Instruction
from router.placement import Policy
from router.placing import Placing
from router.prefill_desk import PrefillDesk
from router.replica_view import ReplicaView
from router.tracked import Tracked


class PairingDispatcher(Dispatcher):
    """After each call take `take_orders`, behind the instructions that the call returned."""

    def __init__(
        self, config: DispatcherConfig, policy: Policy, hand_over: HandOverConfig | None = None, name: str = "router"
    ) -> None:
        """`name` is this router's alone: ids of hand-overs come from it."""
        placing = _PairedPlacing(config, policy)
        self.desk = placing.desk = PrefillDesk(hand_over or HandOverConfig(), name, placing.journal)
        super().__init__(config, policy, placing)

    def view_of(self, replica_id: ReplicaId) -> ReplicaView | None:
        """Of whichever role."""
        return self.views.get(replica_id) or self.desk.views.get(replica_id)

    @property
    def all_views(self) -> dict[ReplicaId, ReplicaView]:
        """Of all roles."""
        return {**self.desk.views, **self.views}

    def take_orders(self) -> list[Instruction]:
        """What hand-overs want done."""
        orders, self.desk.outbox = self.desk.outbox, []
        return orders

    # ---- prefill replicas ----

    def add_replica(self, view: ReplicaView) -> None:
        if view.role is Role.PREFILL:
            self.desk.views[view.replica_id] = view
        else:
            super().add_replica(view)

    def on_connected(self, replica_id: ReplicaId, now: float) -> list[Instruction]:
        if (view := self.desk.views.get(replica_id)) is None:
            return super().on_connected(replica_id, now)
        view.is_connected = True
        return []

    def on_draining(self, replica_id: ReplicaId) -> None:
        if (view := self.desk.views.get(replica_id)) is None:
            super().on_draining(replica_id)
        else:
            view.is_draining = True

    def on_load(self, replica_id: ReplicaId, load: ReplicaLoad, now: float) -> list[Instruction]:
        if (view := self.desk.views.get(replica_id)) is None:
            return super().on_load(replica_id, load, now)
        view.hear(load, now)
        return []

    def on_reply(
        self, request_id: RequestId, epoch: int, refusal: RefusalReason | None, message: str, now: float
    ) -> list[Instruction]:
        self.desk.on_reply(request_id, refusal, now)  # ids of legs are no request's
        return super().on_reply(request_id, epoch, refusal, message, now)

    def on_lost(self, replica_id: ReplicaId, now: float) -> list[Instruction]:
        if replica_id in self.desk.views:
            self.desk.lost(replica_id, now)
            return []
        return super().on_lost(replica_id, now)

    # ---- hand-overs ----

    def on_seated(self, replica_id: ReplicaId, message: Seated, now: float) -> None:
        """A decode replica has a seat for a sequence whose prompt is computed elsewhere."""
        if (view := self.views.get(replica_id)) is not None:
            self.desk.seated(message, view, now)

    def first_token(self, replica_id: ReplicaId, output: SequenceOutput, max_tokens: int) -> SequenceOutput | None:
        """What the client gets of a leg's output; None: it is nobody's, or the leg has failed (`leg_failed`).
        `max_tokens`: of the sequence as the client asked for it.
        """
        request_id = self.desk.request_of(output.request_id, replica_id, output.index)
        if request_id is None or output.finish_reason in _GIVEN_BACK:
            return None
        goes_on = output.finish_reason is FinishReason.LENGTH and max_tokens > len(output.new_token_ids)
        reason = None if goes_on else output.finish_reason
        return msgspec.structs.replace(output, request_id=request_id, finish_reason=reason, seq_id=None)

    def leg_failed(self, replica_id: ReplicaId, output: SequenceOutput, now: float) -> None:
        """Of an output that is no first token."""
        if output.finish_reason in _GIVEN_BACK and self.desk.request_of(output.request_id, replica_id, output.index):
            self.desk.leg_failed(output.request_id, f"ended with {output.finish_reason}", now)

    def prefilled(self, leg_id: RequestId, tokens: dict[int, list[int]], ended: set[int], now: float) -> None:
        """First tokens are with the client."""
        self.desk.prefilled(leg_id, tokens, ended, now)

    # ---- time ----

    def next_deadline(self) -> float | None:
        deadlines = (super().next_deadline(), self.desk.next_deadline())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def on_time(self, now: float) -> list[Instruction]:
        self.desk.on_time(now)
        return super().on_time(now)

    def validate(self) -> None:
        super().validate()
        self.desk.validate(self._is_at)

    # ---- inside ----

    def _is_at(self, request_id: RequestId, replica_id: ReplicaId, epoch: int) -> bool:
        request = self._requests.get(request_id)
        return request is not None and (request.replica_id, request.epoch) == (replica_id, epoch)


class _PairedPlacing(Placing):
    """Wherever a request goes to a replica, leaves it, or ends."""

    desk: PrefillDesk

    def send(self, request: Tracked, view: ReplicaView, now: float) -> Dispatch:
        self.desk.stop(request.request_id)
        dispatch = super().send(request, view, now)
        source = self.desk.begin(request, view, now) if view.role is Role.DECODE else None
        return dispatch if source is None else msgspec.structs.replace(dispatch, kv_source=source)

    def place_or_hold(self, request: Tracked, now: float, is_replaced: bool = False) -> list[Instruction]:
        self.desk.stop(request.request_id)
        return super().place_or_hold(request, now, is_replaced)

    def forget(self, request_id: RequestId, outcome: str) -> Tracked | None:
        self.desk.stop(request_id)
        return super().forget(request_id, outcome)


_GIVEN_BACK = (FinishReason.MOVED, FinishReason.ERROR, FinishReason.SHED)
