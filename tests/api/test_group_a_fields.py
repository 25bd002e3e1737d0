"""Group A: what fields mean, with their empty, null and excessive values. Named by case."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jsonschema
import pytest

from router.openai_api import ChatRequest, CompletionRequest
from tests.api.calls import (
    CHAT,
    PROMPT,
    answer,
    chat,
    chunks_of,
    complete,
    error_of,
    pieces_of,
    text_of,
    timed,
    watched_health,
)
from tests.api.harness import CONTEXT, FAKE_MODEL, ApiUnderTest, fake_api

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def test_a03_no_stop_null_and_an_empty_list_are_the_same(fake: ApiUnderTest) -> None:
    forms: tuple[dict[str, Any], ...] = ({}, {"stop": None}, {"stop": []})
    texts = {text_of(complete(fake, max_tokens=8, **more)) for more in forms}
    assert len(texts) == 1
    assert texts.pop()


@pytest.mark.parametrize("stop", ["", ["ok", ""], ["a", "b", "c", "d", "e"]])
def test_a03_empty_and_too_many_stop_strings_are_refused(fake: ApiUnderTest, stop: Any) -> None:
    """Our choice: at most 4, OpenAI's limit."""
    error_of(complete(fake, max_tokens=8, stop=stop), 400, "stop")
    error_of(chat(fake, max_tokens=8, stop=stop), 400, "stop")


def test_a03_a_huge_stop_list_is_refused_at_once_and_holds_nobody_up(fake: ApiUnderTest) -> None:
    stop = [chr(ord("a") + position % 26) for position in range(200_000)]
    with watched_health(fake) as seconds:
        response, took = timed(lambda: complete(fake, max_tokens=8, stop=stop))
    error_of(response, 400, "stop")
    assert took < 2
    assert max(seconds) < 1


@pytest.mark.slow
@pytest.mark.model
def test_a13_without_a_limit_a_chat_ends_by_itself(real: ApiUnderTest) -> None:
    first = answer(chat(real, "Say hi"))
    assert first["choices"][0]["finish_reason"] == "stop"
    assert first["usage"]["completion_tokens"] < 500
    assert answer(chat(real, "Say hi", max_tokens=None))["choices"] == first["choices"]


@pytest.mark.slow
def test_a13_without_a_limit_a_chat_may_fill_the_context() -> None:
    with fake_api(max_model_len=128) as api:
        for more in ({}, {"max_tokens": None}, {"max_completion_tokens": None}):
            body = answer(chat(api, ignore_eos=True, **more))
            assert body["choices"][0]["finish_reason"] == "length"
            assert body["usage"]["total_tokens"] == 128
        # vLLM's rule, documented: a limit that does not fit beside the prompt is clipped
        assert answer(chat(api, ignore_eos=True, max_tokens=128))["usage"]["total_tokens"] == 128


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"max_completion_tokens": 5}, 5),
        ({"max_tokens": 9, "max_completion_tokens": 5}, 5),
        ({"max_tokens": 3, "max_completion_tokens": 5}, 5),
        ({"max_tokens": 9}, 9),
    ],
)
def test_a13_the_newer_limit_wins(fake: ApiUnderTest, limits: dict[str, int], expected: int) -> None:
    body = answer(chat(fake, ignore_eos=True, **limits))
    assert body["usage"]["completion_tokens"] == expected
    assert body["choices"][0]["finish_reason"] == "length"


def test_a13_a_completion_without_a_limit_has_16_tokens(fake: ApiUnderTest) -> None:
    """Our choice: OpenAI's default."""
    for more in ({}, {"max_tokens": None}):
        assert answer(complete(fake, ignore_eos=True, **more))["usage"]["completion_tokens"] == 16


def test_a21_text_parts_are_joined_without_anything_between(fake: ApiUnderTest) -> None:
    """Our choice: joined with ""."""

    def prompt_tokens(content: Any) -> int:
        return int(answer(chat(fake, content, max_tokens=1))["usage"]["prompt_tokens"])

    parts = [{"type": "text", "text": "Say"}, {"type": "text", "text": " hi"}]
    assert prompt_tokens(parts) == prompt_tokens("Say hi")
    assert text_of(chat(fake, parts, max_tokens=8)) == text_of(chat(fake, "Say hi", max_tokens=8))
    assert prompt_tokens([]) == prompt_tokens("")


def test_a21_other_parts_are_refused_by_name(fake: ApiUnderTest) -> None:
    image = [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]
    assert "image_url" in error_of(chat(fake, image, max_tokens=1), 400, "messages")
    assert "text" in error_of(chat(fake, [{"type": "text"}], max_tokens=1), 400, "messages")


def test_a22_an_assistant_turn_without_content_is_an_empty_one(fake: ApiUnderTest) -> None:
    turns: tuple[dict[str, Any], ...] = (
        {"content": None, "tool_calls": []},
        {"content": ""},
        {},
        {"content": None},
        {"content": []},
    )
    bodies = []
    for turn in turns:
        messages = [
            {"role": "user", "content": "A"},
            {"role": "assistant", **turn},
            {"role": "user", "content": "B"},
        ]
        bodies.append(answer(fake.http.post(CHAT, json={"messages": messages, "temperature": 0, "max_tokens": 6})))
    assert len({body["usage"]["prompt_tokens"] for body in bodies}) == 1
    assert len({body["choices"][0]["message"]["content"] for body in bodies}) == 1
    assert all(body["choices"][0]["message"].get("tool_calls") is None for body in bodies)


def test_a22_what_client_libraries_add_to_an_answer_comes_back_and_is_ignored(fake: ApiUnderTest) -> None:
    """litellm sends `provider_specific_fields`. In a message of the client's own an unknown field is a mistake."""
    turns: list[dict[str, Any]] = [{"role": "assistant", "content": "B"}, {"role": "user", "content": "C"}]

    def ask(**more: Any) -> Any:
        first, *rest = turns
        messages = [{"role": "user", "content": "A"}, {**first, **more}, *rest]
        return fake.http.post(CHAT, json={"messages": messages, "temperature": 0, "max_tokens": 6})

    added: dict[str, Any] = {
        "provider_specific_fields": {"refusal": None},
        "refusal": None,
        "annotations": [],
        "function_call": None,
    }
    assert text_of(ask(**added)) == text_of(ask())
    assert text_of(ask(reasoning_details=[{"text": "hm"}])) == text_of(ask()), "another server's field"
    turns[0]["role"] = "user"
    error_of(ask(foo=1), 400, "messages")


def test_a24_no_tools_and_null_tools(fake: ApiUnderTest) -> None:
    """Our choice: an empty list is the same as none."""
    plain = text_of(chat(fake, max_tokens=6))
    assert text_of(chat(fake, max_tokens=6, tools=None, tool_choice=None)) == plain
    assert text_of(chat(fake, max_tokens=6, tools=None)) == plain
    assert [text_of(chat(fake, max_tokens=6, tools=[])) for _ in range(3)] == [plain] * 3


@pytest.mark.parametrize("tools", [{}, {"tools": None}, {"tools": []}])
@pytest.mark.parametrize("stream", [False, True])
def test_a24_a_tool_is_required_but_there_is_none(fake: ApiUnderTest, stream: bool, tools: dict[str, Any]) -> None:
    response = chat(fake, max_tokens=6, tool_choice="required", stream=stream, **tools)
    error_of(response, 400, "tool_choice")
    assert response.headers["content-type"] == "application/json", "an event stream had begun"


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("choice", ["auto", "none"])
@pytest.mark.parametrize("stream", [False, True])
def test_a24_a_tool_with_a_template_that_knows_none(real: ApiUnderTest, choice: str, stream: bool) -> None:
    """Our choice: tools are supported with every template. With "none" the answer never holds a call."""
    response = chat(real, "Say hi", max_tokens=12, tools=[WEATHER], tool_choice=choice, stream=stream)
    if stream:
        chunks = chunks_of(response)
        assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length", "tool_calls")
        calls = [chunk["choices"][0]["delta"].get("tool_calls") for chunk in chunks]
        assert pieces_of(chunks) or any(calls)
        assert choice == "auto" or not any(calls)
        return
    message = answer(response)["choices"][0]["message"]
    assert message["content"] or message["tool_calls"]
    assert choice == "auto" or not message.get("tool_calls")


def nested(levels: int) -> str:
    """A schema nested so deeply that Python's own encoder could not write it."""
    inside = '{"type":"object","properties":{"a":' * levels + '{"type":"string"}'
    return inside + '},"required":["a"],"additionalProperties":false}' * levels


def json_schema(schema: Any, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}}


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize(
    "format_",
    [
        json_schema({"type": "nonsense"}),
        json_schema("nonsense"),
        {"response_format": {"type": "yaml"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": "json_object"},
        json_schema({"type": "string", "pattern": "(" * 500}),
    ],
    ids=["nonsense", "no-schema", "yaml", "no-json_schema", "no-object", "bad-pattern"],
)
def test_a25_a_bad_response_format_is_refused_and_the_engine_lives(real: ApiUnderTest, format_: dict[str, Any]) -> None:
    with engine_unharmed(real):
        response, took = timed(lambda: chat(real, "Say hi", max_tokens=8, **format_))
    error_of(response, 400, "response_format")
    assert took < 2


@pytest.mark.slow
@pytest.mark.model
def test_a25_a_schema_of_500_levels_is_refused_and_the_engine_lives(real: ApiUnderTest) -> None:
    """Our choice: refused."""
    body = (
        b'{"messages":[{"role":"user","content":"Say hi"}],"temperature":0,"max_tokens":8,"response_format":'
        b'{"type":"json_schema","json_schema":{"name":"x","schema":%s}}}' % nested(500).encode()
    )
    with engine_unharmed(real):
        response, took = timed(lambda: real.http.post(CHAT, content=body))
    error_of(response, 400)
    assert took < 2


@contextmanager
def engine_unharmed(real: ApiUnderTest) -> Iterator[None]:
    """The same engine, on the same thread of the same process, gives the same answer afterwards."""
    engine, threads = real.replicas[0].engine, runner_threads()
    before = text_of(chat(real, "Say hi", max_tokens=8))
    yield
    assert text_of(chat(real, "Say hi", max_tokens=8)) == before
    assert real.replicas[0].engine is engine
    assert runner_threads() == threads != set()
    real.peek(engine.check_health)


def runner_threads() -> set[int | None]:
    return {thread.native_id for thread in threading.enumerate() if thread.name == "shoal-runner"}


@pytest.mark.slow
@pytest.mark.model
def test_a25_json_object_gives_an_object(real: ApiUnderTest) -> None:
    for limit in (4, 60):
        choice = answer(chat(real, "A person as JSON", max_tokens=limit, response_format={"type": "json_object"}))
        choice = choice["choices"][0]
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)
        else:
            assert choice["finish_reason"] == "length"
        assert choice["message"]["content"].lstrip().startswith("{")


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("strict", [True, False, None])
def test_a25_json_schema_gives_what_validates(real: ApiUnderTest, strict: bool | None) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    more = {} if strict is None else {"strict": strict}
    choice = answer(chat(real, "A person as JSON", max_tokens=60, **json_schema(schema, **more)))["choices"][0]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), schema)


#: fields that OpenAI knows for a chat and that are harmless where they ask for nothing
OPENAI_OPTIONAL = """
    audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens metadata
    modalities n parallel_tool_calls prediction presence_penalty prompt_cache_key reasoning_effort response_format
    safety_identifier seed service_tier stop store stream stream_options temperature tool_choice tools top_logprobs
    top_p user verbosity web_search_options
"""


def test_a36_null_is_absent_and_harmless_fields_are_accepted(fake: ApiUnderTest) -> None:
    minimal: dict[str, Any] = {
        "model": FAKE_MODEL,
        "messages": [{"role": "user", "content": "Say hello"}],
        "temperature": 0,
        "max_tokens": 8,
    }

    def text(body: dict[str, Any]) -> str:
        return text_of(fake.http.post(CHAT, json=body))

    expected = text(minimal)
    optional = {*ChatRequest.model_fields, *OPENAI_OPTIONAL.split()} - {"messages"}
    assert len(optional) > 30
    nulls = dict.fromkeys(sorted(optional))
    assert text({**nulls, **minimal}) == expected
    harmless = {
        "user": "u-1",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "logit_bias": {},
    }
    assert text({**minimal, **harmless}) == expected
    assert text({**nulls, **minimal, **harmless}) == expected


def test_a36_nulls_of_a_completion(fake: ApiUnderTest) -> None:
    nulls = dict.fromkeys(set(CompletionRequest.model_fields) - {"prompt", "temperature", "max_tokens"})
    assert text_of(complete(fake, max_tokens=8, **nulls)) == text_of(complete(fake, max_tokens=8))


def test_a36_an_unknown_field_is_refused_by_name_on_both_endpoints(fake: ApiUnderTest) -> None:
    """Our choice: a field that would silently do nothing is a mistake of the client's."""
    assert "foo" in error_of(chat(fake, max_tokens=8, foo=1), 400, "foo")
    assert "foo" in error_of(complete(fake, max_tokens=8, foo=1), 400, "foo")


def test_a39_an_empty_prompt_is_refused(fake: ApiUnderTest) -> None:
    """Our choice: refused, no token is put in its place."""
    error_of(complete(fake, prompt="", max_tokens=4), 400, "prompt")
    error_of(complete(fake, prompt=[""], max_tokens=4), 400, "prompt")
    error_of(complete(fake, prompt=[PROMPT, ""], max_tokens=4), 400, "prompt")
    error_of(fake.http.post("/v1/completions", json={"max_tokens": 4}), 400, "prompt")
    error_of(complete(fake, prompt=None, max_tokens=4), 400, "prompt")
    assert answer(chat(fake, "", max_tokens=4))["usage"]["prompt_tokens"] > 0


def test_the_context_of_both_servers_is_what_the_cases_assume(fake: ApiUnderTest) -> None:
    assert fake.http.get("/v1/models").json()["data"][0]["max_model_len"] == CONTEXT
