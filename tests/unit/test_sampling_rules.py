"""Rules over logits, one row at a time, against a naive reading of what they promise."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from replica.errors import InvalidRequestError
from replica.grammar import GrammarCompiler, GrammarError
from replica.messages import SamplingParams
from replica.sampling_rules import LogprobReader, SequenceRules, prompt_logprobs

VOCAB = 40
EOS = (39,)


def rules(prompt: Sequence[int] = (1, 2), output: Sequence[int] = (), **sampling: object) -> SequenceRules:
    return SequenceRules(SamplingParams(8, **sampling), prompt, output, VOCAB, EOS, None)  # type: ignore[arg-type]


def applied(row: np.ndarray, output: Sequence[int], prompt: Sequence[int] = (1, 2), **sampling: object) -> np.ndarray:
    changed = row.copy()
    rules(prompt, output, **sampling).apply(changed, np.asarray(output, np.int32))
    return changed


def naive(
    row: list[float], prompt: list[int], output: list[int], repetition: float, presence: float, frequency: float
) -> list[float]:
    result = []
    for token, logit in enumerate(row):
        value = logit
        if token in prompt or token in output:
            value = value / repetition if value > 0 else value * repetition
        if token in output:
            value -= presence + frequency * output.count(token)
        result.append(value)
    return result


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=30)


@given(
    seed=st.integers(0, 1000),
    prompt=tokens,
    output=tokens,
    repetition=st.sampled_from([1.0, 0.5, 1.3]),
    presence=st.sampled_from([0.0, -1.0, 0.5]),
    frequency=st.sampled_from([0.0, 0.25, -2.0]),
)
def test_penalties(
    seed: int, prompt: list[int], output: list[int], repetition: float, presence: float, frequency: float
) -> None:
    row = (np.random.default_rng(seed).standard_normal(VOCAB) * 4).astype(np.float32)
    changed = applied(
        row,
        output,
        prompt,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    np.testing.assert_allclose(
        changed, naive(row.tolist(), prompt, output, repetition, presence, frequency), rtol=1e-5, atol=1e-5
    )


def test_bias_comes_before_penalties_and_masks_after_both() -> None:
    row = np.zeros(VOCAB, np.float32)
    changed = applied(row, [3], logit_bias={3: 4.0, 5: 100.0}, repetition_penalty=2.0, allowed_token_ids=(3, 4))
    assert changed[3] == 2.0  # (0 + 4) / 2
    assert np.flatnonzero(np.isfinite(changed)).tolist() == [3, 4]


def test_bad_words_ban_their_last_token_only_behind_the_others() -> None:
    row = np.zeros(VOCAB, np.float32)
    words = ((7,), (8, 9), (8, 8, 10))
    for output, banned in (([], [7]), ([8], [7, 9]), ([8, 8], [7, 9, 10]), ([9, 8], [7, 9]), ([8, 1], [7])):
        changed = applied(row, output, bad_words=words)
        assert np.flatnonzero(np.isinf(changed)).tolist() == banned, output
    # words are looked for in the output, not across its border with the prompt
    assert np.isfinite(applied(row, [], prompt=(8,), bad_words=((8, 9),))).all()


def test_min_tokens_holds_eos_and_stop_tokens_back() -> None:
    row = np.zeros(VOCAB, np.float32)
    held = rules(min_tokens=2, stop_token_ids=(5,))
    for output, banned in (([], [5, 39]), ([1], [5, 39]), ([1, 1], [])):
        changed = row.copy()
        held.apply(changed, np.asarray(output, np.int32))
        assert np.flatnonzero(np.isinf(changed)).tolist() == banned
        assert held.is_active(len(output)) == bool(banned)


def test_nothing_left_is_an_error_and_not_a_random_token() -> None:
    with pytest.raises(GrammarError, match="leave no token"):
        applied(np.zeros(VOCAB, np.float32), [], allowed_token_ids=(7,), bad_words=((7,),))


def test_min_tokens_yields_where_only_the_end_is_possible() -> None:
    changed = applied(np.zeros(VOCAB, np.float32), [], allowed_token_ids=EOS, min_tokens=3)
    assert np.flatnonzero(np.isfinite(changed)).tolist() == [39]


def test_logprobs_are_those_of_the_untouched_distribution() -> None:
    row = np.log(np.asarray([0.1, 0.4, 0.2, 0.3] + [1e-9] * (VOCAB - 4), np.float32))
    told = rules(num_logprobs=2, logit_bias={0: 50.0}, presence_penalty=1.0)
    changed = row.copy()
    told.apply(changed, np.asarray([1], np.int32))
    assert changed.argmax() == 0
    entry = told.chosen(0)
    assert entry is not None
    assert entry.logprob == pytest.approx(math.log(0.1), abs=1e-5)
    assert (entry.rank, entry.top_token_ids) == (4, [1, 3])
    assert entry.top_logprobs == pytest.approx([math.log(0.4), math.log(0.3)], abs=1e-5)


@given(st.lists(st.sampled_from([-2.0, 0.0, 1.0, 1.5, 3.0]), min_size=1, max_size=30), st.integers(0, 40))
def test_top_ids_are_sorted_with_ties_by_id(values: list[float], count: int) -> None:
    row = np.asarray(values, np.float32)
    entry = LogprobReader(row, count).read(0)
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
    assert entry.top_token_ids == expected
    assert entry.rank == 1 + sum(value > values[0] for value in values)
    total = math.log(sum(math.exp(value) for value in values))
    assert entry.logprob == pytest.approx(values[0] - total, abs=1e-5)


@given(st.integers(0, 1000), st.integers(1, 20), st.sampled_from([127, 128, 500, 3000]), st.integers(1, 1000))
def test_top_ids_of_long_rows(seed: int, count: int, size: int, num_values: int) -> None:
    """Many equal values, and sizes around whole pieces."""
    row = np.random.default_rng(seed).integers(0, num_values, size).astype(np.float32)
    expected = sorted(range(size), key=lambda i: (-row[i], i))[:count]
    assert LogprobReader(row, count).read(0).top_token_ids == expected


def test_prompt_logprobs_pair_each_row_with_the_token_that_follows() -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    logits[0, 5] = logits[1, 6] = 10.0
    first, second = prompt_logprobs(logits, np.asarray([5, 7], np.int32), 1)
    assert (first.rank, first.top_token_ids, second.top_token_ids) == (1, [5], [6])
    assert second.rank == 2


def test_plain_sampling_has_no_rules() -> None:
    assert not SamplingParams(8, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, stop_token_ids=(3,)).has_rules
    assert not SamplingParams(8, ignore_eos=True).has_rules


# ---- grammars ----


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    """Over a byte-level tokenizer whose tokens are single characters, two words, and eos."""
    words = [chr(c) for c in range(0x21, 0x7F)] + ["Ġ", "Ċ", "true", "null", "<eos>"]
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    model = {"type": "BPE", "vocab": {word: i for i, word in enumerate(words)}, "merges": []}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    added = [{"id": len(words) - 1, "content": "<eos>", "special": True, "single_word": False}]
    added[0] |= {"lstrip": False, "rstrip": False, "normalized": False}
    data = {"version": "1.0", "added_tokens": added, "pre_tokenizer": byte_level, "decoder": byte_level, "model": model}
    path.write_text(json.dumps(data))
    tokenizers.Tokenizer.from_file(str(path))
    return GrammarCompiler(path, len(words), (len(words) - 1,))


def ids(text: str) -> list[int]:
    return [ord(c) - 0x21 if c != " " else 94 for c in text]


def grammar(schema: object) -> str:
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_flexible": False}))


def test_a_grammar_allows_what_may_follow_and_ends_with_eos(compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(grammar({"enum": [True, "ab"]}))
    assert np.flatnonzero(matcher.allowed()).tolist() == [*ids('"'), *ids("t"), 96]
    matcher.consume([96])
    assert np.flatnonzero(matcher.allowed()).tolist() == [98]


def test_state_comes_from_the_output_so_a_resumed_sequence_goes_on(compiler: GrammarCompiler) -> None:
    text = grammar({"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]})
    whole = compiler.matcher(text)
    output = ids('{"a":')
    for count, token_id in enumerate(output):
        resumed = compiler.matcher(text)
        resumed.consume(output[:count])
        assert np.array_equal(resumed.allowed(), whole.allowed())
        whole.consume([token_id])


def test_matchers_of_one_grammar_do_not_see_each_other(compiler: GrammarCompiler) -> None:
    text = grammar({"type": "integer"})
    one, two = compiler.matcher(text), compiler.matcher(text)
    one.consume(ids("12"))
    assert not one.allowed()[ids("-")[0]]
    assert two.allowed()[ids("-")[0]]


def test_a_token_that_the_grammar_forbids_is_an_error(compiler: GrammarCompiler) -> None:
    with pytest.raises(GrammarError):
        compiler.matcher(grammar({"type": "integer"})).consume(ids("x"))


@pytest.mark.parametrize("text", ['{"grammars": [{"json_schema": {"type": "nonsense"}}]}', "no grammar", "{"])
def test_a_grammar_that_cannot_be_compiled_is_refused_in_one_line(compiler: GrammarCompiler, text: str) -> None:
    with pytest.raises(InvalidRequestError, match="the grammar cannot be compiled: ") as caught:
        compiler.compile(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_nobody_fails_because_of_what_others_did_with_the_grammar(compiler: GrammarCompiler) -> None:
    """Matchers of one grammar share llguidance's states, and their limit: a regex with a state for each way through."""
    from llguidance import LLMatcher

    text = str(LLMatcher.grammar_from_regex("[a-d]*(a[a-d]{14}|b[a-d]{13}|c[a-d]{15})"))
    rng = np.random.default_rng(3)
    for _ in range(60):
        matcher = compiler.matcher(text)
        for token_id in rng.choice(ids("abcd"), 400).tolist():
            assert matcher.allowed()[token_id]
            matcher.consume([token_id])


def test_min_tokens_holds_eos_back_under_a_grammar_even_where_eos_is_to_be_ignored(compiler: GrammarCompiler) -> None:
    """Under a grammar eos ends the sequence all the same."""
    sampling = SamplingParams(8, grammar=grammar({"type": "integer"}), min_tokens=3, ignore_eos=True)
    row = np.zeros(99, np.float32)
    SequenceRules(sampling, [1], ids("12"), 99, (98,), compiler).apply(row, np.asarray(ids("12"), np.int32))
    assert not np.isfinite(row[98])


def test_a_model_without_tokenizer_or_end_is_told(tmp_path: Path, compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequestError, match=r"lacks"):
        GrammarCompiler(tmp_path / "tokenizer.json", 10, (1,)).compile(grammar({"type": "null"}))


def test_grammar_and_masks_meet(compiler: GrammarCompiler) -> None:
    text = grammar({"type": "integer"})
    sampling = SamplingParams(8, grammar=text, bad_words=((ids("7")[0],),), min_tokens=2)
    both = SequenceRules(sampling, [1], ids("1"), 99, (98,), compiler)
    row = np.zeros(99, np.float32)
    both.apply(row, np.asarray(ids("1"), np.int32))
    assert np.flatnonzero(np.isfinite(row)).tolist() == [i for i in ids("0123456789") if i != ids("7")[0]]
    both.chosen(ids("2")[0])
    row = np.zeros(99, np.float32)
    both.apply(row, np.asarray(ids("12"), np.int32))
    assert np.isfinite(row[98]), "min_tokens is over: the number may end"
