"""PURE. How long until whoever is queued now has left the queue: what `Retry-After` is made of.

How many left lately says little: at the beginning of a flood a mean over seconds counts seconds in which nobody wanted
to leave (a promise of 5 to 36 s where 2 to 5 came true), and when short requests follow long ones, or the other way
round, it speaks of those that are gone (from a tenth to eighteen times the truth). So the queue as it stands is played
forward: who runs gives a place back when it has said what it will say, at the measured pace of steps; who waits takes
it, in order, if blocks are free and the prompts before it are computed.

What a sequence will say is known as a bound only. Of what they were allowed to say, those that ended lately said a
share, and that share is expected of the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

import msgspec

from replica.sequence import Sequence
from replica.step_pace import StepPace

#: a walk over 128 running and 64 waiting ones takes 0.17 ms; it is made again after so long, or when the queue has
#: doubled
_FRESH_S = 0.1
#: how much of what was learned one more end leaves: the last fifty count
_MEMORY = 0.98


class Room(msgspec.Struct, frozen=True):
    """What sequences compete for: places in a step, tokens of KV that nobody needs, prompt tokens in a step."""

    num_places: int
    num_free_tokens: int
    num_prompt_tokens: int
    #: of one sequence, tokens whose KV it holds at once: fewer than it has in a model with a window
    max_held_tokens: float = float("inf")


class DrainForecast:
    """Of one replica."""

    def __init__(self) -> None:
        # an exact one to begin with, so that one early end is not taken for all
        self._num_said = self._num_allowed = 1.0
        self._made_at = float("-inf")
        self._num_queued = 0
        self._rate = 0.0

    def learn(self, ended: Sequence) -> None:
        """It said what it wanted, or as much as it was allowed to."""
        self._num_said = _MEMORY * self._num_said + ended.num_tokens - ended.num_prompt_tokens
        self._num_allowed = _MEMORY * self._num_allowed + ended.max_total_tokens - ended.num_prompt_tokens

    def is_fresh(self, num_queued: int, now: float) -> bool:
        """`rate` need not be made again."""
        return self._made_at <= now < self._made_at + _FRESH_S and num_queued <= 2 * self._num_queued

    @property
    def rate(self) -> float:
        """Queued sequences that will leave the queue a second, on the mean; 0: not known, or nobody waits."""
        return self._rate

    def make(
        self, running: Iterable[Sequence], waiting: Iterable[Sequence], num_queued: int, room: Room, pace: StepPace,
        now: float,
    ) -> None:  # fmt: skip
        """`waiting`: in the order in which they will be admitted; `num_queued` of them were never scheduled."""
        self._made_at, self._num_queued = now, num_queued
        drain_s = self._play(running, waiting, room, pace) if num_queued else 0.0
        self._rate = num_queued / drain_s if drain_s > 0 else 0.0

    def _play(self, running: Iterable[Sequence], waiting: Iterable[Sequence], room: Room, pace: StepPace) -> float:
        """Seconds until the last one is admitted; 0 if no step was measured yet."""
        share = self._num_said / self._num_allowed
        base_s, decode_s, prompt_s = pace.line
        most = room.max_held_tokens
        free, per_step = float(room.num_free_tokens), max(1, room.num_prompt_tokens)
        #: steps from now, and when the prompts before are computed; prompt tokens make steps longer, not more
        clock, prompts_end, seconds = 0.0, 0.0, 0.0
        #: step, and the tokens whose KV is given back then
        ends: list[tuple[float, float]] = []
        for sequence in running:
            num_tokens = sequence.num_tokens
            left = max(1.0, share * (sequence.max_total_tokens - num_tokens))
            prompt = max(0, num_tokens - sequence.num_computed_tokens - 1)
            prompts_end += prompt / per_step
            seconds += prompt * prompt_s
            held = num_tokens + left
            if held > most:  # with a window; `min` and `max` here cost the walk 30 %
                free, held = free - max(0.0, most - num_tokens), most
            else:
                free -= left
            ends.append((left + prompt / per_step, held))
        heapify(ends)
        admitted = seconds
        for sequence in waiting:
            prompt = sequence.num_tokens
            left = max(1.0, share * (sequence.max_total_tokens - prompt))
            size, at, step_s = min(most, prompt + left), max(clock, prompts_end), base_s + decode_s * len(ends)
            while ends and (len(ends) >= room.num_places or free < size or ends[0][0] <= at):
                end, given_back = heappop(ends)
                at, free = max(at, end), free + given_back
            admitted = seconds = seconds + (at - clock) * step_s
            seconds += prompt * prompt_s
            clock, prompts_end, free = at, at + prompt / per_step, free - size
            heappush(ends, (prompts_end + left, size))
        return max(admitted, base_s)  # those for whom there is room are admitted with the next step


def rate_at_once(num_queued: int, num_running: int, num_tokens: int, pace: StepPace) -> float:
    """The rate where there is room for all who wait, `num_tokens` long in all: they join in the next step, so nothing
    has to be played. With 1,024 running a forecast takes 0.4 ms, and one was made for every second submission.
    """
    base_s, decode_s, prompt_s = pace.line
    step_s = base_s + decode_s * num_running + prompt_s * num_tokens
    return num_queued / step_s if step_s > 0 else 0.0
