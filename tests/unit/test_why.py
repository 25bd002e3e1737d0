"""`shoal why`: what is put together from router and replicas, what is found in it, and how it reads."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.config import ClusterConfig
from cluster.status import format_status
from cluster.why import format_living, format_request
from replica.messages import ReplicaId, RequestId, SequenceAccount, WaitCause
from router.findings import all_knobs
from router.journal import Entry, Journal
from router.why import explain, living
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
    assert (found["waits_for"], found["since_s"]) == ("its turn, 1 before it", 3.0)
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
    journal.open(RequestId("big"), 0.0)
    lines = living(journal.living(), accounts(harness), "router", 9.0, 10)
    assert [(line["request_id"], line["state"], line["waits_for"]) for line in lines] == [
        ("long", "decode", None),
        ("big", "queued", "KV blocks"),
        ("last", "queued", "its turn, 1 before it"),
        ("mine", "held", "a replica with room in its queue"),
    ]
    assert len(living(journal.living(), accounts(harness), "router", 9.0, 2)) == 2


def test_several_sequences_are_one_line_that_of_the_one_furthest_behind() -> None:
    harness = Harness(max_num_seqs=1)
    harness.submit("pair", list(range(8)), 20, n=2)
    harness.step()
    (line,) = living([], accounts(harness), "router", 1.0, 10)
    assert (line["sequences"], line["state"], line["waits_for"]) == (2, "queued", "a seat in the batch")


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
    replica |= {"kv_blocks": 10, "kv_blocks_free": 5, "step": 200, "oldest_wait_s": 3.21, "kv_fragmentation": 0.25}
    status = {"router_id": "r", "requests": 3, "held": 0, "replicas": [replica | {"counters": counters}]}
    line = " ".join(format_status(status).splitlines()[-1].split())
    assert line == "a up 1/64 0 2 3.2 s 50 % 25 % - 3 10.0 ms 0.50 ms 2.0 %"
    fresh = replica | {"step": 0, "counters": {}}
    assert format_status(status | {"replicas": [fresh]}).splitlines()[-1].split()[-3:] == ["-", "-", "-"]
