"""PURE. Policies: which replica gets a request. Plain data in, an order out; no state of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from router.replica_view import ReplicaView

#: candidates, best first
Policy = Callable[[Iterable[ReplicaView]], list[ReplicaView]]


def least_tokens(candidates: Iterable[ReplicaView]) -> list[ReplicaView]:
    """Least outstanding tokens first. Counting requests instead would call a replica with one 8,000-token prompt idle
    (vLLM #40795).

    Ties go to the replica this router used less, then by id, so that the choice is repeatable.
    """
    return sorted(candidates, key=lambda view: (view.outstanding_tokens, view.num_placed, view.replica_id))


def round_robin(candidates: Iterable[ReplicaView]) -> list[ReplicaView]:
    """The replica this router used least first."""
    return sorted(candidates, key=lambda view: (view.num_placed, view.replica_id))


POLICIES: dict[str, Policy] = {"least-tokens": least_tokens, "round-robin": round_robin}
