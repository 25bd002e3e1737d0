"""PURE. The latency figures of a request, computed from its named instants: here and nowhere else. The HTTP edge, the
simulator and the load generator of the benchmarks all note instants in a `Timeline` and ask `latencies`.

    arrival          the request reached our HTTP edge (in the load generator: the client sent it)
    first token      the first output token of any of its sequences was there
    each token       every later one, by sequence
    last token       the last one of all
    submitted, first scheduled, first token, last token at the replica: what lies between them comes as `Stages`
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from replica.messages import Stages


class Timeline:
    """The instants of one request, noted as they happen, in seconds of one clock."""

    __slots__ = ("_first_s", "_last_s", "_stages", "arrival_s", "last_token_s", "num_tokens")

    def __init__(self, arrival_s: float) -> None:
        self.arrival_s = arrival_s
        self.last_token_s = arrival_s
        #: output tokens of all sequences
        self.num_tokens = 0
        self._first_s: dict[int, float] = {}
        self._last_s: dict[int, float] = {}
        self._stages: dict[int, Stages] = {}

    def note(self, index: int, num_tokens: int, now_s: float) -> float | None:
        """`num_tokens` (at least 1) tokens of sequence `index` are here, together.

        Returns the gap in front of them, None before a sequence's first token. Tokens that come together have gaps of 0
        between them; they are not returned.
        """
        last_s = self._last_s
        previous_s = last_s.get(index)
        last_s[index] = self.last_token_s = now_s
        self.num_tokens += num_tokens
        if previous_s is None:
            self._first_s[index] = now_s
            return None
        return now_s - previous_s

    def note_stages(self, index: int, stages: Stages) -> None:
        """What the replica told of a sequence; the later word counts."""
        self._stages[index] = stages


class SequenceTimes(msgspec.Struct, frozen=True):
    """Where the time of one sequence went on the replica that ended it, in seconds. None: not known."""

    #: first scheduled - submitted
    queue_s: float | None = None
    #: first token - first scheduled
    prefill_s: float | None = None
    #: last token - first token
    decode_s: float | None = None
    #: last token - first scheduled
    inference_s: float | None = None
    num_preemptions: int | None = None


class Latencies(msgspec.Struct, frozen=True):
    """The figures of one request, in seconds. None: undefined."""

    #: first token - arrival
    ttft_s: float | None = None
    #: (last token - first token) / (output tokens - 1); undefined for one token. With several sequences the tokens of
    #: one are not those of the request: undefined as well
    tpot_s: float | None = None
    #: last token - arrival
    e2e_s: float | None = None
    sequences: list[SequenceTimes] = []


def latencies(timeline: Timeline, num_tokens: int | None = None) -> Latencies:
    """Every figure that the instants noted so far allow. `num_tokens` is for a client that notes chunks and learns the
    number of tokens from the answer's usage.
    """
    firsts = timeline._first_s
    if not firsts:
        return Latencies()
    first_s = next(iter(firsts.values()))
    count = timeline.num_tokens if num_tokens is None else num_tokens
    tpot_s = None
    if count > 1 and len(firsts) == 1:
        tpot_s = (timeline.last_token_s - first_s) / (count - 1)
    return Latencies(
        ttft_s=first_s - timeline.arrival_s,
        tpot_s=tpot_s,
        e2e_s=timeline.last_token_s - timeline.arrival_s,
        sequences=[
            _sequence_times(stages, timeline._last_s[index] - firsts[index])
            for index, stages in timeline._stages.items()
            if index in firsts
        ],
    )


def replay(arrival_s: float, token_times_s: Iterable[float]) -> tuple[Timeline, list[float]]:
    """Timeline and gaps of a request of one sequence whose tokens' instants are known."""
    timeline = Timeline(arrival_s)
    gaps = [timeline.note(0, 1, now_s) for now_s in token_times_s]
    return timeline, [gap for gap in gaps if gap is not None]


def _sequence_times(stages: Stages, seen_decode_s: float) -> SequenceTimes:
    """A sequence that a stop string ended here was never ended there: its decode time is then what we saw of it."""
    has_ended = stages.decode_s is not None
    decode_s = stages.decode_s if stages.decode_s is not None else seen_decode_s
    return SequenceTimes(
        queue_s=stages.queued_s,
        prefill_s=stages.prefill_s,
        decode_s=decode_s,
        inference_s=None if stages.prefill_s is None else stages.prefill_s + decode_s,
        num_preemptions=stages.num_preemptions if has_ended else None,
    )
