"""PURE. How many prompt tokens a step may take so that the streams in it keep their time per output token.

A step's duration is learned as a line, base + decodes x a + prompt tokens x b, by normalised least mean squares: each
measured step moves the line part of the way to itself. It needs no history, follows a machine that becomes slower and a
context that becomes longer, and one slow step moves it by a bounded amount.

A line learned from few steps says little about many tokens, so a step has at most a quarter more than a step within
the target had lately, and half of what a step had that missed it.

Only prompt tokens are limited, and never to less than `LEAST_PROMPT_TOKENS`, so that prompts get on even where the
decodes alone take longer than the target: a prompt of n tokens is computed in at most n / `LEAST_PROMPT_TOKENS` steps.
"""

from __future__ import annotations

LEAST_PROMPT_TOKENS = 16
#: share of the error that one step corrects
_RATE = 0.3
#: what a typical step has, so that the three terms are of one size
_DECODES, _PROMPT_TOKENS = 16.0, 128.0
#: of the target, what is planned for: the way between two steps is not in a step's duration, and steps scatter
_MARGIN = 0.9


class StepPace:
    """Learns from every step; asked when one is planned."""

    def __init__(self, target_s: float) -> None:
        self.target_s = target_s
        self._weights = [0.0, 0.0, 0.0]
        #: beside running streams, so many prompt tokens were within the target
        self._trusted = LEAST_PROMPT_TOKENS
        #: of the last step that was asked for
        self.prompt_tokens: int | None = None

    def limit(self, num_decodes: int, most: int) -> int:
        """Prompt tokens that the next step may have, at most `most`, beside `num_decodes` streams."""
        self.prompt_tokens = self._limit(num_decodes, most)
        return self.prompt_tokens

    def learn(self, num_decodes: int, num_prompt_tokens: int, duration_s: float) -> None:
        """What a step took."""
        if duration_s <= 0:
            return
        if num_decodes and num_prompt_tokens:
            if duration_s <= self.target_s:
                self._trusted = max(self._trusted, num_prompt_tokens)
            else:
                self._trusted = max(LEAST_PROMPT_TOKENS, min(self._trusted, num_prompt_tokens // 2))
        inputs = (1.0, num_decodes / _DECODES, num_prompt_tokens / _PROMPT_TOKENS)
        guess = self._guess(inputs)
        error = duration_s - guess
        if guess > 0:  # a step that waited for the machine is no reason to starve prompts for long
            error = min(error, guess)
        scale = _RATE * error / sum(x * x for x in inputs)
        self._weights = [max(0.0, w + scale * x) for w, x in zip(self._weights, inputs, strict=True)]

    @property
    def line(self) -> tuple[float, float, float]:
        """Seconds of a step, and what each decode and each prompt token adds; all 0 while none was measured."""
        base, decodes, prompt_tokens = self._weights
        return base, decodes / _DECODES, prompt_tokens / _PROMPT_TOKENS

    def _guess(self, inputs: tuple[float, float, float]) -> float:
        return sum(w * x for w, x in zip(self._weights, inputs, strict=True))

    def _limit(self, num_decodes: int, most: int) -> int:
        if not self.target_s or not num_decodes:
            return most
        per_token = self._weights[2] / _PROMPT_TOKENS
        left = _MARGIN * self.target_s - self._guess((1.0, num_decodes / _DECODES, 0.0))
        # nothing learned yet: begin with the least and feel the way up
        num_tokens = int(left / per_token) if per_token > 0 and left > 0 else LEAST_PROMPT_TOKENS
        return min(most, self._trusted * 5 // 4, max(LEAST_PROMPT_TOKENS, num_tokens))
