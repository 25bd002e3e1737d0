"""PURE. Loads of sequences whose prompt another replica computes: their blocks come piece by piece, while that one
computes, into blocks that nothing else writes (`replica/remote_prefill.py`).

A load is *open* while more may come. It is *over* when nothing more comes and its copies are over, whichever is later:
only then its sequence may compute what is missing, since until then a copy may write there. Its lease is released
exactly once, when it is over.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from replica.block_manager import BlockManager
from replica.copy_line import CopyJob
from replica.kv_messages import Acquire, Acquired, Release, ToConnector
from replica.sequence import Sequence
from replica.transfer_counters import TransferCounters


class Loader(Protocol):
    """Who brings blocks."""

    def follow(self, sequence: Sequence) -> None:
        """It has a seat, and waits for the blocks of its prompt."""

    def stop(self, sequence: Sequence) -> bool:
        """Bring no more. True: its blocks are being written, and `loaded` is called when that is over."""


class Seats(Protocol):
    """Who keeps the sequences that wait (`replica/remote_prefill.py`)."""

    loader: Loader | None

    def loaded(self, sequence: Sequence, end: int, is_over: bool) -> None:
        """The leading `end` blocks of its prompt are there; `is_over`: more will not come."""

    def loader_changed(self, is_there: bool) -> list[Sequence]:
        """Whether anything can be loaded. Returns who has a seat and waits."""


class RemoteLoad:
    """Of one sequence, from its seat until it is over."""

    __slots__ = ("end", "first", "is_good", "is_open", "is_orphan", "lease_id", "num_given", "pieces", "sequence")

    def __init__(self, sequence: Sequence, lease_id: int, first: int) -> None:
        #: None: it has ended, or lost its seat
        self.sequence: Sequence | None = sequence
        self.lease_id = lease_id
        #: position of the first block that was asked for
        self.first = first
        self.num_given = 0
        #: position behind the last block that is there
        self.end = first
        self.is_open = True
        #: False: what is copied from now on must not be used
        self.is_good = True
        #: its connector is gone, and with it the lease
        self.is_orphan = False
        #: pinned block ids of the copies that are not over, in their order
        self.pieces: list[list[int]] = []


class RemoteLoads:
    """A `Loader`. Sends nothing: `take_messages` has what is to be sent."""

    def __init__(self, blocks: BlockManager, ids: Iterator[int], counters: TransferCounters) -> None:
        """`ids`: of leases, no two of one replica are equal."""
        self._blocks = blocks
        self._counters = counters
        self._seats: Seats | None = None
        self._is_connected = False
        self._ids = ids
        self._loads: dict[int, RemoteLoad] = {}
        self._by_seq: dict[int, RemoteLoad] = {}
        self._asks: list[ToConnector] = []
        self._released: list[int] = []

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def num_copying(self) -> int:
        """Whose blocks are being written."""
        return sum(bool(load.pieces) for load in self._loads.values())

    def serve(self, seats: Seats) -> None:
        """Who is to be told."""
        self._seats, seats.loader = seats, self

    def connected(self) -> None:
        """Also those are followed that have a seat already."""
        self._is_connected = True
        if self._seats is not None:
            for sequence in self._seats.loader_changed(True):
                self.follow(sequence)

    def take_messages(self) -> list[ToConnector]:
        """To be sent in this order."""
        messages, self._asks = self._asks, []
        if self._released:
            messages.append(Release(self._released))
            self._released = []
        return messages

    def follow(self, sequence: Sequence) -> None:
        """See `Loader`. It asks for the full blocks of its prompt that the pool lacks."""
        remote = sequence.remote
        if not self._is_connected or remote is None or remote.is_loaded or sequence.seq_id in self._by_seq:
            return
        first, end = remote.end, sequence.num_prompt_tokens // self._blocks.block_size
        sequence.extend_hashes(self._blocks.block_size)
        hashes = sequence.block_hashes[first:end]
        if not hashes:
            return
        load = RemoteLoad(sequence, next(self._ids), first)
        self._loads[load.lease_id] = self._by_seq[sequence.seq_id] = load
        self._counters.loads += 1
        source = remote.source
        before = sequence.block_hashes[first - 1] if first else b""
        within_s = source.continue_within_s + source.load_within_s
        self._asks.append(Acquire(load.lease_id, hashes, within_s, source.connectors, first, before, waits=True))

    def acquired(self, message: Acquired) -> CopyJob | None:
        """A piece has come: its copies. What comes twice, or after the end, is ignored."""
        load = self._loads.get(message.lease_id)
        if load is None or not load.is_open or message.num_before != load.num_given:
            return None
        sequence = load.sequence
        assert sequence is not None, "the open load of nobody"
        start = load.first + load.num_given
        load.num_given += len(message.slots)
        load.is_open = not message.is_last
        block_ids = sequence.block_ids[start : start + len(message.slots)]
        if message.is_last:
            num_wanted = sequence.num_prompt_tokens // self._blocks.block_size
            self._counters.failed_loads += load.first + load.num_given < num_wanted
        if not block_ids:
            self._end_if_over(load)
            return None
        self._blocks.pin(block_ids)
        load.pieces.append(block_ids)
        return CopyJob(list(zip(message.slots, block_ids, strict=True)), True, load)

    def copied(self, load: RemoteLoad, ok: bool) -> None:
        """The oldest of its copies are over."""
        block_ids = load.pieces.pop(0)
        self._blocks.unpin(block_ids)
        load.is_good = load.is_good and ok
        num_loaded = len(block_ids) if load.is_good else 0
        load.end += num_loaded
        self._counters.blocks_loaded += num_loaded
        load.is_open = load.is_open and load.is_good  # behind a gap nothing is of use
        if not self._end_if_over(load) and num_loaded:
            self._loaded(load.sequence, load.end, False)

    def stop(self, sequence: Sequence) -> bool:
        """See `Loader`."""
        load = self._by_seq.get(sequence.seq_id)
        if load is None:
            return False
        self._counters.failed_loads += load.is_open
        load.is_open = False
        if load.pieces:
            return True
        del self._by_seq[sequence.seq_id]
        load.sequence = None  # who asks knows
        self._end_if_over(load)
        return False

    def ended(self, sequence: Sequence) -> None:
        """It has finished or lost its seat."""
        load = self._by_seq.pop(sequence.seq_id, None)
        if load is not None:
            load.sequence = None
            self._void(load)

    def lost(self, lease_id: int) -> bool:
        """The lease is void: whether it was one of these."""
        load = self._loads.get(lease_id)
        if load is not None:
            self._void(load)
        return load is not None

    def lose_all(self) -> None:
        """All leases are void."""
        for load in list(self._loads.values()):
            self._void(load)

    def forget_connector(self) -> None:
        """It is gone. Nobody writes its arena any more, so copies from it are as good as ever."""
        self._is_connected = False
        self._asks.clear()
        if self._seats is not None:
            self._seats.loader_changed(False)
        for load in list(self._loads.values()):
            load.is_orphan, load.is_open = True, False
            self._end_if_over(load)

    def validate(self) -> None:
        """Raises AssertionError."""
        for load in self._loads.values():
            assert load.is_open or load.pieces, "a load that is over is still known"
            assert load.sequence is not None or not load.is_open, "the open load of nobody"
        living = {load.sequence.seq_id: load for load in self._loads.values() if load.sequence is not None}
        assert living == self._by_seq, "whose load it is is not clear"
        for load in living.values():
            assert load.sequence is not None
            assert load.sequence.remote is not None, f"{load.sequence} goes on, and its blocks are written"

    def _void(self, load: RemoteLoad) -> None:
        load.is_open = load.is_good = False
        self._end_if_over(load)

    def _end_if_over(self, load: RemoteLoad) -> bool:
        if load.is_open or load.pieces:
            return False
        del self._loads[load.lease_id]
        if not load.is_orphan:
            self._released.append(load.lease_id)
        sequence, load.sequence = load.sequence, None
        if sequence is not None:
            del self._by_seq[sequence.seq_id]
            self._loaded(sequence, load.end, True)
        return True

    def _loaded(self, sequence: Sequence | None, end: int, is_over: bool) -> None:
        if sequence is not None and self._seats is not None:
            self._seats.loaded(sequence, end, is_over)
