"""How a check is written, run and told. No pytest: the clients live in an environment without it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, Field


class Server(NamedTuple):
    """Where the clients are pointed to."""

    #: with /v1 at its end, as OpenAI's clients want it
    url: str
    model: str


class Check(NamedTuple):
    client: str
    name: str
    run: Callable[[Server], object]


class Checks:
    """The checks of one client; used as a decorator."""

    def __init__(self, client: str) -> None:
        self.client = client
        self.all: list[Check] = []

    def __call__(self, function: Callable[[Server], object]) -> Callable[[Server], object]:
        self.all.append(Check(self.client, function.__name__.replace("_", " "), function))
        return function


def run(checks: Iterable[Check], server: Server) -> int:
    """One line a check; the number of failures."""
    num_failed = 0
    for check in checks:
        started = time.monotonic()
        try:
            check.run(server)
            verdict = "ok"
        except Exception as error:
            num_failed += 1
            verdict = f"FAILED: {type(error).__name__}: {str(error)[:300]}"
            traceback.print_exc()
        print(f"{check.client:10} {check.name:44} {time.monotonic() - started:6.2f} s  {verdict}", flush=True)
    return num_failed


# ---- what the checks ask for: small enough that a small model ends in time, whatever it means to say ----

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Say hello."}]
ASK_WEATHER: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris?"}]


class Person(BaseModel):
    """A person, as a structured answer."""

    name: Literal["Ann", "Bob", "Cleo"]
    age: int = Field(ge=1, le=99)
    likes: Literal["tea", "coffee"]


class Weather(BaseModel):
    """The arguments of `get_weather`."""

    city: Literal["Paris", "Rome", "Oslo"]
    unit: Literal["celsius", "fahrenheit"]


WEATHER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome", "Oslo"]},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather of a city.", "parameters": WEATHER_SCHEMA},
}
TIME_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "The time in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "get_weather"}}
