"""Configuration that changes while sequences wait, run and are in the runner's hands. The harness validates the core
after every change and step.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from replica.messages import FinishReason, RefusalReason
from tests.unit.engine_harness import Harness, reference


def busy(num_running: int, num_queued: int, *, num_blocks: int = 400, **scheduler: Any) -> Harness:
    """So many run, and so many wait because `max_num_seqs` is reached. Names: r0, r1, ... and q0, q1, ..."""
    h = Harness(num_blocks=num_blocks, max_num_seqs=num_running, **scheduler)
    for number in range(num_running):
        assert h.submit(f"r{number}", [number + 1, 2, 3], 20) is None
    while len(h.running()) < num_running:
        h.step()
    for number in range(num_queued):
        assert h.submit(f"q{number}", [number + 50, 2, 3], 4) is None
    return h


def queued(h: Harness) -> list[str]:
    return h.names(h.core.scheduler.queued)


def test_a_new_policy_sorts_a_full_queue_again_and_back() -> None:
    h = Harness(max_num_seqs=1, num_blocks=100, cap=3)
    h.submit("r", [1, 2, 3], 20)
    h.step()
    h.submit("long", [9] * 40, 8, priority=1)
    h.submit("short", [8, 7], 2, priority=2)
    h.submit("urgent", [5, 6, 7, 8], 30, priority=0)
    assert queued(h) == ["long", "short", "urgent"]
    assert h.submit("too-many", [1], 1) is RefusalReason.QUEUE_FULL
    h.configure(policy="priority")
    assert queued(h) == ["urgent", "long", "short"]
    h.configure(policy="sjf")
    assert queued(h) == ["short", "urgent", "long"]
    h.configure(sjf_ageing_tokens_per_s=50)
    assert queued(h) == ["short", "urgent", "long"]
    h.configure(policy="fcfs")
    assert queued(h) == ["long", "short", "urgent"]
    assert h.running() == ["r"]
    h.run()
    assert h.tokens["urgent"] == reference([5, 6, 7, 8], 30)


def test_returning_and_blocked_sequences_are_sorted_too() -> None:
    """A preempted one has a key of the old order; as it comes back to its place the books must agree."""
    h = Harness(num_blocks=8, max_num_seqs=3)
    for name, priority in (("a", 2), ("b", 1), ("c", 0)):
        h.submit(name, [ord(name)] * 8, 12, priority=priority)
    while not h.core.scheduler.returning:
        h.step()
    h.submit("waits-for-grammar", [1, 2], 4, grammar="g")
    before = h.names(h.core.scheduler.returning)
    h.configure(policy="priority")
    assert set(h.names(h.core.scheduler.returning)) == set(before)
    h.core.grammar_compiled("g", None, h.now)
    h.run()
    assert {name: h.tokens[name] for name in "abc"} == {name: reference([ord(name)] * 8, 12) for name in "abc"}


def test_under_a_new_policy_a_waiting_request_takes_the_place_of_a_running_one() -> None:
    """Who runs was admitted under fcfs; its key is made anew as well, or nobody would outrank it rightly."""
    h = Harness(max_num_seqs=1, num_blocks=100)
    h.submit("bulk", [1, 2, 3], 40, priority=5)
    h.step()
    h.now = 3.0
    h.submit("urgent", [4, 5, 6], 4, priority=0)
    h.step()
    assert h.running() == ["bulk"]
    h.configure(policy="priority")
    h.step()
    assert h.running() == ["urgent"]
    h.run()
    assert h.tokens["bulk"] == reference([1, 2, 3], 40)


def test_a_cap_below_the_queue_drops_nobody_and_refuses_until_below() -> None:
    h = busy(2, 6)
    h.configure(cap=3)
    assert h.core.load(h.now).queue_cap == 3
    assert len(queued(h)) == 6
    assert h.submit("x", [1], 1) is RefusalReason.QUEUE_FULL
    assert h.submit("y", [1], 1, n=4) is RefusalReason.TOO_MANY_SEQUENCES
    while len(queued(h)) >= 3:
        assert h.submit("x", [1], 1) is RefusalReason.QUEUE_FULL
        h.step()
    assert h.submit("x", [1, 2], 1) is None
    h.run()
    assert {h.ends[f"q{i}"] for i in range(6)} == {FinishReason.LENGTH}


def test_above_a_lowered_cap_an_urgent_request_takes_one_place_and_not_all_the_surplus() -> None:
    h = busy(1, 5, policy="priority", max_preemptions=0)
    h.configure(cap=2)
    assert h.submit("urgent", [7], 1, priority=-1) is None
    assert list(h.ends.values()) == [FinishReason.SHED]
    assert len(queued(h)) == 5


def test_fewer_places_than_running_put_nobody_back() -> None:
    h = busy(6, 3)
    h.configure(max_num_seqs=2)
    running = h.running()
    h.step()
    assert h.running() == running
    while len(h.running()) >= 2:
        before = queued(h)
        h.step()
        assert len(h.running()) < 2 or queued(h) == before, "somebody was admitted above the limit"
    assert h.core.scheduler.counters.preemptions == 0
    h.run()
    assert all(h.tokens[f"r{i}"] == reference([i + 1, 2, 3], 20) for i in range(6))
    assert h.core.scheduler.counters.preemptions == 0


def test_above_a_lowered_max_num_seqs_an_urgent_request_displaces_nobody() -> None:
    h = busy(4, 0, policy="priority")
    h.configure(max_num_seqs=2)
    h.submit("urgent", [7], 2, priority=-1)
    h.step()
    h.step()
    assert h.core.scheduler.counters.displaced == 0
    h.configure(max_num_seqs=4)
    h.step()
    assert h.core.scheduler.counters.displaced == 1


def test_validate_notices_who_is_admitted_above_a_lowered_limit() -> None:
    h = busy(6, 2)
    h.configure(max_num_seqs=3)
    h.core.scheduler._rules.admission._config = h.core.scheduler._rules.config.model_copy(update={"max_num_seqs": 99})
    with pytest.raises(AssertionError, match="more running"):
        h.step()


def test_chunking_switched_off_in_the_middle_of_a_prompt_computes_the_rest_at_once() -> None:
    h = Harness(num_blocks=100)
    h.submit("talks", [1, 2, 3], 30)
    h.step()
    prompt = list(range(1, 151))
    h.submit("prompt", prompt, 5)
    assert h.step()["prompt"] == 31
    h.configure(enable_chunked_prefill=False, long_prefill_token_threshold=10)
    assert h.step()["prompt"] == 150 - 31
    h.submit("another", list(range(200, 300)), 2)
    assert h.step()["another"] == 100
    h.configure(enable_chunked_prefill=True)
    h.submit("last", list(range(300, 400)), 2)
    assert h.step()["last"] == 10
    h.run()
    assert (h.tokens["prompt"], h.tokens["talks"]) == (reference(prompt, 5), reference([1, 2, 3], 30))


def test_two_begun_prompts_are_completed_one_a_step_when_chunking_is_off() -> None:
    h = Harness(num_blocks=100, long_prefill_token_threshold=10)
    h.submit("a", list(range(1, 91)), 2)
    h.submit("b", list(range(100, 190)), 2)
    assert h.step() == {"a": 10, "b": 10}
    h.configure(enable_chunked_prefill=False)
    assert h.step() == {"a": 80}
    # then b is first, and the budget covers a's decode beside it
    assert h.step() == {"a": 1, "b": 80}
    h.run()
    assert h.tokens["b"] == reference(list(range(100, 190)), 2)


def test_a_budget_of_one_token_still_gets_everybody_to_the_end() -> None:
    h = busy(2, 2)
    h.configure(max_num_batched_tokens=1)
    assert sum(h.step().values()) == 1
    h.run()
    assert h.tokens["q1"] == reference([51, 2, 3], 4)


def test_a_change_while_a_step_is_with_the_runner_counts_from_the_next_one() -> None:
    h = busy(3, 3, num_speculative_tokens=4)
    h.submit("prompt", list(range(100, 160)), 3)
    plan = h.plan()
    assert plan is not None
    h.configure(policy="sjf", max_num_seqs=1, max_num_batched_tokens=2, enable_chunked_prefill=False, cap=1)
    h.configure(speculative_ngram=1, watermark=0.5)
    h.finish(plan)
    h.configure(max_num_seqs=8, max_num_batched_tokens=64, enable_chunked_prefill=True, cap=64)
    h.run()
    assert h.tokens["prompt"] == reference(list(range(100, 160)), 3)
    assert all(h.tokens[f"r{i}"] == reference([i + 1, 2, 3], 20) for i in range(3))


@pytest.mark.parametrize("change", [{"speculative_ngram": 2}, {"num_speculative_tokens": 0}])
def test_a_guess_in_the_step_is_judged_though_guessing_has_changed_meanwhile(change: dict[str, int]) -> None:
    prompt = list(range(1000))  # every token stands in it, so that each finds a guess
    h = Harness(num_blocks=300, num_speculative_tokens=4, speculative_ngram=1, max_num_batched_tokens=1000)
    h.submit("a", prompt, 12)
    h.step()
    plan = h.plan()
    assert plan is not None
    assert plan.drafts
    h.configure(**change)
    h.finish(plan)
    assert h.core.scheduler.counters.drafted_tokens == len(plan.drafts[plan.seq_ids[0]])
    h.run()
    assert h.tokens["a"] == reference(prompt, 12)


def test_the_watermark_counts_from_the_next_admission() -> None:
    h = busy(1, 0, num_blocks=20)
    h.configure(watermark=0.95, max_num_seqs=4)
    h.submit("x", [1, 2, 3, 4], 2)
    h.step()
    assert h.running() == ["r0"]
    h.configure(watermark=0.0)
    h.step()
    assert h.running() == ["r0", "x"]


def test_the_same_configuration_again_changes_no_key() -> None:
    """A sjf key counts what was cached when its owner began to wait; that stays until the order itself changes."""
    h = busy(1, 3, policy="sjf")
    before = [s.queue_key for s in h.core.scheduler.queued]
    h.configure(watermark=0.2)
    assert [s.queue_key for s in h.core.scheduler.queued] == before


def test_changes_at_random_moments_change_no_token() -> None:
    """A first look; the state machine of tests/property does it at every moment."""
    rng = random.Random(4)
    h = Harness(num_blocks=48, cap=16)
    prompts = {}
    for number in range(60):
        name = f"n{number}"
        prompt = [rng.randrange(1, 20) for _ in range(rng.randint(1, 60))]
        if h.submit(name, prompt, 10, priority=rng.randint(0, 2)) is None:
            prompts[name] = prompt
        changes: dict[str, list[Any]] = {
            "policy": ["fcfs", "priority", "sjf"],
            "max_num_seqs": [1, 2, 8],
            "max_num_batched_tokens": [1, 16, 64],
            "enable_chunked_prefill": [True, False],
            "long_prefill_token_threshold": [5, 20],
            "max_long_partial_prefills": [0, 1],
            "max_partial_prefills": [0, 2],
            "admission_look_past": [0, 8],
            "watermark": [0.0, 0.2],
            "preemption_victim": ["policy", "cost"],
            "max_preemptions": [0, 1, 8],
            "num_speculative_tokens": [0, 3],
            "speculative_ngram": [1, 2],
        }
        plan = h.plan()
        h.configure(long_prefill_token_threshold=h.settings.get("long_prefill_token_threshold") or 20)
        for key in rng.sample(sorted(changes), 3):
            h.configure(**{key: rng.choice(changes[key])})
        h.configure(cap=rng.choice([1, 4, 16]))
        if plan is not None:
            h.finish(plan)
    h.run()
    done = {name for name, reason in h.ends.items() if reason is FinishReason.LENGTH}
    assert {name: h.tokens[name] for name in done} == {name: reference(prompts[name], 10) for name in done}
    assert {h.ends[name] for name in prompts} <= {FinishReason.LENGTH, FinishReason.SHED}
    assert len(done) > 20
