"""Requests: what is accepted, what is refused, and that the sentence names field, value and what is allowed."""

from __future__ import annotations

import json
import time
import typing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.errors import InvalidRequestError, NeverFitsError, UnknownModelError
from replica.messages import SamplingParams
from router.openai_api import ChatRequest, CompletionRequest, parse_chat, parse_completion, parse_tokenize
from router.openai_fields import CHAT_REFUSED, COMPLETION_REFUSED, WITHOUT_EFFECT
from router.prepare import check_request, prepare
from router.sampling import mixed_seed
from router.sentences import short
from tests.unit.http_fakes import settings, small_tokenizer

USER = {"role": "user", "content": "Say"}


def chat(**body: Any) -> ChatRequest:
    return parse_chat(json.dumps({"messages": [USER], **body}).encode())


def completion(**body: Any) -> CompletionRequest:
    return parse_completion(json.dumps({"prompt": "The sky", **body}).encode())


def refusal(function: Any, param: str | None = None, **body: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        function(**body)
    if param is not None:
        assert caught.value.param == param
    assert len(str(caught.value)) < 400
    return str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"true",
        b"null",
        b'"hi"',
        b'{"messages":"hi"}',
        b'{"messages":[1]}',
        b'{"messages":[]}',
        b"{}",
        b"\xff",
    ],
)
def test_malformed_bodies(body: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        parse_chat(body)
    with pytest.raises(InvalidRequestError):
        parse_completion(body)


@pytest.mark.parametrize("text", ["\\ud800", "\\ud800abcdefgh", "x\\udc00 aaaaaaaaaaaa", "\\ud83d\\u0041"])
def test_lone_surrogate_is_no_text(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        parse_chat(b'{"messages":[{"role":"user","content":"%s"}]}' % text.encode())


def test_surrogate_pair_is_one_character() -> None:
    request = parse_chat(b'{"messages":[{"role":"user","content":"ok \\ud83d\\ude00"}]}')
    assert request.messages[0]["content"] == "ok 😀"


def test_nesting_without_end_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="nested"):
        parse_chat(b'{"messages":' + b"[" * 50_000 + b"]" * 50_000 + b"}")
    schema: Any = {}
    for _ in range(500):
        schema = {"properties": schema}
    assert "response_format" in refusal(chat, "response_format", response_format={"type": "json_schema", "s": schema})


@pytest.mark.parametrize("stop", [None, []])
def test_no_stop(stop: Any) -> None:
    assert completion(stop=stop).stop == completion().stop == ()


@pytest.mark.parametrize("stop", ["", ["ok", ""], ["a"] * 5, ["a"] * 200_000, 3, [3], {"a": 1}, "x" * 1025, [["a"]]])
def test_wrong_stop(stop: Any) -> None:
    assert "allowed" in refusal(completion, "stop", stop=stop)


def test_stop_is_a_string_or_a_list() -> None:
    assert completion(stop="a").stop == ("a",)
    assert chat(stop=["a", "b", "c", "d"]).stop == ("a", "b", "c", "d")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("x", ["x"]), (["x", "y"], ["x", "y"]), ([5, 6], [[5, 6]]), ([[5, 6], [7]], [[5, 6], [7]])],
)
def test_prompt_forms(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompt == expected


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        None,
        [],
        [[]],
        [""],
        ["x", [1, 2]],
        [[1], "x"],
        [1, "x"],
        ["x", 1],
        [True],
        [[1, True]],
        5,
        {},
        [None],
        [1.5],
    ],
)
def test_wrong_prompts(prompt: Any) -> None:
    refusal(completion, "prompt", prompt=prompt)


@pytest.mark.parametrize("wrong", [[49152], [-1], [9_999_999_999_999], [10**30]])
def test_out_of_vocabulary(wrong: list[int]) -> None:
    message = refusal(lambda: check_request(completion(prompt=wrong), settings()), "prompt")
    assert "out of vocabulary" in message
    message = refusal(lambda: check_request(completion(stop_token_ids=wrong), settings()), "stop_token_ids")
    assert "out of vocabulary" in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.5),
        ("temperature", "0"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("n", 0),
        ("n", True),
        ("max_tokens", -1),
        ("max_tokens", 0),
        ("max_tokens", "5"),
        ("seed", 1 << 63),
        ("min_tokens", -1),
        ("stream", "yes"),
        ("stream", 1),
        ("ignore_eos", 0),
        ("cache_salt", ""),
        ("stop_token_ids", 5),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [1] * 129),
        ("stream_options", 5),
        ("model", 5),
        ("min_p", 1.1),
        ("min_p", True),
        ("presence_penalty", -2.1),
        ("frequency_penalty", 3),
        ("repetition_penalty", 0),
        ("repetition_penalty", 101),
        ("logit_bias", [1]),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": True}),
        ("logit_bias", {"5": None}),
        ("logit_bias", {"five": 1}),
        ("logit_bias", {"05": 1}),
        ("logit_bias", {str(number): 1 for number in range(1025)}),
        ("bad_words", "x"),
        ("bad_words", [""]),
        ("bad_words", ["x" * 129]),
        ("bad_words", ["x"] * 129),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [1.0]),
        ("allowed_token_ids", 5),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", True),
        ("echo", 1),
        ("return_tokens_as_token_ids", "true"),
        ("truncate_prompt_tokens", -2),
        ("truncate_prompt_tokens", 0),
        ("truncation_side", "right"),
        ("priority", "high"),
        ("request_id", ""),
        ("request_id", "x" * 129),
        ("response_format", "json"),
        ("structured_outputs", "json"),
    ],
)
def test_wrong_values_are_named_on_both_endpoints(field: str, value: Any) -> None:
    for function in (chat, completion):
        message = refusal(function, field, **{field: value})
        assert field in message
        assert "allowed" in message


@pytest.mark.parametrize("value", [10**20, -(10**20), 10**400, 1e30])
@pytest.mark.parametrize("field", ["priority", "seed", "top_k", "prompt_logprobs", "logprobs", "top_logprobs"])
def test_a_number_that_is_too_large_is_told_the_range(field: str, value: Any) -> None:
    function = {"logprobs": completion, "top_logprobs": chat}.get(field, chat)
    said = refusal(function, field, **{field: value}).partition("allowed: ")[2]
    least, most = {
        "priority": ("-2147483648", "2147483647"),
        "seed": ("-9223372036854775808", "9223372036854775807"),
        "top_k": ("-1", "2147483647"),
    }.get(field, ("0", "20"))
    assert f"an integer from {least} to {most}" in said


def test_bad_part_of_stream_options_is_named() -> None:
    assert "stream_options.include_usage is 1" in refusal(chat, stream=True, stream_options={"include_usage": 1})
    assert "stream_options" in refusal(chat, "stream_options", stream_options={"include_usage": True})
    assert chat(stream=True, stream_options={"include_usage": None}).stream_options is not None


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("Say hi", "Say hi"),
        ([{"type": "text", "text": "Say"}, {"type": "text", "text": " hi"}], "Say hi"),
        ([], ""),
        ("", ""),
    ],
)
def test_content_parts_are_joined(content: Any, text: str) -> None:
    assert chat(messages=[{"role": "user", "content": content}]).messages == [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([{"type": "image_url", "image_url": {"url": "http://x/y.png"}}], "image_url"),
        ([{"type": "text"}], "text"),
        ([{"type": "text", "text": 5}], "5"),
        (["text"], "messages[0].content[0]"),
        (5, "content"),
        (None, "content"),
    ],
)
def test_wrong_content(content: Any, said: str) -> None:
    assert said in refusal(chat, "messages", messages=[{"role": "user", "content": content}])


@pytest.mark.parametrize(
    "turn", [{"content": None, "tool_calls": []}, {"content": ""}, {}, {"refusal": None, "annotations": []}]
)
def test_empty_assistant_turns(turn: dict[str, Any]) -> None:
    request = chat(messages=[USER, {"role": "assistant", **turn}, USER])
    assert request.messages[1] == {"role": "assistant", "content": ""}


def test_unknown_roles_and_keys_are_refused() -> None:
    assert "use role 'tool'" in refusal(chat, "messages", messages=[USER, {"role": "function", "content": "x"}])
    assert "allowed: system" in refusal(chat, "messages", messages=[{"role": "boss", "content": "x"}])
    assert "'contents'" in refusal(chat, "messages", messages=[{"role": "user", "content": "x", "contents": "y"}])


def test_developer_is_the_system_role() -> None:
    assert chat(messages=[{"role": "developer", "content": "x"}]).messages[0]["role"] == "system"


def test_every_optional_field_may_be_null() -> None:
    names = [*ChatRequest.model_fields, *CHAT_REFUSED, *WITHOUT_EFFECT]
    assert chat(**{name: None for name in names if name != "messages"}) == chat()
    names = [*CompletionRequest.model_fields, *COMPLETION_REFUSED, *WITHOUT_EFFECT]
    assert completion(**{name: None for name in names if name != "prompt"}) == completion()


def test_harmless_fields_change_nothing() -> None:
    harmless = {
        **{name: {"a": 1} for name in WITHOUT_EFFECT},
        "parallel_tool_calls": True,
        "logit_bias": {},
        "logprobs": False,
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "response_format": {"type": "text"},
        "structured_outputs": {},
        "best_of": 1,
        "priority": 0,
        "include_reasoning": True,
        "length_penalty": 1.0,
        "function_call": "none",
    }
    assert chat(**harmless) == chat()
    # these are kept as they came and mean the same
    same = {"top_logprobs": 0, "tools": [], "tool_choice": "none", "reasoning_effort": "none", "request_id": "r"}
    assert sampling(chat(**same)) == sampling(chat())
    assert chat(**same).tool_request is None


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("best_of", 2, "use n"),
        ("guided_json", {"a": 1}, "use structured_outputs.json or response_format"),
        ("guided_grammar", "x", "use structured_outputs.grammar"),
        ("use_beam_search", True, "beam search is not supported"),
        ("functions", [{"name": "f"}], "use tools"),
        ("include_reasoning", False, "reasoning is always told"),
        ("spaces_between_special_tokens", False, "joined as the tokenizer does it"),
        ("ec_transfer_params", {"a": 1}, "cannot steer"),
        ("stream_interval", 2, "each step is sent at once"),
        ("chat_template", "{{ messages }}", "chat_template_kwargs"),
        ("modalities", ["text", "audio"], "text alone"),
    ],
)
def test_what_is_refused_is_named_with_the_reason_and_what_to_use(field: str, value: Any, said: str) -> None:
    message = refusal(chat, field, **{field: value})
    assert message.startswith(f"{field} is ")
    assert said in message


def test_fields_of_completions_alone_that_are_refused() -> None:
    assert "fill in the middle" in refusal(completion, "suffix", suffix="x")
    assert "prompt" in refusal(completion, "prompt_embeds", prompt_embeds="x")


def test_every_field_of_the_official_client_is_known() -> None:
    from openai.types import completion_create_params as completions
    from openai.types.chat import completion_create_params as chats

    for params, known in (
        (chats.CompletionCreateParamsStreaming, {*ChatRequest.model_fields, *CHAT_REFUSED, *WITHOUT_EFFECT}),
        (
            completions.CompletionCreateParamsStreaming,
            {*CompletionRequest.model_fields, *COMPLETION_REFUSED, *WITHOUT_EFFECT},
        ),
    ):
        assert set(typing.get_type_hints(params)) <= known


def test_a_field_is_in_one_place_only() -> None:
    for fields, not_supported in ((ChatRequest, CHAT_REFUSED), (CompletionRequest, COMPLETION_REFUSED)):
        assert not set(fields.model_fields) & set(not_supported)
        assert not set(WITHOUT_EFFECT) & {*fields.model_fields, *not_supported}


@pytest.mark.parametrize("function", [chat, completion])
def test_unknown_field_is_named_with_the_nearest_valid_one(function: Any) -> None:
    assert "'foo'" in refusal(function, "foo", foo=1)
    assert "Did you mean 'temperature'?" in refusal(function, "temprature", temprature=1)


def test_large_counts_are_refused_at_once() -> None:
    started = time.process_time()
    for body in ({"n": 100_000}, {"prompt": ["x"] * 50_000}, {"prompt": ["x"] * 1000, "n": 100}):
        refusal(lambda body=body: check_request(completion(max_tokens=1, **body), settings()))
    refusal(completion, "stop", stop=["x"] * 50_000)
    refusal(completion, "bad_words", bad_words=["x"] * 50_000)
    assert time.process_time() - started < 1.0


def test_unknown_model() -> None:
    with pytest.raises(UnknownModelError, match="'no-such-model'"):
        check_request(chat(model="no-such-model"), settings())
    for name in ("m", "alias", None, ""):
        assert check_request(chat(model=name), settings()) == 1


def test_min_tokens_and_max_tokens() -> None:
    refusal(completion, "min_tokens", min_tokens=5, max_tokens=4)
    refusal(chat, "min_tokens", min_tokens=5, max_tokens=9, max_completion_tokens=4)
    refusal(completion, "max_tokens", max_tokens=0)
    assert completion(max_tokens=0, echo=True).max_tokens == 0


def sampling(request: ChatRequest | CompletionRequest, **changes: Any) -> list[SamplingParams]:
    seeds = iter(range(1000, 2000))
    prepared = prepare(request, settings(**changes), small_tokenizer(), "id-1", 5.0, lambda: next(seeds))
    return [sequence.sampling for sequence in prepared.generate.sequences]


def test_output_limits() -> None:
    num_prompt = len(small_tokenizer().encode("<|im_start|>user\nSay<|im_end|>\n<|im_start|>assistant\n"))
    left = 256 - num_prompt
    assert sampling(chat())[0].max_tokens == left
    assert sampling(chat(max_tokens=None))[0].max_tokens == left
    assert sampling(chat(max_completion_tokens=5))[0].max_tokens == 5
    assert sampling(chat(max_tokens=9, max_completion_tokens=5))[0].max_tokens == 5
    assert sampling(chat(max_tokens=255))[0].max_tokens == left  # clipped, as vLLM does
    assert sampling(completion())[0].max_tokens == 16
    assert sampling(completion(min_tokens=20))[0].max_tokens == 20
    refusal(lambda: check_request(chat(max_tokens=257), settings()), "max_tokens")


def test_prompt_that_does_not_fit_tells_both_numbers() -> None:
    for length in (256, 10_000):
        request = chat(messages=[{"role": "user", "content": "1" * length}])
        with pytest.raises(NeverFitsError, match=r"\d+ tokens, but this model's maximum context length is 256 tokens"):
            sampling(request)
    with pytest.raises(NeverFitsError, match="256 tokens"):
        check_request(completion(prompt=[5] * 256), settings())
    assert sampling(completion(prompt=[5] * 255))[0].max_tokens == 1


def test_sampling_defaults_come_from_the_settings_and_the_request_wins() -> None:
    model = {"default_temperature": 0.6, "default_top_p": 0.9, "default_top_k": 40}
    default = sampling(chat(), **model)[0]
    assert (default.temperature, default.top_p, default.top_k) == (0.6, 0.9, 40)
    own = sampling(chat(temperature=0, top_p=1, top_k=-1), **model)[0]
    assert (own.temperature, own.top_p, own.top_k) == (0.0, 1.0, 0)


@pytest.mark.parametrize(("asked", "used"), [(0, 0.0), (1e-6, 0.0), (1e-4, 0.01), (0.01, 0.01), (2, 2.0)])
def test_very_small_temperatures(asked: float, used: float) -> None:
    assert sampling(chat(temperature=asked))[0].temperature == used


def test_fields_reach_the_replica() -> None:
    params = sampling(completion(min_tokens=3, max_tokens=9, ignore_eos=True, stop_token_ids=[7, 8], seed=-5))[0]
    assert params == SamplingParams(
        max_tokens=9, min_tokens=3, ignore_eos=True, stop_token_ids=(7, 8), seed=(1 << 64) - 5
    )


def test_seeds_differ_between_samples_and_not_between_prompts() -> None:
    seeds = [params.seed for params in sampling(completion(prompt=["a", "b"], n=3, seed=42))]
    assert seeds[0] == 42
    assert len(set(seeds[:3])) == 3
    assert seeds[3:] == seeds[:3]
    assert [params.seed for params in sampling(chat(n=2))] == [1000, 1001]
    assert sampling(chat(seed=-1))[0].seed == 1000


@given(st.integers(-(1 << 63), (1 << 63) - 1))
def test_mixed_seed_is_64_bit_and_bijective_in_the_sample(seed: int) -> None:
    mixed = [mixed_seed(seed, sample) for sample in range(1, 128)]
    assert len(set(mixed)) == len(mixed)
    assert all(0 <= value < 1 << 64 for value in mixed)


def test_request_of_the_replica() -> None:
    prepared = prepare(
        completion(prompt=["one", "two three"], n=2, cache_salt="s"),
        settings(),
        small_tokenizer(),
        "cmpl-1",
        12.5,
        lambda: 1,
    )
    request = prepared.generate
    assert (request.request_id, request.order_key, request.cache_salt) == ("cmpl-1", (0.0, 0, 12.5), "s")
    assert [sequence.index for sequence in request.sequences] == [0, 1, 2, 3]
    expected = [small_tokenizer().encode(text) for text in ("one", "one", "two three", "two three")]
    assert [sequence.prompt_token_ids for sequence in request.sequences] == expected


def test_echo_of_token_ids_is_their_text() -> None:
    ids = small_tokenizer().encode("two three")
    prepared = prepare(completion(prompt=ids, echo=True), settings(), small_tokenizer(), "i", 0.0, lambda: 1)
    assert prepared.echo_texts == ["two three"]


def test_both_ways_to_end_the_prompt_exclude_each_other() -> None:
    refusal(chat, "continue_final_message", continue_final_message=True, add_generation_prompt=True)
    assert chat(continue_final_message=True).continue_final_message
    assert chat(continue_final_message=True, add_generation_prompt=False).continue_final_message


def test_tokenize_wants_one_of_two() -> None:
    for body in (b"{}", b'{"prompt":"x","messages":[{"role":"user","content":"x"}]}'):
        with pytest.raises(InvalidRequestError):
            parse_tokenize(body)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=200), st.lists, max_leaves=8))
def test_short_is_short(value: Any) -> None:
    assert len(short(value)) <= 63


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.dictionaries(
        st.sampled_from([*ChatRequest.model_fields, *CompletionRequest.model_fields, "tools", "foo"]), json_values
    )
)
def test_any_json_object_is_a_request_or_a_sentence(body: dict[str, Any]) -> None:
    for parse in (parse_chat, parse_completion, parse_tokenize):
        message = ""
        try:
            parse(json.dumps(body).encode())
        except InvalidRequestError as error:
            message = str(error)
        assert len(message) < 400
