"""`tools`, `tool_choice`, `parallel_tool_calls`: what is taken, and one sentence for what is not."""

from __future__ import annotations

from typing import Any

import pytest

from replica.errors import InvalidRequestError
from router.tool_request import MAX_TOOLS, parse_tools


def tool(name: object = "f", **function: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def named(name: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_every_field_of_a_tool() -> None:
    schema = {"properties": {"x": {"type": "integer"}}}
    request = parse_tools([tool("a-B_9", description="d", parameters=schema, strict=True), tool("g")], None, None)
    assert request is not None
    first, second = request.tools
    assert (first.name, first.description, first.strict) == ("a-B_9", "d", True)
    assert first.parameters == {"type": "object", **schema}
    assert (second.description, second.strict) == ("", False)
    assert second.parameters == {"type": "object", "properties": {}, "additionalProperties": False}
    assert (request.choice, request.parallel, request.callable) == ("auto", True, request.tools)


def test_explicit_nulls_are_absent_and_empty_parameters_take_any_arguments() -> None:
    nulls = parse_tools([tool(description=None, parameters=None, strict=None)], None, None)
    assert nulls == parse_tools([tool()], None, None)
    anything = parse_tools([tool(parameters={})], None, None)
    assert anything is not None
    assert anything.tools[0].parameters == {"type": "object"}


@pytest.mark.parametrize(
    ("choice", "expected", "callable_names"),
    [
        (None, ("auto", ""), ["f", "g"]),
        ("auto", ("auto", ""), ["f", "g"]),
        ("none", ("none", ""), []),
        ("required", ("required", ""), ["f", "g"]),
        (named("g"), ("named", "g"), ["g"]),
    ],
)
def test_choices(choice: object, expected: tuple[str, str], callable_names: list[str]) -> None:
    request = parse_tools([tool("f"), tool("g")], choice, False)
    assert request is not None
    assert (request.choice, request.named) == expected
    assert not request.parallel
    assert [each.name for each in request.callable] == callable_names


@pytest.mark.parametrize("tools", [None, []])
@pytest.mark.parametrize("choice", [None, "none"])
@pytest.mark.parametrize("parallel", [None, True, False])
def test_nothing_to_do_without_tools(tools: object, choice: object, parallel: object) -> None:
    assert parse_tools(tools, choice, parallel) is None


@pytest.mark.parametrize("tools", [None, []])
@pytest.mark.parametrize("choice", ["auto", "required", named("f")])
def test_a_choice_without_tools_is_refused(tools: object, choice: object) -> None:
    with pytest.raises(InvalidRequestError, match="without tools") as caught:
        parse_tools(tools, choice, None)
    assert caught.value.param == "tool_choice"


def deep(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"properties": value}
    return value


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        ({}, "tools is"),
        ("f", "tools is 'f'"),
        ([tool(f"f{number}") for number in range(MAX_TOOLS + 1)], "129 entries"),
        ([tool(), tool("g"), tool()], r"tools\[2\].function.name is 'f' a second time"),
        ([1], r"tools\[0\] is 1"),
        ([{"function": {"name": "f"}}], r"tools\[0\].type is null"),
        ([{"type": "web_search"}], r"tools\[0\].type is 'web_search'"),
        ([{"type": "function"}], r"tools\[0\].function is null"),
        ([{**tool(), "x": 1}], r"tools\[0\] has an unknown field 'x'"),
        ([tool(returns=1)], r"tools\[0\].function has an unknown field 'returns'"),
        ([tool(None)], r"tools\[0\].function.name is null"),
        ([tool("")], "function.name is ''"),
        ([tool("a" * 65)], "1 to 64 characters"),
        ([tool("a.b")], "function.name is 'a.b'"),
        ([tool("ä")], "function.name is 'ä'"),
        ([tool(description=1)], "function.description is 1"),
        ([tool(strict="yes")], "function.strict is 'yes'"),
        ([tool(parameters=[])], "function.parameters is"),
        ([tool(parameters={"type": "array"})], "function.parameters.type is 'array'"),
        ([tool(parameters={"type": ["object"]})], "function.parameters.type is"),
        ([tool(parameters=deep(100))], "nested deeper than 100"),
        ([tool(parameters=deep(100_000))], "nested deeper than 100"),
        ([tool(description="x" * 300_000)], "bytes as JSON; allowed: 262144"),
    ],
)
def test_wrong_tools_are_refused_by_name(tools: object, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says) as caught:
        parse_tools(tools, None, None)
    assert caught.value.param == "tools"
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ("any", "tool_choice is 'any'"),
        (1, "tool_choice is 1"),
        ([], r"tool_choice is \[\]"),
        ({"type": "function"}, "tool_choice is"),
        ({"type": "allowed_tools", "allowed_tools": {}}, "tool_choice is"),
        (named(1), "tool_choice is"),
        ({**named("f"), "x": 1}, "tool_choice is"),
        ({"type": "function", "function": {"name": "f", "x": 1}}, "tool_choice is"),
        (named("h"), r"tool_choice.function.name is 'h'; allowed: the name of one of the tools \(f, g\)"),
    ],
)
def test_wrong_choices_are_refused_by_name(choice: object, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says) as caught:
        parse_tools([tool("f"), tool("g")], choice, None)
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize("tools", [None, [tool()]])
def test_parallel_tool_calls_is_a_boolean(tools: object) -> None:
    with pytest.raises(InvalidRequestError, match="parallel_tool_calls is 1; allowed: true or false") as caught:
        parse_tools(tools, None, 1)
    assert caught.value.param == "parallel_tool_calls"
