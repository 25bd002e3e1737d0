"""PURE. When each router hears from a replica: with every step that has a token for it, soon after a refusal, else now
and then.
"""

from __future__ import annotations

from collections.abc import Container

from replica.messages import RouterId

#: a router without a token in a step hears of the load at most this often
LOAD_INTERVAL_S = 0.05


class ReportSchedule:
    """Remembers when each router last heard. Sends nothing itself."""

    def __init__(self, interval_s: float = LOAD_INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._last_sent_at: dict[RouterId, float] = {}
        self._owed: set[RouterId] = set()

    def sent(self, router_id: RouterId, now: float) -> None:
        """A message with a fresh load went to this router."""
        self._last_sent_at[router_id] = now
        self._owed.discard(router_id)

    def refused(self, router_id: RouterId) -> None:
        """It may hold the request: tell it as soon as a step was planned, for then there may be room."""
        self._owed.add(router_id)

    def forget(self, router_id: RouterId) -> None:
        """The router is gone."""
        self._last_sent_at.pop(router_id, None)
        self._owed.discard(router_id)

    def due(self, now: float, with_output: Container[RouterId]) -> list[RouterId]:
        """Routers to send to after a step was planned."""
        return [
            router_id
            for router_id, last in self._last_sent_at.items()
            if router_id in with_output or router_id in self._owed or now - last >= self._interval_s
        ]
