"""PURE. Who has to leave the queue so that a newcomer may enter it, or why the newcomer may not.

Two limits: the queue cap, in sequences, and `shed_above_queued_tokens`. Requests that are wholly queued (nothing of
them was ever scheduled) may be shed, as a whole and least urgent first:
- at the cap, for a newcomer that outranks them (`replica/order.py`);
- above the tokens, for a newcomer that comes before them in the order.
If that does not make enough room, nobody is shed and the newcomer is refused. A request that is longer than the limit
on tokens by itself is taken while nobody else is queued: else it would be refused for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from heapq import merge

from replica.admission import Refused
from replica.messages import GenerateRequest, RefusalReason
from replica.order import OrderPolicy, QueueKey, Standing, outranks
from replica.permits import First
from replica.places import Places
from replica.request_book import RequestBook, key_of
from replica.sequence import Sequence
from replica.waiting_queue import WaitingQueue


class Shedding:
    """Looks at who waits; ends nobody."""

    def __init__(
        self, policy: OrderPolicy, requests: RequestBook, queues: tuple[WaitingQueue, ...], cap: int, max_tokens: int
    ) -> None:
        self._policy = policy
        self._requests = requests
        #: in which those wait that were never scheduled; others may be among them
        self._queues = queues
        self.cap = cap
        self._max_tokens = max_tokens

    @property
    def num_queued(self) -> int:
        return sum(queue.num_fresh for queue in self._queues)

    def make_room(
        self, request: GenerateRequest, seq_id: int, num_permits: int, first: First | None, places: Places | None
    ) -> list[Sequence]:
        """Sequences to end so that `request` may be queued. Raises Refused. Its first sequence would be `seq_id`.

        `num_permits`: places that are reserved for others. `first`: who waits for a place and comes first, unless
        `request` has a permit; `places`: who has how many.
        """
        # before anything is hashed, so as if nothing of it were cached; of its sequences the least urgent counts
        work = max(len(s.prompt_token_ids) + s.sampling.max_tokens for s in request.sequences)
        newcomer = (request.order_key[1], self._policy.key(request.order_key, work, seq_id))
        num_sequences, num_tokens = len(request.sequences), request.num_prompt_tokens
        num_taken = self.num_queued + num_permits
        # above the cap (it was lowered) places are taken over one for one: the newcomer need not bring it down again
        surplus = num_sequences - max(0, self.cap - num_taken)
        num_queued_tokens = sum(queue.num_tokens for queue in self._queues)
        shed: list[Sequence] = []
        if surplus <= 0 and first is not None and self._is_behind(request, newcomer[1], first, places):
            raise Refused(RefusalReason.QUEUE_FULL, "the free places in the queue are for requests that come before it")
        if surplus <= 0 and not self._is_too_much(num_queued_tokens, num_tokens):
            return shed
        for siblings in self._from_the_end(newcomer):
            is_too_much = self._is_too_much(num_queued_tokens, num_tokens)
            if surplus <= 0 and not is_too_much:
                break
            if is_too_much or outranks(self._policy, newcomer, siblings[0].standing):
                shed += siblings
                surplus -= len(siblings)
                num_queued_tokens -= sum(sequence.num_tokens for sequence in siblings)
        if surplus > 0:
            raise Refused(
                RefusalReason.QUEUE_FULL,
                f"{num_taken} of {self.cap} places in the queue are taken, {num_sequences} wanted",
            )
        if self._is_too_much(num_queued_tokens, num_tokens):
            raise Refused(
                RefusalReason.SHED,
                f"{num_queued_tokens} tokens of more urgent requests are queued; with {num_tokens} more there would be "
                f"more than {self._max_tokens}",
            )
        return shed

    def num_queued_by_tenant(self) -> Counter[str]:
        """Sequences that wait, returning ones that are blocked included: those are few."""
        counts: Counter[str] = Counter()
        for queue in self._queues:
            counts.update(queue.tenants)
        return counts

    def make_way(self, first: First, places: Places) -> list[Sequence]:
        """The last request of the tenant that has the most places for its weight, if it has as many still as `first`
        would have; else nobody.
        """
        most = places.share(first.tenant, first.weight, first.wish.num_sequences)
        leaving: list[Sequence] = []
        seen = {first.tenant}
        for sequence in merge(*map(reversed, self._queues), key=lambda s: s.queue_key, reverse=True):
            if sequence.tenant in seen or not (siblings := self._requests.untouched(sequence)):
                continue
            seen.add(sequence.tenant)
            left = places.share(sequence.tenant, sequence.tenant_weight, -len(siblings))
            if left >= most:
                leaving, most = siblings, left
        return leaving

    def _is_behind(self, request: GenerateRequest, key: QueueKey, first: First, places: Places | None) -> bool:
        """Routers do not know the work, so what they sort by under a policy that does is the arrival."""
        assert places is not None
        share = places.share(request.tenant, request.tenant_weight)
        value = key[2] if self._policy.needs_work else key[1]
        return (places.share(first.tenant, first.weight), first.wish.value) <= (share, value)

    def _is_too_much(self, num_queued_tokens: int, num_tokens: int) -> bool:
        return 0 < self._max_tokens < num_queued_tokens + num_tokens and num_queued_tokens > 0

    def _from_the_end(self, newcomer: Standing) -> Iterator[list[Sequence]]:
        """Requests that may be shed and come behind the newcomer, last in order first; their sequences."""
        seen = set()
        is_shared = len(self.num_queued_by_tenant()) > 1  # then turns sort them, which a newcomer has not got yet
        for sequence in merge(*map(reversed, self._queues), key=lambda s: s.queue_key, reverse=True):
            if sequence.standing[1] <= newcomer[1]:
                if is_shared:
                    continue
                return
            key = key_of(sequence)
            if key in seen:
                continue
            seen.add(key)
            if siblings := self._requests.untouched(sequence):
                yield siblings


def last_queued(policy: OrderPolicy, queues: Iterable[WaitingQueue]) -> tuple[int, float] | None:
    """Priority and standing of the least urgent one, whose place a more urgent request might take; None: nobody's."""
    if not policy.has_classes:
        return None
    last = max((s for queue in queues if (s := queue.last) is not None), key=lambda s: s.queue_key, default=None)
    return None if last is None else (last.order_key[1], last.queue_key[1])
