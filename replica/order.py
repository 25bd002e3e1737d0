"""PURE. Whose turn it is: three policies, and one key for each waiting sequence.

A key is computed when a sequence begins to wait and does not change while it waits, though waiting makes it more
urgent: ageing is linear, so nothing has to be sorted again. Take `priority`. At time t a sequence that arrived at a has
the level priority - (t - a) / ageing_s, and the smaller level goes first. The difference of two levels is
(priority1 - priority2) + (a1 - a2) / ageing_s: t cancels out, so who is ahead stays ahead, and the levels sort like
priority * ageing_s + a. `sjf` is the same with work / rate in the place of priority * ageing_s.

So nothing starves, and the bound can be read off the key: whoever arrives after the key's time cannot pass.
- `fcfs`: nobody passes a sequence by arriving later.
- `priority`: nobody who arrives more than (p - q) * ageing_s later, where q is the most urgent priority in use.
- `sjf`: nobody who arrives more than work / rate later.
What arrived before that, and what runs, is all it ever waits for.
"""

from __future__ import annotations

from typing import Protocol

from replica.config import SchedulerConfig
from replica.messages import OrderKey, aged_priority

#: tenant turn, then the policy's value, then arrival, then the number of the sequence: smaller goes first
QueueKey = tuple[float, float, float, int]
#: how urgent: priority, and the key that counts the waiting in
Standing = tuple[int, QueueKey]


class OrderPolicy(Protocol):
    """Makes keys, and says who may take the place of whom."""

    #: the key needs the work: whoever asks looks up the prefix cache first
    needs_work: bool
    #: some requests are strictly more urgent than others, and may take the places of those
    has_classes: bool

    def key(self, order_key: OrderKey, work: int, seq_id: int) -> QueueKey:
        """Its place in the order. `work`: tokens that are still to be computed, output that may come included."""
        ...


class FirstCome:
    """By arrival; priorities are not looked at (a router refuses them under this policy)."""

    needs_work = False
    has_classes = False

    def key(self, order_key: OrderKey, work: int, seq_id: int) -> QueueKey:
        turn, _, arrival = order_key
        return (turn, arrival, arrival, seq_id)


class ByPriority:
    """Smaller is more urgent; `ageing_s` seconds of waiting are worth one level."""

    needs_work = False
    has_classes = True

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s

    def key(self, order_key: OrderKey, work: int, seq_id: int) -> QueueKey:
        turn, _, arrival = order_key
        return (turn, aged_priority(order_key, self._ageing_s), arrival, seq_id)


class ShortestFirst:
    """Least work left, after what the prefix cache holds. Of the output only the limit is known, so `max_tokens`
    counts in full. A second of waiting is worth `rate` tokens.
    """

    needs_work = True
    has_classes = False

    def __init__(self, rate: float) -> None:
        self._rate = rate

    def key(self, order_key: OrderKey, work: int, seq_id: int) -> QueueKey:
        turn, _, arrival = order_key
        return (turn, arrival + work / self._rate, arrival, seq_id)


def outranks(policy: OrderPolicy, one: Standing, other: Standing) -> bool:
    """`one` is strictly more urgent than `other`, so that it may take its place: a smaller number, and still ahead with
    the other's waiting counted.
    """
    return policy.has_classes and one[0] < other[0] and one[1] < other[1]


def make_policy(config: SchedulerConfig) -> OrderPolicy:
    match config.policy:
        case "priority":
            return ByPriority(config.priority_ageing_s)
        case "sjf":
            return ShortestFirst(config.sjf_ageing_tokens_per_s)
        case _:
            return FirstCome()
