"""PURE. Part of the contract: a prompt that one replica computes and another goes on with (`docs/disaggregation.md`).

router                          decode replica D                      prefill replica P
  Submit(kv_source) ─────────────> queued, then blocks and a seat
  <───────────────────── Seated ── computes nothing
  Submit(kv_sink, 1 token) ──────────────────────────────────────────> stores blocks as they are computed
  <────────────────────────────────────────────── the first tokens ──  to the client at once
  Continue(first tokens) ────────> loads what is missing, goes on
"""

from __future__ import annotations

import msgspec

from replica.stages import WireRecord


class KVSource(WireRecord, frozen=True):
    """Of a request that D gets: somebody else computes its prompt. Durations, since clocks differ."""

    #: names the attempt; never used twice
    hand_over: str
    #: who has its seat and hears no `Continue` for so long gives the sequence back (`MOVED`): its router hangs
    continue_within_s: float
    #: blocks that are not there so long after `Continue` are computed
    load_within_s: float
    #: connectors that will have the blocks, asked before others: `peer_id`s
    connectors: list[str] = []


class KVSink(WireRecord, frozen=True):
    """Of a request that P gets: whatever is computed of its prompts is stored (`Reserve.must_stay`) as it is
    computed.
    """

    hand_over: str
    #: leading tokens that D has itself: not to be sent
    num_cached_tokens: int = 0


class Seated(msgspec.Struct, frozen=True, tag="seated", gc=False):
    """D to router: a sequence has a seat, and blocks for its whole prompt. Nothing was computed of it."""

    request_id: str
    hand_over: str
    index: int
    #: of its prompt, what D has itself: not to be sent
    num_cached_tokens: int
    #: False: next to nothing is missing, so it goes on by itself and needs no `Continue`
    is_waiting: bool = True


class Continue(msgspec.Struct, frozen=True, tag="continue", gc=False):
    """Router to D: go on. `tokens`: index of a sequence -> what P said of it, which its client has already. Nothing:
    compute it yourself. Unknown or earlier hand-overs are ignored.
    """

    request_id: str
    hand_over: str
    tokens: dict[int, list[int]]
