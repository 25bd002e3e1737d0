"""PURE. Whose tenant's turn it is: virtual token counters, after Sheng et al., "Fairness in Serving Large Language
Models" (OSDI 2024).

A tenant's counter is the service it got, over its weight: W_IN for each token of a prompt that had to be computed, when
its sequence is admitted, and W_OUT for each token that was generated. The waiting tenant with the least counter is
admitted next. A tenant that begins to wait is lifted to CREDIT below the least counter of those who wait already:
having been away is little credit. (In the paper it is none. But then a tenant below its share that sends two requests
at once waits for others with the second, though it got less than they did.)

**Bound.** While two tenants both wait, the service over weight that they get differs by at most 2 * U + CREDIT, where
U = (W_IN * L + W_OUT * M) / w: L is the longest prompt, M the most output tokens that the running sequences of one
tenant may still generate, w the smaller weight. Proof: take any moment and the tenant f with the larger counter. When f
was admitted last its counter was the least among those who waited, or f was lifted to the least since. After that it
rose by W_IN * L / w at most for that prompt, and by W_OUT * M / w at most for what its running sequences generated, for
none has been added; and counters of others never fall. So counters differ by at most U, or U + CREDIT if the other has
come since, at any moment in which both wait, and what they rise by between two such moments by at most 2 * U + CREDIT.
(The paper has 2 * max(W_IN * L, W_OUT * M) with M the tokens of the pool, which prompt and output share.) Who is
admitted behind another in one step goes by whole prompts, their cached part included, and a head that does not fit may
be passed: up to `max_head_passes` more prompts of others. Who is put back for another tenant
(`replica/seat_shares.py`) pays nothing twice. The bound is one of a replica; over R replicas the sum is bounded by R
times as much.

Work-conserving: only the order changes, nobody is made to wait for a turn while there is room; but in a guest's step
(`replica/running_work.py`), which is never empty, and never the next one as well.
"""

from __future__ import annotations

from collections.abc import Iterable

from replica.sequence import Sequence
from replica.waiting_queue import WaitingQueue

#: a generated token costs about as much as two of a prompt; the paper's figures
W_IN, W_OUT = 1.0, 2.0
#: What a tenant keeps of the time in which it used less than its share, as service over weight: so many tokens go
#: before others' when it comes back. Poisson arrivals at 80 % of a share beside a flood, virtual time, TTFT p50 with 0,
#: 1,024, 4,096: 229, 106, 75 ms (8 places in the batch), 204, 64, 47 (16). One who was away for an hour and comes with
#: a flood has these before the others get their turn: one or two seconds of two cores.
CREDIT = 4096.0


class TenantLedger:
    """Counters of the tenants of one replica. While only one tenant waits nothing is sorted and nothing is walked."""

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        #: of everybody who ever waited, the latest
        self._weights: dict[str, float] = {}
        #: the counter of whoever was admitted last: where a tenant starts that comes when nobody waits
        self._level = 0.0
        #: some who wait have the turns of a time when two tenants waited
        self._has_turns = False

    @property
    def counters(self) -> dict[str, float]:
        """Service over weight, with what each was lifted; a copy."""
        return dict(self._counters)

    def counter(self, tenant: str) -> float:
        """Of one that runs or waits."""
        return self._counters.get(tenant, self._level)

    def hosts(self, guest: str, tenants: Iterable[str]) -> frozenset[str]:
        """Of `tenants`, those that got so much more than `guest` that their prompts wait for its: by half of CREDIT.
        Two tenants that both have more to do than they may are seldom so far apart.
        """
        most = self.counter(guest) + CREDIT / 2
        return frozenset(tenant for tenant in tenants if tenant != guest and self.counter(tenant) >= most)

    def weights(self, queued: WaitingQueue) -> dict[str, float]:
        """Of the tenants that wait."""
        return {tenant: self._weights[tenant] for tenant in queued.tenants}

    def arrives(self, tenant: str, weight: float, queued: WaitingQueue, running: Iterable[Sequence]) -> None:
        """A sequence of `tenant` is about to join `queued`."""
        self._weights[tenant] = weight
        if tenant in queued.tenants:
            return
        if queued.tenants or len(self._counters) > 1:
            self.settle(running)
        floor = min((self._counters[other] for other in queued.tenants), default=self._level)
        self._counters[tenant] = max(self._counters.get(tenant, floor), floor - CREDIT)

    def admitted(self, sequence: Sequence) -> None:
        """It is scheduled for the first time: its prompt is paid for, as far as it was not cached."""
        num_uncached = sequence.num_prompt_tokens - sequence.num_cached_tokens
        _set_turn(sequence, 0.0)  # if it is put back it waits with those who began, by the policy alone
        counter = self._charge(sequence, W_IN * num_uncached)
        sequence.num_charged_outputs = sequence.num_output_tokens  # what it had before was paid for elsewhere
        self._level = counter

    def settle(self, sequences: Iterable[Sequence]) -> None:
        """Charge what these have generated since they were last looked at."""
        for sequence in sequences:
            num_new = sequence.num_output_tokens - sequence.num_charged_outputs
            if num_new > 0 and sequence.first_scheduled_at is not None:
                sequence.num_charged_outputs += num_new
                self._charge(sequence, W_OUT * num_new)

    def put_in_order(self, queued: WaitingQueue, running: Iterable[Sequence]) -> None:
        """Before somebody is admitted: the queue by tenants' turns, and within a tenant by the policy."""
        if len(queued.tenants) < 2:
            if self._has_turns:
                self._has_turns = False
                self._sort(queued, dict.fromkeys(queued.tenants, 0.0), 0.0)
            return
        self._has_turns = True
        self.settle(running)
        self._sort(queued, {tenant: self._counters[tenant] for tenant in queued.tenants}, W_IN)

    def _sort(self, queued: WaitingQueue, turns: dict[str, float], of_token: float) -> None:
        """`turns`: of each tenant's first sequence; of those behind it, `of_token` later for each token before."""
        for sequence in sorted(queued, key=lambda s: s.queue_key[1:]):
            _set_turn(sequence, turns[sequence.tenant])
            turns[sequence.tenant] += of_token * sequence.num_prompt_tokens / sequence.tenant_weight
        queued.sort_by(lambda s: s.queue_key)

    def _charge(self, sequence: Sequence, amount: float) -> float:
        counter = self._counters.get(sequence.tenant, self._level) + amount / sequence.tenant_weight
        self._counters[sequence.tenant] = counter
        return counter


def _set_turn(sequence: Sequence, turn: float) -> None:
    sequence.order_key = (turn, *sequence.order_key[1:])
    sequence.queue_key = (turn, *sequence.queue_key[1:])
