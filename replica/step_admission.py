"""PURE. Which of the waiting sequences join the running ones in a step.

They are looked at in the order of their turn: returning ones, then queued ones, each by key; a queued one that outranks
a returning one goes before it, and so does one of another tenant that has fewer places for its weight
(`replica/seat_shares.py`). Somebody who cannot join now
- because its lane is full (`replica/prefill_lanes.py`) is passed by all behind it;
- because there are not enough blocks for it is passed, if it is queued, by some behind it: in one step at most
  `admission_look_past` sequences are left behind, and once `max_head_passes` were admitted past a sequence, nobody
  passes it any more. From then on freed blocks add up for it, and it waits only for those who run already;
- and, returning, because of blocks, is passed by nobody;
- because the KVConnector of the node may have blocks of it is asked for there, waits as *blocked* for the answer, a few
  milliseconds at most, and has its place again (`replica/kv_transfer.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

from replica.block_manager import BlockManager
from replica.config import SchedulerConfig
from replica.kv_transfer import KVTransfer
from replica.messages import WaitCause
from replica.order import OrderPolicy, outranks
from replica.progress import SchedulerCounters
from replica.remote_prefill import RemotePrefills
from replica.running_set import RunningSet
from replica.seat_shares import SeatShares
from replica.sequence import Sequence, Status
from replica.step_budget import StepBudget
from replica.tenant_ledger import TenantLedger
from replica.waiting_queue import WaitingQueue


class Turns:
    """A walk over the waiting sequences in the order of their turn."""

    __slots__ = ("_from_queued", "_policy", "_queued", "_queued_at", "_returning", "_returning_at", "_seats")

    def __init__(self, returning: WaitingQueue, queued: WaitingQueue, policy: OrderPolicy, seats: SeatShares) -> None:
        self._returning, self._returning_at = returning, 0
        self._queued, self._queued_at = queued, 0
        self._policy = policy
        self._seats = seats
        self._from_queued = False

    def current(self) -> Sequence | None:
        """Who comes next; None: nobody is left."""
        returning, queued = self._returning.at(self._returning_at), self._queued.at(self._queued_at)
        self._from_queued = returning is None or (
            queued is not None
            and (outranks(self._policy, queued.standing, returning.standing) or self._may_pass(queued, returning))
        )
        return queued if self._from_queued else returning

    def _may_pass(self, queued: Sequence, returning: Sequence) -> bool:
        is_lesser = outranks(self._policy, returning.standing, queued.standing)
        return not is_lesser and self._seats.goes_before(queued, returning)

    def skip(self) -> None:
        """The current one stays where it is."""
        if self._from_queued:
            self._queued_at += 1
        else:
            self._returning_at += 1

    def take(self) -> None:
        """The current one leaves its queue."""
        if self._from_queued:
            self._queued.take(self._queued_at)
        else:
            self._returning.take(self._returning_at)


class LookPast:
    """Who was left behind in one step for want of blocks."""

    __slots__ = ("_left_behind", "_max_passes", "_most")

    def __init__(self, most: int, max_passes: int) -> None:
        self._most = most
        self._max_passes = max_passes
        self._left_behind: list[Sequence] = []

    def may_pass(self, sequence: Sequence) -> bool:
        """Whether those behind `sequence`, which does not fit, are looked at."""
        if (
            sequence.status is Status.RETURNING
            or len(self._left_behind) >= self._most
            or sequence.num_passes >= self._max_passes
        ):
            return False
        self._left_behind.append(sequence)
        return True

    def passed(self) -> bool:
        """Somebody was admitted behind them. False: one more may not be."""
        for sequence in self._left_behind:
            sequence.num_passes += 1
        return all(sequence.num_passes < self._max_passes for sequence in self._left_behind)


class _Verdict(enum.Enum):
    JOINS = enum.auto()
    NO_LANE = enum.auto()
    NO_BLOCKS = enum.auto()
    NO_BUDGET = enum.auto()
    #: its answer will take a moment
    ASKS = enum.auto()
    #: blocks of it are on their way to where they are asked for
    NOT_YET = enum.auto()
    #: copies under way free enough blocks; nobody passes it, least of all the one that made way for it
    SOON = enum.auto()


_MISSING = {
    _Verdict.NO_LANE: WaitCause.LANE,
    _Verdict.NO_BLOCKS: WaitCause.BLOCKS,
    _Verdict.NO_BUDGET: WaitCause.BUDGET,
    _Verdict.ASKS: WaitCause.LOAD,
    _Verdict.NOT_YET: WaitCause.LOAD,
    _Verdict.SOON: WaitCause.BLOCKS,
}


class StepAdmission:
    """Moves sequences from the waiting queues to the running set, and plans their first chunk."""

    def __init__(
        self,
        config: SchedulerConfig,
        policy: OrderPolicy,
        blocks: BlockManager,
        returning: WaitingQueue,
        queued: WaitingQueue,
        running: RunningSet,
        counters: SchedulerCounters,
        ledger: TenantLedger,
        blocked: WaitingQueue,
        transfer: KVTransfer | None,
        remote: RemotePrefills,
    ) -> None:
        self._remote = remote
        self._blocked = blocked
        self._transfer = transfer
        self._config = config
        self._policy = policy
        self._blocks = blocks
        self._returning = returning
        self._queued = queued
        self._running = running
        self._seats = SeatShares(running)
        self._counters = counters
        self._ledger = ledger
        self._watermark_blocks = int(config.watermark * blocks.num_blocks)

    @property
    def keep_free(self) -> int:
        """The watermark in blocks; it holds only beside others."""
        return self._watermark_blocks if self._running else 0

    def first(self) -> Sequence | None:
        """Whose turn it is."""
        return Turns(self._returning, self._queued, self._policy, self._seats).current()

    def in_turn(self) -> Iterator[Sequence]:
        """Everybody who waits, in the order in which they are looked at."""
        turns = Turns(self._returning, self._queued, self._policy, self._seats)
        while (sequence := turns.current()) is not None:
            yield sequence
            turns.skip()

    def admit(self, budget: StepBudget, now: float, hosts: frozenset[str] = frozenset()) -> None:
        """As many as places, tokens and blocks allow, until it is the turn of one of the tenants `hosts`."""
        if len(self._running) < self._config.max_num_seqs and budget.tokens_left:
            self._ledger.put_in_order(self._queued, self._running)
        turns = Turns(self._returning, self._queued, self._policy, self._seats)
        look_past = LookPast(self._config.admission_look_past, self._config.max_head_passes)
        while (sequence := turns.current()) is not None:
            if len(self._running) >= self._config.max_num_seqs:
                note_no_room(sequence, WaitCause.SEATS, now)
                return
            if sequence.tenant in hosts:
                note_no_room(sequence, WaitCause.BUDGET, now)
                return
            if not budget.tokens_left and sequence.remote is None:
                note_no_room(sequence, WaitCause.BUDGET, now)
                if not self._remote.num_unseated:
                    return
                turns.skip()  # who is behind it and needs no tokens of a step takes none from it
                continue
            verdict = self._try(sequence, budget, now)
            if verdict is _Verdict.JOINS:
                turns.take()
                self._join(sequence, budget, now)
                if not look_past.passed():
                    return
                continue
            note_no_room(sequence, _MISSING[verdict], now)
            if verdict is _Verdict.ASKS:
                turns.take()
                self._blocked.push(sequence)
            elif verdict in (_Verdict.NO_LANE, _Verdict.NOT_YET) or (
                verdict is _Verdict.NO_BLOCKS and look_past.may_pass(sequence)
            ):
                turns.skip()
            else:
                return

    def _try(self, sequence: Sequence, budget: StepBudget, now: float) -> _Verdict:
        """JOINS: it has its blocks, and nothing else is changed."""
        if sequence.remote is not None:
            return _Verdict.JOINS if self._blocks.admit(sequence, keep_free=self.keep_free) else _Verdict.NO_BLOCKS
        if self._config.enable_chunked_prefill:
            if not budget.lanes.is_open and not budget.lanes.has_place(self._uncached(sequence), budget.tokens_left):
                return _Verdict.NO_LANE
        elif budget.has_prefill and self._uncached(sequence) > budget.tokens_left:
            # without chunks a prompt wants a budget that covers it, but the first one of a step gets its way: else a
            # prompt longer than the budget, or one beside many decodes, would wait for ever
            return _Verdict.NO_BUDGET
        transfer = self._transfer
        if transfer is not None and transfer.may_help(sequence):
            if transfer.must_wait(sequence):
                return _Verdict.NOT_YET
            if self._blocks.num_missing(sequence, self.keep_free) <= 0 and transfer.ask(sequence, now):
                return _Verdict.ASKS
        if self._blocks.admit(sequence, keep_free=self.keep_free):
            return _Verdict.JOINS
        if transfer is not None and transfer.make_room() and self._blocks.admit(sequence, keep_free=self.keep_free):
            return _Verdict.JOINS
        if transfer is not None and self._blocks.num_missing(sequence, self.keep_free - transfer.num_freeing) <= 0:
            return _Verdict.SOON
        return _Verdict.NO_BLOCKS

    def _uncached(self, sequence: Sequence) -> int:
        return sequence.num_tokens - self._blocks.num_hit_tokens(sequence)

    def _join(self, sequence: Sequence, budget: StepBudget, now: float) -> None:
        sequence.record.stopped_waiting(now, was_put_back=sequence.first_scheduled_at is not None)
        sequence.status = Status.RUNNING
        self._running.add(sequence)
        if sequence.first_scheduled_at is None:
            sequence.first_scheduled_at = now
            self._counters.admitted += 1
            self._counters.queue_time_s += now - sequence.submitted_at
            self._counters.prompt_tokens += sequence.num_prompt_tokens
            self._counters.cached_prompt_tokens += sequence.num_cached_tokens
            self._ledger.admitted(sequence)
        if self._remote.begin(sequence, now):
            return
        if self._transfer is not None and self._transfer.begin(sequence):
            budget.lanes.enter(self._transfer.num_left(sequence), 0)
            return
        if not self._config.enable_chunked_prefill:
            budget.allow_whole(sequence.num_uncomputed_tokens)
        budget.spend_prompt(sequence, self._blocks.room(sequence))
        if not sequence.known_to_runner:  # it came in without a token or a lane left, since it was to need none
            self._remote.next_step(sequence)


def note_no_room(sequence: Sequence, cause: WaitCause, now: float) -> None:
    """It was its turn. Waiting after a preemption is not waiting for a first place."""
    sequence.record.found_no_room(cause, now, sequence.first_scheduled_at is None)
