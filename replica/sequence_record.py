"""PURE. What happened to one sequence on this replica, beside what its instants say: what it waited for, the pieces of
its prompt, how often it was put back.

Only what is out of the ordinary is written down, so steady decoding costs nothing.
"""

from __future__ import annotations

from replica.hand_over_times import HandOverTimes
from replica.messages import Chunk, Preempted, PreemptionCause, WaitCause

#: pieces of a prompt that are told one by one; of longer prompts the first ones and the number of all
MAX_CHUNKS = 32
#: the same for preemptions
MAX_PREEMPTIONS = 16


class SequenceRecord:
    """Written by the scheduler, read when a router is told. Instants are seconds as the caller's clock has them."""

    __slots__ = (
        "chunks",
        "end_asked_at",
        "grammar_s",
        "hand_over",
        "lacks_since",
        "looked_at",
        "num_chunks",
        "preemptions",
        "put_back_s",
        "room_wait_since",
        "waited_for",
        "waiting_since",
        "waits",
    )

    def __init__(self, now: float) -> None:
        #: since when it waits, while it does
        self.waiting_since = now
        #: since when it was its turn and it found no room, before it was first scheduled
        self.room_wait_since: float | None = None
        #: what it found missing last
        self.waited_for: WaitCause | None = None
        #: since when it has been missing, while it waits for that
        self.lacks_since: float | None = None
        #: when that was seen last: if not in the last step, others have come before it since
        self.looked_at: float | None = None
        #: seconds by what was missing, but for the wait that goes on; None: there was always room
        self.waits: dict[WaitCause, float] | None = None
        #: seconds in which its grammar was compiled
        self.grammar_s = 0.0
        #: its prompt is, or was, to be computed elsewhere
        self.hand_over: HandOverTimes | None = None
        #: when it was ended while the runner worked on it
        self.end_asked_at: float | None = None
        self.chunks: list[Chunk] = []
        self.num_chunks = 0
        self.preemptions: list[Preempted] = []
        #: seconds that it waited as returning
        self.put_back_s = 0.0

    def found_no_room(self, cause: WaitCause, now: float, is_fresh: bool) -> None:
        """It was its turn, and it could not join. Told again in each step, so little happens while it stays so."""
        self.looked_at = now
        if cause is self.waited_for and self.lacks_since is not None:
            return
        if is_fresh and self.room_wait_since is None:
            self.room_wait_since = now
        self._end_lack(now)
        self.waited_for, self.lacks_since = cause, now

    def stopped_waiting(self, now: float, was_put_back: bool) -> None:
        """It runs, or has ended. `was_put_back`: it had run before, and waited to run again."""
        self._end_lack(now)
        if was_put_back:
            self.put_back_s += now - self.waiting_since

    def waits_until(self, now: float) -> dict[WaitCause, float]:
        """Seconds by what was missing, a wait that goes on included."""
        waits = dict(self.waits or {})
        if self.lacks_since is not None and self.waited_for is not None:
            waits[self.waited_for] = waits.get(self.waited_for, 0.0) + now - self.lacks_since
        return waits

    def computed(self, step: int, num_tokens: int) -> None:
        """A piece of its prompt."""
        self.num_chunks += 1
        if self.num_chunks <= MAX_CHUNKS:
            self.chunks.append(Chunk(step, num_tokens))

    def put_back(self, cause: PreemptionCause, num_lost_tokens: int, by: str, now: float) -> None:
        """Preempted for the request `by`; what it had computed is given up, though the prefix cache may give some of it
        back.
        """
        self.waiting_since = now
        if len(self.preemptions) < MAX_PREEMPTIONS:
            self.preemptions.append(Preempted(now, cause, num_lost_tokens, by))

    def _end_lack(self, now: float) -> None:
        if self.lacks_since is not None:
            self.waits, self.lacks_since = self.waits_until(now), None
