"""PURE. What is known of the ranks of a replica, and what follows: fine, or these ranks are lost because of this.

A rank may be gone (its socket closed, its process or actor ended), stopped (SIGSTOP: the kernel says so), starved (it
gives no sign of life, but the kernel would let it run: a busy machine, a long import), or hung in a step. Gone and
stopped count at once; starved and hung only after a time that a slow machine does not reach.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

#: ranks give a sign of life so often
BEAT_S = 0.1
#: and are looked at so often
LOOK_S = 0.1
#: silent for longer: ask the kernel whether it is stopped. With the two above: noticed within 0.5 s
ASK_AFTER_S = 0.3
#: silent for longer, not stopped: lost all the same. Measured beside six busy processes on two cores: at most 0.27 s
STARVED_S = 5.0
#: while a rank imports, reads weights or joins its peers it may hold the interpreter for longer
STARVED_AT_START_S = 120.0
#: a step is hung after so many times what such a step took at most, never before `LEAST_STEP_S`
STEP_FACTOR = 10.0
LEAST_STEP_S = 5.0
#: nothing is known of such steps yet: kernels may be compiled in it
FIRST_STEP_S = 60.0
#: of what a step of a class took at most, what the next one of that class leaves over: one hiccup is forgotten
_DECAY = 0.95


class LossCause(enum.StrEnum):
    """Why a rank is lost."""

    #: its socket closed, or its process ended
    GONE = "gone"
    #: the kernel says so
    STOPPED = "stopped"
    #: no sign of life, or not where it should be in time
    SILENT = "silent"
    #: it does not come out of a step, or of waiting for its peers
    HUNG = "hung"
    #: it raised in a step; its process stays
    FAILED = "failed"


class Loss(NamedTuple):
    """`why` in words that follow "rank 1 of 3 "."""

    cause: LossCause
    why: str


class RankSign(msgspec.Struct, frozen=True):
    """What is known of one rank at one instant."""

    rank: int
    #: how it ended, as a sentence part; empty: it has not
    ended: str = ""
    #: since its last sign of life
    silent_s: float = 0.0
    #: what the kernel says (it is asked after `ASK_AFTER_S` only); False on another node, where nobody can be asked
    is_stopped: bool = False
    is_starting: bool = False
    #: it has not begun the step under way, or has begun it and not ended it
    owes_step: bool = False
    #: it waits for what its peers have to say
    waits_for_peers: bool = False


class StepSign(msgspec.Struct, frozen=True):
    """The step under way."""

    age_s: float
    limit_s: float


def lost_ranks(ranks: Iterable[RankSign], step: StepSign | None) -> dict[int, Loss]:
    """Rank -> why it is lost. Empty: all is fine."""
    ranks = list(ranks)
    lost = {sign.rank: loss for sign in ranks if (loss := _loss(sign)) is not None}
    if not lost and step is not None and step.age_s > step.limit_s:
        why = f"hangs in a step: {step.age_s:.1f} s, and {step.limit_s:.1f} s would be long"
        lost = dict.fromkeys(culprits(ranks), Loss(LossCause.HUNG, why))
    return lost


def culprits(ranks: Iterable[RankSign]) -> list[int]:
    """Who holds up a step: those who owe it and wait for nobody. If all wait for each other, the way between them is
    broken, and all who owe it have to go; if nobody owes it, its result was lost on the way from rank 0.
    """
    owing = [sign for sign in ranks if sign.owes_step]
    return [sign.rank for sign in owing if not sign.waits_for_peers] or [sign.rank for sign in owing] or [0]


def _loss(sign: RankSign) -> Loss | None:
    if sign.ended:
        return Loss(LossCause.GONE, sign.ended)
    if sign.silent_s > ASK_AFTER_S and sign.is_stopped:
        why = f"is stopped (no sign of life for {sign.silent_s:.2f} s, and the kernel says so)"
        return Loss(LossCause.STOPPED, why)
    patience_s = STARVED_AT_START_S if sign.is_starting else STARVED_S
    if sign.silent_s > patience_s:
        return Loss(LossCause.SILENT, f"gave no sign of life for {sign.silent_s:.1f} s")
    return None


class StepLimits:
    """When a step counts as hung: `STEP_FACTOR` times what steps of its size took at most lately. Sizes are classes of
    tokens, each twice the one before; a class that was never seen is thought from the nearest one below, and from the
    nearest above if there is none: a token of a large step costs no more than one of a small step.
    """

    def __init__(self) -> None:
        self._longest_s: dict[int, float] = {}

    def learn(self, num_tokens: int, took_s: float) -> None:
        """A step ended well."""
        size = num_tokens.bit_length()
        self._longest_s[size] = max(took_s, _DECAY * self._longest_s.get(size, 0.0))

    def limit_s(self, num_tokens: int) -> float:
        """For a step of so many tokens."""
        size = num_tokens.bit_length()
        below = [known for known in self._longest_s if known <= size]
        if below:
            nearest = max(below)
            predicted_s = self._longest_s[nearest] * (1 << (size - nearest))
        elif self._longest_s:
            predicted_s = self._longest_s[min(self._longest_s)]
        else:
            return FIRST_STEP_S
        return max(LEAST_STEP_S, STEP_FACTOR * predicted_s)
