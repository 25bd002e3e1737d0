"""Request fields beyond OpenAI's core: what they mean for the replica, together and at their limits."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from replica.errors import InvalidRequestError, NeverFitsError
from replica.messages import GenerateRequest, SamplingParams
from router.message_parts import ReplyPlan
from router.openai_api import ChatRequest, CompletionRequest, parse_chat, parse_completion, parse_tokenize
from router.prepare import PreparedRequest, check_request, needs_thread, prepare, render_chat
from tests.unit.http_fakes import settings, small_tokenizer

USER = {"role": "user", "content": "Say"}
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"word": {"type": "string"}}}},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def chat(**body: Any) -> ChatRequest:
    return parse_chat(json.dumps({"messages": [USER], **body}).encode())


def completion(**body: Any) -> CompletionRequest:
    return parse_completion(json.dumps({"prompt": "The sky", **body}).encode())


def prepared(request: ChatRequest | CompletionRequest, **changes: Any) -> PreparedRequest:
    check_request(request, settings(**changes))
    return prepare(request, settings(**changes), small_tokenizer(), "id-1", 5.0, lambda: 7)


def with_tools(**body: Any) -> PreparedRequest:
    """The small tokenizer needs hundreds of tokens to describe a tool."""
    return prepared(chat(tools=[TOOL], **body), max_model_len=2048)


def sampling(request: ChatRequest | CompletionRequest, **changes: Any) -> SamplingParams:
    return prepared(request, **changes).generate.sequences[0].sampling


def refused(function: Any, param: str, *said: str, **body: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        function(**body)
    assert caught.value.param == param
    assert len(str(caught.value)) < 500
    for words in said:
        assert words in str(caught.value)


def ids(text: str) -> tuple[int, ...]:
    return tuple(small_tokenizer().encode(text))


def test_sampling_fields_reach_the_replica() -> None:
    params = sampling(
        completion(
            max_tokens=4,
            min_p=0.25,
            presence_penalty=-1,
            frequency_penalty=2,
            repetition_penalty=1.5,
            logit_bias={"7": -100, "8": 2.5},
            allowed_token_ids=[9, 8, 9],
            seed=3,
        )
    )
    assert params == SamplingParams(
        max_tokens=4,
        min_p=0.25,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        repetition_penalty=1.5,
        logit_bias={7: -100.0, 8: 2.5},
        allowed_token_ids=(8, 9),
        seed=3,
    )


def test_all_fields_together_survive_the_wire() -> None:
    request = prepared(
        completion(
            max_tokens=4,
            logit_bias={"7": 1},
            bad_words=["one"],
            allowed_token_ids=[7],
            logprobs=2,
            structured_outputs={"json": SCHEMA},
        )
    ).generate
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=GenerateRequest) == request


def test_model_defaults_of_penalty_and_min_p() -> None:
    model = {"default_repetition_penalty": 1.1, "default_min_p": 0.05}
    default = sampling(chat(), **model)
    assert (default.repetition_penalty, default.min_p) == (1.1, 0.05)
    own = sampling(chat(repetition_penalty=1, min_p=0), **model)
    assert (own.repetition_penalty, own.min_p) == (1.0, 0.0)


@pytest.mark.parametrize("word", ["one", " one"])
def test_bad_words_are_banned_with_and_without_a_space_in_front(word: str) -> None:
    assert set(sampling(completion(bad_words=[word])).bad_words) == {ids("one"), ids(" one")}


def test_bad_words_each_once() -> None:
    assert len(sampling(completion(bad_words=["one", " one", "one"])).bad_words) == 2
    assert sampling(completion(bad_words=[" "])).bad_words == (ids(" "),)


@pytest.mark.parametrize("field", ["logit_bias", "allowed_token_ids", "stop_token_ids"])
@pytest.mark.parametrize("token_id", [-1, 100_000, 10**18])
def test_ids_are_checked_against_the_vocabulary(field: str, token_id: int) -> None:
    value = {str(token_id): 1} if field == "logit_bias" else [token_id]
    refused(lambda: check_request(completion(**{field: value}), settings()), field, "out of vocabulary")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 2}, 2),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": None, "top_logprobs": None}, None),
    ],
)
def test_logprobs_of_a_chat(body: dict[str, Any], expected: int | None) -> None:
    """A-07."""
    assert sampling(chat(**body)).num_logprobs == expected


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
    ],
)
def test_wrong_logprobs_of_a_chat(body: dict[str, Any], param: str) -> None:
    refused(chat, param, **body)


@pytest.mark.parametrize(("value", "expected"), [(None, None), (0, 0), (20, 20)])
def test_logprobs_of_a_completion(value: int | None, expected: int | None) -> None:
    assert sampling(completion(logprobs=value)).num_logprobs == expected


@pytest.mark.parametrize("value", [True, False, 21, -1, 1.0])
def test_wrong_logprobs_of_a_completion(value: Any) -> None:
    refused(completion, "logprobs", "allowed: an integer from 0 to 20", logprobs=value)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"prompt_logprobs": 3}, 3),
        ({"echo": True, "logprobs": 2}, 2),
        ({"echo": True, "logprobs": 2, "prompt_logprobs": 5}, 5),
        ({"echo": True, "logprobs": 2, "prompt_logprobs": 0}, 2),
        ({"echo": True}, None),
        ({"logprobs": 2}, None),
    ],
)
def test_prompt_logprobs(body: dict[str, Any], expected: int | None) -> None:
    assert sampling(completion(**body)).num_prompt_logprobs == expected


def test_prompt_logprobs_come_in_one_piece() -> None:
    for function in (chat, completion):
        refused(function, "prompt_logprobs", "stream", prompt_logprobs=0, stream=True)
    assert completion(echo=True, logprobs=1, stream=True).stream


@pytest.mark.parametrize(
    ("body", "drops"),
    [({"logprobs": 1}, True), ({"prompt_logprobs": 0}, True), ({}, False), ({"logprobs": None}, False)],
)
def test_scoring_a_prompt_asks_for_one_token_that_is_dropped(body: dict[str, Any], drops: bool) -> None:
    """A-09."""
    request = prepared(completion(max_tokens=0, echo=True, **body))
    assert request.drops_output is drops
    assert request.max_tokens == [0]
    assert request.generate.sequences[0].sampling.max_tokens == (1 if drops else 0)
    assert not prepared(completion(max_tokens=1, echo=True, **body)).drops_output


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([USER], []),
        ([USER, {"role": "assistant", "content": "It is"}], ["It is"]),
        ([USER, {"role": "assistant", "content": None}], []),
        ([USER, {"role": "assistant", "content": "A"}, USER], []),
    ],
)
def test_echo_of_a_chat_is_the_last_message_of_an_assistant(messages: list[Any], expected: list[str]) -> None:
    assert prepared(chat(messages=messages, echo=True)).echo_texts == expected
    assert prepared(chat(messages=messages)).echo_texts == []


@pytest.mark.parametrize("number", [10**6, 1 << 63, 10**20, 10**400])
def test_however_large_a_number_is_the_limit_that_counts_is_named(number: int) -> None:
    """It depends on model and configuration, so the check of types must not be first with a limit of its own."""
    for function, field, limit in (
        (chat, "n", "1 to 128"),
        (completion, "n", "1 to 128"),
        (chat, "max_tokens", "context of 256 tokens; allowed: at most that"),
        (completion, "max_tokens", "context of 256 tokens; allowed: at most that"),
        (chat, "max_completion_tokens", "context of 256 tokens; allowed: at most that"),
        (completion, "truncate_prompt_tokens", "context of 256 tokens; allowed: at most that"),
        (completion, "stop_token_ids", "allowed: 0 to"),
        (completion, "allowed_token_ids", "allowed: 0 to"),
    ):
        value = [number] if field.endswith("_ids") else number
        refused(lambda f=function, v={field: value}: check_request(f(**v), settings()), field, limit)  # type: ignore[misc]
    assert prepared(completion(min_tokens=number)).generate.sequences[0].sampling.min_tokens <= 256, "clipped, as ever"
    if number < 10**100:
        bias = {str(number): 1}
        refused(lambda: check_request(completion(logit_bias=bias), settings()), "logit_bias", "allowed: 0 to")


def test_only_arrival_counts_with_fcfs() -> None:
    refused(lambda: check_request(chat(priority=1), settings()), "priority", "policy 'fcfs'")
    assert prepared(chat(priority=0)).generate.order_key == (0.0, 0, 5.0)
    assert prepared(chat(priority=-3), policy="priority").generate.order_key == (0.0, -3, 5.0)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [[5] * 200_000], "n": 64},
        {"prompt": "x", "allowed_token_ids": list(range(200_000)), "n": 128},
        {"prompt": ["x"] * 1000, "structured_outputs": {"choice": [f"{n}" * 50 for n in range(1000)]}},
    ],
)
def test_what_is_repeated_for_each_sequence_fits_one_message(body: dict[str, Any]) -> None:
    large = {"max_model_len": 1 << 20, "vocab_size": 1 << 20}
    param = "n" if "n" in body else "prompt"
    refused(lambda: prepared(completion(**body), **large), param, "MiB", "sequences")
    if "n" in body:
        assert prepared(completion(**{**body, "n": 1}), **large)


def test_request_id_changes_nothing_inside() -> None:
    assert prepared(chat(request_id="mine")).generate == prepared(chat()).generate


def test_greedy_samples_may_be_many() -> None:
    assert len(prepared(chat(n=3, temperature=0)).generate.sequences) == 3


@pytest.mark.parametrize("keep", [1, 3, 5, 50])
def test_truncation_keeps_the_end_of_the_prompt(keep: int) -> None:
    whole = small_tokenizer().encode("The capital of France is Paris")
    for prompt in ("The capital of France is Paris", whole):
        request = prepared(completion(prompt=prompt, truncate_prompt_tokens=keep, echo=True))
        assert request.prompts == [whole[-keep:]]
        assert request.echo_texts == [small_tokenizer().decode(whole[-keep:])]


def test_truncation_to_the_context_leaves_room_for_the_output() -> None:
    long = [5] * 300
    assert prepared(completion(prompt=long, truncate_prompt_tokens=-1, max_tokens=6)).prompts == [[5] * 250]
    assert prepared(completion(prompt=long, truncate_prompt_tokens=-1)).prompts == [[5] * 240]
    assert (
        len(prepared(chat(messages=[{"role": "user", "content": "1" * 400}], truncate_prompt_tokens=-1)).prompts[0])
        == 255
    )
    assert prepared(completion(prompt=[5] * 9, truncate_prompt_tokens=-1)).prompts == [[5] * 9]
    refused(
        lambda: check_request(completion(truncate_prompt_tokens=257), settings()),
        "truncate_prompt_tokens",
        "256",
        "257",
    )
    with pytest.raises(NeverFitsError):
        prepared(completion(prompt=long, truncate_prompt_tokens=256))


@pytest.mark.parametrize("prompt", ["1" * 300, [5] * 300])
def test_a_long_prompt_has_the_same_param_as_text_and_as_ids(prompt: Any) -> None:
    refused(lambda: prepared(completion(prompt=prompt)), "prompt", "256 tokens")


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    ],
)
def test_all_ways_to_ask_for_a_schema_give_one_grammar(body: dict[str, Any]) -> None:
    grammar = sampling(chat(**body)).grammar
    assert json.loads(grammar)["grammars"][0]["json_schema"]["required"] == ["a"]
    assert sampling(completion(**body)).grammar == grammar


def test_text_has_no_grammar() -> None:
    assert sampling(chat(response_format={"type": "text"})).grammar == ""


def test_one_of_two_ways_to_say_it() -> None:
    refused(
        chat,
        "structured_outputs",
        "one of them",
        response_format={"type": "json_object"},
        structured_outputs={"regex": "a"},
    )


def test_a_bad_grammar_is_refused_before_it_is_sent() -> None:
    for field, value in (
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}),
        ("structured_outputs", {"regex": "(a"}),
    ):
        refused(lambda field=field, value=value: prepared(chat(**{field: value})), field)


def test_tools_are_in_the_prompt_and_in_the_plan() -> None:
    request = with_tools()
    text = small_tokenizer().decode(request.prompts[0], False)
    assert "look_up" in text
    assert request.tool_request is not None
    assert request.reply.tool_names == ("look_up",)
    assert "look_up" not in small_tokenizer().decode(with_tools(tool_choice="none").prompts[0], False)
    assert prepared(chat()).reply == ReplyPlan()


def test_required_tools_have_a_grammar() -> None:
    assert "look_up" in with_tools(tool_choice="required").generate.sequences[0].sampling.grammar
    assert with_tools().generate.sequences[0].sampling.grammar == ""


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": {}}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ],
)
def test_wrong_tools_are_refused_when_parsed(body: dict[str, Any], param: str) -> None:
    refused(chat, param, **body)


def test_schemas_of_tools_are_bounded_and_compiled() -> None:
    def tool(parameters: Any) -> Any:
        return {"type": "function", "function": {"name": "f", "parameters": parameters}}

    wild = tool({"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 999_983}}})
    refused(chat, "tools", "the parameters of f", "multipleOf", tools=[wild], tool_choice="required")
    wild["function"]["strict"] = True
    refused(chat, "tools", "multipleOf", tools=[wild])
    wild["function"]["strict"] = False
    assert chat(tools=[wild]).tool_request is not None  # no grammar is made of it
    product = {"allOf": [{"anyOf": [{"required": [f"{side}{n}"]} for n in range(30)]} for side in "ab"]}
    many = [{"type": "function", "function": {"name": f"f{n}", "parameters": product}} for n in range(12)]
    assert chat(tools=many[:4], tool_choice="required").tool_request is not None
    refused(chat, "tools", "too large together", tools=many, tool_choice="required")
    assert chat(tools=many).tool_request is not None
    wrong = tool({"type": "object", "properties": {"a": {"not": {}}}})
    refused(lambda: prepared(chat(tools=[wrong], tool_choice="required")), "tools", "not")


def test_tools_change_the_count_of_tokenize_as_they_change_the_prompt() -> None:
    body = {"messages": [USER], "tools": [TOOL]}
    text = render_chat(parse_tokenize(json.dumps(body).encode()), small_tokenizer())
    assert small_tokenizer().encode(text) == with_tools().prompts[0]


def test_reasoning_effort_none_switches_thoughts_off() -> None:
    assert chat(reasoning_effort="none").template_kwargs == {"enable_thinking": False}
    own = chat(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    assert own.template_kwargs == {"enable_thinking": True}
    refused(chat, "reasoning_effort", "'none'", reasoning_effort="high")


def test_what_takes_time_goes_to_a_thread() -> None:
    assert not needs_thread(chat())
    assert not needs_thread(completion(bad_words=["x"] * 4, logprobs=3, response_format={"type": "text"}))
    assert needs_thread(chat(response_format={"type": "json_object"}))
    assert needs_thread(completion(structured_outputs={"choice": ["a"]}))
    assert needs_thread(chat(tools=[TOOL]))
    assert needs_thread(chat(bad_words=["x"] * 100))


CALL = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "sky"}'}}


def test_calls_and_results_of_earlier_turns() -> None:
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "blue"}]},
    ]
    assert chat(messages=messages).messages[1:] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": {"word": "sky"}}}
            ],
        },
        {"role": "tool", "content": "blue", "tool_call_id": "c1"},
    ]
    text = small_tokenizer().decode(prepared(chat(messages=messages)).prompts[0], False)
    assert "look_up" in text
    assert "blue" in text


@pytest.mark.parametrize(
    ("arguments", "expected"), [("", {}), (None, {}), ("{}", {}), ({"a": 1}, {"a": 1}), ("{", "{"), ("[1]", "[1]")]
)
def test_arguments_become_an_object(arguments: Any, expected: Any) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    message = chat(messages=[USER, {"role": "assistant", "tool_calls": [call]}]).messages[1]
    assert message["tool_calls"][0]["function"]["arguments"] == expected


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "tool"}, "messages[1].content is missing"),
        ({"role": "tool", "content": "x", "tool_call_id": 5}, "tool_call_id is 5"),
        ({"role": "user", "content": "x", "tool_call_id": "c"}, "tool_call_id"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "belongs to role 'assistant'"),
        ({"role": "assistant", "tool_calls": "x"}, "tool_calls is 'x'"),
        ({"role": "assistant", "tool_calls": [5]}, "tool_calls[0] is 5"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "function.name"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 7}}]}, "arguments"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ["{}"]}}]}, "arguments"),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}, "tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [CALL] * 129}, "at most 128"),
        ({"role": ["user"], "content": "x"}, "role is ['user']"),
        ({"role": "assistant", "content": "x", "reasoning": 5}, "reasoning is 5"),
    ],
)
def test_wrong_turns_of_tools(message: Any, said: str) -> None:
    refused(chat, "messages", said, messages=[USER, message])


def test_message_objects_of_client_libraries_may_be_sent_back() -> None:
    from openai.types.chat import ParsedChatCompletionMessage

    message: Any = ParsedChatCompletionMessage(role="assistant", content='{"a": 1}', parsed={"a": 1})
    assert chat(messages=[USER, message.model_dump()]).messages[1] == {"role": "assistant", "content": '{"a": 1}'}


def test_reasoning_of_an_earlier_turn_has_both_names() -> None:
    message = {"role": "assistant", "content": "x", "reasoning": "because"}
    assert chat(messages=[USER, message]).messages[1] == {**message, "reasoning_content": "because"}
