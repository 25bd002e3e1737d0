"""PURE. What a request is told that the router gives up, and when it may come again."""

from __future__ import annotations

import math
from collections.abc import Collection

from replica.messages import RefusalReason
from router.instructions import Fail, Refuse
from router.replica_view import ReplicaView
from router.tracked import Tracked


def retry_after_s(views: Collection[ReplicaView], now: float) -> float:
    """Seconds until the queues in front of a new request have drained, as their replicas foresee it; 1 to 60."""
    loads = [view.load for view in views if view.is_placeable(now) and view.load.drain_rate > 0]
    rate = sum(load.drain_rate for load in loads)
    if rate <= 0:
        return 1.0
    return float(min(60, max(1, math.ceil(sum(load.num_queued for load in loads) / rate))))


def last_word(
    request: Tracked, views: Collection[ReplicaView], max_losses: int, now: float, is_stopping: bool = False
) -> Refuse | Fail:
    """`Fail` once it has begun or was lost too often, else `Refuse` with the reason."""
    request_id = request.request_id
    if request.num_losses >= max_losses:
        why = f"{request.num_losses} replicas died or failed under this request; sent again as it is, it may end others"
        return Fail(request_id, why, is_lost_too_often=True)
    if request.has_begun and is_stopping:
        return Fail(request_id, "the server stops, and this answer did not end in time")
    if request.has_begun:
        return Fail(request_id, "the replica that generated this answer is gone, and no other was there in time")
    if request.is_overdue(now):
        why = "the deadline passed before a replica had begun the request; give it more time, or send less at once"
        return Refuse(request_id, RefusalReason.DEADLINE, 0.0, why)
    if is_stopping:
        return Refuse(request_id, RefusalReason.NO_REPLICA, 2.0, "the server stops")
    up = [view for view in views if view.is_placeable(now)]
    if request.was_shed:
        why = "it made way for requests that come before it, and no other replica takes it"
    elif not up:
        why = "no replica is ready: all of them start, drain or are gone"
        return Refuse(request_id, RefusalReason.NO_REPLICA, 2.0, why)
    elif any(view.refusals.window is not None and view.has_room_for(request.num_sequences) for view in up):
        # by what the others were told, it was not sent
        why = "too many tokens of requests that come before it are queued"
    else:
        why = "the queue of every replica is full"
        return Refuse(request_id, RefusalReason.QUEUE_FULL, retry_after_s(views, now), why)
    return Refuse(request_id, RefusalReason.SHED, retry_after_s(views, now), why)
