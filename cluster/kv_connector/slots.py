"""PURE. The slots of an arena and what may be done to each."""

from __future__ import annotations

import enum


class SlotState(enum.IntEnum):
    FREE = 0
    #: one holder may write it
    RESERVED = 1
    #: a job of the connector writes it
    STAGING = 2
    #: everybody may read it under a lease, nobody writes
    SEALED = 3
    #: its holder was given up, and might still write
    QUARANTINED = 4


_F, _R, _ST, _SE, _Q = SlotState
#: by state before: what it may become; whatever is not here is a bug. A list, since hashing an enum runs Python
_MAY_BECOME = [(_R, _ST), (_SE, _F, _Q), (_SE, _F), (_F,), (_F,)]


class SlotPool:
    """States and the free ones. The last freed is used first: it may still be in a CPU cache."""

    def __init__(self, num_slots: int) -> None:
        self.states = [SlotState.FREE] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.states)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, state: SlotState) -> int:
        """A free one, as `state`. There has to be one."""
        slot = self._free.pop()
        self.move(slot, state)
        return slot

    def move(self, slot: int, state: SlotState) -> None:
        before = self.states[slot]
        assert state in _MAY_BECOME[before], f"slot {slot} is {before.name} and is to become {state.name}"
        self.states[slot] = state
        if state is SlotState.FREE:
            self._free.append(slot)

    def count(self) -> list[int]:
        """Slots by state; O(n)."""
        counts = [0] * len(SlotState)
        for state in self.states:
            counts[state] += 1
        return counts

    def validate(self) -> None:
        """Raises AssertionError."""
        free = {slot for slot, state in enumerate(self.states) if state is SlotState.FREE}
        assert sorted(self._free) == sorted(free), "the free slots are not those that are free"
