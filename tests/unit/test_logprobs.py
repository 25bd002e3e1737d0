"""Logprobs in the shapes of OpenAI and vLLM."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest

from replica.messages import TokenLogprobs
from router.logprobs import (
    LOWEST_LOGPROB,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprobs,
    TokenNames,
    finite,
    prompt_offsets,
)

#: id -> bytes; 3 and 4 are halves of one character, 9 is no token
VOCABULARY = {0: b"a", 1: b" b", 2: "é".encode(), 3: b"\xc3", 4: b"\xa9", 5: b'"\n'}
NAMES = ["a", " b", "é", "\ufffd", "\ufffd", '"\n']


def names(as_ids: bool = False) -> TokenNames:
    return TokenNames(VOCABULARY.get, as_ids)


def plain(value: object) -> Any:
    """As a client reads it."""
    return json.loads(msgspec.json.encode(value))


def entry(token_id: int, logprob: float, *top: tuple[int, float], rank: int = 1) -> TokenLogprobs:
    return TokenLogprobs(logprob, rank, [other for other, _ in top], [value for _, value in top])


@pytest.mark.parametrize(
    ("logprob", "told"),
    [(-0.5, -0.5), (0.0, 0.0), (-math.inf, LOWEST_LOGPROB), (math.nan, LOWEST_LOGPROB), (-20000.0, LOWEST_LOGPROB)],
)
def test_json_has_no_infinity(logprob: float, told: float) -> None:
    assert finite(logprob) == told


def test_completion_tells_the_likeliest_and_the_chosen_one() -> None:
    logprobs = CompletionLogprobs(names(), 2)
    logprobs.add(0, 0, None)
    logprobs.add(1, 1, entry(1, -3.0, (2, -0.5), (5, -1.0)))
    logprobs.add(2, 3, entry(2, -0.5, (2, -0.5), (5, -1.0)))
    assert plain(logprobs.take()) == {
        "tokens": ["a", " b", "é"],
        "token_logprobs": [None, -3.0, -0.5],
        "top_logprobs": [None, {"é": -0.5, '"\n': -1.0, " b": -3.0}, {"é": -0.5, '"\n': -1.0}],
        "text_offset": [0, 1, 3],
    }
    assert plain(logprobs.take())["tokens"] == []


def test_completion_with_no_alternatives_tells_the_chosen_one() -> None:
    logprobs = CompletionLogprobs(names(), 0)
    logprobs.add(1, 0, entry(1, -math.inf))
    assert plain(logprobs.take())["top_logprobs"] == [{" b": LOWEST_LOGPROB}]


def test_of_two_tokens_with_one_text_the_likelier_is_told() -> None:
    logprobs = CompletionLogprobs(names(), 2)
    logprobs.add(0, 0, entry(0, -1.0, (3, -2.0), (4, -3.0)))
    assert plain(logprobs.take())["top_logprobs"] == [{"\ufffd": -2.0, "a": -1.0}]
    by_id = CompletionLogprobs(names(as_ids=True), 2)
    by_id.add(0, 0, entry(0, -1.0, (3, -2.0), (4, -3.0)))
    assert plain(by_id.take())["top_logprobs"] == [{"token_id:3": -2.0, "token_id:4": -3.0, "token_id:0": -1.0}]


@pytest.mark.parametrize("num_top", [0, 1, 2])
def test_chat_tells_exactly_as_many_alternatives_as_asked_for(num_top: int) -> None:
    logprobs = ChatLogprobs(names(), num_top)
    logprobs.add(1, 0, entry(1, -3.0, (2, -0.5), (3, -1.0), (4, -2.0)))
    logprobs.add(9, 0, entry(9, -4.0))
    value = plain(logprobs.take())
    top = [
        {"token": "é", "logprob": -0.5, "bytes": [0xC3, 0xA9]},
        {"token": "\ufffd", "logprob": -1.0, "bytes": [0xC3]},
    ]
    assert value == {
        "content": [
            {"token": " b", "logprob": -3.0, "bytes": [32, 98], "top_logprobs": top[:num_top]},
            {"token": "", "logprob": -4.0, "bytes": None, "top_logprobs": []},
        ],
        "refusal": None,
    }


def test_tokens_as_ids_keep_their_bytes() -> None:
    logprobs = ChatLogprobs(names(as_ids=True), 0)
    logprobs.add(3, 0, entry(3, -1.0))
    (told,) = plain(logprobs.take())["content"]
    assert (told["token"], told["bytes"]) == ("token_id:3", [0xC3])


def test_prompt_logprobs_are_keyed_by_id_with_the_prompts_own_token_first() -> None:
    prompt = PromptLogprobs(names(as_ids=True), 2)
    prompt.add(0, None)
    prompt.add(1, entry(1, -7.0, (2, -0.5), (3, -math.inf), (4, -9.0), rank=40))
    prompt.add(2, entry(2, -0.5, (2, -0.5), (3, -1.0)))
    told = [
        {
            "1": {"logprob": -7.0, "rank": 40, "decoded_token": " b"},
            "2": {"logprob": -0.5, "rank": 1, "decoded_token": "é"},
            "3": {"logprob": LOWEST_LOGPROB, "rank": 2, "decoded_token": "\ufffd"},
        },
        {
            "2": {"logprob": -0.5, "rank": 1, "decoded_token": "é"},
            "3": {"logprob": -1.0, "rank": 2, "decoded_token": "\ufffd"},
        },
    ]
    assert plain(prompt.positions) == [None, *told]
    assert list(plain(prompt.positions)[1]) == ["1", "2", "3"]


def test_prompt_offsets_stay_inside_of_the_text() -> None:
    pieces = {7: "<s>", 0: "a", 1: " b"}
    assert prompt_offsets([0, 1, 0], "a ba", pieces.__getitem__) == ([0, 1, 3], "a ba")
    offsets, text = prompt_offsets([7, 0, 1], "a b", pieces.__getitem__)
    assert (offsets, text) == ([0, 3, 3], "<s>a b")
