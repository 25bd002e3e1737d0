"""PURE. What a copy between pool and arena takes, as measured, beside computing the same block."""

from __future__ import annotations

from collections.abc import Callable

from replica.step import StepResult

#: how much of what was measured before one more measurement leaves
_MEMORY = 0.8


class CopyPace:
    """Of one replica."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        #: of one block; and through which copy that was measured
        self.copy_s = 0.0
        self._num_copied = 0
        #: tells seconds of a computed prompt token; 0: not measured
        self.token_s: Callable[[], float] = lambda: 0.0

    def learn(self, result: StepResult) -> None:
        num_copies, self._num_copied = result.copied - self._num_copied, max(self._num_copied, result.copied)
        if result.copy_s > 0 and num_copies > 0:
            each = result.copy_s / num_copies
            self.copy_s = _MEMORY * self.copy_s + (1 - _MEMORY) * each if self.copy_s else each

    def is_worth_it(self, num_blocks: int, num_before: int) -> bool:
        """Copies are faster than the model, with so many that come before; also while that is not known."""
        token_s = self.token_s()
        if not token_s or not self.copy_s:
            return True
        return (num_blocks + num_before) * self.copy_s < num_blocks * self._block_size * token_s
