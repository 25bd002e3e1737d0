"""PURE. Policies: which replica gets a request. Plain data in, one of them out; no state of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from router.replica_view import ReplicaView

#: picks one of the candidates, of which there is at least one
Policy = Callable[[Sequence[ReplicaView]], ReplicaView]


def least_tokens(candidates: Sequence[ReplicaView]) -> ReplicaView:
    """Least outstanding tokens. Counting requests would call a replica with one 8,000-token prompt idle (vLLM #40795).

    Ties go to the replica this router used less, then by id, so that the choice is repeatable.
    """
    return min(candidates, key=lambda view: (view.outstanding_tokens, view.num_placed, view.replica_id))


def round_robin(candidates: Sequence[ReplicaView]) -> ReplicaView:
    """The replica this router used least."""
    return min(candidates, key=lambda view: (view.num_placed, view.replica_id))


POLICIES: dict[str, Policy] = {"least-tokens": least_tokens, "round-robin": round_robin}
