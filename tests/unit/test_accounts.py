"""What a replica tells of its sequences when it is asked: stages that sum, causes of waiting, who took whose place."""

from __future__ import annotations

import pytest

from replica.accounts import MAX_ENDED, EndedSequences
from replica.messages import (
    Explain,
    Explained,
    PreemptionCause,
    SequenceAccount,
    SequenceState,
    WaitCause,
    decode_down,
    decode_up,
    encode,
)
from tests.unit.engine_harness import ROUTER, Harness


def told(harness: Harness, name: str = "", limit: int = 100) -> list[SequenceAccount]:
    """As a router hears it."""
    question = decode_down(encode(Explain("q", name, limit)))
    assert isinstance(question, Explain)
    answer = decode_up(encode(harness.core.explain(question, harness.now)))
    assert isinstance(answer, Explained)
    return answer.accounts


def only(harness: Harness, name: str) -> SequenceAccount:
    (account,) = told(harness, name)
    assert account.request_id == name
    whole = (account.ended_at or account.at) - account.submitted_at
    assert sum(account.stages.by_stage().values()) == whole, "a second is missing or counted twice"
    return account


def prompt(number: int, length: int = 20) -> list[int]:
    return list(range(100 * number, 100 * number + length))


def test_a_sequence_is_told_of_in_each_of_its_states() -> None:
    harness = Harness(max_num_batched_tokens=10)
    harness.submit("a", prompt(0, 25), 3)
    queued = only(harness, "a")
    assert (queued.state, queued.num_ahead, queued.num_blocks, queued.num_blocks_needed) == ("queued", 0, 0, 7)
    harness.step()
    prefill = only(harness, "a")
    assert (prefill.state, prefill.num_computed_tokens, prefill.stages.by_stage()["prefill"]) == ("prefill", 10, 1.0)
    harness.step()
    harness.step()
    assert only(harness, "a").state is SequenceState.DECODE
    harness.run()
    ended = only(harness, "a")
    assert (ended.state, ended.finish_reason, ended.num_output_tokens) == (SequenceState.ENDED, "length", 3)
    assert ended.stages.by_stage() == {"queued": 0.0, "blocks": 0.0, "prefill": 3.0, "decode": 2.0}


def test_waiting_for_two_things_in_turn_is_told_by_cause() -> None:
    harness = Harness(num_blocks=14, max_num_seqs=2, caching=False)
    harness.submit("long", prompt(0, 12), 16)
    harness.submit("short", prompt(1, 12), 4)
    harness.step()
    harness.submit("waits", prompt(2, 44), 4)
    for _ in range(3):
        assert only(harness, "waits").state is SequenceState.QUEUED
        harness.step()
    waiting = only(harness, "waits")
    assert (waiting.stages.waited_for, waiting.lacks_since) == (WaitCause.SEATS, 1.0)
    harness.step()
    waiting = only(harness, "waits")
    assert (waiting.stages.waited_for, waiting.lacks_since) == (WaitCause.BLOCKS, 4.0)
    harness.run()
    ended = only(harness, "waits")
    assert ended.stages.waits == {WaitCause.SEATS: 3.0, WaitCause.BLOCKS: 12.0}
    assert ended.stages.by_stage()["blocks"] == 15.0
    assert ended.lacks_since is None


def test_a_spent_budget_is_a_cause_too() -> None:
    harness = Harness(max_num_batched_tokens=16)
    harness.submit("a", prompt(0, 30), 2)
    harness.submit("b", prompt(1, 30), 2)
    harness.step()
    assert only(harness, "b").stages.waited_for is WaitCause.BUDGET


def test_who_is_put_back_knows_by_whom_and_what_it_waits_for() -> None:
    harness = Harness(num_blocks=10, caching=False)
    harness.submit("a", prompt(0, 12), 20)
    harness.submit("b", prompt(1, 12), 20)
    while not harness.core.scheduler.counters.preemptions:
        harness.step()
    put_back = only(harness, "b")
    assert (put_back.state, put_back.num_ahead) == (SequenceState.RETURNING, 0)
    (preempted,) = put_back.stages.preemptions
    assert (preempted.cause, preempted.by) == (PreemptionCause.BLOCKS, "a")
    assert put_back.stages.waited_for is WaitCause.BLOCKS, "in the very step that had no blocks for it"
    assert put_back.stages.by_stage()["blocks"] == 0.0, "that stage is over: it has been scheduled"
    harness.run()
    ended = only(harness, "b")
    assert ended.stages.put_back_s == ended.stages.waits[WaitCause.BLOCKS] > 3
    assert ended.stages.by_stage()["blocks"] == 0.0


def test_the_displaced_one_knows_for_whom() -> None:
    harness = Harness(max_num_seqs=1, policy="priority")
    harness.submit("meek", prompt(0, 8), 20, priority=5)
    harness.step()
    harness.submit("urgent", prompt(1, 8), 3)
    harness.step()
    (preempted,) = only(harness, "meek").stages.preemptions
    assert (preempted.cause, preempted.by) == (PreemptionCause.DISPLACED, "urgent")


@pytest.mark.parametrize("num_steps", [1, 3])
def test_an_end_in_the_middle_of_a_step_is_a_stage_of_its_own(num_steps: int) -> None:
    """In the prompt, and behind the first token."""
    harness = Harness(max_num_batched_tokens=10)
    harness.submit("a", prompt(0, 30), 9)
    for _ in range(num_steps):
        harness.step()
    plan = harness.plan()
    assert plan is not None
    harness.now += 0.25
    harness.core.abort(ROUTER, harness.sequence("a").request_id, harness.now)
    assert only(harness, "a").stages.finish_s == 0.0
    harness.now += 0.5
    assert only(harness, "a").stages.finish_s == 0.5
    harness.finish(plan)
    ended = only(harness, "a")
    assert (ended.stages.finish_s, ended.finish_reason) == (1.5, "abort")
    assert ended.stages.by_stage()["prefill"] == (1.25 if num_steps == 1 else 3.0)


def test_an_end_in_the_queue_leaves_no_time_elsewhere() -> None:
    harness = Harness(max_num_seqs=1)
    harness.submit("a", prompt(0), 30)
    harness.submit("b", prompt(1), 30, deadline=4.0)
    while "b" not in harness.ends:
        harness.step()
    ended = only(harness, "b")
    assert (ended.finish_reason, ended.stages.by_stage()) == ("deadline", {"queued": 0.0, "blocks": 4.0})


def test_without_an_id_the_oldest_living_ones_are_told() -> None:
    harness = Harness(max_num_seqs=2)
    for number in range(6):
        harness.submit(str(number), prompt(number), 50)
        harness.step()
    assert [a.request_id for a in told(harness, limit=3)] == ["0", "1", "2"]
    assert [a.num_ahead for a in told(harness)] == [None, None, 0, 1, 2, 3]
    assert told(harness, "nobody") == []
    assert len(told(harness, "0", limit=0)) == 1, "of a request everything is told"


def test_only_the_last_ended_ones_are_kept() -> None:
    harness = Harness()
    harness.submit("a", prompt(0), 1)
    harness.run()
    ring = EndedSequences(most=3)
    assert len(harness.core.scheduler.ended) == 1 <= MAX_ENDED
    harness.submit("b", prompt(1), 1)
    sequence = harness.sequence("b")
    for _ in range(5):
        ring.add(sequence, 4, 1.0)
    assert len(ring) == len(ring.of(sequence.request_id)) == 3
