"""PURE. A prefill replica's part of a request, on its way there and back: what is submitted to it, and whom its outputs
concern (`docs/disaggregation.md`).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from replica.messages import GenerateRequest, KVSink, ReplicaId, RequestId, SequenceOutput
from router.instructions import DispatchPrefill
from router.pairing import PairingDispatcher


def leg_of(request: GenerateRequest, order: DispatchPrefill) -> GenerateRequest:
    """The prompts of `order`, each for one token. All else is as in the request, so that the token is the one that D
    would have chosen.
    """
    prompts = [sequence.prompt_token_ids for sequence in request.sequences]
    # what D has of its first prompt says nothing of others
    num_cached_tokens = order.num_cached_tokens if all(prompt == prompts[0] for prompt in prompts) else 0
    return msgspec.structs.replace(
        request,
        request_id=order.leg_id,
        sequences=[
            msgspec.structs.replace(sequence, sampling=msgspec.structs.replace(sequence.sampling, max_tokens=1))
            for sequence in request.sequences
            if sequence.index in order.indices
        ],
        kv_source=None,
        kv_sink=KVSink(order.hand_over, num_cached_tokens),
    )


def first_tokens(
    dispatcher: PairingDispatcher,
    replica_id: ReplicaId,
    outputs: list[SequenceOutput],
    max_tokens: Callable[[RequestId, int], int],
    now: float,
) -> list[SequenceOutput]:
    """What clients get of `outputs`, all of one request that is none of ours, or was one: a leg or the rest of one.
    Decode replicas are told by the orders that it leaves behind. `max_tokens`: of a sequence as its client asked.
    """
    found: list[SequenceOutput] = []
    failed: list[SequenceOutput] = []
    for output in outputs:
        request_id = dispatcher.desk.request_of(output.request_id, replica_id, output.index)
        if request_id is None:
            continue
        first = dispatcher.first_token(replica_id, output, max_tokens(request_id, output.index))
        if first is not None:
            found.append(first)
        elif output.finish_reason is not None:
            failed.append(output)
    if found:
        ended = {first.index for first in found if first.finish_reason is not None}
        tokens = {first.index: first.new_token_ids for first in found}
        dispatcher.prefilled(outputs[0].request_id, tokens, ended, now)
    for output in failed:
        dispatcher.leg_failed(replica_id, output, now)
    return found
