"""PURE. What a replica tells the policy that decides how many replicas there are (`cluster/autoscaling.py`).

Serve sees no request of ours, so these figures are all that the policy has. Counts are of the moment. The two rates
are means over the last seconds, in which older ones fade: a step's tokens alone would jump between prompts and none.
"""

from __future__ import annotations

import math

from replica.messages import ReplicaLoad

#: half of what a rate says is younger than 0.7 times this
_RATE_S = 8.0
#: what `take` returns, and Serve carries by name
NAMES = (
    "waiting",
    "queued_prompt_tokens",
    "uncomputed_tokens",
    "running",
    "kv_use",
    "drain_s",
    "decode_tokens_per_s",
    "prompt_tokens_per_s",
    "step_base_s",
    "step_decode_s",
    "step_prompt_token_s",
)


class ScalingFigures:
    """Of one replica; asked about once a second."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._decoded = self._prompts = 0.0
        #: faded sums: tokens, and the seconds in which they were computed
        self._sums = [0.0, 0.0, 0.0]

    def take(self, load: ReplicaLoad, line: tuple[float, float, float], now: float) -> dict[str, float]:
        """The figures of `NAMES`. `line`: `StepPace.line`, seconds of a step and of each decode and prompt token."""
        decode_rate, prompt_rate = self._rates(load, now)
        base_s, decode_s, prompt_token_s = line
        used = load.num_blocks - load.num_free_blocks
        return {
            "waiting": load.num_queued + load.num_returning,
            "queued_prompt_tokens": load.num_queued_prompt_tokens,
            "uncomputed_tokens": load.num_uncomputed_tokens,
            "running": load.num_running,
            "kv_use": used / max(1, load.num_blocks),
            "drain_s": load.num_queued / load.drain_rate if load.drain_rate else 0.0,
            "decode_tokens_per_s": decode_rate,
            "prompt_tokens_per_s": prompt_rate,
            "step_base_s": base_s,
            "step_decode_s": decode_s,
            "step_prompt_token_s": prompt_token_s,
        }

    def _rates(self, load: ReplicaLoad, now: float) -> tuple[float, float]:
        decoded = load.counters.get("generation_tokens", 0.0)
        prompts = load.counters.get("scheduled_tokens", 0.0) - decoded
        if self._at is not None and now > self._at:
            passed = now - self._at
            fade = math.exp(-passed / _RATE_S)
            new = (decoded - self._decoded, max(0.0, prompts - self._prompts), passed)
            self._sums = [fade * old + more for old, more in zip(self._sums, new, strict=True)]
        self._at, self._decoded, self._prompts = now, decoded, prompts
        of_decodes, of_prompts, seconds = self._sums
        return (of_decodes / seconds, of_prompts / seconds) if seconds else (0.0, 0.0)
