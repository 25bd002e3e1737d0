"""PURE. What the dispatcher tells its shell to do."""

from __future__ import annotations

import msgspec

from replica.messages import KVSource, Permit, RefusalReason, ReplicaId, RequestId


class Dispatch(msgspec.Struct, frozen=True):
    """Submit the request to this replica, as attempt `epoch`."""

    request_id: RequestId
    replica_id: ReplicaId
    epoch: int
    #: it was accepted before, so the replica's cap does not apply
    is_returning: bool = False
    #: the places that the replica reserved for it
    permit: Permit | None = None
    #: another replica computes its prompt
    kv_source: KVSource | None = None


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
    #: replica after replica was lost under it: another try would cost more of them
    is_lost_too_often: bool = False


class SendAbort(msgspec.Struct, frozen=True):
    """Tell the replica that nobody wants this request any more."""

    request_id: RequestId
    replica_id: ReplicaId
    #: these sequences; None: all
    indices: list[int] | None = None


class DispatchPrefill(msgspec.Struct, frozen=True):
    """Submit the prompts of these sequences to a prefill replica as the request `leg_id`, each for one token."""

    request_id: RequestId
    replica_id: ReplicaId
    leg_id: RequestId
    hand_over: str
    indices: list[int]
    #: leading tokens of its first prompt that the decode replica has itself
    num_cached_tokens: int = 0


class SendContinue(msgspec.Struct, frozen=True):
    """Tell the decode replica the first tokens, or that it has to compute them."""

    request_id: RequestId
    replica_id: ReplicaId
    hand_over: str
    tokens: dict[int, list[int]]


Instruction = Dispatch | Refuse | Fail | SendAbort | DispatchPrefill | SendContinue
