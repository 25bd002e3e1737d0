"""litellm: completion, streams, tools, structured answers, errors."""

from __future__ import annotations

import asyncio
import os
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else its import asks the network for prices

import litellm

from tests.clients.checking import ASK_WEATHER, HELLO, NAMED, WEATHER_TOOL, Checks, Person, Server, Weather

check = Checks("litellm")
litellm.telemetry = False
litellm.suppress_debug_info = True


def ask(server: Server, **more: Any) -> Any:
    return litellm.completion(**arguments(server, **more))


def arguments(server: Server, **more: Any) -> dict[str, Any]:
    given = {"messages": HELLO, "max_tokens": 8, "temperature": 0, "num_retries": 0, **more}
    return {"model": f"openai/{server.model}", "api_base": server.url, "api_key": "none", **given}


@check
def completion(server: Server) -> None:
    answer = ask(server)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.completion_tokens >= 1


@check
def stream_equals_completion(server: Server) -> None:
    chunks = list(ask(server, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == ask(server).choices[0].message.content
    assert litellm.stream_chunk_builder(chunks, messages=HELLO).usage.completion_tokens >= 1


@check
def acompletion_and_its_stream(server: Server) -> None:
    async def main() -> None:
        answers = await asyncio.gather(*(litellm.acompletion(**arguments(server)) for _ in range(4)))
        assert len({answer.choices[0].message.content for answer in answers}) == 1
        stream = await litellm.acompletion(**arguments(server, stream=True))
        assert [chunk async for chunk in stream]

    asyncio.run(main())


@check
def text_completion(server: Server) -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{server.model}",
        api_base=server.url,
        api_key="none",
        prompt="Count: one two",
        max_tokens=8,
        temperature=0,
    )
    assert answer.choices[0].text


@check
def tools(server: Server) -> None:
    for choice in ("required", NAMED):
        answer = ask(server, messages=ASK_WEATHER, tools=[WEATHER_TOOL], tool_choice=choice, max_tokens=100)
        call = answer.choices[0].message.tool_calls[0]
        assert call.function.name == "get_weather"
        Weather.model_validate_json(call.function.arguments)


@check
def tools_in_a_stream(server: Server) -> None:
    asked: dict[str, Any] = {"messages": ASK_WEATHER, "tools": [WEATHER_TOOL], "tool_choice": "required"}
    chunks = list(ask(server, **asked, parallel_tool_calls=False, max_tokens=100, stream=True))
    built = litellm.stream_chunk_builder(chunks, messages=ASK_WEATHER)
    call = built.choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather"
    Weather.model_validate_json(call.function.arguments)


@check
def a_tools_answer_goes_back(server: Server) -> None:
    first = ask(server, messages=ASK_WEATHER, tools=[WEATHER_TOOL], tool_choice="required", max_tokens=100)
    message = first.choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "21"} for call in message.tool_calls]
    second = ask(server, messages=[*ASK_WEATHER, message, *results], tools=[WEATHER_TOOL], max_tokens=20)
    assert second.choices[0].message.content or second.choices[0].message.tool_calls


@check
def response_format(server: Server) -> None:
    answer = ask(server, response_format=Person, max_tokens=100)
    Person.model_validate_json(answer.choices[0].message.content)


@check
def errors_have_their_classes(server: Server) -> None:
    for error, more in (
        (litellm.BadRequestError, {"temperature": 9}),
        (litellm.NotFoundError, {"model": "openai/no-such-model"}),
        (litellm.ContextWindowExceededError, {"messages": [{"role": "user", "content": "word " * 9000}]}),
    ):
        try:
            ask(server, **more)
        except error:
            continue
        raise AssertionError(f"{more} was accepted")
