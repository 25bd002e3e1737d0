"""PURE. Whose tokens stand in the columns of a step: from a replica's numbers back to requests.

The first output of a sequence at a replica gives its number (`SequenceOutput.seq_id`); from then on the replica sends
plain tokens under it (`StepOutput.seq_ids`).
"""

from __future__ import annotations

from collections.abc import Container

from replica.messages import ReplicaId, RequestId, SequenceOutput, StepOutput


class SequenceNames:
    """Filled by what replicas send. `forget` a request when it ends here: of an aborted one no end will be told."""

    def __init__(self) -> None:
        #: replica -> number -> request, index in it, tokens of its prompt from the prefix cache
        self._by_replica: dict[ReplicaId, dict[int, tuple[RequestId, int, int]]] = {}
        #: request -> where it has a name
        self._of_request: dict[RequestId, list[tuple[ReplicaId, int]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_replica.values()))

    def requests(self) -> list[RequestId]:
        """Those that have a name somewhere."""
        return list(self._of_request)

    def expand(self, replica_id: ReplicaId, step: StepOutput, unfinished: Container[RequestId]) -> list[SequenceOutput]:
        """All outputs of a step, as if each token had come in a record of its own. Names are kept for the requests in
        `unfinished`.
        """
        for output in step.outputs:
            if output.seq_id is not None and output.finish_reason is None and output.request_id in unfinished:
                entry = (output.request_id, output.index, output.num_cached_tokens)
                self._by_replica.setdefault(replica_id, {})[output.seq_id] = entry
                self._of_request.setdefault(output.request_id, []).append((replica_id, output.seq_id))
        if not step.seq_ids:
            return step.outputs
        names = self._by_replica.get(replica_id, {})
        outputs = step.outputs.copy()
        for seq_id, token_id in zip(step.seq_ids, step.token_ids, strict=True):
            if (named := names.get(seq_id)) is not None:
                request_id, index, num_cached = named
                outputs.append(SequenceOutput(request_id, index, [token_id], None, None, num_cached))
        return outputs

    def forget(self, request_id: RequestId) -> None:
        """The request is over; what still comes for it is dropped. Idempotent."""
        for replica_id, seq_id in self._of_request.pop(request_id, ()):
            self._by_replica.get(replica_id, {}).pop(seq_id, None)

    def forget_replica(self, replica_id: ReplicaId) -> None:
        """Its stream broke. Idempotent."""
        self._by_replica.pop(replica_id, None)
