"""RAY. The one file that knows Serve's request-router API (alpha; Ray is pinned, and `tests/cluster/test_serve.py`
runs its scenario: start, kill -9, replacement).

Serve creates a `Membership` in each process that has a handle to the replicas and calls `update_replicas` on every
change of the set: 0.11 s after a replica is ready or is told to stop. It is used to observe only; no request is ever
routed through it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

View = Mapping[str, Mapping[str, str]]

#: (loop, callback) pairs of this process; a callback is given a deployment and who runs in it. `Membership` is pickled
#: by value, so it reaches this list by import
LISTENERS: list[tuple[asyncio.AbstractEventLoop, Callable[[str, View], None]]] = []


class Views:
    """Of several deployments, one for each role: tells of all replicas together, since who is missing has left."""

    def __init__(self, on_view: Callable[[View], None]) -> None:
        self._on_view = on_view
        self._views: dict[str, View] = {}

    def __call__(self, deployment: str, view: View) -> None:
        self._views[deployment] = view
        self._on_view({replica_id: data for one in self._views.values() for replica_id, data in one.items()})


class Membership(RequestRouter):
    """Tells `LISTENERS` who is running: replica id -> what `record_replica_metadata` returned."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Nothing to set up."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called on Serve's router thread, not on our loop."""
        super().update_replicas(replicas)
        import router.membership as module

        view = {replica.replica_id.unique_id: dict(replica.replica_metadata) for replica in replicas}
        for loop, callback in list(module.LISTENERS):
            loop.call_soon_threadsafe(callback, str(self._deployment_id), view)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Any replica, with backoff: without it a full set would be retried in a loop that never sleeps."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        return [candidate_replicas]
