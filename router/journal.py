"""PURE. What one router remembers of each request, living or lately ended: what was decided when, and on what grounds.

The dispatcher writes down what it decides, the HTTP edge when bytes came and went and what error was told, replicas
tell their stages. Memory is bounded: of one request the first and the last events, of ended requests the last ones, and
apart from them the last refused ones: under overload those are many, and must not push the others out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from heapq import nsmallest
from itertools import chain
from typing import Any

import msgspec

from replica.messages import ReplicaId, RequestId, Stages
from router.replica_view import ReplicaView

#: ended requests that are remembered, 1 to 3 KB each, and as many refused ones
MAX_ENDED = 1000
#: how requests end: `aborted` by a client that left, `failed` with an error, `refused` before any token
FINISHED, ABORTED, FAILED, REFUSED = "finished", "aborted", "failed", "refused"
LOST = "lost with its replica or its step"
GIVEN_BACK = "given back by the replica, which drains"
TAKEN_AWAY = "taken away from the replica, which drains"
#: events that say where a request is; those of the HTTP edge do not
DECISIONS = frozenset({"arrived", "submitted", "placed", "held", "accepted", LOST, GIVEN_BACK, TAKEN_AWAY})
#: events of one request: so many of the first and so many of the last
_MAX_FIRST, _MAX_LAST = 32, 16
#: replicas whose load is written down with a decision
_MAX_REPLICAS = 12


class Event(msgspec.Struct, frozen=True, gc=False):
    """Something that happened, on the dispatcher's clock. `detail` is plain JSON data."""

    at: float
    what: str
    detail: dict[str, Any]


class Entry:
    """One request."""

    __slots__ = (
        "_first",
        "_last",
        "header_id",
        "num_events",
        "opened_at",
        "outcome",
        "prefill_stages",
        "request_id",
        "stages",
    )

    def __init__(self, request_id: RequestId, now: float, header_id: str) -> None:
        self.request_id = request_id
        #: `X-Request-Id` of its answer: the client's own, so not unique, or made by the edge
        self.header_id = header_id
        self.opened_at = now
        self._first: list[Event] = []
        self._last: deque[Event] = deque(maxlen=_MAX_LAST)
        self.num_events = 0
        #: how the dispatcher's part ended; None: it has not
        self.outcome: str | None = None
        #: index -> where its latest stages were told, and these
        self.stages: dict[int, tuple[ReplicaId, Stages]] = {}
        #: the same of the replica that computed its prompt, if that was another one, and when it told
        self.prefill_stages: dict[int, tuple[ReplicaId, Stages, float]] = {}

    def add(self, event: Event) -> None:
        self.num_events += 1
        if len(self._first) < _MAX_FIRST:
            self._first.append(event)
        else:
            self._last.append(event)

    @property
    def events(self) -> list[Event]:
        return [*self._first, *self._last]

    @property
    def last_decision(self) -> Event | None:
        return next((event for event in reversed(self.events) if event.what in DECISIONS), None)

    @property
    def num_dropped_events(self) -> int:
        return self.num_events - len(self._first) - len(self._last)


class Journal:
    """Entries by request. Notes on unknown requests change nothing: they were forgotten."""

    def __init__(self, most_ended: int = MAX_ENDED) -> None:
        self._most_ended = most_ended
        self._living: dict[RequestId, Entry] = {}
        #: oldest end first
        self._ended: dict[RequestId, Entry] = {}
        self._refused: dict[RequestId, Entry] = {}

    @property
    def num_living(self) -> int:
        return len(self._living)

    @property
    def num_ended(self) -> int:
        """Refused ones are not among them."""
        return len(self._ended)

    @property
    def num_refused(self) -> int:
        return len(self._refused)

    def open(self, request_id: RequestId, now: float, header_id: str = "") -> None:
        """A request is here. Idempotent while it lives."""
        if request_id not in self._living:
            for over in (self._ended, self._refused):  # ids are not used again, but nothing here depends on that
                over.pop(request_id, None)
            self._living[request_id] = Entry(request_id, now, header_id)

    def note(self, request_id: RequestId, now: float, what: str, /, **detail: Any) -> None:
        if (entry := self.of(request_id)) is not None:
            entry.add(Event(now, what, detail))

    def told(self, request_id: RequestId, index: int, replica_id: ReplicaId, stages: Stages) -> None:
        """A replica told where the time of a sequence went; the later word counts."""
        if (entry := self.of(request_id)) is not None:
            entry.stages[index] = (replica_id, stages)

    def told_of_leg(self, request_id: RequestId, index: int, replica_id: ReplicaId, stages: Stages, now: float) -> None:
        """The same of a prefill replica."""
        if (entry := self.of(request_id)) is not None:
            entry.prefill_stages[index] = (replica_id, stages, now)
            entry.stages[index] = (replica_id, stages)  # until its decode replica tells

    def end(self, request_id: RequestId, outcome: str) -> None:
        """Nothing more will be decided about it. The first outcome counts."""
        entry = self._living.pop(request_id, None)
        if entry is None:
            return
        entry.outcome = outcome
        over = self._refused if outcome == REFUSED else self._ended
        over[request_id] = entry
        if len(over) > self._most_ended:
            del over[next(iter(over))]

    def of(self, request_id: RequestId) -> Entry | None:
        return self._living.get(request_id) or self._ended.get(request_id) or self._refused.get(request_id)

    def under(self, header_id: str) -> list[Entry]:
        """Whose answers had this `X-Request-Id`, the latest first. Looks at all: people ask, programs do not."""
        everyone = chain(self._living.values(), self._ended.values(), self._refused.values())
        found = [entry for entry in everyone if header_id and entry.header_id == header_id]
        return sorted(found, key=lambda entry: -entry.opened_at)

    def living(self) -> Iterator[Entry]:
        """Oldest first."""
        return iter(self._living.values())


def grounds(
    views: Iterable[ReplicaView], tried: dict[ReplicaId, int], num_sequences: int, now: float
) -> list[dict[str, Any]]:
    """What a decision saw of each replica (the nearest ones if there are many): its load, or why it could not be
    chosen.
    """
    shown = nsmallest(_MAX_REPLICAS, views, key=lambda view: (not view.is_placeable(now), view.outstanding_tokens))
    return [_standing(view, tried.get(view.replica_id), num_sequences, now) for view in shown]


def _standing(view: ReplicaView, said_no_at: int | None, num_sequences: int, now: float) -> dict[str, Any]:
    if not view.is_connected:
        return {"replica": view.replica_id, "not": "not connected"}
    takes_back = view.takes_back(now)
    if view.is_draining and not takes_back:
        return {"replica": view.replica_id, "not": "draining"}
    if not view.load.is_ready:
        return {"replica": view.replica_id, "not": "restarting its ranks"}
    if not (takes_back or view.is_placeable(now)):
        return {"replica": view.replica_id, "not": f"silent for {now - view.load_at:.1f} s"}
    standing: dict[str, Any] = {
        "replica": view.replica_id,
        "outstanding_tokens": view.outstanding_tokens,
        "queued": view.load.num_queued,
        "cap": view.load.queue_cap,
        "unanswered": view.unanswered_sequences,
        "placed": view.num_placed,
    }
    if view.kv_node:
        standing["kv_node"] = view.kv_node
    if said_no_at == view.num_news:
        standing["not"] = "said no, and nothing has changed there"
    elif not view.has_room_for(num_sequences):
        standing["not"] = "queue full"
    return standing
