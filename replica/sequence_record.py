"""PURE. What happened to one sequence on this replica, beside what its instants say: what it waited for, the pieces of
its prompt, how often it was put back.

Only what is out of the ordinary is written down, so steady decoding costs nothing.
"""

from __future__ import annotations

from replica.messages import Chunk, Preempted, PreemptionCause, WaitCause

#: pieces of a prompt that are told one by one; of longer prompts the first ones and the number of all
MAX_CHUNKS = 32
#: the same for preemptions
MAX_PREEMPTIONS = 16


class SequenceRecord:
    """Written by the scheduler, read when a router is told. Instants are seconds as the caller's clock has them."""

    __slots__ = ("chunks", "num_chunks", "preemptions", "put_back_s", "room_wait_since", "waited_for", "waiting_since")

    def __init__(self, now: float) -> None:
        #: since when it waits, while it does
        self.waiting_since = now
        #: since when it was its turn and it found no room, before it was first scheduled
        self.room_wait_since: float | None = None
        #: what it found missing last
        self.waited_for: WaitCause | None = None
        self.chunks: list[Chunk] = []
        self.num_chunks = 0
        self.preemptions: list[Preempted] = []
        #: seconds that it waited as returning
        self.put_back_s = 0.0

    def found_no_room(self, cause: WaitCause, now: float) -> None:
        """It was its turn for the first time here, and it could not join."""
        if self.room_wait_since is None:
            self.room_wait_since = now
        self.waited_for = cause

    def computed(self, step: int, num_tokens: int) -> None:
        """A piece of its prompt."""
        self.num_chunks += 1
        if self.num_chunks <= MAX_CHUNKS:
            self.chunks.append(Chunk(step, num_tokens))

    def put_back(self, cause: PreemptionCause, num_lost_tokens: int, now: float) -> None:
        """Preempted; what it had computed is given up, though the prefix cache may give some of it back."""
        self.waiting_since = now
        if len(self.preemptions) < MAX_PREEMPTIONS:
            self.preemptions.append(Preempted(now, cause, num_lost_tokens))

    def came_back(self, now: float) -> None:
        """Scheduled again after a preemption or a resume."""
        self.put_back_s += now - self.waiting_since
