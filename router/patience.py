"""PURE. How long a request is held before it is given up.

A fresh one for `admission_wait_s`. One that lost its replica for `resume_wait_s` since the last sign that somebody
works on a place for it, which is what a replica gives that mends itself: it is alive, says so every second, and will
take work again. `resume_limit_s` bounds the whole of it, from the loss to the next token. When the server stops, its
`drain_s` goes before all that.
"""

from __future__ import annotations

from router.live_settings import DispatcherConfig
from router.tracked import Tracked


class Patience:
    """Of one router. Times are in the dispatcher's clock; `config` may be exchanged."""

    def __init__(self, config: DispatcherConfig) -> None:
        self.config = config
        self._sign_at = float("-inf")
        #: nobody is held any longer than that; None: the server does not stop
        self.stops_at: float | None = None

    def sign(self, now: float) -> None:
        """A replica said that it mends itself."""
        self._sign_at = now

    def stop(self, at: float) -> None:
        """The server stops: all has to be over by then. The first word counts."""
        if self.stops_at is None:
            self.stops_at = at

    @property
    def is_stopping(self) -> bool:
        return self.stops_at is not None

    def is_over(self, now: float) -> bool:
        """The server has stopped."""
        return self.stops_at is not None and self.stops_at <= now

    def begin(self, request: Tracked, now: float, is_replaced: bool) -> None:
        """`request` is held from now on, if it is not yet. `is_replaced`: it waits for another place after a loss."""
        if is_replaced and request.resume_by is None:
            request.resume_by = now + self.config.resume_limit_s
        if request.held_until is None:
            request.held_until = now + (self.config.resume_wait_s if is_replaced else request.hold_left_s)
            request.awaits_place = is_replaced

    def ends_at(self, request: Tracked) -> float | None:
        """When it is given up if it is still held then; None: it is not held."""
        ends = request.held_until
        if ends is None:
            return None
        if request.awaits_place and request.resume_by is not None:
            ends = min(request.resume_by, max(ends, self._sign_at + self.config.resume_wait_s))
        if request.deadline_at is not None and not request.is_returning:
            ends = min(ends, request.deadline_at)
        return ends if self.stops_at is None else min(ends, self.stops_at)
