"""PURE. Part of the contract: what a replica tells of where a sequence's time went, what it waits for and why.

The five stages of a sequence at one replica lie between shared instants, so they sum to its whole time there:

    submitted ──queued──> its turn came and there was no room ──blocks──> first scheduled ──prefill──> first token
    ──decode──> its end was decided (last token, or an abort was asked for) ──finish──> its blocks are free

Who found room at once has no time in `blocks`; whose end comes early has no time in the stages behind it.
"""

from __future__ import annotations

import enum

import msgspec

STAGES = ("queued", "blocks", "prefill", "decode", "finish")


class WireRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of plain records: positional on the wire, so new fields go at the end with a default."""


class WaitCause(enum.StrEnum):
    """What a sequence lacked when it was its turn to be scheduled."""

    BLOCKS = "blocks"
    #: of the prompts that may be under way at once
    LANE = "lane"
    #: tokens of a step
    BUDGET = "budget"
    #: all `max_num_seqs` were taken
    SEATS = "seats"
    #: blocks that the KVConnector of the node has were on their way
    LOAD = "load"


class PreemptionCause(enum.StrEnum):
    """Why a running sequence was put back."""

    BLOCKS = "blocks"
    #: a more urgent one took its place
    DISPLACED = "displaced"


class Chunk(WireRecord, frozen=True):
    """A piece of a prompt."""

    step: int
    num_tokens: int


class Preempted(WireRecord, frozen=True):
    """One preemption. `at` is in seconds since the epoch."""

    at: float
    cause: PreemptionCause
    num_lost_tokens: int
    #: the request that needed the room; its own if the sequence could not grow and nobody else could go
    by: str = ""


class Stages(WireRecord, frozen=True):
    """Where the time of a sequence went on its last replica, in seconds. None: it did not get so far."""

    #: submitted to first scheduled: the stages `queued` and `blocks`
    queued_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    num_preemptions: int = 0
    #: of `queued_s`, the time since it was its turn and there was no room: the stage `blocks`
    no_room_s: float = 0.0
    #: what was missing last, whenever it waited
    waited_for: WaitCause | None = None
    #: of `prefill_s` and `decode_s`, the time in which it was put back
    put_back_s: float = 0.0
    #: the first ones of `num_chunks`
    chunks: list[Chunk] = []
    num_chunks: int = 0
    #: the first ones of `num_preemptions`
    preemptions: list[Preempted] = []
    #: how many were admitted past it while it did not fit
    num_passes: int = 0
    #: its end was decided to its blocks were free; 0 unless it was ended in the middle of a step
    finish_s: float = 0.0
    #: seconds by what was missing, before it was first scheduled and while it was put back
    waits: dict[WaitCause, float] = {}
    #: of the stage `queued`, the time in which its grammar was compiled
    grammar_s: float = 0.0
    #: where another replica was to compute its prompt, of the stage `prefill`: with a seat until `Continue`, from there
    #: to its next step, and the part of the transfer that lies in the first
    away_s: float = 0.0
    transfer_wait_s: float = 0.0
    transfer_hidden_s: float = 0.0

    def by_stage(self) -> dict[str, float]:
        """Seconds by stage, as far as it got."""
        if self.queued_s is None:
            return {}
        found = {"queued": self.queued_s - self.no_room_s, "blocks": self.no_room_s}
        if self.prefill_s is not None:
            found["prefill"] = self.prefill_s
        if self.decode_s is not None:
            found["decode"] = self.decode_s
        if self.finish_s:
            found["finish"] = self.finish_s
        return found


class SequenceState(enum.StrEnum):
    """What a sequence is doing at its replica."""

    #: its grammar is being compiled
    GRAMMAR = "grammar"
    #: KV that was computed before is brought back
    LOADING = "loading"
    QUEUED = "queued"
    #: put back, resumed or moved in
    RETURNING = "returning"
    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


class SequenceAccount(WireRecord, frozen=True):
    """One sequence as its replica knows it, on the replica's clock. Of an unfinished one `stages` has the time so
    far.
    """

    request_id: str
    index: int
    router_id: str
    state: SequenceState
    #: when this was told
    at: float
    submitted_at: float
    stages: Stages
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_blocks: int
    #: blocks that its known tokens need
    num_blocks_needed: int
    #: while it waits: since when it lacks `stages.waited_for`; None: it was not its turn yet
    lacks_since: float | None = None
    #: while it waits: how many are looked at before it
    num_ahead: int | None = None
    priority: int = 0
    finish_reason: str | None = None
    ended_at: float | None = None
    #: while it waits: since when, that is since it was submitted here or, preempted, put back
    waiting_since: float | None = None
    #: while it waits: what the one lacks whose turn it is; of who stands behind it this is the true cause
    turn_lacks: WaitCause | None = None
