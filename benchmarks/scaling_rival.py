"""The rival of `cluster/autoscaling.py`: Ray Serve's default policy (2.60), target_ongoing_requests over ongoing
requests, written again for the virtual clock. `tests/unit/test_autoscaling.py` compares it with Ray's own functions.
"""

from __future__ import annotations

import math
from collections import deque

import msgspec

from cluster.simulation.sim_scaling import Seen


class ServeSettings(msgspec.Struct, frozen=True):
    """Of Serve's `AutoscalingConfig`, with its defaults."""

    target_ongoing_requests: float = 2.0
    metrics_interval_s: float = 10.0
    look_back_period_s: float = 30.0
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0


class ServeDefaultPolicy:
    """Ongoing requests are recorded each `min(look_back / 5, metrics_interval)`, known to the controller each
    `metrics_interval`, and their mean over `look_back` decides, once it has said so for the whole delay.
    """

    def __init__(self, settings: ServeSettings, fewest: int, most: int) -> None:
        self._settings = settings
        self._fewest, self._most = fewest, most
        self._points: deque[tuple[float, int]] = deque()
        self._known: list[int] = []
        self._recorded_at = self._pushed_at = -math.inf
        self._direction = 0
        self._since: float | None = None

    def wanted(self, seen: Seen, now: float) -> int:
        self._observe(seen.num_ongoing, now)
        if not seen.num_running or not self._known:
            return seen.target
        ongoing = sum(self._known) / len(self._known)
        desired = math.ceil(seen.num_running * (ongoing / (self._settings.target_ongoing_requests * seen.num_running)))
        return min(self._most, max(self._fewest, self.after_delay(max(0, desired), seen.target, now)))

    def after_delay(self, desired: int, target: int, now: float) -> int:
        """Ray's `_apply_delay_logic`."""
        direction = (desired > target) - (desired < target)
        if direction != self._direction or self._since is None:
            self._since = now
        self._direction = direction
        if direction == 0:
            self._since = None
            return target
        if direction < 0:
            desired = max(1, desired) if target > 1 else desired
        delay = self._settings.upscale_delay_s if direction > 0 else self._settings.downscale_delay_s
        if now - self._since + 1e-6 < delay:
            return target
        self._direction, self._since = 0, None
        return desired

    def _observe(self, ongoing: int, now: float) -> None:
        settings = self._settings
        if now - self._recorded_at >= min(settings.look_back_period_s / 5, settings.metrics_interval_s):
            self._recorded_at = now
            self._points.append((now, ongoing))
        while self._points and self._points[0][0] < now - settings.look_back_period_s:
            self._points.popleft()
        if now - self._pushed_at >= settings.metrics_interval_s:
            self._pushed_at = now
            self._known = [count for _, count in self._points]
