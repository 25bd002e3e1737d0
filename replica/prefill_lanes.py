"""PURE. Limits on prompts that are computed in pieces, so that long ones cannot block short ones.

A prompt is long while more than `long_prefill_token_threshold` tokens of it are to be computed; what the prefix cache
holds does not count. In each step
- a piece of a long prompt has at most `threshold` tokens, however large the budget is and whoever else is there;
- at most `max_long` long prompts are under way (their lane), and at most `max_partial` prompts of any length are left
  unfinished; who finds no place is passed by those behind it, and is the first to be looked at when a place is free;
- with a lane for long prompts, they share half of the tokens that decodes leave (rounded up, so that they always get
  on) while a short prompt wants some, however the threshold and the budget compare.
0 switches a limit off.
"""

from __future__ import annotations


class PrefillLanes:
    """The limits of one step, and who is under way in it. Thrown away after the step."""

    __slots__ = ("_long_tokens_left", "_max_long", "_max_partial", "_num_long", "_num_partial", "_threshold")

    def __init__(self, threshold: int, max_partial: int = 0, max_long: int = 0) -> None:
        self._threshold = threshold
        self._max_partial = max_partial
        self._max_long = max_long
        self._num_partial = 0
        self._num_long = 0
        #: None: as many as there are
        self._long_tokens_left: int | None = None

    @property
    def has_long_lane(self) -> bool:
        return self._max_long > 0

    @property
    def is_open(self) -> bool:
        """Nobody is ever without a place, so nobody has to ask for one."""
        return not self._max_long and not self._max_partial

    def is_long(self, num_uncomputed: int) -> bool:
        return 0 < self._threshold < num_uncomputed

    def share(self, tokens_left: int) -> None:
        """Short prompts want tokens as well: the long ones get half of what is left, and at least one."""
        self._long_tokens_left = max(1, (tokens_left + 1) // 2)

    def open_wide(self) -> None:
        """No limits in this step any more: chunked prefill is off."""
        self._threshold = self._max_partial = self._max_long = 0
        self._long_tokens_left = None

    def chunk(self, num_uncomputed: int, tokens_left: int) -> int:
        """Tokens that a prompt with so many to compute gets now; 0: its share is spent."""
        num_tokens = min(num_uncomputed, tokens_left)
        if self.is_long(num_uncomputed):
            num_tokens = min(num_tokens, self._threshold)
            if self._long_tokens_left is not None:
                num_tokens = min(num_tokens, self._long_tokens_left)
        return num_tokens

    def has_place(self, num_uncomputed: int, tokens_left: int) -> bool:
        """Whether one more prompt may begin (or come back)."""
        num_tokens = self.chunk(num_uncomputed, tokens_left)
        if not num_tokens or (self._max_long and self.is_long(num_uncomputed) and self._num_long >= self._max_long):
            return False
        return not self._max_partial or num_tokens == num_uncomputed or self._num_partial < self._max_partial

    def enter(self, num_uncomputed: int, num_tokens: int) -> None:
        """A prompt with `num_uncomputed` tokens to compute is under way, and gets `num_tokens` in this step."""
        self._num_partial += num_tokens < num_uncomputed
        if self.is_long(num_uncomputed):
            self._num_long += 1
            if self._long_tokens_left is not None:
                self._long_tokens_left -= num_tokens
