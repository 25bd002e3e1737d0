"""PURE. Has a change of live knobs come everywhere, and if not, what is told to whoever made it?

What Serve's controller holds is the truth: whoever starts, is replaced or answers again gets that and nothing older.
So a change is as good as made while the controller holds it, and over as soon as it holds another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from cluster.config import ClusterConfig
from cluster.live_knobs import differences, flat_values, lay_over, number_of, overlay_of, shown
from replica.errors import ConfigError, ShoalError

#: how long all may take until they say that a change is in force
CONFIRM_S = 60.0
#: how long a change may be on its way inside the controller, whose loop turns every 0.1 s
SETTLE_S = 5.0


class Held(msgspec.Struct, frozen=True):
    """What Serve's controller holds at one moment."""

    #: by deployment, what lies over the configuration of the start
    overlays: Mapping[str, Mapping[str, Any]]
    #: False: something may have been given to it that is not in `overlays` yet
    is_settled: bool


class Seen(msgspec.Struct, frozen=True):
    """The processes of a deployment at one moment."""

    name: str
    #: those that should be there, and of these the ones that Serve is starting
    num_wanted: int
    num_starting: int
    #: `configuration()` of those that said something
    answers: Sequence[Mapping[str, Any]]


class Confirmed(msgspec.Struct, frozen=True):
    """Everybody who is up goes by it. Who is starting begins with it."""

    number: int
    num_replicas: int
    num_routers: int
    num_starting: int

    def sentence(self, took_s: float) -> str:
        later = f"; {self.num_starting} more start(s) and will have it" if self.num_starting else ""
        return (
            f"configuration {self.number:08x} is in force at {self.num_replicas} replica(s) and "
            f"{self.num_routers} router(s) after {took_s:.1f} s{later}"
        )


class Confirmation:
    """Of one change, from `before` to `wanted`, which names `keys`; given to the controller at `now`."""

    def __init__(
        self, start: Mapping[str, Any], before: ClusterConfig, wanted: ClusterConfig, keys: Iterable[str], now: float
    ) -> None:
        self._start, self._before, self._wanted = start, before, wanted
        values = dict(flat_values(wanted))
        self._asked = {key: values[key] for key in keys}
        self._overlay: Mapping[str, Any] = overlay_of(lay_over(start, {}), wanted)
        self._number = number_of(wanted)
        self._end = now + CONFIRM_S
        self._missing_since: float | None = None

    def check_base(self, found: Held, held: Held) -> None:
        """Our whole was made from `found`. Raises ShoalError if something else is held now: ours would undo it."""
        if held.overlays != found.overlays:
            others = [overlay for name, overlay in held.overlays.items() if overlay != found.overlays[name]]
            raise ShoalError(
                f"superseded by another change before anything of this one was done; in force: {self._told(others[0])}"
            )

    def follow(self, held: Held, now: float) -> bool:
        """Whether the controller holds our change. Another one may have come later: if it keeps our values, we wait for
        it; else ours will be nowhere, and ShoalError is raised.
        """
        others = [overlay for overlay in held.overlays.values() if overlay != self._overlay]
        if not others:
            self._missing_since = None
            return True
        if self._missing_since is None:
            self._missing_since = now
        if not held.is_settled and now < self._missing_since + SETTLE_S:
            return False  # ours, or what came before it
        try:
            config = lay_over(self._start, others[0])
        except ConfigError as error:  # it did not come by `shoal set`, which checks
            raise ShoalError(f"superseded by another change, which cannot work: {error}") from None
        values = dict(flat_values(config))
        if any(values.get(key) != value for key, value in self._asked.items()):
            raise ShoalError(f"superseded by another change; in force: {self._told(others[0])}")
        self._overlay, self._number = others[0], number_of(config)
        return False

    def judge(self, held: Held, seen: Sequence[Seen], now: float) -> Confirmed | None:
        """None: ask again. Raises ShoalError when nothing good will come of it, or not in time."""
        if not self.follow(held, now):
            return None
        self._check_refusals(seen)
        missing, having = [], {}
        for one in seen:
            having[one.name] = sum(answer["number"] == self._number for answer in one.answers)
            needed = max(1, one.num_wanted - one.num_starting, len(one.answers))
            if having[one.name] < needed:
                missing.append(f"{one.name}: {having[one.name]} of {needed}")
        if not missing:
            num_starting = sum(one.num_starting for one in seen)
            num_routers = having.pop("Router")
            return Confirmed(self._number, sum(having.values()), num_routers, num_starting)
        if now <= self._end:
            return None
        raise ShoalError(
            f"after {CONFIRM_S:g} s not everybody has confirmed ({', '.join(missing)}). Serve holds the new values: "
            "whoever starts anew, and whoever answers again, will have them"
        )

    def _check_refusals(self, seen: Sequence[Seen]) -> None:
        """A process that was given the change and does not take it will not take it later."""
        for one in seen:
            refusing = [a for a in one.answers if a["refused"] and a["told"] == self._overlay]
            if refusing:
                back = " ".join(f"{key}={shown(old)}" for key, old, _ in differences(self._before, self._wanted))
                raise ShoalError(
                    f"{one.name}: {len(refusing)} of {len(one.answers)} refuse it and stay as they were: "
                    f"{refusing[0]['refused']}. The others take it; to go back: shoal set {back}"
                )

    def _told(self, overlay: Mapping[str, Any]) -> str:
        """All that either change has to do with, as it is with `overlay`."""
        try:
            now = lay_over(self._start, overlay)
        except ConfigError:
            return "see `shoal get`"
        values = dict(flat_values(now))
        keys = [*self._asked, *(key for key, _, _ in differences(self._before, now))]
        return ", ".join(f"{key}={shown(values.get(key))}" for key in dict.fromkeys(keys)) + f" ({number_of(now):08x})"
