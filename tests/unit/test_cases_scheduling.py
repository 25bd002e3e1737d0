"""Failures that users of other engines reported (group C), each with its own input. C-10 takes 120 s of virtual time
and is in `tests/simulation/test_fairness.py`; C-16 is in `test_block_manager.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

from replica.messages import FinishReason, RefusalReason, RequestId
from tests.unit.engine_harness import ROUTER, Harness, reference


def engine(**knobs: Any) -> Harness:
    return Harness(**{"block_size": 16, "max_num_batched_tokens": 256, **knobs})


def cached_tokens(h: Harness, name: str, prompt: list[int]) -> int:
    """Of the prompt, how many tokens came from the cache; runs it to its end."""
    h.submit(name, prompt, 8)
    h.step()
    found = h.sequence(name).num_cached_tokens
    h.run()
    assert h.tokens[name] == reference(prompt, 8)
    return found


def test_c_01_the_last_token_of_a_prompt_that_is_cached_is_computed() -> None:
    h, prompt = engine(), list(range(64))
    longer = [*prompt, *range(500, 516)]
    found = [cached_tokens(h, f"run {i}", p) for i, p in enumerate((prompt, prompt, longer, longer))]
    assert found == [0, 48, 64, 64]


def test_c_03_a_prompt_that_fits_the_context_but_not_the_pool_is_refused_with_numbers() -> None:
    h = engine(num_blocks=8)
    assert h.submit("impossible", [1] * 200) is RefusalReason.NEVER_FITS
    assert "200" in h.message
    assert "128" in h.message
    assert h.submit("small", [2] * 10) is None
    assert h.run() <= 9, "eight tokens, and a word to the runner"
    assert h.ends == {"small": FinishReason.LENGTH}


def test_c_04_a_sequence_that_outgrows_the_pool_alone_is_cut_without_preempting_itself() -> None:
    h = engine(num_blocks=8)
    h.submit("alone", [1] * 100, 100)
    assert h.run() <= 29, "28 tokens, and a word to the runner"
    assert h.ends == {"alone": FinishReason.LENGTH}
    assert len(h.tokens["alone"]) == 28
    assert h.core.scheduler.counters.preemptions == 0


@pytest.mark.parametrize("victim", ["policy", "cost"])
def test_c_06_preempted_recomputed_resumed(victim: str) -> None:
    h = engine(num_blocks=10, preemption_victim=victim)
    prompts = {"a": [1] * 48, "b": [2] * 48}
    for name, prompt in prompts.items():
        h.submit(name, prompt, 60)
    h.run()
    assert h.core.scheduler.counters.preemptions > 0
    for name, prompt in prompts.items():
        assert h.tokens[name] == reference(prompt, 60)


@pytest.mark.parametrize("look_past", [0, 8])
def test_c_07_a_preempted_sequence_comes_back_before_those_who_arrived_later(look_past: int) -> None:
    h = Harness(num_blocks=10, admission_look_past=look_past, caching=False)
    h.submit("older", [1] * 11, 30, arrival=0.0)
    h.submit("x", [2] * 11, 20, arrival=1.0)
    h.step()
    h.submit("w1", [3] * 35, 2, arrival=2.0)
    for number in (2, 3, 4):
        h.submit(f"w{number}", [number + 2] * 19, 2, arrival=1.0 + number)
    while not h.names(h.core.scheduler.returning):
        h.step()
    assert h.names(h.core.scheduler.returning) == ["x"]
    h.submit("small", [8, 8], 2, arrival=9.0)
    assert h.core.blocks.num_free >= 1, "it would fit at once"
    before = [*h.running(), *h.ends]
    started: list[str] = []
    while h.core.num_unfinished:
        h.step()
        started += [n for n in [*h.running(), *h.ends] if n not in [*before, *started]]
    assert started[0] == "x", "nobody passes a sequence that was preempted, not even a small one"
    fresh = [name for name in [*before, *started] if name.startswith("w")]
    assert [name for name in fresh if name != "w1"] == ["w2", "w3", "w4"], "equal ones start as they arrived"
    assert look_past or fresh[0] == "w1"
    assert len(h.ends) == 7


def test_c_09_an_urgent_request_does_not_wait_for_a_place() -> None:
    h = Harness(max_num_seqs=2, num_blocks=400, policy="priority")
    for name in ("a", "b"):
        h.submit(name, [ord(name)] * 4, 500, priority=5)
    h.step()
    h.submit("urgent", [1] * 20, 5, priority=0)
    h.step()
    assert len(h.tokens["urgent"]) == 1, "its first token comes with the next step"
    assert h.running() == ["a", "urgent"]
    h.run(2000)
    assert {name: h.tokens[name] for name in "ab"} == {name: reference([ord(name)] * 4, 500) for name in "ab"}


@pytest.mark.parametrize("way", ["abort", "deadline", "shed", "drain", "shutdown"])
def test_c_12_every_way_out_of_the_queue_answers_and_leaves_nothing(way: str) -> None:
    """Who aborts does not wait for an answer; everybody else hears a reason, once."""
    h = Harness(cap=1, max_num_seqs=1, policy="priority", max_preemptions=0)
    h.submit("runs", [9], 200)
    h.step()
    h.submit("waits", [1, 2], 3, priority=5, deadline=h.now + 5)
    if way == "abort":
        h.core.abort(ROUTER, RequestId("waits"), h.now)
    elif way == "deadline":
        h.now += 5
        h.core.end_overdue(h.now)
        h.hear(h.core.take_ended())
    elif way == "shed":
        h.submit("urgent", [3], 3, priority=1)
        h.core.abort(ROUTER, RequestId("urgent"), h.now)
    else:
        if way == "drain":
            h.core.stop_admission()
        h.hear(h.core.hand_over(h.now))
    reasons = {
        "abort": None,
        "deadline": FinishReason.DEADLINE,
        "shed": FinishReason.SHED,
        "drain": FinishReason.MOVED,
        "shutdown": FinishReason.MOVED,
    }
    assert h.ends.get("waits") is reasons[way]
    assert h.core.num_unfinished == (0 if way in ("drain", "shutdown") else 1)
    h.core.validate()
    if way != "drain":
        assert h.submit("waits", [1, 2], 3) is None, "nothing of the first one is left"
    h.run()
    assert h.core.blocks.num_free == h.core.blocks.num_blocks
    assert h.runner.num_known == 0


def test_c_13_one_at_a_time() -> None:
    h = Harness(max_num_seqs=1, max_num_batched_tokens=16, num_blocks=100)
    lengths = [5, 100, 40, 17, 64]
    for number, length in enumerate(lengths):
        h.submit(f"q{number}", [number] * length, 4)
    while h.core.num_unfinished:
        h.step()
        assert len(h.running()) <= 1
    assert list(h.ends) == [f"q{number}" for number in range(5)]


def test_c_15_blocks_of_an_unfinished_prefill_are_not_visible() -> None:
    h, prompt = engine(max_num_batched_tokens=16, num_blocks=100), list(range(160))
    h.submit("aborted", prompt)
    for _ in range(3):
        h.step()
    h.core.abort(ROUTER, RequestId("aborted"), h.now)
    h.submit("again", prompt)
    h.step()
    assert h.sequence("again").num_cached_tokens == 48, "what was really computed, and no more"
    h.submit("beside it", prompt)
    h.configure(max_num_batched_tokens=256)
    h.step()
    assert h.sequence("beside it").num_cached_tokens == 64
    h.run()
    assert h.tokens["again"] == h.tokens["beside it"] == reference(prompt, 8)


def test_c_18_prompts_that_differ_in_their_first_block_share_nothing() -> None:
    """The choice: a collision-resistant hash over the whole prefix, and no comparing of tokens."""
    h = engine()
    first, second = [1] * 16 + [7] * 48, [2] * 16 + [7] * 48
    assert cached_tokens(h, "first", first) == 0
    assert cached_tokens(h, "second", second) == 0
    hashes = h.core.blocks.cached_hashes()
    assert len(set(hashes)) == len(hashes)
    assert min(map(len, hashes)) >= 16, "128 bits and more"


def test_c_19_recomputation_is_not_a_cache_hit() -> None:
    h = engine(num_blocks=10)
    for number in range(20):
        h.submit(f"q{number}", [(number * 48 + i) % 997 for i in range(48)], 60)
    h.run(5000)
    assert h.core.scheduler.counters.preemptions > 0
    assert h.core.scheduler.counters.recomputed_tokens > 0
    stats = h.core.blocks.stats()
    assert stats.query_tokens == 20 * 48
    assert stats.hit_tokens == 0
