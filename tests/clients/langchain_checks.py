"""langchain-openai: chat models and the plain LLM, with tools and structured output."""

from __future__ import annotations

import asyncio
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

from tests.clients.checking import Checks, Person, Server, Weather

check = Checks("langchain")


def chat_model(server: Server, **more: Any) -> ChatOpenAI:
    given = {"max_tokens": 100, "temperature": 0, "max_retries": 0, **more}
    return ChatOpenAI(base_url=server.url, api_key="none", model=server.model, **given)


@tool(args_schema=Weather)
def get_weather(city: str, unit: str) -> str:
    """The weather of a city."""
    return f"21 degrees {unit} in {city}"


@check
def invoke(server: Server) -> None:
    message = chat_model(server, max_tokens=8).invoke("Say hello.")
    assert isinstance(message, AIMessage)
    assert message.content
    assert message.usage_metadata is not None
    assert message.usage_metadata["output_tokens"] >= 1
    assert message.response_metadata["finish_reason"] in ("stop", "length")


@check
def stream_equals_invoke(server: Server) -> None:
    model = chat_model(server, max_tokens=8, stream_usage=True)
    chunks = list(model.stream("Say hello."))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.content == model.invoke("Say hello.").content
    assert total.usage_metadata is not None


@check
def ainvoke_and_batch(server: Server) -> None:
    model = chat_model(server, max_tokens=6)

    async def main() -> None:
        messages = await model.abatch(["Say hello."] * 4)
        assert len({message.content for message in messages}) == 1
        assert [chunk async for chunk in model.astream("Say hello.")]

    asyncio.run(main())


@check
def bind_tools_any_and_named(server: Server) -> None:
    for choice in ("any", "get_weather", True):
        # one call: a small model that may make several makes them until its tokens are spent
        model = chat_model(server).bind_tools([get_weather], tool_choice=choice, parallel_tool_calls=False)
        message = model.invoke("What is the weather in Paris?")
        assert message.tool_calls
        for call in message.tool_calls:
            assert call["name"] == "get_weather"
            Weather.model_validate(call["args"])
        assert not message.invalid_tool_calls


@check
def bind_tools_auto_and_strict(server: Server) -> None:
    model = chat_model(server, max_tokens=20).bind_tools([get_weather], tool_choice="auto")
    message = model.invoke("What is the weather in Paris?")
    assert message.content or message.tool_calls or message.invalid_tool_calls
    strict = chat_model(server).bind_tools([get_weather], tool_choice="any", strict=True)
    Weather.model_validate(strict.invoke("What is the weather in Paris?").tool_calls[0]["args"])


@check
def tool_calls_in_a_stream(server: Server) -> None:
    model = chat_model(server).bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False)
    chunks = list(model.stream("What is the weather in Paris?"))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.tool_calls
    Weather.model_validate(total.tool_calls[0]["args"])


@check
def a_tools_answer_goes_back(server: Server) -> None:
    question = HumanMessage("What is the weather in Paris?")
    call = chat_model(server).bind_tools([get_weather], tool_choice="any").invoke([question])
    results = [ToolMessage(get_weather.invoke(each["args"]), tool_call_id=each["id"]) for each in call.tool_calls]
    message = chat_model(server, max_tokens=20).bind_tools([get_weather]).invoke([question, call, *results])
    assert message.content or message.tool_calls or message.invalid_tool_calls


@check
def structured_output_by_schema(server: Server) -> None:
    model = chat_model(server).with_structured_output(Person)
    assert isinstance(model.invoke("A person."), Person)
    raw = chat_model(server).with_structured_output(Person, method="json_schema", include_raw=True, strict=True)
    assert isinstance(raw.invoke("A person.")["parsed"], Person)


@check
def structured_output_by_function_calling(server: Server) -> None:
    model = chat_model(server).with_structured_output(Person, method="function_calling")
    assert isinstance(model.invoke("A person."), Person)


@check
def structured_output_in_a_stream(server: Server) -> None:
    model = chat_model(server).with_structured_output(Person)
    assert isinstance(list(model.stream("A person."))[-1], Person)


@check
def logprobs_and_stop(server: Server) -> None:
    model = chat_model(server, max_tokens=4, logprobs=True, top_logprobs=2, seed=3)
    message = model.invoke("Say hello.")
    assert len(message.response_metadata["logprobs"]["content"]) >= 1
    assert chat_model(server, max_tokens=8).invoke("Say hello.", stop=["!", "."]).content is not None


@check
def plain_llm(server: Server) -> None:
    model = OpenAI(base_url=server.url, api_key="none", model=server.model, max_tokens=8, temperature=0, max_retries=0)
    text = model.invoke("Count: one two")
    assert text
    assert "".join(model.stream("Count: one two")) == text
    assert len(model.batch(["Count: one two", "Count: three"])) == 2
