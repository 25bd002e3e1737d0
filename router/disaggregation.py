"""PURE. Whether one replica computes all of a request, or another one its prompt: decided per request, from what the
replicas measured.

What is compared is the time to the first token, as foreseen:

    local   tokens that D still has to compute, then those of this prompt that D does not have, beside D's streams
    remote  D's seat, then tokens that P still has to compute and those of this prompt that P does not have,
            and the fixed cost of two messages more

A remote first token does not wait for the transfer, the second one does: what of the transfer is not hidden behind P's
work, beyond the time that a token may take, is added to `remote`. A step that is under way is waited for half of it.
Ties go local: nothing has to be moved. No hysteresis: a decision is made once, and each one is seen by the next in the
queues.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from router.replica_view import ReplicaView

Decision = Literal["auto", "always", "never"]
#: seconds of a step by its parts, as `ReplicaLoad.step_line`
Line = tuple[float, float, float]


class HandOverConfig(msgspec.Struct, frozen=True):
    """How requests with two replicas are decided and bounded."""

    decision: Decision = "auto"
    #: P gets so long to the first tokens; then another P, and then D computes
    prefill_timeout_s: float = 30.0
    #: blocks that are not there so long after the first token are computed by D
    transfer_timeout_s: float = 3.0
    #: messages to and fro that a local request does not need
    fixed_s: float = 0.002
    #: of KV: 0, and its transfer is not counted
    bytes_per_token: float = 0.0
    transfer_bytes_s: float = 1e9
    #: a second token may take so long
    tpot_target_s: float = 0.0


class Side(msgspec.Struct, frozen=True):
    """What is believed of one replica when a request is decided."""

    #: that it computes before this request
    num_queued_tokens: float
    #: of this request
    num_uncached_tokens: float
    #: streams beside which it computes
    num_decodes: int
    line: Line
    #: prompt tokens of a step
    num_step_tokens: int
    is_busy: bool

    @property
    def step_s(self) -> float:
        """Of a step without prompts."""
        base_s, decode_s, _ = self.line
        return base_s + self.num_decodes * decode_s

    def seconds(self, num_tokens: float) -> float:
        """To compute so many prompt tokens beside its streams."""
        return num_tokens * self.line[2] + -(-num_tokens // max(1, self.num_step_tokens)) * self.step_s

    @property
    def under_way_s(self) -> float:
        """Until the next step begins, on average."""
        if not self.is_busy:
            return 0.0
        num_tokens = min(self.num_queued_tokens, self.num_step_tokens)
        return (self.step_s + num_tokens * self.line[2]) / 2

    @property
    def first_token_s(self) -> float:
        return self.under_way_s + self.seconds(self.num_queued_tokens + self.num_uncached_tokens)


class Verdict(msgspec.Struct, frozen=True):
    """What was decided, and why. `terms`: for the journal, in seconds and tokens."""

    is_remote: bool
    reason: str
    terms: dict[str, float] = {}


def hit_share(view: ReplicaView) -> float:
    """Of the prompt tokens that it was asked for, the share that it had."""
    counters = view.load.counters
    return counters.get("prefix_cache_hits", 0.0) / max(1.0, counters.get("prefix_cache_queries", 0.0))


def side(view: ReplicaView, num_uncached_tokens: float | None, num_tokens: int, coming: float, line: Line) -> Side:
    """`num_uncached_tokens`: of this request, if it is known; `coming`: tokens that will be sent there; `line`: for who
    has measured nothing yet.
    """
    load, missing = view.load, 1 - hit_share(view)
    num_queued = max(0, load.num_uncomputed_tokens - load.num_awaited_tokens) + view.unanswered_tokens + coming
    return Side(
        num_queued_tokens=num_queued * missing,
        num_uncached_tokens=num_tokens * missing if num_uncached_tokens is None else num_uncached_tokens,
        num_decodes=load.num_running,
        line=load.step_line if load.step_line[2] > 0 else line,
        num_step_tokens=load.num_step_prompt_tokens,
        is_busy=load.num_running > 0 or num_queued > 0,
    )


def decide(config: HandOverConfig, decode: Side, prefill: Side | None, is_seated: bool = False) -> Verdict:
    """`prefill`: the best one; None: there is none that could take it. `is_seated`: D has its seat already."""
    if prefill is None:
        return Verdict(False, "no prefill replica is up and has room")
    if config.decision != "auto":
        return Verdict(config.decision == "always", f"disaggregation.decision is {config.decision}")
    if not (decode.line[2] > 0 and prefill.line[2] > 0):
        return Verdict(False, "nothing is measured yet")
    local_s = decode.first_token_s
    seat_s = 0.0 if is_seated else decode.under_way_s
    transfer_s = decode.num_uncached_tokens * config.bytes_per_token / config.transfer_bytes_s
    compute_s = prefill.seconds(prefill.num_uncached_tokens)
    stall_s = max(0.0, transfer_s - compute_s - config.tpot_target_s)
    remote_s = config.fixed_s + seat_s + prefill.first_token_s + stall_s
    terms = {
        "local_s": local_s,
        "remote_s": remote_s,
        "decode_queued_tokens": decode.num_queued_tokens,
        "decode_uncached_tokens": decode.num_uncached_tokens,
        "decode_streams": float(decode.num_decodes),
        "prefill_queued_tokens": prefill.num_queued_tokens,
        "prefill_uncached_tokens": prefill.num_uncached_tokens,
        "transfer_s": transfer_s,
        "transfer_not_hidden_s": stall_s,
    }
    is_remote = remote_s < local_s
    return Verdict(is_remote, "the first token comes sooner", terms)


def fallback_line(views: Sequence[ReplicaView]) -> Line:
    """Of the slowest one that has measured: what is believed of those that have not."""
    return max((view.load.step_line for view in views), key=lambda line: line[2], default=(0.0, 0.0, 0.0))
