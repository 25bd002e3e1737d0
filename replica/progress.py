"""PURE. What a step changed, as the scheduler tells it to the engine core, and what it counts."""

from __future__ import annotations

import msgspec

from replica.messages import STEP_SEQUENCE_BOUNDS, STEP_TOKEN_BOUNDS, FinishReason, TokenLogprobs
from replica.running_set import Decodes
from replica.sequence import Sequence


class SchedulerCounters(msgspec.Struct):
    """Totals since the start. `recomputed_tokens` is work done again after preemptions."""

    steps: int = 0
    scheduled_tokens: int = 0
    #: by `STEP_TOKEN_BOUNDS`
    step_token_counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(STEP_TOKEN_BOUNDS) + 1))
    scheduled_sequences: int = 0
    #: by `STEP_SEQUENCE_BOUNDS`
    step_sequence_counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(STEP_SEQUENCE_BOUNDS) + 1))
    prompt_tokens: int = 0
    #: of `prompt_tokens`, those found in the prefix cache
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    #: of these, those that made way for a more urgent one
    displaced: int = 0
    recomputed_tokens: int = 0
    #: guesses that were computed, and those of them that came true
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    admitted: int = 0
    #: seconds between submit and first schedule, summed over admitted sequences
    queue_time_s: float = 0.0
    finished: dict[FinishReason, int] = msgspec.field(default_factory=lambda: dict.fromkeys(FinishReason, 0))

    def told(self) -> dict[str, float]:
        """As routers are told them, by name; without those by bounds, and the steps."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_prompt_tokens": self.cached_prompt_tokens,
            "scheduled_tokens": self.scheduled_tokens,
            "generation_tokens": self.generation_tokens,
            "preemptions": self.preemptions,
            "displaced": self.displaced,
            "recomputed_tokens": self.recomputed_tokens,
            "drafted_tokens": self.drafted_tokens,
            "accepted_tokens": self.accepted_tokens,
            "admitted": self.admitted,
            "queue_time_s": self.queue_time_s,
            "scheduled_sequences": self.scheduled_sequences,
            **{f"finished_{reason.value}": count for reason, count in self.finished.items()},
        }


class Progress(msgspec.Struct, frozen=True):
    """What a step changed for one sequence: a new token, the end, or both."""

    sequence: Sequence
    new_token_ids: list[int]
    finish_reason: FinishReason | None
    #: one entry a new token, where asked for
    logprobs: list[TokenLogprobs] = []
    #: with `INVALID`, `SHED` and `DEADLINE`
    message: str = ""
    #: the first token since the replica took the sequence
    is_first: bool = False


class StepProgress(msgspec.Struct, frozen=True):
    """A whole step. Most sequences got one token and there is no more to say: those are `plain`, their tokens beside
    them in `token_ids`.
    """

    plain: Decodes
    token_ids: list[int]
    others: list[Progress]
