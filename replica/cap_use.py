"""PURE. How the queue cap was used: the most places that were ever taken, and how many on average.

Written down where places change hands, so the most is a true maximum and no sample. The averages are integrals over
time: the difference of two readings is exact for the span between them, however late they are read.
"""

from __future__ import annotations


class CapUse:
    """Of one replica. Places are those of the queue: taken by queued sequences, or reserved by permits."""

    __slots__ = ("_at", "_num_places", "_num_queued", "max_places", "max_queued", "places_s", "queued_s", "watched_s")

    def __init__(self) -> None:
        #: most sequences ever queued, and most places ever taken or reserved
        self.max_queued = self.max_places = 0
        #: sequences queued x seconds, places taken or reserved x seconds
        self.queued_s = self.places_s = 0.0
        #: the seconds that they are summed over
        self.watched_s = 0.0
        self._num_queued = self._num_places = 0
        self._at: float | None = None

    def note(self, num_queued: int, num_permits: int, now: float) -> None:
        """So many are queued and reserved from now on. A clock that was set back adds nothing."""
        if self._at is not None and now > self._at:
            span_s = now - self._at
            self.watched_s += span_s
            self.queued_s += span_s * self._num_queued
            self.places_s += span_s * self._num_places
        self._at = now
        self._num_queued, self._num_places = num_queued, num_queued + num_permits
        self.max_queued = max(self.max_queued, num_queued)
        self.max_places = max(self.max_places, self._num_places)

    @property
    def counters(self) -> dict[str, float]:
        """As they stand in `ReplicaLoad.counters`."""
        return {
            "max_queued": self.max_queued,
            "max_queue_places": self.max_places,
            "queued_s": self.queued_s,
            "queue_places_s": self.places_s,
            "queue_watched_s": self.watched_s,
        }
