"""PURE. `tools`, `tool_choice` and `parallel_tool_calls` of a chat request: JSON values to a checked record.

Choices made here: an empty `tools` list is the same as none (agents send one when they have no tool left; OpenAI
refuses it); `tool_choice` other than none then has nothing to choose from and is refused, whatever its value (A-24).
`parallel_tool_calls` without tools is harmless and accepted (A-36). Without `tool_choice` it is auto. A tool without
`parameters` takes no arguments; `parameters: {}` takes any. Unknown keys are refused, as OpenAI does.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from replica.errors import InvalidRequestError
from replica.messages import MAX_GRAMMAR_BYTES
from router.schema_bounds import is_deeper
from router.sentences import short

#: OpenAI's limits
MAX_TOOLS = 128
MAX_NAME_CHARS = 64
#: how deep a tool may be nested; schemas in use have below 30 levels
MAX_TOOL_DEPTH = 100
_NAME_CHARS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
_NAME_RULE = f"1 to {MAX_NAME_CHARS} characters of A-Z, a-z, 0-9, _ and -"
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class Tool(msgspec.Struct, frozen=True):
    """A function the model may call. `parameters` is a JSON Schema of type object."""

    name: str
    description: str
    parameters: dict[str, Any]
    #: the arguments must follow the schema, also with `tool_choice` auto
    strict: bool = False


class ToolRequest(msgspec.Struct, frozen=True):
    """What a request says about tools. At least one tool."""

    tools: tuple[Tool, ...]
    choice: Literal["none", "auto", "required", "named"] = "auto"
    #: with `choice` named: the tool to call
    named: str = ""
    #: more than one call in an answer is fine
    parallel: bool = True

    @property
    def callable(self) -> tuple[Tool, ...]:
        """Tools the answer may call."""
        if self.choice == "none":
            return ()
        if self.choice == "named":
            return tuple(tool for tool in self.tools if tool.name == self.named)
        return self.tools


def parse_tools(tools: object, tool_choice: object, parallel_tool_calls: object) -> ToolRequest | None:
    """The three fields, each None when absent or null. None when the request has no tools.

    Raises `InvalidRequestError` that names the field.
    """
    if parallel_tool_calls is not None and not isinstance(parallel_tool_calls, bool):
        raise InvalidRequestError(
            f"parallel_tool_calls is {short(parallel_tool_calls)}; allowed: true or false.", "parallel_tool_calls"
        )
    given = _parse_list(tools)
    choice, named = _parse_choice(tool_choice, given)
    if not given:
        return None
    return ToolRequest(given, choice, named, parallel_tool_calls is not False)


def _wrong(where: str, value: object, allowed: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where} is {short(value)}; allowed: {allowed}.", where.partition("[")[0])


def _parse_list(tools: object) -> tuple[Tool, ...]:
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise _wrong("tools", tools, f"a list of at most {MAX_TOOLS} tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"tools has {len(tools)} entries; allowed: at most {MAX_TOOLS}.", "tools")
    if is_deeper(tools, MAX_TOOL_DEPTH):
        raise InvalidRequestError(f"tools is nested deeper than {MAX_TOOL_DEPTH} levels; allowed: less.", "tools")
    num_bytes = len(msgspec.json.encode(tools))
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidRequestError(f"tools has {num_bytes} bytes as JSON; allowed: {MAX_GRAMMAR_BYTES}.", "tools")
    parsed = tuple(_parse_tool(tool, f"tools[{position}]") for position, tool in enumerate(tools))
    seen: set[str] = set()
    for position, tool in enumerate(parsed):
        if tool.name in seen:
            raise InvalidRequestError(
                f"tools[{position}].function.name is {tool.name!r} a second time; allowed: each name once.", "tools"
            )
        seen.add(tool.name)
    return parsed


def _check_keys(value: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in value:
        if key not in known:
            raise InvalidRequestError(
                f"{where} has an unknown field {short(key)}; allowed: {', '.join(known)}.", "tools"
            )


def _parse_tool(tool: object, where: str) -> Tool:
    if not isinstance(tool, dict):
        raise _wrong(where, tool, 'an object {"type": "function", "function": {...}}')
    if tool.get("type") != "function":
        raise _wrong(f"{where}.type", tool.get("type"), "'function'")
    _check_keys(tool, ("type", "function"), where)
    function = tool.get("function")
    where += ".function"
    if not isinstance(function, dict):
        raise _wrong(where, function, "an object with name, description, parameters, strict")
    _check_keys(function, ("name", "description", "parameters", "strict"), where)
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise _wrong(f"{where}.description", description, "a string")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise _wrong(f"{where}.strict", strict, "true or false")
    return Tool(
        _check_name(function.get("name"), f"{where}.name"),
        description or "",
        _check_parameters(function.get("parameters"), f"{where}.parameters"),
        bool(strict),
    )


def _check_name(name: object, where: str) -> str:
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_CHARS or not _NAME_CHARS.issuperset(name):
        raise _wrong(where, name, _NAME_RULE)
    return name


def _check_parameters(parameters: object, where: str) -> dict[str, Any]:
    if parameters is None:
        return _NO_ARGUMENTS
    if not isinstance(parameters, dict):
        raise _wrong(where, parameters, "a JSON Schema object")
    if parameters.get("type", "object") != "object":
        raise _wrong(f"{where}.type", parameters["type"], "'object', as arguments are an object")
    return {"type": "object", **parameters}


_CHOICE_FORMS = '\'none\', \'auto\', \'required\', or {"type": "function", "function": {"name": ...}}'


def _parse_choice(choice: object, tools: tuple[Tool, ...]) -> tuple[Literal["none", "auto", "required", "named"], str]:
    if choice is None:
        return "auto", ""
    if choice == "none":
        return "none", ""
    named = _named(choice)
    if named is None and choice not in ("auto", "required"):
        raise _wrong("tool_choice", choice, _CHOICE_FORMS)
    if not tools:
        raise InvalidRequestError(
            f"tool_choice is {short(choice)} without tools; allowed: 'none', null, or with at least one tool.",
            "tool_choice",
        )
    if named is None:
        return ("auto" if choice == "auto" else "required"), ""
    if all(tool.name != named for tool in tools):
        names = ", ".join(tool.name for tool in tools[:5])
        raise InvalidRequestError(
            f"tool_choice.function.name is {short(named)}; allowed: the name of one of the tools ({names}"
            f"{', ...' if len(tools) > 5 else ''}).",
            "tool_choice",
        )
    return "named", named


def _named(choice: object) -> str | None:
    """The tool that `{"type": "function", "function": {"name": ...}}` names; None for another form."""
    if not isinstance(choice, dict) or choice.get("type") != "function" or len(choice) != 2:
        return None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) and len(function) == 1 else None
    return name if isinstance(name, str) else None
