"""PURE. What is told of a load that takes a while: bytes, the layer it is at, rate."""

from __future__ import annotations

#: short loads say one line at their end, long ones where they are every so often
EVERY_S = 5.0
_MIB, _GB = 1 << 20, 1e9


class LoadProgress:
    """Of one rank. Its methods return the sentence that is due."""

    def __init__(self, rank: int, num_ranks: int, num_layers: int, now: float) -> None:
        self.num_bytes = 0
        self._who = f"rank {rank} of {num_ranks}: " if num_ranks > 1 else ""
        self._layer, self._num_layers = 0, num_layers
        self._started = self._told = now

    def at_layer(self, index: int) -> None:
        """Layers before this one are read."""
        self._layer = index

    def add(self, num_bytes: int, now: float) -> str | None:
        """So much more was read."""
        self.num_bytes += num_bytes
        if now - self._told < EVERY_S:
            return None
        self._told = now
        return f"{self._who}loading weights, {self._amount(now)}, layer {self._layer + 1} of {self._num_layers}"

    def end(self, now: float) -> str:
        """All was read, and packed by whoever wanted it."""
        return f"{self._who}weights loaded, {self._amount(now)}"

    def _amount(self, now: float) -> str:
        seconds = max(now - self._started, 1e-9)
        return f"{self.num_bytes / _MIB:.0f} MiB in {seconds:.1f} s ({self.num_bytes / seconds / _GB:.2f} GB/s)"
