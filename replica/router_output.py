"""PURE. What a step has for each router: columns for tokens with which there is nothing more to say, records for the
rest.

With 1,024 running sequences and two routers a record for every token cost 0.5 us to build, 0.08 to encode, 0.29 to
decode and 18 bytes; in columns 0.1, 0.014, 0.03 and 6.
"""

from __future__ import annotations

import msgspec

from replica.accounts import stages
from replica.messages import KVEvent, ReplicaLoad, RouterId, SequenceOutput, StepOutput
from replica.progress import Progress
from replica.running_set import Decodes, RunningSet


class RouterOutput(msgspec.Struct):
    """For one router. `token_ids[i]` is the new token of the sequence that `seq_ids[i]` names."""

    outputs: list[SequenceOutput] = []
    seq_ids: list[int] = []
    token_ids: list[int] = []

    def to_message(self, incarnation: str, load: ReplicaLoad, kv_events: list[KVEvent] | None = None) -> StepOutput:
        """With the load of the moment it is sent."""
        return StepOutput(incarnation, load, self.outputs, kv_events or [], self.seq_ids, self.token_ids)


RouterOutputs = dict[RouterId, RouterOutput]


def add_record(outputs: RouterOutputs, item: Progress) -> None:
    """All that there is to tell about one sequence."""
    sequence = item.sequence
    # with the first token too: of a sequence that a stop string ends, the router hears no end
    tells_stages = item.finish_reason is not None or sequence.num_output_tokens == 1
    record = SequenceOutput(
        sequence.request_id,
        sequence.index,
        item.new_token_ids,
        item.finish_reason,
        sequence.stop_reason,
        sequence.num_cached_tokens,
        item.logprobs,
        sequence.take_prompt_logprobs() if item.new_token_ids else [],
        stages(sequence) if tells_stages else None,
        item.message,
        sequence.seq_id if item.is_first else None,
    )
    outputs.setdefault(sequence.router_id, RouterOutput()).outputs.append(record)


def add_columns(outputs: RouterOutputs, plain: Decodes, token_ids: list[int], running: RunningSet) -> None:
    """One token each, and they go on."""
    for router_id, seq_ids, tokens in running.by_router(plain.rows, plain.seq_ids, token_ids):
        output = outputs.setdefault(router_id, RouterOutput())
        output.seq_ids, output.token_ids = seq_ids, tokens
