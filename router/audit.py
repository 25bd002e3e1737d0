"""PURE. Requests, places and memory of a router that nobody will ever give back, by what is lost.

As in `replica/audit.py`: each has one owner, and this finds nothing unless there is a mistake of ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from replica.messages import ReplicaId, RequestId
from router.dispatcher import Dispatcher
from router.sequence_names import SequenceNames
from router.tracked import State

#: what may be lost
WHAT = ("streams", "requests", "held", "unanswered", "placed", "names", "hand_overs")


def audit(
    dispatcher: Dispatcher,
    streams: Collection[RequestId],
    names: SequenceNames,
    linked: Collection[ReplicaId],
    hand_overs: Collection[RequestId] = (),
) -> Counter[str]:
    """Counts of what is lost, none of them 0. `streams`: the requests whose clients wait; `linked`: the replicas that
    there is a link to; `hand_overs`: the requests that wait for another replica's work.
    """
    requests, views = dispatcher._requests, dispatcher.views
    unanswered: Counter[ReplicaId] = Counter()
    for request in requests.values():
        if request.state is State.SENT and request.replica_id is not None:
            unanswered[request.replica_id] += request.num_sequences
    found = Counter(
        {
            # a client waits for a request that nobody works on
            "streams": sum(request_id not in requests for request_id in streams),
            # a request that no client waits for
            "requests": sum(request_id not in streams for request_id in requests),
            # held, and would never be given up; or not held, and among them
            "held": sum(r.hold_ends is None for r in dispatcher._held)
            + abs(len(dispatcher._held) - sum(r.state is State.HELD for r in requests.values())),
            # counted as on the way to a replica, and not
            "unanswered": sum(abs(v.unanswered_sequences - unanswered[v.replica_id]) for v in views.values()),
            # at a replica that is gone
            "placed": sum(r.replica_id is not None and r.replica_id not in views for r in requests.values())
            + sum(replica_id not in linked for replica_id in dispatcher.all_views),
            # of a request that is over
            "hand_overs": sum(request_id not in requests for request_id in hand_overs),
            # of sequences whose request is over
            "names": sum(request_id not in streams for request_id in names.requests()),
        }
    )
    return +found
