"""PURE. One request whose prompt another replica computes, beside what `router/dispatcher.py` knows of it.

    SEATING ──Seated──> PREFILLING ──first tokens of all──> OVER
       │                  │   ▲ P refused, lost or late: another P, once
       │ local is better  │   └──────┐
       └──────────────────┴──> OVER, and D computes what has no token yet (`Continue` without tokens)

Whatever ends the request, or takes it away from D, ends this: `stop`. P's work is a request of its own there (a *leg*),
with an id that never comes again, so that late output of a leg is nobody's.
"""

from __future__ import annotations

import enum

from replica.messages import KVSource, ReplicaId, RequestId
from router.instructions import DispatchPrefill, Instruction, SendAbort, SendContinue
from router.tracked import Tracked

#: P's in a row that may fail one request
MAX_LEGS = 2


class Stage(enum.Enum):
    SEATING = "seating"
    PREFILLING = "prefilling"
    OVER = "over"


class HandOver:
    """Returns instructions; never waits for anything without `deadline`, but for its seat: there the request waits in
    D's queue as any other, and D answers for it.
    """

    def __init__(self, request: Tracked, decode_id: ReplicaId, source: KVSource) -> None:
        self.request = request
        self.request_id = request.request_id
        #: of the attempt that this belongs to
        self.epoch = request.epoch
        self.decode_id = decode_id
        self.source = source
        self.stage = Stage.SEATING
        #: sequences that D has to be told of
        self.open = set(range(request.num_sequences))
        #: no prefill replica has it yet
        self.is_coming = True
        self.prefill_id: ReplicaId | None = None
        self.num_legs = 0
        self.deadline: float | None = None
        #: D's word at its first seat
        self.num_cached_tokens = 0
        self.tried: set[ReplicaId] = set()
        #: P's answer to the submission is here
        self.is_answered = False
        #: with the leg
        self.sent_sequences = self.sent_tokens = 0

    @property
    def leg_id(self) -> RequestId:
        """Of the leg under way."""
        return RequestId(f"{self.source.hand_over}~{self.num_legs}")

    @property
    def may_try_again(self) -> bool:
        return self.num_legs < MAX_LEGS and bool(self.open)

    def prefill_at(self, prefill_id: ReplicaId, until: float) -> DispatchPrefill:
        """A leg begins."""
        assert self.stage is not Stage.OVER
        assert self.may_try_again
        self.stage, self.prefill_id, self.deadline = Stage.PREFILLING, prefill_id, until
        self.num_legs += 1
        self.tried.add(prefill_id)
        self.is_answered = False
        return DispatchPrefill(
            self.request_id, prefill_id, self.leg_id, self.source.hand_over, sorted(self.open), self.num_cached_tokens
        )

    def prefilled(self, tokens: dict[int, list[int]], ended: set[int]) -> list[Instruction]:
        """First tokens are with the client; `ended`: sequences that are over with them. Indices that are not open are
        ignored.
        """
        assert self.stage is Stage.PREFILLING
        tokens = {i: t for i, t in tokens.items() if i in self.open and i not in ended}
        ended &= self.open
        self.open -= tokens.keys() | ended
        if not self.open:
            self.close()
        told: list[Instruction] = []
        if tokens:
            told.append(SendContinue(self.request_id, self.decode_id, self.source.hand_over, tokens))
        if ended:
            told.append(SendAbort(self.request_id, self.decode_id, sorted(ended)))
        return told

    def compute_there(self) -> list[Instruction]:
        """D computes what has no token yet."""
        tokens: dict[int, list[int]] = {index: [] for index in sorted(self.open)}
        self.open.clear()
        self.close()
        return [SendContinue(self.request_id, self.decode_id, self.source.hand_over, tokens)] if tokens else []

    def drop_leg(self, is_there: bool) -> list[Instruction]:
        """P is not waited for any more; `is_there`: it can be told."""
        prefill_id, self.prefill_id, self.deadline = self.prefill_id, None, None
        return [SendAbort(self.leg_id, prefill_id)] if prefill_id is not None and is_there else []

    def close(self) -> None:
        """Nothing is to be done any more."""
        self.stage, self.prefill_id, self.deadline = Stage.OVER, None, None
