"""Prompt lookup: what is guessed, what becomes of it, and that it never changes what is said."""

from __future__ import annotations

import random
from typing import Any

import pytest

from replica.fake_runner import FakeModelRunner, expected_output
from replica.messages import FinishReason, RequestId, SamplingParams
from replica.speculation import Drafter
from tests.unit.engine_harness import ROUTER, Harness

#: so few tokens that the fake runner's text repeats itself by chance
VOCAB = 3


def speculating(num_tokens: int = 4, ngram: int = 2, **changes: object) -> Harness:
    harness = Harness(num_speculative_tokens=num_tokens, speculative_ngram=ngram, **changes)  # type: ignore[arg-type]
    info = harness.core.info
    harness.runner = FakeModelRunner(
        num_blocks=info.num_blocks, block_size=info.block_size, vocab_size=VOCAB, eos_token_ids=()
    )
    return harness


def reference(prompt: list[int], num_tokens: int, seed: int = 0) -> list[int]:
    return expected_output(prompt, num_tokens, seed=seed, vocab_size=VOCAB)


def test_what_followed_before_is_guessed_the_latest_occurrence_first() -> None:
    assert Drafter().propose([1, 2, 3, 9, 1, 2, 4, 8, 1, 2], 2, 10) == [4, 8]
    assert Drafter().propose([1, 2, 3, 9, 1, 2, 4, 8, 1, 2], 2, 1) == [4]
    assert Drafter().propose([1, 2, 3], 2, 10) == []
    assert Drafter().propose([7, 7, 7], 1, 10) == [7, 7], "a loop goes on"
    assert Drafter().propose([6, 7, 6, 7, 6], 2, 10) == [7, 6]
    assert Drafter().propose([1], 3, 10) == []
    assert Drafter().propose([1, 2], 3, 10) == [], "a text shorter than what is looked up"
    assert Drafter().propose([], 3, 10) == []


def test_a_text_that_was_shorter_than_the_ngram_is_found_once_it_has_grown() -> None:
    drafter, tokens = Drafter(), [4]
    for token in [5, 6, 4, 5]:
        assert drafter.propose(tokens, 3, 10) == []
        tokens.append(token)
    tokens.append(6)
    assert drafter.propose(tokens, 3, 2) == [4, 5]


@pytest.mark.parametrize("ngram", [1, 2, 3, 5])
def test_looking_up_step_by_step_finds_what_a_search_finds(ngram: int) -> None:
    rng = random.Random(ngram)
    drafter, tokens = Drafter(), [rng.randrange(3) for _ in range(3000)]
    while len(tokens) < 3400:
        found = drafter.propose(tokens, ngram, 1)
        if drafter._num_indexed == len(tokens):
            ends = [i for i in range(ngram, len(tokens)) if tokens[i - ngram : i] == tokens[-ngram:]]
            assert found == tokens[ends[-1] : ends[-1] + 1]
        else:
            assert found == []  # a long prompt is taken in over several steps
        tokens += [rng.randrange(3) for _ in range(rng.randrange(1, 4))]
    assert drafter._num_indexed > 3390


def test_guesses_grow_with_success_shrink_and_pause_without() -> None:
    drafter, tokens = Drafter(), [5] * 100
    lengths = []
    for _ in range(4):
        lengths.append(len(drafter.propose(tokens, 2, 64)))
        tokens += [5] * (lengths[-1] + 1)
        drafter.judge(lengths[-1], lengths[-1])
    assert lengths == [2, 4, 8, 16]
    drafter.judge(16, 3)
    assert drafter.propose(tokens, 2, 64) == [5, 5, 5]
    pauses = []
    for _ in range(8):
        drafter.judge(1, 0)
        pauses.append(0)
        while not drafter.propose(tokens, 2, 1):
            pauses[-1] += 1
            tokens.append(5)
    assert pauses == [2, 4, 8, 16, 32, 64, 64, 64]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("caching", [True, False])
def test_the_output_is_that_of_an_undisturbed_run_in_fewer_steps(temperature: float, caching: bool) -> None:
    num_steps = []
    prompts = {f"p{i}": [i % VOCAB, *([0, 1] * i)] for i in range(6)}
    for most in (0, 4):
        harness = speculating(most, num_blocks=200, caching=caching)
        for name, prompt in prompts.items():
            harness.submit(name, prompt, 60, temperature=temperature, seed=3)
        num_steps.append(harness.run())
        for name, prompt in prompts.items():
            assert harness.tokens[name] == reference(prompt, 60, 3 if temperature else 0)
            assert harness.ends[name] is FinishReason.LENGTH
    counters = harness.core.scheduler.counters
    assert 0 < counters.accepted_tokens < counters.drafted_tokens
    assert counters.generation_tokens == 360
    # a seeded text repeats itself only by chance; one that never does takes as many steps as ever
    assert num_steps[1] < num_steps[0] + bool(temperature), num_steps
    assert harness.core.blocks.num_free == harness.core.blocks.num_blocks


def test_guesses_preempt_nobody_and_leave_the_last_tokens_of_a_step_to_prompts() -> None:
    harness = speculating(max_num_batched_tokens=8)
    harness.submit("talking", [0, 1] * 4, 200)
    while harness.core.scheduler.counters.drafted_tokens < 20:
        harness.step()
    drafted = harness.core.scheduler.counters.drafted_tokens
    harness.submit("long", [2] * 70, 1)
    for _ in range(9):
        assert sum(harness.step().values()) == 8
    assert harness.core.scheduler.counters.drafted_tokens == drafted, "a guess took a token from a prompt"
    harness.run()
    assert harness.tokens["talking"] == reference([0, 1] * 4, 200)


def test_guesses_fill_a_step_only_up_to_their_limit() -> None:
    harness = speculating(8, ngram=1, speculative_max_step_tokens=5, num_blocks=200)
    for number in range(3):
        harness.submit(f"{number}", [0, 1] * 4, 60)
    seen = set()
    while (plan := harness.plan()) is not None:
        if plan.drafts:
            assert plan.num_tokens <= 5
            seen.add(plan.num_tokens - len(plan.seq_ids))
        harness.finish(plan)
    assert 2 in seen
    for number in range(3):
        assert harness.tokens[f"{number}"] == reference([0, 1] * 4, 60)


def test_without_free_blocks_there_are_fewer_guesses_and_no_preemption() -> None:
    alone = speculating(num_blocks=9)
    alone.submit("a", [0, 1] * 4, 28)  # 36 tokens are 9 blocks of 4
    alone.run()
    assert alone.tokens["a"] == reference([0, 1] * 4, 28)
    assert alone.core.scheduler.counters.preemptions == 0
    tight = speculating(num_blocks=14)
    for name in "ab":
        tight.submit(name, [0, 1] * 4, 40)
    tight.run()
    for name in "ab":
        assert tight.tokens[name] == reference([0, 1] * 4, 40)


def test_max_tokens_is_kept_at_every_position() -> None:
    prompt = [0, 1] * 4
    text = reference(prompt, 80)
    stops = {n: speculating() for n in range(1, 60)}
    for n, harness in stops.items():
        harness.submit("a", prompt, n)
        harness.run()
        assert harness.tokens["a"] == text[:n]
        assert harness.ends["a"] is FinishReason.LENGTH
    assert stops[59].core.scheduler.counters.accepted_tokens > 0


def test_eos_and_stop_tokens_among_accepted_ones_are_the_last() -> None:
    """Two tokens: 0 is eos. Prompts that end in many different ways."""
    num_inside = 0
    for number in range(40):
        harness = Harness(num_speculative_tokens=6, speculative_ngram=1)
        info = harness.core.info
        harness.runner = FakeModelRunner(num_blocks=info.num_blocks, block_size=4, vocab_size=9, eos_token_ids=(7,))
        prompt = [number % 9, *range(9)] * 3
        harness.submit("a", prompt, 100, ignore_eos=False, stop_token_ids=(3,))
        harness.run()
        text = expected_output(prompt, 100, vocab_size=9)
        end = next((i for i, token in enumerate(text) if token in (3, 7)), 99)
        assert harness.tokens["a"] == text[: end + 1]
        assert harness.ends["a"] is (FinishReason.STOP if end < 99 else FinishReason.LENGTH)
        num_inside += harness.core.scheduler.counters.accepted_tokens
    assert num_inside


def test_an_abort_while_guesses_are_computed_leaves_nothing() -> None:
    harness = speculating()
    harness.submit("a", [0, 1] * 4, 100)
    while (plan := harness.plan()) is not None and not plan.drafts:
        harness.finish(plan)
    assert plan is not None
    result = harness.runner.execute(plan)
    harness.core.abort(ROUTER, RequestId("a"), 1.0)
    assert harness.core.update(plan, result, 2.0) == {}
    harness.core.validate()
    assert harness.core.num_unfinished == 0
    assert harness.core.blocks.num_free == harness.core.blocks.num_blocks


@pytest.mark.parametrize(
    "rules", [{"min_tokens": 2}, {"num_logprobs": 1}, {"bad_words": ((1,),)}, {"presence_penalty": 0.5}]
)
def test_sequences_with_rules_do_not_guess(rules: dict[str, Any]) -> None:
    assert SamplingParams(8, **rules).has_rules
    harness = speculating()
    harness.submit("a", [0, 1] * 4, 30, **rules)
    harness.run()
    assert harness.core.scheduler.counters.drafted_tokens == 0
