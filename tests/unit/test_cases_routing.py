"""Failures that users of other routers reported (group D), as far as they are decisions alone; the others are in
`tests/api/test_group_d.py`, and what waits for something that is not built is in `tests/api/test_completeness.py`.
"""

from __future__ import annotations

from collections import Counter

import pytest

from replica.messages import ReplicaId, ReplicaLoad, RequestId
from router.dispatcher import Dispatcher, DispatcherConfig
from router.instructions import Dispatch
from router.placement import POLICIES
from router.replica_view import ReplicaView

IDLE = ReplicaLoad(queue_cap=64, num_free_blocks=100, num_blocks=100)


def router(policy: str, **loads: ReplicaLoad) -> Dispatcher:
    """With these replicas, none of which was ever sent anything."""
    dispatcher = Dispatcher(DispatcherConfig(), POLICIES[policy])
    for name, load in loads.items():
        dispatcher.add_replica(ReplicaView(ReplicaId(name), "address", "incarnation"))
        dispatcher.on_load(ReplicaId(name), load, 0.0)
        dispatcher.on_connected(ReplicaId(name), 0.0)
    return dispatcher


def place(dispatcher: Dispatcher, name: str) -> ReplicaId:
    (sent,) = dispatcher.submit(RequestId(name), 1, 40, 0.0)
    assert isinstance(sent, Dispatch)
    return sent.replica_id


@pytest.mark.parametrize("policy", POLICIES)
def test_d01_a_burst_before_any_statistics_is_spread(policy: str) -> None:
    """At one instant, the first traffic ever: nobody has answered when the last one is placed."""
    dispatcher = router(policy, a=IDLE, b=IDLE, c=IDLE, d=IDLE)
    assert Counter(place(dispatcher, f"q{number}") for number in range(8)) == dict.fromkeys("abcd", 2)


def test_d04_a_miss_goes_to_the_idle_replica_though_its_cache_is_full() -> None:
    busy = ReplicaLoad(queue_cap=64, num_queued=20, num_uncomputed_tokens=800, num_free_blocks=100, num_blocks=100)
    idle = ReplicaLoad(queue_cap=64, num_free_blocks=100, num_blocks=100, counters={"evictions": 1e6})
    assert place(router("least-tokens", a=busy, b=idle), "unseen") == "b"


def test_d16_turns_are_each_routers_own() -> None:
    """A router serves one model, and two of them share nothing."""
    routers = {model: router("round-robin", **{f"{model}{i}": IDLE for i in range(2)}) for model in "ab"}
    counts = Counter(place(routers["ab"[number % 2]], f"q{number}") for number in range(100))
    assert counts == {"a0": 25, "a1": 25, "b0": 25, "b1": 25}
