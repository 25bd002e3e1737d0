"""PURE. A replica's half of the KVConnector: which sequence loads what, which blocks are stored, what is told to whom.

Messages of the connector, the progress of copies and the scheduler's wishes in; messages and copies out. The scheduler
asks at a sequence's turn, and only then: a lease is short, and what the pool itself has is known. Everything has a
deadline, and its end is that the tokens are computed.

Without a connector (not there yet, or gone) it does nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from replica.block_manager import BlockManager
from replica.block_offers import Offer, offer_of
from replica.copy_line import CopyBatch, CopyJob, CopyLine
from replica.copy_pace import CopyPace
from replica.kv_loads import BlockLoads, Load, LoadState
from replica.kv_messages import (
    NO_ARENA,
    Acquire,
    Acquired,
    ArenaPlace,
    Clear,
    FromConnector,
    LostSlots,
    Release,
    Reserved,
    TierEvent,
    ToConnector,
)
from replica.kv_stores import BlockStores, Reservation
from replica.remote_loads import RemoteLoad, RemoteLoads, Seats
from replica.sequence import Sequence, Status
from replica.step import StepResult
from replica.transfer_counters import TransferCounters

#: a process that stood still for this share of its lease trusts nothing that it had leased
_STOOD_STILL = 0.6


class TransferLimits(msgspec.Struct, frozen=True):
    """What a replica wants of its connector."""

    #: with fewer blocks to be had a sequence does not wait for them
    min_load_blocks: int = 2
    #: a sequence waits for an answer at most so long, and so do blocks that are to be stored
    load_wait_s: float = 0.1
    #: of the pool, what background stores may pin
    store_share: float = 0.125


class KVTransfer:
    """Owns leases, reservations and the line of copies of one replica. Does not move sequences between queues: it
    returns those that may go on.
    """

    def __init__(self, blocks: BlockManager, limits: TransferLimits | None = None) -> None:
        assert blocks.is_caching, "blocks have no hashes"
        assert blocks.window is None, "blocks come and go"
        self._blocks = blocks
        self._limits = limits or TransferLimits()
        blocks.record_offers()
        self.counters = TransferCounters()
        self._line = CopyLine()
        self._loads = BlockLoads(blocks)
        #: of sequences whose prompt another replica computes
        self._remote = RemoteLoads(blocks, self._loads.ids, self.counters)
        most_pinned = max(1, int(self._limits.store_share * blocks.num_blocks))
        self._stores = BlockStores(blocks, most_pinned, self._limits.load_wait_s)
        self._outbox: list[ToConnector] = []
        #: what the connector is said to have; None: it has not said
        self._known: set[bytes] | None = None
        self._place: ArenaPlace | None = None
        self._lease_s = 0.0
        self._ticked_at: float | None = None
        self._num_clears = 0
        self.pace = CopyPace(blocks.block_size)
        #: put back, and kept by the connector
        self._swapped: set[int] = set()

    def serve(self, seats: Seats, token_s: Callable[[], float]) -> None:
        """`seats`: who waits for blocks that another replica computes; `token_s`: seconds of a computed prompt token,
        0: not measured.
        """
        self._remote.serve(seats)
        self.pace.token_s = token_s

    # ---- the connector ----

    @property
    def is_connected(self) -> bool:
        return self._place is not None

    def connected(self, place: ArenaPlace, lease_s: float, now: float) -> None:
        """A connector is there, perhaps another one than before: `gone` was called in between."""
        assert self._place is None, "gone() first"
        self._place, self._lease_s, self._ticked_at = place, lease_s, now
        self._line.use(place)
        self._remote.connected()

    def gone(self) -> list[Sequence]:
        """The connection is over. What was not copied yet will not be; copies under way go on, since whoever has mapped
        the arena keeps it. Returns who need not wait any more.
        """
        self._place, self._known = None, None
        self._outbox.clear()
        waiting = self._loads.forget_connector()
        self._stores.forget_connector()
        for job in self._line.drop_unsent():
            self._take(job, ok=False)
        self._remote.forget_connector()
        # its memory stays as long as somebody has it mapped; and a rank's open door keeps us out
        self._line.use(NO_ARENA)
        return waiting

    def receive(self, message: FromConnector, now: float) -> list[Sequence]:
        """Returns who need not wait any more. What comes late or twice is ignored."""
        match message:
            case Acquired():
                return self._acquired(message, now)
            case Reserved():
                self._reserved(message)
            case LostSlots(lease_id=lease_id):
                if self._remote.lost(lease_id):
                    return []
                sequence = self._loads.lost(lease_id)
                return [] if sequence is None else [sequence]
            case TierEvent():
                self._learn(message)
        return []

    def take_messages(self) -> list[ToConnector]:
        """To be sent in this order."""
        if released := self._loads.released:
            self._outbox.append(Release(released))
            self._loads.released = []
        self._outbox += self._remote.take_messages()
        messages, self._outbox = self._outbox, []
        return messages

    # ---- time ----

    @property
    def next_deadline(self) -> float | None:
        """When `tick` has something to do, if nothing happens before."""
        asked_at, given_up_at = self._loads.oldest_ask(), self._stores.next_deadline()
        answer_at = None if asked_at is None else asked_at + self._limits.load_wait_s
        return min((at for at in (answer_at, given_up_at) if at is not None), default=None)

    def tick(self, now: float) -> list[Sequence]:
        """Time has passed; at least once a second. Returns who need not wait any more."""
        last, self._ticked_at = self._ticked_at, now
        waiting = []
        if self.is_connected and last is not None and now - last > _STOOD_STILL * self._lease_s:
            # the connector may have taken the leases back, and others may write there
            waiting = self._lose_all()
        before = now - self._limits.load_wait_s + 1e-9
        late = self._loads.overdue(before)
        self.counters.failed_loads += len(late)
        self._stores.give_up(now)
        return waiting + late

    # ---- loads ----

    @property
    def num_wanting(self) -> int:
        """Sequences that wait as blocked."""
        return self._loads.num_wanting

    @property
    def num_loading(self) -> int:
        """Running sequences that are in no step yet, and copies for those that have ended."""
        return self._loads.num_loading + self._remote.num_copying

    @property
    def num_awaited(self) -> int:
        """Sequences with a seat whose prompt's blocks come from another replica, and have not all come."""
        return len(self._remote)

    @property
    def num_swapped(self) -> int:
        """Put back sequences whose KV is kept, and that wait for their turn."""
        return len(self._swapped)

    @property
    def num_storing(self) -> int:
        """Offers that are not over: not answered, or being copied."""
        return len(self._stores)

    def may_help(self, sequence: Sequence) -> bool:
        """It was not asked for yet, and it could be."""
        return self.is_connected and sequence.load is None and not sequence.lacks_prompt_logprobs

    def must_wait(self, sequence: Sequence) -> bool:
        """Blocks that it gave up are still on their way to the arena: asking now would find less."""
        if sequence.status is not Status.RETURNING or not len(self._stores):
            return False
        known = self._known or ()
        first = next((h for h in self._missing(sequence)[1] if h not in known), None)
        return first is not None and self._stores.is_under_way(first)

    def ask(self, sequence: Sequence, now: float) -> bool:
        """It is its turn, and there is room: True if it has to wait for an answer first."""
        first, hashes = self._missing(sequence)
        if self._known is not None:
            hashes = hashes[: next((i for i, h in enumerate(hashes) if h not in self._known), len(hashes))]
        is_kept = sequence.seq_id in self._swapped  # that was decided when it was put back
        if len(hashes) < self._limits.min_load_blocks or not (
            is_kept or self.pace.is_worth_it(len(hashes), self._line.num_copies)
        ):
            return False
        if self._known is not None and self._known.issuperset(sequence.block_hashes[:first]):
            # what the pool has now may be taken by others before it is admitted, and blocks behind a gap are worth
            # nothing; a lease costs nothing
            first, hashes = 0, sequence.block_hashes[:first] + hashes
        load = self._loads.ask(sequence, first, hashes, now)
        before = sequence.block_hashes[first - 1] if first else b""
        self._outbox.append(Acquire(load.lease_id, hashes, self._limits.load_wait_s, first=first, before=before))
        return True

    def begin(self, sequence: Sequence) -> bool:
        """It was admitted just now. True: its blocks are loaded first, and it may not be in a step."""
        self._swapped.discard(sequence.seq_id)
        self._stores.sinks.begin(sequence)
        job = self._loads.begin(sequence)
        if job is None:
            return False
        self._line.add(job)
        self.counters.loads += 1
        return True

    def num_left(self, sequence: Sequence) -> int:
        """Of one that is loading: tokens that are to be computed then."""
        assert sequence.load is not None
        return sequence.num_tokens - sequence.load.end * self._blocks.block_size

    def ended(self, sequence: Sequence) -> None:
        """It has finished or was preempted, whatever it waited for."""
        self._swapped.discard(sequence.seq_id)
        self._loads.ended(sequence)
        self._remote.ended(sequence)
        self._stores.sinks.ended(sequence, self.is_connected)

    # ---- stores ----

    def plan_stores(self, now: float) -> None:
        """Offer what was computed since the last step."""
        self._stores.offer(self._blocks.take_offers())
        if not self.is_connected:
            return
        self._outbox += self._stores.reserve_for_sinks(now)
        if (message := self._stores.reserve(self._known or (), self.pace.is_worth_it(1, 0), now)) is not None:
            self._outbox.append(message)

    def keep(self, sequence: Sequence, now: float) -> None:
        """It is being put back and still has its blocks: what is computed of it will stay."""
        blocks = self._kept(sequence)
        if not self.is_connected or not blocks:
            return
        self.counters.offloads += 1
        self._swapped.add(sequence.seq_id)
        if (message := self._stores.keep(blocks, self._known or (), now)) is not None:
            self._outbox.append(message)

    def times(self, sequence: Sequence, num_shared: int) -> tuple[float, float] | None:
        """Seconds to keep it and load it again, all copies before its own included, and to compute it again, if it
        shares `num_shared` tokens with others. None: not measured, or nobody would keep it.
        """
        token_s, copy_s = self.pace.token_s(), self.pace.copy_s
        if not self.is_connected or not token_s or not copy_s:
            return None
        blocks = self._kept(sequence)
        known = self._known or ()
        num_missing = sum(
            one.block_hash not in known and not self._stores.is_under_way(one.block_hash) for one in blocks
        )
        num_loaded = max(0, len(blocks) - num_shared // self._blocks.block_size)
        lost = max(0, sequence.num_computed_tokens - num_shared)
        rest = lost - num_loaded * self._blocks.block_size
        copies = num_missing + num_loaded + self._line.num_copies
        return copies * copy_s + max(0, rest) * token_s, lost * token_s

    # ---- copies ----

    def take_copies(self) -> CopyBatch | None:
        """What the next plan tells the runner."""
        return self._line.take()

    @property
    def is_copying(self) -> bool:
        return self._line.is_busy

    def frees_soon(self) -> bool:
        """Blocks come back when copies, or what is about to be copied, are over: nobody need be put back for them."""
        return self.num_loading > 0 or self._blocks.num_pinned_alone > 0

    @property
    def num_freeing(self) -> int:
        """Blocks that are free when the copies under way are over."""
        return self._blocks.num_pinned_alone if len(self._stores) or self.num_loading else 0

    def make_room(self) -> bool:
        """Give up what was offered and not answered, but for what must stay. Returns whether there was any."""
        return self._stores.give_up(with_kept=False)

    def progress(self, result: StepResult) -> list[Sequence]:
        """Returns who is loaded: it goes on with what it has now."""
        over = self._line.progress(result.copied, result.failed_below)
        self.pace.learn(result)
        return [sequence for job, ok in over if (sequence := self._take(job, ok)) is not None]

    def step_failed(self) -> None:
        """The runner raised: perhaps it has not read the plan."""
        self._line.step_failed()

    def runner_lost(self) -> None:
        """All copies are over, and nobody knows how they ended. No sequence is left. A rank may still write until
        `runner_back`, so slots are given back only then (`take_messages` is not to be called before).
        """
        for job in self._line.reset():
            self._take(job, ok=False)
        self._stores.sinks.clear(is_again=False)
        self._stores.give_up()
        if self._place is not None:
            self._line.use(self._place)

    def reset(self) -> None:
        """The prefix cache was emptied, and so are the tiers: nothing that was stored before comes back."""
        self._stores.void_all()
        self._known = None if self._known is None else set()
        if self.is_connected:
            self._outbox.append(Clear(self._num_clears))
            self._num_clears += 1

    def forget_leases(self) -> list[Sequence]:
        """With `reset`: what was leased is computed instead. Returns who need not wait any more."""
        return self._lose_all()

    def validate(self) -> None:
        """Raises AssertionError."""
        self._loads.validate()
        self._remote.validate()
        self._stores.validate()

    def _lose_all(self) -> list[Sequence]:
        self._remote.lose_all()
        return self._loads.lose_all()

    def _acquired(self, message: Acquired, now: float) -> list[Sequence]:
        if (job := self._remote.acquired(message)) is not None:
            self._line.add(job)
            return []
        load = self._loads.acquired(message.lease_id, message.slots)
        if load is None or load.sequence is None:
            return []
        self.counters.load_wait_s += max(0.0, now - load.asked_at)
        self.counters.failed_loads += len(message.slots) < len(load.hashes)
        return [load.sequence]

    def _reserved(self, message: Reserved) -> None:
        self.counters.blocks_refused += sum(slot < 0 for slot in message.slots)
        match self._stores.reserved(message.reservation_id, message.slots):
            case CopyJob() as job:
                self._line.add(job)
            case None:
                pass
            case seal:
                self._outbox.append(seal)

    def _take(self, job: CopyJob, ok: bool) -> Sequence | None:
        """A job is over. Returns who is loaded."""
        if isinstance(job.owner, Reservation):
            seal, hashes = self._stores.copied(job.owner, ok)
            self.counters.blocks_stored += len(hashes)
            if seal is not None:
                self._outbox.append(seal)
                if self._known is not None:
                    self._known.update(hashes)
            return None
        load = job.owner
        if isinstance(load, RemoteLoad):
            self._remote.copied(load, ok)
            return None
        assert isinstance(load, Load)
        sequence = self._loads.copied(load, ok)
        if sequence is None:
            return None
        if load.is_void:
            self.counters.failed_loads += 1
            return sequence
        self.counters.blocks_loaded += len(job.pairs)
        sequence.num_computed_tokens = load.end * self._blocks.block_size
        self._blocks.commit(sequence)
        return sequence

    def _learn(self, event: TierEvent) -> None:
        known = set() if self._known is None or event.is_cleared else self._known
        known.difference_update(event.removed)
        for hashes in event.stored.values():
            known.update(hashes)
        self._known = known

    def _missing(self, sequence: Sequence) -> tuple[int, list[bytes]]:
        """Position of the first block that the pool does not have, and the hashes from there on; without the block of
        the last token, which is always computed.
        """
        first = len(self._blocks.find_prefix(sequence))
        return first, sequence.block_hashes[first : (sequence.num_tokens - 1) // self._blocks.block_size]

    def _kept(self, sequence: Sequence) -> list[Offer]:
        """Its blocks that are full and computed."""
        return [offer_of(sequence, position) for position in range(sequence.num_blocks_committed)]


def is_loading(sequence: Sequence) -> bool:
    """It runs, but its blocks are not filled yet."""
    return sequence.load is not None and sequence.load.state is LoadState.LOADING
