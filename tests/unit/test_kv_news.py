"""What a KVConnector brings from other nodes, and what it tells of its tiers."""

from __future__ import annotations

from cluster.kv_connector.instructions import Fetch, Resync, Send
from cluster.kv_connector.tier_news import EVERY_S
from replica.kv_messages import (
    Acquired,
    Clear,
    Cleared,
    KVTier,
    TierEvent,
)
from tests.unit.kv_node import Node, hashes, messages, of, only

# ---- from other nodes ----


def event(number: int, stored: list[bytes], removed: tuple[bytes, ...] = (), *, is_cleared: bool = False) -> TierEvent:
    return TierEvent(number, {KVTier.HOST: stored} if stored else {}, list(removed), is_cleared)


def test_blocks_of_another_node_are_fetched_in_one_job_and_stay() -> None:
    chain = hashes(4)
    node = Node(num_slots=16)
    node.store(chain[:1])
    node.core.on_peer("node-1")
    node.kept(node.core.on_peer_event("node-1", event(0, chain[1:]), node.now))
    fetch = only(of(node.acquire(chain).told, Fetch))
    assert (fetch.peer_id, fetch.hashes) == ("node-1", chain[1:])
    told = node.kept(node.core.on_fetched(fetch.job, [True, True, False], node.now))
    answer = only(messages(told, Acquired))
    assert answer.tiers == [KVTier.HOST, KVTier.REMOTE, KVTier.REMOTE]
    assert answer.slots[1:] == fetch.slots[:2]
    # who does not have it is not asked again
    assert of(node.acquire(chain[3:]).told, Fetch) == []
    assert node.core.tier_of(chain[3]) is None


def test_sources_are_asked_before_those_that_told_so_if_they_are_connected() -> None:
    chain = hashes(2)
    node = Node(num_slots=16)
    for peer in ("node-1", "node-2"):
        node.core.on_peer(peer)
    node.kept(node.core.on_peer_event("node-1", event(0, chain), node.now))
    assert only(of(node.acquire(chain, sources=["node-9", "node-2"]).told, Fetch)).peer_id == "node-2"


def test_a_peer_that_skipped_an_event_is_believed_nothing_until_it_tells_anew() -> None:
    node = Node(num_slots=16)
    node.core.on_peer("node-1")
    node.kept(node.core.on_peer_event("node-1", event(0, hashes(2)), node.now))
    told = node.kept(node.core.on_peer_event("node-1", event(2, hashes(3)), node.now))
    assert of(told, Resync) == [Resync("node-1")]
    assert node.core.tier_of(hashes(1)[0]) is None
    assert node.kept(node.core.on_peer_event("node-1", event(3, hashes(3)), node.now)) == []
    node.core.on_peer("node-1")
    node.kept(node.core.on_peer_event("node-1", event(0, hashes(1)), node.now))
    assert node.core.tier_of(hashes(1)[0]) is KVTier.REMOTE
    node.core.on_peer_gone("node-1")
    assert node.core.tier_of(hashes(1)[0]) is None


def test_a_connector_that_asks_gets_what_this_node_has_and_not_what_a_third_one_has() -> None:
    """Else two of them could ask each other in a ring."""
    chain = hashes(2)
    node = Node(num_slots=16)
    node.store(chain[:1])
    node.core.on_peer("node-1")
    node.kept(node.core.on_peer_event("node-1", event(0, chain[1:]), node.now))
    told = node.hello(2, "node-2", is_peer=True)
    assert only(messages(told, TierEvent, 2)).stored == {KVTier.HOST: chain[:1]}
    lease = node.acquire(chain, member=2, sources=["node-1"])
    assert len(lease.slots) == 1
    assert of(lease.told, Fetch) == []


# ---- news ----


def test_news_are_numbered_and_tell_what_is_different_now() -> None:
    node = Node(num_slots=2)
    node.hello(2, "node-2", is_peer=True)
    node.core.on_peer("node-1")
    a, b, c, d = (hashes(1, name) for name in "abcd")
    node.wait(1)
    node.store(a)  # told at once: nothing was told for long
    node.told = []
    for block in (b, c, d):  # the first and the second of all are given up
        node.store(block)
    assert messages(node.told, TierEvent) == []
    node.wait(EVERY_S)
    for member in (1, 2):
        told = only(messages(node.told, TierEvent, member))
        assert (told.number, told.removed) == (2, a)
        assert told.stored == {KVTier.HOST: [*c, *d]}
    node.told = []
    node.kept(node.core.on_peer_event("node-1", event(0, a), node.now))
    node.wait(1)
    assert only(messages(node.told, TierEvent, 1)).stored == {KVTier.REMOTE: a}
    assert messages(node.told, TierEvent, 2) == []


def test_a_rank_hears_no_news() -> None:
    node = Node()
    assert messages(node.hello(2, wants_events=False), TierEvent) == []
    node.store(hashes(1))
    node.wait(1)
    assert messages(node.told, TierEvent, 2) == []
    assert messages(node.told, TierEvent, 1)


def test_clear_is_told_before_it_is_answered() -> None:
    node = Node()
    node.store(hashes(2))
    told = node.say(Clear(3))
    said = [t.message for t in told if isinstance(t, Send)]
    assert [type(message) for message in said] == [TierEvent, Cleared]
    assert isinstance(said[0], TierEvent)
    assert said[0].is_cleared
    assert node.core.stats(node.now).num_free == 8


def test_a_forgotten_holder_may_clear() -> None:
    """It was given up and does not know: to forget is always right. It is not answered, since its connection ends."""
    node = Node()
    node.hello(2, incarnation="b")
    node.store(hashes(2), member=2)
    assert messages(node.say(Clear(1), member=1), Cleared) == []
    assert node.count_found(hashes(2), member=2) == 0
