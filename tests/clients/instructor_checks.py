"""instructor: answers that are pydantic models, by tools, by JSON mode and by schema."""

from __future__ import annotations

import asyncio
from typing import Any

import instructor
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict

from tests.clients.checking import HELLO, Checks, Person, Server

check = Checks("instructor")


class AnyObject(BaseModel):
    """JSON mode asks for an object and not for a certain one: what a small model makes of its keys is open."""

    model_config = ConfigDict(extra="allow")


def client_of(server: Server, mode: instructor.Mode) -> Any:
    return instructor.from_openai(OpenAI(base_url=server.url, api_key="none", max_retries=0), mode=mode)


def ask(server: Server, mode: instructor.Mode, model: Any = Person, **more: Any) -> Any:
    given = {"messages": HELLO, "max_tokens": 120, "temperature": 0, "max_retries": 0, **more}
    return client_of(server, mode).chat.completions.create(model=server.model, response_model=model, **given)


@check
def tools(server: Server) -> None:
    assert isinstance(ask(server, instructor.Mode.TOOLS), Person)


@check
def tools_strict(server: Server) -> None:
    assert isinstance(ask(server, instructor.Mode.TOOLS_STRICT), Person)


@check
def json_schema(server: Server) -> None:
    assert isinstance(ask(server, instructor.Mode.JSON_SCHEMA), Person)


@check
def json_mode(server: Server) -> None:
    found = ask(
        server,
        instructor.Mode.JSON,
        AnyObject,
        messages=[{"role": "user", "content": 'Answer with {"name": "Ann"}'}],
    )
    assert isinstance(found, AnyObject)


@check
def with_completion(server: Server) -> None:
    client = client_of(server, instructor.Mode.TOOLS)
    person, completion = client.chat.completions.create_with_completion(
        model=server.model, response_model=Person, messages=HELLO, max_tokens=120, temperature=0, max_retries=0
    )
    assert isinstance(person, Person)
    assert completion.usage.completion_tokens > 1


@check
def partial_in_a_stream(server: Server) -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        stages = list(
            client_of(server, mode).chat.completions.create_partial(
                model=server.model,
                response_model=Person,
                messages=HELLO,
                max_tokens=120,
                temperature=0,
                max_retries=0,
            )
        )
        assert len(stages) > 1
        Person.model_validate(stages[-1].model_dump())


@check
def asynchronous(server: Server) -> None:
    async def main() -> None:
        async with AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as plain:
            client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
            person = await client.chat.completions.create(
                model=server.model, response_model=Person, messages=HELLO, max_tokens=120, max_retries=0
            )
            assert isinstance(person, Person)

    asyncio.run(main())
