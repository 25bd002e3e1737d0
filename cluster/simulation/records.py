"""PURE. What goes into a simulated run and what comes out."""

from __future__ import annotations

import msgspec

from replica.messages import FinishReason, RefusalReason, Stages
from router.latency import Latencies, latencies, replay


class SimRequest(msgspec.Struct, frozen=True):
    """One client request: greedy unless `temperature` > 0. `abort_at_s` is when the client goes away."""

    request_id: str
    arrival_s: float
    prompt_token_ids: list[int]
    max_tokens: int
    seed: int = 0
    temperature: float = 0.0
    abort_at_s: float | None = None
    router: int = 0
    #: smaller is more urgent
    priority: int = 0
    #: when it must have begun
    deadline_s: float | None = None
    tenant: str = ""
    tenant_weight: float = 1.0


class SimRecord(msgspec.Struct):
    """What the client saw. Exactly one of `finish_reason`, `refusal`, `failure`, `aborted` ends it; `num_ends`
    counts.
    """

    request: SimRequest
    token_ids: list[int] = []
    token_times_s: list[float] = []
    finish_reason: FinishReason | None = None
    refusal: RefusalReason | None = None
    retry_after_s: float = 0.0
    failure: str = ""
    aborted: bool = False
    ended_s: float = 0.0
    num_ends: int = 0
    #: times that it left a replica which drains, or was silent, for another
    num_moves: int = 0
    #: first tokens that came from a prefill replica
    num_remote: int = 0
    #: where its time went on its last replica
    stages: Stages | None = None

    @property
    def latencies(self) -> Latencies:
        """TTFT, TPOT and end to end."""
        return latencies(replay(self.request.arrival_s, self.token_times_s)[0])

    @property
    def ttft_s(self) -> float | None:
        """Arrival to first token, queueing included."""
        return self.latencies.ttft_s

    @property
    def gaps_s(self) -> list[float]:
        """Times between consecutive tokens (ITL)."""
        return replay(self.request.arrival_s, self.token_times_s)[1]
