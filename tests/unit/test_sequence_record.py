"""Where a sequence's time went and what it waited for; and what an engine tells of all of them."""

from __future__ import annotations

from typing import Any

import pytest

from replica.messages import Chunk, PreemptionCause, SequenceOutput, Stages, WaitCause
from replica.router_output import RouterOutputs
from replica.sequence_record import MAX_CHUNKS
from replica.step_times import StepTimes
from tests.unit.engine_harness import Harness


class Listening(Harness):
    """Keeps the last stages of each request. A step takes one second."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.stages: dict[str, Stages] = {}

    def told(self, outputs: RouterOutputs) -> list[SequenceOutput]:
        told = super().told(outputs)
        self.stages.update({str(o.request_id): o.stages for o in told if o.stages is not None})
        return told


def test_the_stages_sum_to_the_whole_time_and_chunks_are_told() -> None:
    harness = Listening(max_num_batched_tokens=10)
    harness.submit("a", list(range(25)), 4)
    harness.run()
    stages = harness.stages["a"]
    assert (stages.queued_s, stages.prefill_s, stages.decode_s) == (0.0, 3.0, 3.0)
    assert stages.chunks == [Chunk(0, 10), Chunk(1, 10), Chunk(2, 5)]
    assert (stages.num_chunks, stages.no_room_s, stages.put_back_s, stages.waited_for) == (3, 0.0, 0.0, None)


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"num_blocks": 8}, WaitCause.BLOCKS),
        ({"max_num_seqs": 1}, WaitCause.SEATS),
        (
            {"max_num_batched_tokens": 8, "long_prefill_token_threshold": 4, "max_long_partial_prefills": 1},
            WaitCause.LANE,
        ),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 21}, WaitCause.BUDGET),
    ],
)
def test_what_was_missing_is_told_by_its_cause(settings: dict[str, Any], cause: WaitCause) -> None:
    harness = Listening(**settings)
    harness.submit("first", list(range(20)), 5)
    harness.submit("second", list(range(100, 120)), 5)
    harness.run()
    first, second = harness.stages["first"], harness.stages["second"]
    assert (first.no_room_s, first.waited_for) == (0.0, None)
    assert second.waited_for is cause
    assert second.queued_s is not None
    assert 0 < second.no_room_s == second.queued_s, "it was the next in turn from the beginning"


def test_who_is_behind_somebody_waits_in_the_queue_not_for_room() -> None:
    harness = Listening(num_blocks=8, admission_look_past=0)
    for name in ("a", "b", "c"):
        harness.submit(name, [ord(name)] * 20, 5)
    harness.run()
    last = harness.stages["c"]
    assert last.queued_s is not None
    assert last.no_room_s < last.queued_s


def test_preemptions_are_told_with_cause_cost_and_the_time_they_took() -> None:
    harness = Listening(num_blocks=10, caching=False)
    harness.submit("a", list(range(12)), 20)
    harness.submit("b", list(range(50, 62)), 20)
    harness.run()
    stages = harness.stages["b"]
    assert stages.num_preemptions == len(stages.preemptions) == 1
    (preempted,) = stages.preemptions
    assert preempted.cause is PreemptionCause.BLOCKS
    assert 12 < preempted.num_lost_tokens <= 20
    assert stages.put_back_s > 0
    assert stages.decode_s is not None
    assert stages.put_back_s < stages.decode_s
    assert stages.num_chunks == 2, "its prompt and output were computed again"


def test_a_displaced_sequence_knows_why() -> None:
    harness = Listening(max_num_seqs=1, policy="priority")
    harness.submit("meek", list(range(8)), 20, priority=5)
    harness.step()
    harness.submit("urgent", list(range(50, 58)), 3, priority=0)
    harness.run()
    assert [p.cause for p in harness.stages["meek"].preemptions] == [PreemptionCause.DISPLACED]
    assert harness.stages["meek"].put_back_s == 3.0


def test_of_many_chunks_the_first_are_kept_and_all_are_counted() -> None:
    harness = Listening(max_num_batched_tokens=1)
    harness.submit("a", list(range(100)), 1)
    harness.run()
    assert (len(harness.stages["a"].chunks), harness.stages["a"].num_chunks) == (
        MAX_CHUNKS,
        99,
    )  # the last token goes with the decodes


@pytest.mark.parametrize("policy", ["fcfs", "priority", "sjf"])
def test_the_longest_wait_is_that_of_a_walk_over_all(policy: str) -> None:
    import random

    rng = random.Random(policy)
    harness = Listening(num_blocks=20, max_num_seqs=3, policy=policy, priority_ageing_s=5.0)
    assert harness.core.load(3.0).oldest_wait_s == 0.0
    for number in range(150):
        prompt = [rng.randrange(900) for _ in range(rng.randrange(1, 40))]
        harness.submit(str(number), prompt, rng.randrange(1, 12), priority=rng.randrange(3) if policy != "fcfs" else 0)
        for _ in range(rng.randrange(3)):
            if (plan := harness.plan()) is not None:
                harness.finish(plan)
            scheduler = harness.core.scheduler
            waiting = [*scheduler.queued, *scheduler.returning, *scheduler.blocked]
            longest = max((harness.now - s.record.waiting_since for s in waiting), default=0.0)
            assert harness.core.load(harness.now).oldest_wait_s == longest
    assert harness.core.scheduler.counters.preemptions > 3
    assert len(harness.core.scheduler._wait_clock._heap) < 400
    harness.run()
    assert harness.core.load(harness.now).oldest_wait_s == 0.0


def test_fragmentation_is_what_the_last_blocks_leave_empty() -> None:
    harness = Listening(block_size=4)
    harness.submit("a", list(range(9)), 8)
    harness.step()
    assert harness.core.load(1.0).kv_fragmentation == pytest.approx(3 / 12)  # 9 tokens in 3 blocks of 4
    harness.run()
    assert harness.core.load(1.0).kv_fragmentation == 0.0


def test_batch_sizes_are_counted() -> None:
    harness = Listening()
    for name in "abc":
        harness.submit(name, [ord(name)] * 3, 2)
    harness.run()
    load = harness.core.load(1.0)
    assert load.step_sequence_counts[:4] == [0, 0, 2, 0]  # bounds 1, 2, 4: two steps of three
    assert load.counters["scheduled_sequences"] == 6


def test_step_times_add_up() -> None:
    times = StepTimes()
    times.add(0.012, 0.001, 0.015)
    times.add(0.5, 0.0, 0.5)
    assert (times.model_s, times.scheduler_s) == (0.512, 0.001)
    assert times.between_s == pytest.approx(0.003)
    assert sum(times.counts) == 2
