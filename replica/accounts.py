"""PURE. What a replica can tell of its sequences: where the time of each went so far, what it does, what it waits for.

Asked for at need (`messages.Explain`), so it may walk over all of them; only the end of a sequence writes something
down.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from replica.kv_transfer import is_loading
from replica.messages import RequestId, SequenceAccount, SequenceState, Stages, WaitCause
from replica.sequence import Sequence, Status

#: ended sequences that are still known, about 1 KB each
MAX_ENDED = 1000
#: most accounts in one answer, whatever was asked for
MAX_ACCOUNTS = 1000


def stages(sequence: Sequence, until: float | None = None) -> Stages:
    """Where its time went, between the instants that it reached. With `until` the stage that it is in, or ended in,
    counts up to then.
    """
    first, token, record = sequence.first_scheduled_at, sequence.first_token_at, sequence.record
    over = sequence.finished_at if sequence.finished_at is not None else until
    # when its end was decided; it may have come while the runner worked on it
    end = over if record.end_asked_at is None else record.end_asked_at
    queued_until = first if first is not None else end
    since = record.room_wait_since
    return Stages(
        queued_s=_between(sequence.submitted_at, first if until is None else queued_until),
        prefill_s=_between(first, token if token is not None or until is None else end),
        decode_s=_between(token, end),
        num_preemptions=sequence.num_preemptions,
        no_room_s=0.0 if since is None or queued_until is None else max(0.0, queued_until - since),
        waited_for=record.waited_for,
        put_back_s=_put_back_s(sequence, over),
        chunks=record.chunks.copy(),
        num_chunks=record.num_chunks,
        preemptions=record.preemptions.copy(),
        num_passes=sequence.num_passes,
        finish_s=_between(end, over) or 0.0,
        waits=dict(record.waits or {}) if over is None else record.waits_until(over),
        grammar_s=record.grammar_s,
        away_s=0.0 if (times := record.hand_over) is None else times.away_s(first, end),
        transfer_wait_s=0.0 if times is None else times.wait_s(end),
        transfer_hidden_s=0.0 if times is None else times.hidden_s,
    )


class EndedSequences:
    """Accounts of those that ended last; the oldest make room."""

    def __init__(self, most: int = MAX_ENDED) -> None:
        self._accounts: deque[SequenceAccount] = deque(maxlen=most)

    def __len__(self) -> int:
        return len(self._accounts)

    def add(self, sequence: Sequence, num_blocks_needed: int, now: float) -> None:
        self._accounts.append(account(sequence, num_blocks_needed, now, Queue()))

    def of(self, request_id: RequestId) -> list[SequenceAccount]:
        return [found for found in self._accounts if found.request_id == request_id]


def oldest(living: Iterable[Sequence], limit: int) -> list[Sequence]:
    """All sequences of the `limit` requests that have been here longest, as far as one answer goes."""
    found: list[Sequence] = []
    requests: set[RequestId] = set()
    for sequence in sorted(living, key=lambda s: (s.submitted_at, s.seq_id)):  # those of one request follow each other
        requests.add(sequence.request_id)
        if len(requests) > limit or len(found) == MAX_ACCOUNTS:
            break
        found.append(sequence)
    return found


class Queue:
    """Who waits for a turn at this moment, in the order in which they are looked at."""

    def __init__(self, in_turn: Iterable[Sequence] = (), looked_at: float | None = None) -> None:
        """`looked_at`: when a step was planned last."""
        self._looked_at = looked_at
        self._position: dict[int, int] = {}
        #: what the first one lacks; None: it has not been looked at yet, or nobody waits
        self.lacks: WaitCause | None = None
        for position, sequence in enumerate(in_turn):
            self._position[sequence.seq_id] = position
            if position == 0 and self.lacks_since(sequence) is not None:
                self.lacks = sequence.record.waited_for

    def num_ahead(self, sequence: Sequence) -> int | None:
        """None: it does not wait for a turn."""
        return self._position.get(sequence.seq_id)

    def lacks_since(self, sequence: Sequence) -> float | None:
        """Since when it lacks what it lacked when it was looked at. What it lacked in an earlier step is past, if
        others came before it since: it waits for those.
        """
        record = sequence.record
        return record.lacks_since if record.looked_at == self._looked_at else None


def account(sequence: Sequence, num_blocks_needed: int, now: float, queue: Queue) -> SequenceAccount:
    """All that is to be told about one sequence. `num_blocks_needed`: for its known tokens."""
    record, num_ahead = sequence.record, queue.num_ahead(sequence)
    is_waiting = sequence.status in (Status.QUEUED, Status.RETURNING)
    return SequenceAccount(
        request_id=sequence.request_id,
        index=sequence.index,
        router_id=sequence.router_id,
        state=_state(sequence, num_ahead),
        at=now,
        submitted_at=sequence.submitted_at,
        stages=stages(sequence, now),
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_output_tokens=sequence.num_output_tokens,
        num_cached_tokens=sequence.num_cached_tokens,
        num_computed_tokens=sequence.num_computed_tokens,
        num_blocks=len(sequence.held_blocks),
        num_blocks_needed=num_blocks_needed,
        lacks_since=queue.lacks_since(sequence),
        num_ahead=num_ahead,
        priority=sequence.order_key[1],
        finish_reason=None if sequence.finish_reason is None else sequence.finish_reason.value,
        ended_at=sequence.finished_at,
        waiting_since=record.waiting_since if is_waiting else None,
        turn_lacks=queue.lacks if num_ahead is not None else None,
    )


def _state(sequence: Sequence, num_ahead: int | None) -> SequenceState:
    match sequence.status:
        case Status.FINISHED:
            return SequenceState.ENDED
        case Status.RUNNING if is_loading(sequence):
            return SequenceState.LOADING
        case Status.RUNNING:
            return SequenceState.PREFILL if sequence.first_token_at is None else SequenceState.DECODE
    if num_ahead is None:
        return SequenceState.GRAMMAR if sequence.load is None else SequenceState.LOADING
    return SequenceState.QUEUED if sequence.status is Status.QUEUED else SequenceState.RETURNING


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def _put_back_s(sequence: Sequence, over: float | None) -> float:
    """A wait that goes on counts as well."""
    record = sequence.record
    waits = sequence.status is Status.RETURNING and sequence.first_scheduled_at is not None
    return record.put_back_s + (over - record.waiting_since if waits and over is not None else 0.0)
