"""PURE. Which sequence waits for blocks of the connector, and which is being filled from them.

A sequence is *wanting* (asked, not answered: it waits as blocked), *leased* (it waits for its turn, its slots stay),
*loading* (it runs, its blocks are pinned, it is in no step) and then *done*, whatever came of it: what was not loaded
is computed. A lease is released exactly once: when its copies are over, or when it is clear that there will be none.
"""

from __future__ import annotations

import enum
import itertools

from replica.block_manager import BlockManager
from replica.copy_line import CopyJob
from replica.sequence import Sequence


class LoadState(enum.Enum):
    WANTING = "wanting"
    LEASED = "leased"
    LOADING = "loading"
    DONE = "done"


class Load:
    """Of one sequence, until it is preempted or ends."""

    __slots__ = (
        "asked_at",
        "block_ids",
        "end",
        "first",
        "hashes",
        "is_orphan",
        "is_void",
        "lease_id",
        "sequence",
        "slots",
        "state",
    )

    def __init__(self, sequence: Sequence, lease_id: int, first: int, hashes: list[bytes], now: float) -> None:
        #: None: it has ended
        self.sequence: Sequence | None = sequence
        self.lease_id = lease_id
        #: position of the first block that was asked for in the block table
        self.first = first
        self.hashes = hashes
        self.asked_at = now
        self.state = LoadState.WANTING
        self.slots: list[int] = []
        #: pinned
        self.block_ids: list[int] = []
        #: position behind the last block that is loaded
        self.end = first
        #: what is copied must not be used
        self.is_void = False
        #: its connector is gone, and with it the lease
        self.is_orphan = False


class BlockLoads:
    """Leases by id. Sends nothing: `released` collects leases to be given back."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        #: those that are not done
        self._loads: dict[int, Load] = {}
        self.ids = itertools.count()
        self.num_wanting = 0
        self.num_loading = 0
        self.released: list[int] = []

    def __len__(self) -> int:
        return len(self._loads)

    def ask(self, sequence: Sequence, first: int, hashes: list[bytes], now: float) -> Load:
        """It wants its blocks from `first` on."""
        load = Load(sequence, next(self.ids), first, hashes, now)
        self._loads[load.lease_id] = load
        self.num_wanting += 1
        sequence.load = load
        return load

    def acquired(self, lease_id: int, slots: list[int]) -> Load | None:
        """Answered. None: nobody waits for it any more."""
        load = self._loads.get(lease_id)
        if load is None or load.state is not LoadState.WANTING:
            return None
        self.num_wanting -= 1
        load.state, load.slots = LoadState.LEASED, slots[: len(load.hashes)]
        if not load.slots:
            self._forget(load)
        return load

    def begin(self, sequence: Sequence) -> CopyJob | None:
        """It has just been admitted: the copies into its blocks. None: nothing to load."""
        load = sequence.load
        if load is None or load.state is not LoadState.LEASED:
            return None
        num_hits = sequence.num_computed_tokens // self._blocks.block_size
        start, end = max(load.first, num_hits), load.first + len(load.slots)
        if num_hits < load.first or start >= end:  # what came before is gone from the pool, or all of it is there now
            self.give_up(load)
            return None
        load.state, load.end = LoadState.LOADING, end
        self.num_loading += 1
        load.block_ids = sequence.block_ids[start:end]
        self._blocks.pin(load.block_ids)
        return CopyJob(list(zip(load.slots[start - load.first :], load.block_ids, strict=True)), True, load)

    def copied(self, load: Load, ok: bool) -> Sequence | None:
        """Its copies are over: who may go on, with `load.end` blocks if they are good. None: it has ended."""
        self.num_loading -= 1
        load.is_void |= not ok
        self._blocks.unpin(load.block_ids)
        load.block_ids = []
        self._release(load)
        return load.sequence

    def give_up(self, load: Load) -> None:
        """Nothing was copied, and nothing will be."""
        assert load.state in (LoadState.WANTING, LoadState.LEASED), load.state
        self.num_wanting -= load.state is LoadState.WANTING
        self._release(load)

    def ended(self, sequence: Sequence) -> None:
        """It has finished or was preempted."""
        load, sequence.load = sequence.load, None
        if load is None:
            return
        load.sequence = None
        if load.state is LoadState.LOADING:
            load.is_void = True  # its blocks stay pinned until the copies are over
        elif load.state is not LoadState.DONE:
            self.give_up(load)

    def lost(self, lease_id: int) -> Sequence | None:
        """The lease is void. Who waited for its answer."""
        load = self._loads.get(lease_id)
        return None if load is None else self._lose(load)

    def lose_all(self) -> list[Sequence]:
        """All leases are void. Those that waited for an answer."""
        return [s for load in list(self._loads.values()) if (s := self._lose(load)) is not None]

    def forget_connector(self) -> list[Sequence]:
        """It is gone. Nobody writes its arena any more, so copies from it are as good as ever. Returns who waited for
        an answer.
        """
        waiting = []
        for load in list(self._loads.values()):
            load.is_orphan = True
            if load.state is not LoadState.LOADING and (sequence := self._lose(load)) is not None:
                waiting.append(sequence)
        return waiting

    def overdue(self, before: float) -> list[Sequence]:
        """Who was not answered since then waits no more. Asked in order, so the first ones are the oldest."""
        late = []
        for load in self._loads.values():
            if load.asked_at > before:
                break
            if load.state is LoadState.WANTING:
                late.append(load)
        for load in late:
            self.give_up(load)
        return [load.sequence for load in late if load.sequence is not None]

    def oldest_ask(self) -> float | None:
        """When the one that waits longest for an answer asked."""
        return next((load.asked_at for load in self._loads.values() if load.state is LoadState.WANTING), None)

    def validate(self) -> None:
        """Raises AssertionError."""
        states = [load.state for load in self._loads.values()]
        assert self.num_wanting == states.count(LoadState.WANTING), "wanting ones are counted wrongly"
        assert self.num_loading == states.count(LoadState.LOADING), "loading ones are counted wrongly"
        for load in self._loads.values():
            assert load.state is not LoadState.DONE, "a load that is done is still known"
            assert bool(load.block_ids) == (load.state is LoadState.LOADING), "pins in the wrong state"
            assert load.sequence is None or load.sequence.load is load, "the load of somebody else"
            assert load.sequence is not None or load.state is LoadState.LOADING, "the load of nobody"

    def _lose(self, load: Load) -> Sequence | None:
        was_wanting = load.state is LoadState.WANTING
        if load.state is LoadState.LOADING:
            load.is_void = True
            return None
        self.give_up(load)
        return load.sequence if was_wanting else None

    def _release(self, load: Load) -> None:
        if not load.is_orphan:
            self.released.append(load.lease_id)
        self._forget(load)

    def _forget(self, load: Load) -> None:
        load.state = LoadState.DONE
        del self._loads[load.lease_id]
