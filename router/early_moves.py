"""PURE. Which requests leave a replica that drains, before it gives them back.

A replica that drains goes on with what it has for `drain_s`, and hands over what is left then. Nobody need wait for
that while another replica has a place: the router takes its requests away, a few at a time.
- What has no token yet goes at once, to a replica whose queue has room for it: nothing that its client has seen is
  computed again.
- A stream goes when it has had `move_after_s` to end: it is computed again elsewhere, prompt and output, and pauses for
  that. Few streams are on their way to one replica at a time, so each pauses for its own recomputation and not for that
  of all, and the others go on where they are meanwhile.
Where no other replica has a place nothing is taken away, so a drain of all replicas (the server stops) is as it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from replica.messages import ReplicaId
from router.live_settings import DispatcherConfig
from router.placement import Policy
from router.replica_view import ReplicaView
from router.tracked import State, Tracked

#: Streams of ours that one replica computes again at the same time. 21 of 32 streams, 3 replicas to 1, in virtual time:
#: with 1, 2, 4, all at once the longest pause is 0.14, 0.27, 0.48, 1.8 s (1,000-token prompts: 0.4, 0.8, 1.5, 7.9), and
#: the drain is over after 3.8, 3.8, 3.9, 3.9 s (3.7, 3.9, 4.7, 10.0). With 1 a replica idles while messages travel.
MAX_MOVING = 2
#: all requests are looked at for it, so not with every message
_LOOK_S = 0.05


class EarlyMoves:
    """Of one router. Names who goes where; the dispatcher sends them."""

    def __init__(self) -> None:
        #: replicas that drain, and when that was seen first
        self._since: dict[ReplicaId, float] = {}
        self._next_look = float("-inf")

    def due(
        self,
        requests: Collection[Tracked],
        views: Collection[ReplicaView],
        config: DispatcherConfig,
        policy: Policy,
        now: float,
    ) -> Iterator[tuple[Tracked, ReplicaView]]:
        """A request and where it goes; it has to be sent there before the next one is asked for."""
        draining = {view.replica_id for view in views if view.is_draining}
        if not draining:
            self._since.clear()
            return
        self._since = {replica_id: self._since.get(replica_id, now) for replica_id in draining}
        if now < self._next_look or not any(view.is_placeable(now) for view in views):
            return
        self._next_look = now + _LOOK_S
        moving = Counter(request.replica_id for request in requests if request.is_moving)
        for request in list(requests):
            if request.replica_id not in draining or request.state is not State.ACCEPTED:
                continue
            if request.has_begun and now < self._since[request.replica_id] + config.move_after_s:
                continue
            places = [
                view
                for view in views
                if view.is_placeable(now)
                and (_may_join(view, moving) if request.has_begun else _has_room(view, request.num_sequences))
            ]
            if places:
                target = policy(places)
                moving[target.replica_id] += request.has_begun
                yield request, target


def _may_join(view: ReplicaView, moving: Counter[ReplicaId | None]) -> bool:
    """What others sent there shows in its load."""
    return moving[view.replica_id] < MAX_MOVING and view.load.num_returning < MAX_MOVING


def _has_room(view: ReplicaView, num_sequences: int) -> bool:
    """What is moved comes before what is queued there, and is no more than a queue holds."""
    load = view.load
    num_waiting = load.num_queued + load.num_permits + load.num_returning + view.unanswered_sequences
    return num_waiting + num_sequences <= load.queue_cap
