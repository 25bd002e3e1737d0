"""PURE. Sequences of a decode replica whose prompt another replica computes.

Such a sequence waits for its turn like any other. Admitted, it has a seat and blocks for its whole prompt, is in no
step, and its router is told (`Seated`). It goes on when the router has said `Continue` and its blocks are there or will
not come: without tokens it computes its prompt itself, with tokens whatever is missing, which is at most the last,
unfilled block if all went well.

It never goes on without `Continue`: the client may have the first token already, and would get it twice. Who hears
nothing for too long is given back.
"""

from __future__ import annotations

from math import inf

from replica.block_manager import BlockManager
from replica.hand_over_messages import KVSource, Seated
from replica.hand_over_times import HandOverTimes
from replica.loaded_sequences import LoadedSequences
from replica.messages import RouterId
from replica.remote_loads import Loader
from replica.running_set import RunningSet
from replica.sequence import Sequence, Status


class Remote:
    """Of one sequence, until it goes on, is put back after `Continue`, or ends."""

    __slots__ = ("end", "has_tokens", "is_loaded", "num_cached", "source", "until", "was_told")

    def __init__(self, source: KVSource) -> None:
        self.source = source
        #: the router was told of the seat
        self.was_told = False
        #: the router has said `Continue`
        self.has_tokens = False
        #: nothing more will be loaded
        self.is_loaded = False
        #: of its prompt, tokens that were in the pool when it was admitted
        self.num_cached = 0
        #: leading blocks of its prompt that are there
        self.end = 0
        #: when it is given back (no `Continue`), or goes on with what it has; None: it has no seat
        self.until: float | None = None


class RemotePrefills:
    """Those of one replica. Knows nobody who has gone on."""

    def __init__(self, blocks: BlockManager, running: RunningSet, loaded: LoadedSequences) -> None:
        self._blocks = blocks
        self._running = running
        self._loaded = loaded
        self._waiting: dict[int, Sequence] = {}
        self._seated: list[tuple[RouterId, Seated]] = []
        #: known tokens of all of them, but for those in the pool: nobody here computes them
        self.num_tokens = 0
        #: waiting for a seat: the walk over the queue goes on for them when a step is full
        self.num_unseated = 0
        #: somebody calls `loaded`; else everything is computed here
        self.has_loader = False
        self.loader: Loader | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> list[Sequence]:
        """For a seat, for `Continue`, or for blocks."""
        return list(self._waiting.values())

    def accept(self, sequence: Sequence, source: KVSource) -> None:
        """It was accepted, and is in no queue yet."""
        sequence.remote = Remote(source)
        sequence.record.hand_over = HandOverTimes()
        self._waiting[sequence.seq_id] = sequence
        self.num_tokens += sequence.num_tokens
        self.num_unseated += 1

    def begin(self, sequence: Sequence, now: float) -> bool:
        """It was admitted just now. True: it may not be in a step."""
        remote = sequence.remote
        if remote is None:
            return False
        num_cached = sequence.num_computed_tokens
        blocks = self._blocks
        # an unfilled block is computed here in any case, and the token behind a full prefix; a chain with holes, or
        # without hashes, cannot be handed over
        can_wait = blocks.is_caching and blocks.window is None
        is_waiting = can_wait and sequence.num_uncomputed_tokens > blocks.block_size
        if not remote.was_told:
            source = remote.source
            told = Seated(sequence.request_id, source.hand_over, sequence.index, num_cached, is_waiting)
            self._seated.append((sequence.router_id, told))
            remote.was_told = True
        if not is_waiting:
            self._leave(sequence)
            return False
        self.num_unseated -= 1
        self.num_tokens -= num_cached
        remote.num_cached = num_cached
        remote.end = num_cached // self._blocks.block_size
        remote.until = now + remote.source.continue_within_s
        if self.loader is not None:
            self.loader.follow(sequence)
        return True

    def loader_changed(self, is_there: bool) -> list[Sequence]:
        """Whether anything can be loaded from now on. Returns who has a seat, and waits."""
        self.has_loader = is_there
        return [sequence for sequence in self._waiting.values() if _until(sequence) is not None]

    def take_seated(self) -> list[tuple[RouterId, Seated]]:
        """What to tell routers."""
        seated, self._seated = self._seated, []
        return seated

    def waits_for(self, sequence: Sequence, hand_over: str) -> bool:
        """`Continue` of this hand-over is news to it."""
        remote = sequence.remote
        return remote is not None and remote.source.hand_over == hand_over and not remote.has_tokens

    def go_on(self, sequence: Sequence, token_ids: list[int], now: float) -> None:
        """`Continue`, while it runs or is in no queue."""
        remote = sequence.remote
        assert remote is not None
        remote.has_tokens = True
        self.num_tokens += len(token_ids)
        for token_id in token_ids:
            sequence.append(token_id)
        if token_ids:
            sequence.take_prompt_logprobs()  # P has told them
        if sequence.status is not Status.RUNNING:
            self._leave(sequence)  # in its turn it loads or computes like any other that returns
        elif remote.is_loaded or not token_ids or not self.has_loader:
            self._stop(sequence)
        else:
            remote.until = now + remote.source.load_within_s

    def loaded(self, sequence: Sequence, end: int, is_over: bool) -> None:
        """The leading `end` blocks of its prompt are in its blocks; `is_over`: more will not come."""
        remote = sequence.remote
        if remote is None or remote.until is None:
            return
        remote.end, remote.is_loaded = max(remote.end, end), remote.is_loaded or is_over
        if remote.is_loaded and remote.has_tokens:
            self._release(sequence)

    def next_step(self, sequence: Sequence) -> None:
        """It was admitted, need not wait, and found nothing left in the step."""
        self._loaded.take_in(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """It lost its blocks. Before `Continue` it waits for another seat, after it it returns like any other."""
        remote = sequence.remote
        if remote is None:
            return
        if remote.has_tokens:
            self._leave(sequence)
        elif remote.until is not None:
            self.num_tokens += remote.num_cached
            remote.until, remote.is_loaded, remote.end, remote.num_cached = None, False, 0, 0
            self.num_unseated += 1

    def ended(self, sequence: Sequence) -> None:
        """Whatever it waited for."""
        if sequence.remote is not None:
            self._leave(sequence)

    @property
    def next_deadline(self) -> float | None:
        deadlines = [until for s in self._waiting.values() if (until := _until(s)) is not None and until < inf]
        return min(deadlines, default=None)

    def overdue(self, now: float) -> list[Sequence]:
        """Who is to be given back; who only waits for blocks goes on without them."""
        late = [s for s in self._waiting.values() if (until := _until(s)) is not None and until <= now]
        for sequence in late:
            if sequence.remote is not None and sequence.remote.has_tokens:
                self._stop(sequence)
        return [sequence for sequence in late if sequence.remote is not None and not sequence.remote.has_tokens]

    def validate(self) -> None:
        """Raises AssertionError."""
        everyone = self._waiting.values()
        assert self.num_tokens == sum(map(_num_awaited, everyone)), "awaited tokens are counted wrongly"
        assert self.num_unseated == sum(_until(s) is None for s in everyone), "unseated ones are counted wrongly"
        for sequence in everyone:
            assert sequence.remote is not None, f"{sequence} has gone on"
            assert sequence.status is not Status.FINISHED, f"{sequence} waits no more"
            assert (_until(sequence) is not None) == (sequence.status is Status.RUNNING), f"{sequence}: a seat or none?"

    def _stop(self, sequence: Sequence) -> None:
        """It waits for no more blocks; what is written just now is over in a moment."""
        if sequence.remote is not None and self.loader is not None and self.loader.stop(sequence):
            sequence.remote.until = inf
        else:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """It takes part in the next step."""
        remote, size = sequence.remote, self._blocks.block_size
        assert remote is not None
        self._leave(sequence)
        num_computed = max(sequence.num_computed_tokens, remote.end * size)
        if num_computed == sequence.num_tokens:  # without a first token the last one of its prompt gives it
            num_computed -= size
        if num_computed + 1 >= sequence.num_tokens and self._blocks.grow(sequence, sequence.num_tokens) is None:
            # the runner hears of it with the blocks that it has then, so a decode may not lack one: the last block of
            # its prompt is computed again
            num_computed -= size
        self._running.cover(sequence)
        sequence.num_computed_tokens = max(sequence.num_computed_tokens, num_computed)
        self._blocks.commit(sequence)
        self._loaded.take_in(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.num_unseated -= _until(sequence) is None
        self.num_tokens -= _num_awaited(sequence)
        del self._waiting[sequence.seq_id]
        sequence.remote = None


def _until(sequence: Sequence) -> float | None:
    return None if sequence.remote is None else sequence.remote.until


def _num_awaited(sequence: Sequence) -> int:
    return sequence.num_tokens - (0 if sequence.remote is None else sequence.remote.num_cached)


def is_away(sequence: Sequence) -> bool:
    """It runs, and another replica computes its prompt."""
    return sequence.remote is not None
