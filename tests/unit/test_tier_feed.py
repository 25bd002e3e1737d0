"""What the connector of a node has, as a router hears of it through one of the node's replicas."""

from __future__ import annotations

import random

from cluster.status import format_status
from replica.kv_messages import KVTier, TierEvent
from replica.messages import KVEvent, ReplicaId, ReplicaLoad, RouterId, StepOutput, decode_up, encode
from replica.tier_feed import MOST_HASHES, SPEAKS_S, TierFeed
from router.journal import grounds
from router.kv_tiers import KVTiers
from router.replica_view import ReplicaView

A, B = ReplicaId("a"), ReplicaId("b")
R, S = RouterId("r"), RouterId("s")
HOST, DISK, REMOTE = KVTier.HOST, KVTier.DISK, KVTier.REMOTE


def hashes(count: int, name: str = "h") -> list[bytes]:
    return [f"{name}{i:014}".encode() for i in range(count)]


def speaker(node: str = "n1") -> TierFeed:
    feed = TierFeed()
    feed.connected(node)
    feed.chosen(0.0)
    return feed


def over_the_wire(events: list[KVEvent]) -> list[KVEvent]:
    told = decode_up(encode(StepOutput("i", ReplicaLoad(), kv_events=events)))
    assert isinstance(told, StepOutput)
    return told.kv_events


def known(view: KVTiers, names: list[bytes], node: str = "n1") -> dict[bytes, KVTier]:
    return {h: run[0] for h in names if (run := view.leading([h]).get(node))}


def test_a_router_hears_which_tier_has_what_and_only_what_has_changed() -> None:
    feed, view, (a, b, c, d) = speaker(), KVTiers(), hashes(4)
    feed.learn(TierEvent(0, {HOST: [a, b], DISK: [c], REMOTE: [d]}))
    view.hear(A, over_the_wire(feed.take(R, 1.0)))
    assert view.node_of(A) == "n1"
    assert view.leading([a, b, c, d]) == {"n1": [HOST, HOST, DISK]}, "what another node has, that one tells"
    assert feed.take(R, 1.0) == []
    assert not feed.is_owed(1.0)
    feed.learn(TierEvent(1, {DISK: [b], REMOTE: [c]}, [a]))
    assert feed.is_owed(1.0)
    told = feed.take(R, 1.0)
    assert [(one.tier, one.stored, sorted(one.removed)) for one in told] == [(HOST, [], [a, c]), (DISK, [b], [])]
    view.hear(A, told)
    assert known(view, [a, b, c, d]) == {b: DISK}
    feed.learn(TierEvent(2, {HOST: [a]}, is_cleared=True))
    view.hear(A, feed.take(R, 1.0))
    assert known(view, [a, b, c, d]) == {a: HOST}


def test_one_replica_of_a_node_speaks_and_the_others_say_where_they_are() -> None:
    quiet, view = TierFeed(), KVTiers()
    quiet.connected("n1")
    quiet.learn(TierEvent(0, {HOST: hashes(3)}))
    assert quiet.take(R, 0.0) == [KVEvent(node="n1")]
    assert quiet.take(R, 0.0) == []
    view.hear(B, [KVEvent(node="n1")])
    assert view.node_of(B) == "n1"
    assert view.describe() == []
    # the speaker leaves, and this one is chosen: everything is told anew, in the other's place
    view.hear(A, [KVEvent(hashes(5, "old"), [], True, HOST, "n1")])
    quiet.chosen(1.0)
    view.hear(B, quiet.take(R, 1.0))
    assert view.describe()[0] == {
        "node": "n1", "told_by": "b", "replicas": 1, "host": 3, "disk": 0, "left_out": 0, "events": 1,
    }  # fmt: skip
    view.hear(A, [KVEvent(hashes(5, "late"), [], False, HOST, "n1")])  # still on its way when the other began
    assert view.num_blocks("n1") == {"host": 3, "disk": 0}
    assert quiet.take(R, 1.0 + SPEAKS_S) == []
    quiet.learn(TierEvent(1, {}, hashes(1)))
    assert quiet.take(R, 1.1 + SPEAKS_S) == [], "nobody has chosen it for long"
    quiet.chosen(9.0)
    assert quiet.take(R, 9.0)[0].removed == hashes(1)


def test_what_nobody_vouches_for_is_forgotten() -> None:
    feed, view = speaker(), KVTiers()
    feed.learn(TierEvent(0, {HOST: hashes(3)}))
    view.hear(A, feed.take(R, 0.0))
    feed.gone()  # the connector died
    assert feed.is_owed(0.0)
    view.hear(A, feed.take(R, 0.0))
    assert view.num_blocks("n1") == {"host": 0, "disk": 0}
    feed.connected("n1")
    feed.chosen(1.0)
    feed.learn(TierEvent(0, {HOST: hashes(2)}))
    view.hear(A, feed.take(R, 1.0))
    assert view.num_blocks("n1") == {"host": 2, "disk": 0}
    view.gone(A)  # the replica's stream broke
    assert (view.describe(), view.node_of(A)) == ([], "")


def test_messages_are_bounded_and_so_is_what_waits() -> None:
    feed, view, many = speaker(), KVTiers(), hashes(3 * MOST_HASHES + 5)
    told = feed.take(R, 0.0)
    assert told[0] == KVEvent(node="n1")
    view.hear(A, told)
    feed.learn(TierEvent(0, {HOST: many}))
    sizes = []
    while feed.is_owed(0.0):
        told = feed.take(R, 0.0)
        sizes.append(sum(len(one.stored) for one in told))
        view.hear(A, told)
    assert sizes == [MOST_HASHES] * 3 + [5]
    assert view.num_blocks("n1")["host"] == len(many)
    for number in range(200):  # nobody takes: what came and went is not kept for ever
        fresh = hashes(1000, f"{number}-")
        feed.learn(TierEvent(0, {HOST: fresh}))
        feed.learn(TierEvent(0, {}, fresh))
    assert len(feed._listeners[R].owed) < 80_000
    while feed.is_owed(0.0):
        view.hear(A, feed.take(R, 0.0))
    assert view.num_blocks("n1")["host"] == len(many)


def test_a_router_remembers_a_bounded_number_of_blocks_and_says_so() -> None:
    view, many = KVTiers(most_blocks=10), hashes(12)
    view.hear(A, [KVEvent(many[:8], [], True, HOST, "n1")])
    view.hear(B, [KVEvent(many, [], True, HOST, "n2")])
    assert [(one["host"], one["left_out"]) for one in view.describe()] == [(8, 0), (2, 10)]
    view.hear(A, [KVEvent(many[:8], [], False, DISK, "n1"), KVEvent([], many[:4], False, HOST, "n1")])
    assert view.num_blocks("n1") == {"host": 0, "disk": 4}
    view.hear(B, [KVEvent(many[4:9], [], False, HOST, "n2")])
    assert view.num_blocks("n2")["host"] == 6
    view.gone(B)
    view.hear(A, [KVEvent(hashes(9, "x"), [], False, HOST, "n1")])
    assert view.num_blocks("n1") == {"host": 6, "disk": 4}


def test_whatever_happens_two_routers_end_with_the_truth() -> None:
    rng = random.Random(3)
    names, feed, truth = hashes(60), speaker(), dict[bytes, KVTier]()
    views = {R: KVTiers(), S: KVTiers()}
    for number in range(3000):
        feed.chosen(number)
        some = rng.sample(names, rng.randrange(4))
        event = TierEvent(number, {rng.choice([HOST, DISK, REMOTE]): some}, rng.sample(names, 2), rng.random() < 0.02)
        event.removed[:] = [h for h in event.removed if h not in some]
        if event.is_cleared:
            truth.clear()
        for h in event.removed:
            truth.pop(h, None)
        for tier, found in event.stored.items():
            for h in found:
                truth.pop(h, None) if tier is REMOTE else truth.update({h: tier})
        feed.learn(event)
        router = rng.choice([R, R, S])
        views[router].hear(A, feed.take(router, number))
        if rng.random() < 0.01:  # its stream breaks
            feed.forget(router)
            views[router].gone(A)
        if rng.random() < 0.01:  # the connector does
            feed.gone()
            feed.connected("n1")
            truth.clear()
        if number % 50 == 49:
            feed.chosen(number)
            for name, view in views.items():
                view.hear(A, feed.take(name, number))
                assert known(view, names) == truth


def test_status_says_it_in_a_line() -> None:
    view = KVTiers()
    view.hear(A, [KVEvent(node="n1"), KVEvent(hashes(3), [], True, HOST, "n1")])
    view.hear(A, [KVEvent(hashes(1, "d"), tier=DISK, node="n1")])
    status = {"router_id": "r", "requests": 0, "held": 0, "replicas": [], "kv_nodes": view.describe()}
    line = "KV of node n1, as this router knows it: 3 blocks in memory, 1 on disk; told by a, read by 1 replica(s)"
    assert line in format_status(status)


def test_why_says_whose_tiers_a_replica_reads() -> None:
    view = ReplicaView(A, "address", "i")
    view.is_connected = True
    view.hear(ReplicaLoad(queue_cap=4), 0.0)
    assert "kv_node" not in grounds([view], {}, 1, 0.0)[0]
    view.kv_node = "n1"
    (seen,) = grounds([view], {}, 1, 0.0)
    assert seen["kv_node"] == view.describe("", 0.0)["kv_node"] == "n1"
