"""ASYNC. The seam between the HTTP edge and what places requests on replicas.

The HTTP edge (`router/app.py`) knows only these records and protocols: no replicas, no gRPC, no Ray. Tests put a fake
here, the production router its dispatcher.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

import msgspec

from replica.messages import FinishReason, GenerateRequest, Stages, TokenLogprobs
from router.journal import Journal


class TokenEvent(msgspec.Struct, frozen=True, gc=False):
    """New tokens of one sequence in one engine step. The last event of a sequence carries `finish_reason`.

    A stop token (eos or one of `stop_token_ids`) that ended the sequence is the last of `token_ids`.
    """

    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    #: the stop token id that ended the sequence, None for eos
    stop_reason: int | None = None
    #: of the prompt, how many tokens came from the prefix cache
    num_cached_tokens: int = 0
    #: one entry a token, where asked for
    logprobs: list[TokenLogprobs] = []
    #: with the first event of a sequence that asked for them: prompt positions 1, 2, ...
    prompt_logprobs: list[TokenLogprobs] = []
    #: with the first token as far as known, and with the finish reason: where the time went on the last replica
    stages: Stages | None = None


class Health(msgspec.Struct, frozen=True):
    """Whether a request sent now could be served. `detail` is plain JSON data."""

    ok: bool
    detail: dict[str, Any] = {}


class GenerationStream(Protocol):
    """One accepted request. Used from one event loop only."""

    @property
    def served_by(self) -> str:
        """NAME@HOST:PORT of the replica that has it, or had it last; empty: none."""
        ...

    def __aiter__(self) -> AsyncIterator[list[TokenEvent]]:
        """One list per engine step; ends after the last sequence has finished.

        Raises a `ShoalError` (for example `ReplicaLostError`) when the request cannot be completed.
        """
        ...

    def finish(self, index: int) -> None:
        """A stop string was found: end this sequence at the replica. Events of it that still arrive are ignored by
        the caller.
        """
        ...

    def abort(self) -> None:
        """The client went away or the request failed here. Idempotent, never raises, does not wait."""
        ...


class Backend(Protocol):
    """Takes requests to replicas."""

    #: the HTTP edge writes down what it sees of a request: for who asks what became of it, or why it took long
    journal: Journal

    async def generate(self, request: GenerateRequest) -> GenerationStream:
        """Return once a replica has accepted `request` and its first event is there or about to be.

        Raises `RefusedError`, `NeverFitsError` or another `ShoalError` before that. Cancelling the await aborts the
        request.
        """
        ...

    def may_admit(self, num_sequences: int, priority: int = 0, tenant: str = "", tenant_weight: float = 1.0) -> None:
        """Cheap look before tokenization. Raises `RefusedError` when the request would certainly be refused."""
        ...

    def health(self) -> Health:
        """The truth at this moment, from what the router knows; asks nobody."""
        ...

    def load(self) -> int:
        """Requests in this router: held or accepted, and not ended."""
        ...

    async def reset_prefix_cache(self, timeout_s: float) -> int:
        """Have every replica forget its cached prefixes; how many that were.

        Raises `NoReplicaError`, or `DeadlineExceededError` that names who did not answer within `timeout_s`.
        """
        ...

    async def explain(self, name: str, timeout_s: float) -> dict[str, object] | None:
        """Plain JSON data on what happened to a request; None: nobody knows it. `name`: its id, or the `X-Request-Id`
        of its answer; of several with the same one the latest is told. Replicas that do not answer in time are named.
        """
        ...

    async def living(self, limit: int, timeout_s: float) -> dict[str, object]:
        """Plain JSON data on the `limit` unfinished requests that are oldest, and how many there are."""
        ...

    def metrics_text(self) -> bytes:
        """Replica and router metrics in Prometheus text format."""
        ...

    def status(self) -> dict[str, object]:
        """Plain JSON data for `shoal status`."""
        ...
