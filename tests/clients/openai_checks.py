"""The official client: sync, async, streams, structured answers, tools, errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import openai
from openai import AsyncOpenAI, OpenAI

from tests.clients.checking import (
    ASK_WEATHER,
    HELLO,
    NAMED,
    TIME_TOOL,
    WEATHER_TOOL,
    Checks,
    Person,
    Server,
    Weather,
)

check = Checks("openai")


def client_of(server: Server) -> Any:
    """Untyped: its stubs know closed lists of models, and differ between releases."""
    return OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=120)


def asynchronous(work: Callable[[Any, str], Coroutine[Any, Any, None]]) -> Callable[[Server], None]:
    """A check that is a coroutine."""

    def run(server: Server) -> None:
        async def main() -> None:
            async with AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=120) as client:
                await work(client, server.model)

        asyncio.run(main())

    run.__name__ = work.__name__
    return run


@check
def models(server: Server) -> None:
    client = client_of(server)
    assert server.model in [model.id for model in client.models.list()]
    assert client.models.retrieve(server.model).id == server.model


@check
def chat(server: Server) -> None:
    client = client_of(server)
    answer = client.chat.completions.create(model=server.model, messages=HELLO, max_completion_tokens=8, temperature=0)
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer._request_id


@check
def chat_stream_equals_the_whole(server: Server) -> None:
    client = client_of(server)
    whole = client.chat.completions.create(model=server.model, messages=HELLO, max_tokens=12, temperature=0)
    stream = client.chat.completions.create(
        model=server.model,
        messages=HELLO,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


@check
def chat_stream_helper(server: Server) -> None:
    # the helper raises when the limit is reached, so there is none
    with client_of(server).chat.completions.stream(model=server.model, messages=HELLO, temperature=0) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content


@check
def completion_and_its_stream(server: Server) -> None:
    client = client_of(server)
    whole = client.completions.create(model=server.model, prompt="Count: one two", max_tokens=8, temperature=0)
    stream = client.completions.create(
        model=server.model, prompt="Count: one two", max_tokens=8, temperature=0, stream=True
    )
    assert whole.choices[0].text == "".join(chunk.choices[0].text for chunk in stream)


@check
def samples_seed_and_stop(server: Server) -> None:
    client = client_of(server)
    asked: dict[str, Any] = {"model": server.model, "messages": HELLO, "max_tokens": 8, "n": 3, "seed": 5}
    first, again = (client.chat.completions.create(**asked, temperature=0.8, top_p=0.9) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert texts == [choice.message.content for choice in again.choices]
    whole = client.completions.create(model=server.model, prompt="Count: one two", max_tokens=20, temperature=0)
    stop = whole.choices[0].text[4:8]
    cut = client.completions.create(
        model=server.model, prompt="Count: one two", max_tokens=20, temperature=0, stop=[stop]
    )
    assert cut.choices[0].text == whole.choices[0].text.partition(stop)[0]
    assert cut.choices[0].finish_reason == "stop"


@check
def penalties_and_bias(server: Server) -> None:
    answer = client_of(server).chat.completions.create(
        model=server.model,
        messages=HELLO,
        max_tokens=8,
        temperature=0,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        logit_bias={"504": -100},
        user="somebody",
    )
    assert answer.choices[0].message.content


@check
def logprobs(server: Server) -> None:
    answer = client_of(server).chat.completions.create(
        model=server.model, messages=HELLO, max_tokens=4, temperature=0, logprobs=True, top_logprobs=2
    )
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert answer.usage is not None
    assert len(told.content) == answer.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in told.content)


@check
def parse(server: Server) -> None:
    client = client_of(server)
    parsers = [client.chat.completions.parse]
    if hasattr(client.beta, "chat"):
        parsers.append(client.beta.chat.completions.parse)
    for parser in parsers:
        answer = parser(
            model=server.model, messages=HELLO, response_format=Person, max_completion_tokens=100, temperature=0
        )
        assert isinstance(answer.choices[0].message.parsed, Person)


@check
def parse_in_a_stream(server: Server) -> None:
    with client_of(server).chat.completions.stream(
        model=server.model, messages=HELLO, response_format=Person, max_tokens=100, temperature=0
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Person)


@check
def json_object(server: Server) -> None:
    answer = client_of(server).chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": "A person as JSON with one key."}],
        response_format={"type": "json_object"},
        max_tokens=60,
        temperature=0,
    )
    choice = answer.choices[0]
    assert choice.message.content
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)


def check_call(call: Any) -> None:
    assert call.type == "function"
    assert call.id
    assert call.function.name in ("get_weather", "get_time")
    if call.function.name == "get_weather":
        Weather.model_validate_json(call.function.arguments)


@check
def tools_required(server: Server) -> None:
    answer = client_of(server).chat.completions.create(
        model=server.model,
        messages=ASK_WEATHER,
        tools=[WEATHER_TOOL, TIME_TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=100,
        temperature=0,
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    check_call(call)


@check
def tools_in_parallel(server: Server) -> None:
    """A small model calls and calls, so the limit may end it: the calls before are complete."""
    answer = client_of(server).chat.completions.create(
        model=server.model,
        messages=ASK_WEATHER,
        tools=[WEATHER_TOOL, TIME_TOOL],
        tool_choice="required",
        max_tokens=100,
        temperature=0,
    )
    (choice,) = answer.choices
    assert choice.finish_reason in ("tool_calls", "length")
    assert choice.message.tool_calls
    assert len({call.id for call in choice.message.tool_calls}) == len(choice.message.tool_calls)
    for call in choice.message.tool_calls:
        check_call(call)


@check
def tools_named_and_not_parallel(server: Server) -> None:
    answer = client_of(server).chat.completions.create(
        model=server.model,
        messages=ASK_WEATHER,
        tools=[TIME_TOOL, WEATHER_TOOL],
        tool_choice=NAMED,
        parallel_tool_calls=False,
        max_tokens=100,
        temperature=0,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    check_call(call)


@check
def tools_auto_and_none(server: Server) -> None:
    client = client_of(server)
    for choice in ("auto", "none"):
        answer = client.chat.completions.create(
            model=server.model, messages=ASK_WEATHER, tools=[WEATHER_TOOL], tool_choice=choice, max_tokens=20
        )
        message = answer.choices[0].message
        assert message.content or message.tool_calls
        assert choice == "auto" or not message.tool_calls


@check
def tool_calls_in_a_stream(server: Server) -> None:
    stream = client_of(server).chat.completions.create(
        model=server.model,
        messages=ASK_WEATHER,
        tools=[WEATHER_TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=100,
        temperature=0,
        stream=True,
    )
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    reason = None
    num_pieces = 0
    for chunk in stream:
        (choice,) = chunk.choices
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or ():
            num_pieces += 1
            assert call.function is not None
            if call.id:
                assert call.index not in names, "the id came twice"
                names[call.index] = call.function.name or ""
            arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    assert reason == "tool_calls"
    assert set(names.values()) == {"get_weather"}
    assert num_pieces > len(names), "the arguments came in one piece"
    for text in arguments.values():
        Weather.model_validate_json(text)


@check
def tool_calls_in_the_stream_helper(server: Server) -> None:
    tool = openai.pydantic_function_tool(Weather, name="get_weather")
    with client_of(server).chat.completions.stream(
        model=server.model,
        messages=ASK_WEATHER,
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=100,
        temperature=0,
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    (call,) = final.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)


@check
def a_tools_answer_goes_back(server: Server) -> None:
    client = client_of(server)
    asked: dict[str, Any] = {"model": server.model, "tools": [WEATHER_TOOL], "max_tokens": 60, "temperature": 0}
    first = client.chat.completions.create(messages=ASK_WEATHER, tool_choice="required", **asked)
    message = first.choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 21}'} for call in message.tool_calls]
    # the client's own object goes back as it is
    second = client.chat.completions.create(messages=[*ASK_WEATHER, message, *results], **asked)
    assert second.choices[0].message.content or second.choices[0].message.tool_calls
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


@check
def parsed_answers_go_back(server: Server) -> None:
    """What `parse` and the stream helper add to a message comes back with it."""
    client = client_of(server)
    tool = openai.pydantic_function_tool(Weather, name="get_weather")
    asked: dict[str, Any] = {"model": server.model, "max_tokens": 100, "temperature": 0}
    parsed = client.chat.completions.parse(messages=HELLO, response_format=Person, **asked).choices[0].message
    called = client.chat.completions.parse(
        messages=ASK_WEATHER, tools=[tool], tool_choice="required", parallel_tool_calls=False, **asked
    )
    message = called.choices[0].message
    assert isinstance(message.tool_calls[0].function.parsed_arguments, Weather)
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "21"}
    history = [*HELLO, parsed, *ASK_WEATHER, message, result]
    assert client.chat.completions.create(messages=history, tools=[tool], **asked).choices


@check
def errors_have_their_classes(server: Server) -> None:
    client = client_of(server)
    for error, body in (
        (openai.NotFoundError, {"model": "no-such-model", "messages": HELLO}),
        (openai.BadRequestError, {"model": server.model, "messages": HELLO, "temperature": 9}),
        (openai.BadRequestError, {"model": server.model, "messages": []}),
        (openai.BadRequestError, {"model": server.model, "messages": HELLO, "stop": ["a"] * 9, "stream": True}),
    ):
        try:
            client.chat.completions.create(**body)
        except error as refusal:
            told: Any = refusal
        else:
            raise AssertionError(f"{body} was accepted")
        assert told.body["message"]
        assert told.request_id


@check
@asynchronous
async def async_chat_many_at_once(client: Any, model: str) -> None:
    answers = await asyncio.gather(
        *(client.chat.completions.create(model=model, messages=HELLO, max_tokens=6, temperature=0) for _ in range(8))
    )
    assert len({answer.choices[0].message.content for answer in answers}) == 1


@check
@asynchronous
async def async_stream_left_early(client: Any, model: str) -> None:
    stream = await client.chat.completions.create(model=model, messages=HELLO, max_tokens=500, stream=True)
    async for _ in stream:
        break
    await stream.close()
    answer = await client.chat.completions.create(model=model, messages=HELLO, max_tokens=2)
    assert answer.choices


@check
@asynchronous
async def async_parse_and_tools(client: Any, model: str) -> None:
    parsed, called = await asyncio.gather(
        client.chat.completions.parse(
            model=model, messages=HELLO, response_format=Person, max_tokens=100, temperature=0
        ),
        client.chat.completions.create(
            model=model, messages=ASK_WEATHER, tools=[WEATHER_TOOL], tool_choice=NAMED, max_tokens=100, temperature=0
        ),
    )
    assert isinstance(parsed.choices[0].message.parsed, Person)
    check_call(called.choices[0].message.tool_calls[0])
