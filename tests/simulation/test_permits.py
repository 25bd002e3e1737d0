"""The cap with several routers under a flood, in virtual time: never passed, and used while requests are refused."""

from __future__ import annotations

from itertools import pairwise

import pytest

from cluster.simulation.event_queue import Rank
from cluster.simulation.records import SimRecord, SimRequest
from cluster.simulation.sim_cluster import SimCluster, SimConfig
from cluster.simulation.workloads import burst, engine
from replica.messages import FinishReason, RefusalReason, RouterId
from replica.permits import LEASE_S
from tests.simulation.test_cluster import assert_reference_tokens

FLOOD_S = 3.0
#: between two looks at the queues
TICK_S = 0.003


class Watch:
    """Looks into every replica at each tick: (time, queued, reserved)."""

    def __init__(self, cluster: SimCluster, until_s: float) -> None:
        self.looks: list[tuple[float, int, int]] = []
        self._cluster = cluster
        for number in range(int(until_s / TICK_S)):
            cluster.events.at(number * TICK_S, Rank.TIMER, self._look)

    def _look(self) -> None:
        for replica in self._cluster.replicas.values():
            load = replica.core.load(self._cluster.events.now)
            self.looks.append((self._cluster.events.now, load.num_queued, load.num_permits))
            replica.core.validate()


def use_while_refusing(watch: Watch, records: list[SimRecord], cap: int) -> float:
    """Mean share of the cap that is queued, over the time in which requests were refused for a full queue."""
    at = sorted(r.ended_s for r in records if r.refusal is RefusalReason.QUEUE_FULL)
    assert len(at) > 100
    assert max(later - earlier for earlier, later in pairwise(at)) < 1
    used = [queued for when, queued, _ in watch.looks if at[0] <= when <= at[-1]]
    return sum(used) / len(used) / cap


def check_ends(records: list[SimRecord]) -> None:
    for record in records:
        assert record.num_ends == 1, record
        assert_reference_tokens(record)
        assert record.refusal in (None, RefusalReason.QUEUE_FULL)


def flood(num_routers: int, span_s: float = FLOOD_S) -> list[SimRequest]:
    return burst(int(400 * span_s), span_s, seed=1, prompt=(5, 60), output=(5, 40), num_routers=num_routers)


@pytest.mark.parametrize(
    ("cap", "num_replicas", "senders", "num_blocks"),
    [
        pytest.param(64, 2, 4, 4096, id="four routers"),
        pytest.param(64, 2, 1, 4096, id="all through one of four"),
        pytest.param(1, 2, 4, 4096, id="cap one"),
        pytest.param(16, 1, 4, 24, id="preemption"),
        pytest.param(3, 3, 4, 4096, id="fewer places than routers"),
    ],
)
def test_the_cap_holds_and_is_used(cap: int, num_replicas: int, senders: int, num_blocks: int) -> None:
    config = engine(cap=cap, max_num_seqs=8, max_num_batched_tokens=256)
    cluster = SimCluster(SimConfig(engine=config, num_replicas=num_replicas, num_routers=4, num_blocks=num_blocks))
    watch = Watch(cluster, FLOOD_S)
    records = cluster.run(flood(senders))
    check_ends(records)
    assert max(queued + permits for _, queued, permits in watch.looks) == cap
    for replica in cluster.replicas.values():
        load = replica.core.load(cluster.events.now)
        assert load.counters["max_queued"] == cap
        assert load.counters["max_queue_places"] == cap, "queued and reserved, by the replica itself"
        assert load.num_permits == 0, "a permit did not come back"
    if num_blocks < 100:
        assert sum(r.core.load(0.0).counters["preemptions"] for r in cluster.replicas.values()) > 20
    # a place is empty while its news are on the way: two hops of 0.5 ms, against a step of some 10 ms
    assert use_while_refusing(watch, records, cap) > 0.95


def test_nobody_passes_whoever_waits_at_another_router() -> None:
    """First come, first served over four routers: who is let in arrived before whoever is still held."""
    cluster = SimCluster(SimConfig(engine=engine(cap=8, max_num_seqs=4), num_routers=4, admission_wait_s=60.0))
    records = cluster.run(burst(300, 1.0, seed=3, output=(5, 20), num_routers=4))
    check_ends(records)
    assert not any(record.refusal for record in records)
    starts = [(r.token_times_s[0], r.request.arrival_s) for r in records]
    # those that were in the queue or under way when one arrived may start later than it
    for number, (_, arrival) in enumerate(sorted(starts)):
        earlier = sum(other < arrival for _, other in starts)
        assert abs(number - earlier) <= 8 + 4 + 4


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_a_router_that_dies_or_freezes_in_a_flood_gives_its_permits_back(how: str) -> None:
    cap = 16
    cluster = SimCluster(SimConfig(engine=engine(cap=cap, max_num_seqs=8), num_replicas=2, num_routers=4))
    span_s = 1.0 + LEASE_S + 1.0 + 0.5
    watch = Watch(cluster, span_s)
    dead = RouterId("router-1")
    (cluster.kill_router_at if how == "kill" else cluster.freeze_router_at)(1.0, dead)
    records = cluster.run(flood(4, span_s), until_s=60.0)
    others = [r for r in records if r.request.router != 1]
    check_ends(others)
    late = [r for r in others if r.request.arrival_s > span_s - 0.5 and r.finish_reason is FinishReason.LENGTH]
    assert len(late) > 20, "the others do not get on"
    for replica in cluster.replicas.values():
        load = replica.core.load(cluster.events.now)
        assert load.num_permits == 0
        assert load.num_queued == 0
    # within the lease and a heartbeat all places are of use again
    after = [queued for when, queued, _ in watch.looks if span_s - 0.5 < when < span_s - 0.1]
    assert sum(after) / len(after) / cap > 0.95
    assert max(queued + permits for _, queued, permits in watch.looks) <= cap


def test_the_bound_on_all_that_waits_holds_over_all_routers() -> None:
    """Held, under way and queued together; each router has a quarter of it."""
    bound = 12
    config = SimConfig(engine=engine(cap=64, max_num_seqs=8), num_replicas=2, num_routers=4, max_waiting=bound // 4)
    cluster = SimCluster(config)
    most = 0

    def look() -> None:
        nonlocal most
        queued = sum(replica.core.load(cluster.events.now).num_queued for replica in cluster.replicas.values())
        most = max(most, queued + sum(router.dispatcher.num_held for router in cluster.routers.values()))

    for number in range(int(FLOOD_S / TICK_S)):
        cluster.events.at(number * TICK_S, Rank.TIMER, look)
    records = cluster.run(flood(4))
    check_ends(records)
    assert bound / 2 <= most <= bound
    assert sum(record.finish_reason is FinishReason.LENGTH for record in records) > 100
