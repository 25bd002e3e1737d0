"""`shoal why`: what is put together from router and replicas, what is found in it, and how it reads."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.config import ClusterConfig
from cluster.status import format_status
from cluster.why import format_living, format_request
from replica.messages import Explain, ReplicaId, ReplicaLoad, RequestId, SequenceAccount, WaitCause
from router.dispatcher import Dispatcher, DispatcherConfig
from router.findings import all_knobs
from router.journal import LOST, REFUSED, Entry, Event, Journal
from router.placement import least_tokens
from router.replica_view import ReplicaView
from router.why import explain, living, num_living
from tests.unit.engine_harness import Harness

A = ReplicaId("replica-a")


def accounts(harness: Harness, name: str = "") -> dict[ReplicaId, list[SequenceAccount]]:
    return {A: harness.core.scheduler.explain(RequestId(name), 100, harness.now)}


def waiting_for_blocks(**settings: Any) -> Harness:
    """`big` waits for blocks that `long` holds; `last` is behind it."""
    harness = Harness(num_blocks=14, caching=False, admission_look_past=0, **settings)
    harness.submit("long", list(range(12)), 16)
    harness.step()
    for name in ("big", "last"):
        harness.submit(name, list(range(100, 144)), 4)
    for _ in range(3):
        harness.step()
    return harness


def journal_entry() -> Entry:
    """Received at 1, held from 1.5 to 2.5."""
    journal = Journal()
    journal.open(RequestId("big"), 1.0)
    for at, what in ((1.0, "arrived"), (1.5, "held"), (2.5, "placed"), (2.5, "accepted")):
        journal.note(RequestId("big"), at, what, **({"replica": A} if at == 2.5 else {}))
    entry = journal.of(RequestId("big"))
    assert entry is not None
    return entry


def told(harness: Harness, entry: Entry | None, name: str = "big", now: float = 9.0) -> dict[str, Any]:
    found = explain(entry, accounts(harness, name), now, 1000.0)
    assert found is not None
    return {"request_id": name, "router_id": "router", "silent_replicas": [], **found}


def test_a_living_request_says_what_it_waits_for() -> None:
    found = told(waiting_for_blocks(), journal_entry())
    assert (found["state"], found["waits_for"], found["since_s"]) == ("queued", "KV blocks", 3.0)
    assert (found["age_s"], found["arrived_at"]) == (8.0, 992.0)
    (sequence,) = found["sequences"]
    assert (sequence["blocks_needed"], sequence["num_ahead"]) == (11, 0)
    assert [(f["seconds"], f["what"]) for f in found["findings"]] == [
        (3.0, "waited for KV blocks (it needs 11)"),
        (1.0, "held by the router: no replica had room in its queue"),
    ]
    assert "scheduler.watermark" in found["findings"][0]["knobs"]


def test_who_is_behind_waits_for_its_turn() -> None:
    found = told(waiting_for_blocks(), None, "last")
    assert (found["waits_for"], found["since_s"]) == ("its turn, 1 before it; the first of them lacks KV blocks", 3.0)
    assert found["findings"][0]["what"] == "queued behind others"


def test_nobody_knows_it() -> None:
    assert explain(None, accounts(Harness(), "nobody"), 0.0, 0.0) is None


def test_after_the_death_of_its_replica_the_last_word_of_that_is_left() -> None:
    harness = waiting_for_blocks()
    harness.run()
    entry = journal_entry()
    (account,) = accounts(harness, "big")[A]
    entry.stages[0] = (A, account.stages)
    entry.outcome = "finished"
    both = explain(entry, accounts(harness, "big"), 99.0, 0.0)
    alone = explain(entry, {}, 99.0, 0.0)
    assert both is not None
    assert alone is not None
    assert len(both["sequences"]) == len(alone["sequences"]) == 1
    assert alone["sequences"][0]["stages_s"] == both["sequences"][0]["stages_s"]
    assert alone["state"] == "ended"


def test_of_a_silent_replica_nothing_is_claimed_but_what_it_said() -> None:
    harness = waiting_for_blocks()
    (account,) = accounts(harness, "long")[A]
    entry = journal_entry()
    entry.outcome = None
    entry.stages[0] = (A, account.stages)
    found = explain(entry, {}, 9.0, 0.0)
    assert found is not None
    assert (found["state"], found["waits_for"]) == ("unknown", None)


def test_the_living_are_told_oldest_first_with_those_that_no_replica_has() -> None:
    harness = waiting_for_blocks()
    journal = Journal()
    journal.open(RequestId("mine"), 8.75)
    journal.note(RequestId("mine"), 8.75, "held")
    journal.open(RequestId("big"), 6.0)
    lines = living(journal.living(), accounts(harness), "router", 9.0, 10)
    assert [(line["request_id"], line["state"], line["waits_for"]) for line in lines] == [
        ("long", "decode", None),
        ("big", "queued", "KV blocks"),
        ("last", "queued", "its turn, 1 before it; the first of them lacks KV blocks"),
        ("mine", "held", "a replica with room in its queue"),
    ]
    assert len(living(journal.living(), accounts(harness), "router", 9.0, 2)) == 2


def test_several_sequences_are_one_line_that_of_the_one_furthest_behind() -> None:
    harness = Harness(max_num_seqs=1)
    harness.submit("pair", list(range(8)), 20, n=2)
    harness.step()
    (line,) = living([], accounts(harness), "router", 1.0, 10)
    assert (line["sequences"], line["state"], line["waits_for"]) == (2, "queued", "a seat in the batch")


def test_who_was_put_back_waits_since_then_and_for_what_the_first_in_turn_lacks() -> None:
    """A stranger read "waits 12 s for the next step" of one that had run for 11 of them."""
    harness = Harness(max_num_seqs=1, policy="priority")
    harness.submit("meek", list(range(8)), 30, priority=5)
    for _ in range(4):
        harness.step()
    harness.submit("urgent", list(range(50, 58)), 6)
    harness.submit("next", list(range(60, 68)), 6)
    harness.step()
    harness.step()
    found = told(harness, None, "meek")
    assert found["sequences"][0]["total_s"] == 6.0
    assert (found["state"], found["since_s"]) == ("returning", 2.0)
    assert found["waits_for"] == "its turn, 1 before it; the first of them lacks a seat in the batch"
    (line,) = (line for line in living([], accounts(harness), "router", 9.0, 10) if line["request_id"] == "meek")
    assert (line["age_s"], line["since_s"], line["waits_for"]) == (6.0, 2.0, found["waits_for"])


def test_all_that_are_put_back_in_one_step_wait_since_then_for_blocks() -> None:
    harness = Harness(num_blocks=9, block_size=4, caching=False)
    for name in "abc":
        harness.submit(name, [ord(name)] * 12, 20)
    while harness.core.scheduler.counters.preemptions < 2:
        harness.step()
    scheduler = harness.core.scheduler
    assert len(scheduler.returning) == 2
    for sequence in scheduler.returning:
        found = told(harness, None, sequence.request_id)
        assert found["state"] == "returning"
        assert "KV blocks" in found["waits_for"]
        assert found["since_s"] == harness.now - sequence.record.waiting_since < found["sequences"][0]["total_s"]


def test_what_it_lacked_before_others_came_before_it_is_past() -> None:
    """Seats were taken when it was its turn; now they are not, and who was put back lacks blocks."""
    harness = Harness(num_blocks=9, max_num_seqs=2, caching=False)
    for name in "ab":
        harness.submit(name, [ord(name)] * 12, 20)
    harness.step()
    harness.submit("c", [1] * 8, 4)
    harness.step()
    assert told(harness, None, "c")["waits_for"] == "a seat in the batch"
    while not harness.core.scheduler.counters.preemptions:
        harness.step()
    found = told(harness, None, "c")
    assert found["waits_for"] == "its turn, 1 before it; the first of them lacks KV blocks"
    assert found["since_s"] == harness.now - 1.0


def test_a_wait_for_two_things_in_turn_tells_the_last_one_apart() -> None:
    harness = Harness(num_blocks=14, max_num_seqs=2, caching=False)
    harness.submit("long", list(range(12)), 16)
    harness.submit("short", list(range(100, 112)), 4)
    harness.step()
    harness.submit("waits", list(range(200, 244)), 4)
    for _ in range(5):
        harness.step()
    found = told(harness, None, "waits")
    assert (found["waits_for"], found["since_s"], found["lacks_since_s"]) == ("KV blocks", 5.0, 2.0)
    assert format_request(found).startswith("waits: queued, waits 5.00 s, the last 2.00 s for KV blocks")


def test_the_time_of_a_grammar_is_not_counted_as_waiting_for_a_turn() -> None:
    harness = Harness(max_num_seqs=1)
    harness.submit("long", list(range(8)), 30)
    harness.step()
    harness.submit("json", list(range(8)), 4, grammar="g")
    for _ in range(3):
        harness.step()
    assert (told(harness, None, "json")["state"], told(harness, None, "json")["since_s"]) == ("grammar", 3.0)
    harness.core.take_wanted_grammars()
    harness.core.grammar_compiled("g", None, harness.now)
    harness.step()
    found = told(harness, None, "json")
    assert (found["waits_for"], found["since_s"]) == ("a seat in the batch", 1.0)


def test_a_request_that_was_given_back_waits_at_its_router_since_then() -> None:
    harness = waiting_for_blocks()
    harness.core.hand_over(harness.now)
    entry = journal_entry()
    for what in ("given back by the replica, which drains", "held", "first byte"):
        entry.add(Event(7.0, what, {}))
    found = told(harness, entry)
    assert (found["state"], found["waits_for"], found["since_s"]) == ("held", "another replica", 2.0)
    entry.add(Event(8.0, "placed", {"replica": "replica-b"}))
    assert told(harness, entry)["waits_for"] == "the replica's answer"


def test_the_list_says_how_many_it_leaves_out_and_counts_requests_not_sequences() -> None:
    harness = Harness(max_num_seqs=1)
    for number in range(4):
        harness.submit(f"r{number}", [number] * 8, 30, n=3)
        harness.step()
    answer = harness.core.explain(Explain("q", "", 2), harness.now)
    assert ([a.request_id for a in answer.accounts], answer.num_requests) == (["r0"] * 3 + ["r1"] * 3, 4)
    journal = Journal()
    for name, what in (("r3", "accepted"), ("held", "held"), ("elsewhere", "accepted")):
        journal.open(RequestId(name), 8.0)
        journal.note(RequestId(name), 8.0, what, replica="silent" if name == "elsewhere" else A)
    lines = living(journal.living(), {A: answer.accounts}, "router", 9.0, 4)
    assert [line["request_id"] for line in lines] == ["r0", "r1", "elsewhere", "held"], "r3 is younger than r1"
    assert num_living(journal.living(), {A: answer.num_requests}) == 6
    text = format_living({"requests": lines, "num_requests": 6, "silent_replicas": []}).splitlines()
    assert text[-1] == "the oldest 4 of 6 unfinished requests; --limit 6 shows all"
    text = format_living({"requests": lines, "num_requests": 5000, "silent_replicas": []}).splitlines()
    assert text[-1] == "the oldest 4 of 5000 unfinished requests; --limit 1000 shows the most there is"
    assert "oldest" not in format_living({"requests": lines, "num_requests": 4, "silent_replicas": []})


def test_what_a_router_has_sent_is_told_beside_the_queue_and_its_cap() -> None:
    """A stranger read "queue 5/4" and took the cap for broken."""
    router = Dispatcher(DispatcherConfig(), least_tokens)
    router.add_replica(ReplicaView(A, "address", "incarnation"))
    router.on_load(A, ReplicaLoad(num_queued=2, queue_cap=4), 0.0)
    router.on_connected(A, 0.0)
    for name in ("first", "second", "big"):
        router.submit(RequestId(name), 1, 7, 1.0)
    entry = router.journal.of(RequestId("big"))
    assert entry is not None
    found = explain(entry, {}, 2.0, 0.0)
    assert found is not None
    text = format_request({"request_id": "big", "router_id": "router", "silent_replicas": [], **found})
    assert "queue 2/4 and 2 sent there without an answer yet, queue full" in text


def test_a_refused_request_is_told_with_its_error_and_its_header() -> None:
    journal = Journal()
    journal.open(RequestId("cmpl-1"), 1.0, "mine")
    journal.note(RequestId("cmpl-1"), 1.0, "arrived")
    journal.note(RequestId("cmpl-1"), 1.5, "answered 503", code="queue_full", why="every queue is full")
    journal.end(RequestId("cmpl-1"), REFUSED)
    (entry,) = journal.under("mine")
    found = explain(entry, {}, 2.0, 0.0)
    assert found is not None
    more = {"request_id": "cmpl-1", "router_id": "router", "silent_replicas": [], "same_x_request_id": ["cmpl-0"]}
    assert format_request(more | found).splitlines()[:5] == [
        "cmpl-1: ended, refused",
        "router router, arrived 1.00 s ago, X-Request-Id mine",
        "the client gave other requests the same X-Request-Id: cmpl-0",
        "  +0 ms      arrived",
        "  +500 ms    answered 503, code queue_full, why every queue is full",
    ]


def test_it_reads_as_a_timeline_with_bars() -> None:
    harness = waiting_for_blocks()
    harness.run()
    text = format_request(told(harness, journal_entry()))
    assert (
        text
        == """\
big: ended
router router, arrived 8.00 s ago
  +0 ms      arrived
  +500 ms    held
  +1.50 s    placed at replica-a
  +1.50 s    accepted at replica-a
sequence 0 at replica-a: ended, length
  queued       0 ms |                                        |
  blocks    15.00 s |##############################          |
  prefill    2.00 s |                              ####      | 44 tokens, 0 cached, 2 pieces
  decode     3.00 s |                                  ######| 4 tokens
  lacked blocks 15.00 s
where to look:
   15.00 s  waited for KV blocks (it needs 12) -> kv_cache.kv_cache_gib, kv_cache.num_blocks, scheduler.watermark, \
scheduler.max_num_seqs
    3.00 s  decoded, 1000.0 ms a token -> scheduler.max_num_seqs, scheduler.max_num_batched_tokens, \
scheduler.tpot_target_ms
    2.00 s  computed its prompt in 2 pieces, 44 tokens -> scheduler.max_num_batched_tokens, \
scheduler.long_prefill_token_threshold"""
    )


def test_preemptions_and_silent_replicas_are_not_hidden() -> None:
    harness = Harness(num_blocks=10, caching=False)
    harness.submit("a", list(range(12)), 20)
    harness.submit("b", list(range(50, 62)), 20)
    harness.run()
    found = told(harness, None, "b") | {"silent_replicas": ["replica-b"]}
    text = format_request(found)
    assert "put back at +" in text
    assert "for a, " in text
    assert "(while put back as well)" in text
    assert "no answer from replica-b" in text
    assert any("put back 1x, " in finding["what"] for finding in found["findings"])


def test_an_empty_list_says_so() -> None:
    assert "no request is unfinished" in format_living({"requests": [], "silent_replicas": []})


def test_every_line_of_the_list_has_its_request() -> None:
    lines = living([], accounts(waiting_for_blocks()), "router", 9.0, 10)
    text = format_living({"requests": lines, "silent_replicas": []}).splitlines()
    assert [line.split()[0] for line in text] == ["request", "long", "big", "last"]
    assert text[2].endswith("queued, waits 3.00 s for KV blocks")


@pytest.mark.parametrize("key", sorted(all_knobs()))
def test_every_knob_that_is_named_is_there(key: str) -> None:
    found: Any = ClusterConfig()
    for part in key.split("."):
        found = getattr(found, part)


def test_every_cause_has_its_sentence_and_its_knobs() -> None:
    from router import findings, why

    assert set(why._LACKS) == set(WaitCause)
    assert set(findings._LACKS) == {cause.value for cause in WaitCause}


def test_status_has_one_line_a_replica_with_what_matters() -> None:
    counters = {"model_s": 2.0, "between_steps_s": 0.1, "scheduler_s": 0.042, "preemptions": 3.0}
    replica = {"replica_id": "a", "state": "up", "queued": 1, "queue_cap": 64, "returning": 0, "running": 2}
    replica |= {
        "role": "decode",
        "kv_blocks": 10,
        "kv_blocks_free": 5,
        "step": 200,
        "oldest_wait_s": 3.21,
        "kv_fragmentation": 0.25,
    }
    status = {"router_id": "r", "requests": 3, "held": 0, "replicas": [replica | {"counters": counters}]}
    line = " ".join(format_status(status).splitlines()[-1].split())
    assert line == "a decode up 1/64 0 2 3.2 s 50 % 25 % - 3 10.0 ms 0.50 ms 2.0 %"
    fresh = replica | {"step": 0, "counters": {}}
    assert format_status(status | {"replicas": [fresh]}).splitlines()[-1].split()[-3:] == ["-", "-", "-"]


def test_status_has_a_line_for_the_ranks_of_a_replica() -> None:
    replica = {"replica_id": "a", "state": "up", "queued": 1, "queue_cap": 64, "returning": 0, "running": 2}
    replica |= {"kv_blocks": 0, "kv_blocks_free": 0, "step": 0, "oldest_wait_s": 0.0, "kv_fragmentation": 0.0}

    def line(**counters: float) -> str:
        told = {"router_id": "r", "requests": 3, "held": 0, "replicas": [replica | {"counters": counters}]}
        return format_status(told).splitlines()[-1].strip()

    ranks: dict[str, float] = {"ranks": 2, "rank_losses_gone": 2, "rank_losses_hung": 1}
    assert line(**ranks, ranks_alive=1) == "ranks 1 of 2, 3 lost so far"
    mended = line(**ranks, ranks_alive=2, group_restarts=2, last_mending_s=1.23)
    assert mended == "ranks 2 of 2, 3 lost so far, mended 2 times, the last time in 1.2 s"


def test_status_shows_a_self_test_that_failed() -> None:
    replica = {"replica_id": "a", "state": "up", "queued": 0, "queue_cap": 64, "returning": 0, "running": 0}
    replica |= {"kv_blocks": 10, "kv_blocks_free": 5, "step": 0, "oldest_wait_s": 0.0, "kv_fragmentation": 0.0}
    replica |= {"counters": {}, "description": "cpu; invariance self-test passed in 9 ms"}
    status = {"router_id": "r", "requests": 0, "held": 0, "replicas": [replica]}
    assert "self-test" not in format_status(status)
    replica["description"] = "cpu; invariance self-test FAILED in 9 ms"
    assert "invariance self-test FAILED: an answer may depend on the requests beside it" in format_status(status)


def test_time_without_a_replica_is_told_as_such() -> None:
    """Two kills: a stranger was told that no queue had room, and nothing of the time at the one that fell silent."""
    journal = Journal()
    journal.open(RequestId("r"), 0.0)
    nobody: dict[str, Any] = {"replicas": [{"replica": A, "not": "silent for 3.2 s"}]}
    full: dict[str, Any] = {"replicas": [{"replica": A, "queued": 4, "cap": 4}]}
    for at, what, detail in (
        (0.0, "placed", full),
        (3.0, LOST, {}),
        (3.0, "held", nobody),
        (5.0, "held", full),
        (6.0, "placed", full),
        (6.0, "answered 503", {}),
    ):
        journal.note(RequestId("r"), at, what, **detail)
    journal.end(RequestId("r"), REFUSED)
    found = explain(journal.of(RequestId("r")), {}, 9.0, 1000.0)
    assert found is not None
    assert [(f["seconds"], f["what"]) for f in found["findings"]] == [
        (3.0, "at a replica that was lost or fell silent"),
        (2.0, "held by the router: no replica was up"),
        (1.0, "held by the router: no replica had room in its queue"),
    ]
