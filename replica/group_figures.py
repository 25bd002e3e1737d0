"""PURE. What a group of ranks counts of its losses: part of `ReplicaLoad.counters`, names in `docs/metrics.md`."""

from __future__ import annotations

from replica.group_health import LossCause


class GroupFigures:
    """`counters` is one dictionary for its whole life and changes only when something happens, so that whoever tells of
    it in each message has nothing to compute.
    """

    def __init__(self, size: int) -> None:
        self.counters: dict[str, float] = {"ranks": size, "ranks_alive": 0}

    def alive(self, number: int) -> None:
        """So many ranks are there now."""
        self.counters["ranks_alive"] = number

    def lost(self, cause: LossCause) -> None:
        """One rank is."""
        self._add(f"rank_losses_{cause.value}", 1)

    def mended(self, took_s: float) -> None:
        """The group is whole again."""
        self._add("group_restarts", 1)
        self.counters["last_mending_s"] = took_s

    def _add(self, name: str, number: float) -> None:
        self.counters[name] = self.counters.get(name, 0) + number
