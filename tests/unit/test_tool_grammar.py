"""Grammars of tool calls, against llguidance: they allow what the format writes, refuse what a schema refuses, and
whatever is generated under them is read back as calls that follow their schemas.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import msgspec
import pytest

from replica.errors import InvalidRequestError
from router.message_parts import ToolFormat
from router.reply_parser import make_parser
from router.tool_grammar import call_schema
from router.tool_plan import TemplateFacts, Tool, ToolPlan, parse_tools, plan_tools
from tests.unit.grammar_walk import GrammarUnderTest

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "near": {"type": "array", "items": {"$ref": "#/$defs/point"}},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
    "$schema": "http://json-schema.org/draft-07/schema#",
}
TREE: dict[str, Any] = {
    "type": "object",
    "properties": {"leaf": {"type": "boolean"}, "left": {"$ref": "#"}},
    "required": ["leaf"],
    "additionalProperties": False,
}
BODY = json.dumps({"grammars": [{"name": "json_schema", "json_schema": {"type": "object", "required": ["answer"]}}]})
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>")
#: (format, added tokens): as text, and as tokens of their own
KINDS: list[tuple[ToolFormat, tuple[str, ...]]] = [
    ("hermes", ()),
    ("hermes", MARKERS),
    ("llama3_json", ()),
    ("llama3_json", MARKERS),
]
kinds = pytest.mark.parametrize(("tool_format", "added"), KINDS)


def tool(name: str, parameters: dict[str, Any] | None, strict: bool = False) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


def plan(
    tool_format: ToolFormat,
    added: tuple[str, ...],
    choice: object,
    parallel: bool | None = None,
    strict: bool = False,
    body: str = "",
    thinks: bool = False,
) -> ToolPlan:
    request = parse_tools(
        [tool("get_weather", WEATHER, strict), tool("tree", TREE, strict), tool("now", None, strict)], choice, parallel
    )
    facts = TemplateFacts(tool_format, thinks, added_markers=frozenset(added))
    return plan_tools(request, facts, [{"role": "user", "content": "x"}], body)


def call(tool_format: ToolFormat, name: str, arguments: object) -> str:
    key = "arguments" if tool_format == "hermes" else "parameters"
    text = json.dumps({"name": name, key: arguments}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>" if tool_format == "hermes" else text


def between(tool_format: ToolFormat) -> str:
    return "\n" if tool_format == "hermes" else "; "


GOOD: list[tuple[str, object]] = [
    ("get_weather", {"city": "Zürich", "unit": "C", "near": [{"x": 1}, {"x": -2}]}),
    ("get_weather", {"city": '"\\\n</tool_'}),
    ("tree", {"leaf": False, "left": {"leaf": True, "left": {"leaf": True}}}),
    ("now", {}),
]
BAD: list[tuple[str, object]] = [
    ("get_weather", {"city": 1}),
    ("get_weather", {}),
    ("get_weather", {"city": "x", "unit": "K"}),
    ("get_weather", {"city": "x", "near": [{"x": "1"}]}),
    ("get_weather", {"city": "x", "more": 1}),
    ("tree", {"leaf": True, "left": {"leaf": 1}}),
    ("now", {"x": 1}),
    ("get_money", {}),
]


@kinds
def test_required_takes_calls_that_follow_their_schemas_and_nothing_else(
    tool_format: ToolFormat, added: tuple[str, ...]
) -> None:
    grammar = GrammarUnderTest(plan(tool_format, added, "required").grammar, added)
    good = [call(tool_format, *each) for each in GOOD]
    assert [grammar.accepts(text) for text in good] == [True] * len(good)
    assert grammar.accepts(between(tool_format).join(good))
    assert [grammar.accepts(call(tool_format, *each)) for each in BAD] == [False] * len(BAD)
    for text in ("", "Hi", good[0] + "Hi", "Hi" + good[0], good[0][:-1], good[0].replace(": ", ":")):
        assert not grammar.accepts(text)


@kinds
def test_one_call_when_parallel_calls_are_off_or_a_tool_is_named(
    tool_format: ToolFormat, added: tuple[str, ...]
) -> None:
    named = {"type": "function", "function": {"name": "now"}}
    one, two = call(tool_format, "now", {}), between(tool_format).join([call(tool_format, "now", {})] * 2)
    weather = call(tool_format, *GOOD[0])
    single = GrammarUnderTest(plan(tool_format, added, "required", parallel=False).grammar, added)
    assert [single.accepts(text) for text in (one, weather, two)] == [True, True, False]
    only = GrammarUnderTest(plan(tool_format, added, named).grammar, added)
    assert [only.accepts(text) for text in (one, weather, two)] == [True, False, False]


@kinds
def test_auto_beside_a_body_grammar_is_calls_or_the_body(tool_format: ToolFormat, added: tuple[str, ...]) -> None:
    grammar = GrammarUnderTest(plan(tool_format, added, "auto", strict=True, body=BODY).grammar, added)
    assert grammar.accepts('{"answer":1}')
    assert grammar.accepts(call(tool_format, *GOOD[0]) + between(tool_format) + call(tool_format, "now", {}))
    for text in ("Hi", '{"answr": 1}', call(tool_format, *BAD[0]), call(tool_format, *BAD[-1])):
        assert not grammar.accepts(text)


@pytest.mark.parametrize("body", ['start: "yes" | "no"', '{"grammars": [{"lark_grammar": "start: /yes|no/"}]}'])
@kinds
def test_a_body_grammar_of_any_kind_can_stand_beside_calls(
    tool_format: ToolFormat, added: tuple[str, ...], body: str
) -> None:
    grammar = GrammarUnderTest(plan(tool_format, added, "auto", body=body).grammar, added)
    assert [grammar.accepts(text) for text in ("yes", "maybe")] == [True, False]
    # not strict: any object will do
    assert grammar.accepts(call(tool_format, *BAD[0]))
    assert not grammar.accepts(call(tool_format, *BAD[-1]))


@kinds
def test_auto_with_strict_tools_is_any_text_in_which_calls_are_right(
    tool_format: ToolFormat, added: tuple[str, ...]
) -> None:
    grammar = GrammarUnderTest(plan(tool_format, added, "auto", strict=True).grammar, added)
    good, bad = call(tool_format, *GOOD[0]), call(tool_format, *BAD[0])
    for text in ("", "Hi", " 1 < 2 <tool", "é\n\n", "<b>", good, f"{good}{between(tool_format)}{good}"):
        assert grammar.accepts(text), text
    for text in (bad, call(tool_format, *BAD[-1]), good + between(tool_format) + bad):
        assert not grammar.accepts(text), text
    if tool_format == "hermes":
        assert grammar.accepts(f"Hi {good} and {good} so")
        assert not grammar.accepts(f"Hi {bad}")
        assert not grammar.accepts("<tool_call>")
    else:
        assert not grammar.accepts(f"\n {bad}")
        assert not grammar.accepts(f"[ {bad}]")
        assert grammar.accepts("[1] says")


@kinds
def test_text_cannot_spell_a_marker_that_the_parser_would_take(tool_format: ToolFormat, added: tuple[str, ...]) -> None:
    grammar = GrammarUnderTest(plan(tool_format, added, "auto", strict=True).grammar, added)
    marker = "<tool_call>" if tool_format == "hermes" else "<|python_tag|>"
    assert grammar.accepts(f"Hi {marker[:-1]}", spelled=True)
    assert not grammar.accepts(f"Hi {marker}", spelled=True)
    assert not grammar.accepts(f"Hi {marker}{call(tool_format, *BAD[0])}", spelled=True)


@kinds
def test_auto_without_parallel_calls_is_any_text_and_at_most_one_call(
    tool_format: ToolFormat, added: tuple[str, ...]
) -> None:
    grammar = GrammarUnderTest(plan(tool_format, added, "auto", parallel=False).grammar, added)
    one = call(tool_format, *BAD[0])
    assert [grammar.accepts(text) for text in ("Hi", one)] == [True, True]
    assert not grammar.accepts(one + between(tool_format) + one)
    if tool_format == "hermes":
        assert grammar.accepts("Hi " + one)


@kinds
def test_a_model_may_think_before_a_grammar_begins(tool_format: ToolFormat, added: tuple[str, ...]) -> None:
    before = plan(tool_format, added, "required", thinks=True)
    good = call(tool_format, *GOOD[0])
    open_prompt, inside, closed = ("user: x\nassistant:", "assistant: <think>\n", "assistant: <think>\n\n</think>\n\n")
    grammar = GrammarUnderTest(before.for_prompt(open_prompt).grammar, added)
    assert grammar.accepts(good)
    assert grammar.accepts(f"<think>\nHm <b>.\n</think>\n\n{good}")
    assert not grammar.accepts(f"<think>{good}")
    assert not grammar.accepts(f"<think></think>{call(tool_format, *BAD[0])}")
    grammar = GrammarUnderTest(before.for_prompt(inside).grammar, added)
    assert grammar.accepts(f"Hm.</think>{good}")
    assert not grammar.accepts(good)
    assert before.for_prompt(closed).grammar == before.grammar


@kinds
def test_thoughts_come_before_a_union_of_calls_and_body_too(tool_format: ToolFormat, added: tuple[str, ...]) -> None:
    before = plan(tool_format, added, "auto", body=BODY, thinks=True)
    grammar = GrammarUnderTest(before.for_prompt("<think>").grammar, added)
    good = call(tool_format, "now", {})
    assert [grammar.accepts(f"a</think>\n{text}") for text in (good, '{"answer":""}', "x")] == [True, True, False]


SCHEMAS = {"get_weather": WEATHER, "tree": TREE, "now": {"maxProperties": 0}}
WALKS = [
    ("required", None, False),
    ("required", False, False),
    ({"type": "function", "function": {"name": "tree"}}, None, False),
    ("auto", None, True),
    ("auto", False, True),
]


@pytest.mark.parametrize(("choice", "parallel", "strict"), WALKS)
@kinds
def test_what_is_generated_is_read_back_as_right_calls(
    tool_format: ToolFormat, added: tuple[str, ...], choice: object, parallel: bool | None, strict: bool
) -> None:
    """Random walks over the tokens that the masks leave."""
    before = plan(tool_format, added, choice, parallel, strict)
    grammar = GrammarUnderTest(before.grammar, added)
    wishes = call(tool_format, "tree", {"leaf": True}) + '}}}}""""]]]'
    begin = "" if choice != "auto" else "<tool_call>" if tool_format == "hermes" else "{"
    num_calls = 0
    for seed in range(12):
        text = grammar.walk(seed, wishes, begin)
        if text is None:
            continue
        parser = make_parser(before.reply, lambda ids=itertools.count(): str(next(ids)))  # type: ignore[misc]
        deltas = [*map(parser.push, text), parser.flush()]
        pieces = [piece for delta in deltas for piece in delta.tool_calls]
        names = [piece.name for piece in pieces if piece.name]
        for index, name in enumerate(names):
            arguments = json.loads("".join(piece.arguments for piece in pieces if piece.index == index))
            jsonschema.validate(arguments, SCHEMAS[name])
        assert parser.num_tool_calls == len(names)
        if choice != "auto":
            assert names
            assert "".join(delta.content for delta in deltas) == ""
        if parallel is False or isinstance(choice, dict):
            assert len(names) <= 1
        num_calls += len(names)
    assert num_calls >= 6


def test_references_move_with_their_schema_and_data_does_not_change() -> None:
    parameters = {
        "properties": {"$ref": {"$ref": "#/$defs/a"}, "const": {"$ref": "#"}, "x": {"const": {"$ref": "#/a"}}},
        "$defs": {"a": {"items": [{"$ref": "#/properties/x"}], "$ref": "http://else/x"}},
        "additionalProperties": True,
    }
    moved = call_schema(Tool("f", "", parameters), "arguments")["properties"]["arguments"]
    at = "#/properties/arguments"
    assert moved == {
        "additionalProperties": True,
        "properties": {
            "$ref": {"$ref": f"{at}/$defs/a"},
            "const": {"$ref": at},
            "x": {"const": {"$ref": "#/a"}},
        },
        "$defs": {"a": {"items": [{"$ref": f"{at}/properties/x"}], "$ref": "http://else/x"}},
    }


def test_a_client_cannot_change_how_schemas_are_read() -> None:
    tools = [tool("f", {"properties": {"a": {"minimum": 1}}, "x-guidance": {"lenient": True}})]
    before = plan_tools(parse_tools(tools, "required", None), TemplateFacts("llama3_json"), [])
    assert "lenient" not in before.grammar


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_schemas_that_take_too_much_are_refused_where_they_are_followed(choice: str) -> None:
    tools = [tool("f", {"properties": {"x": {"type": "integer", "multipleOf": 999_983}}})]
    if choice == "auto":
        assert plan_tools(parse_tools(tools, choice, False), TemplateFacts(), []).grammar
        return
    with pytest.raises(InvalidRequestError, match="tools has values of multipleOf") as caught:
        plan_tools(parse_tools(tools, choice, None), TemplateFacts(), [])
    assert caught.value.param == "tools"


def test_all_tools_together_count() -> None:
    enum = {"properties": {"x": {"enum": list(range(100))}}}
    few, many = ([tool(f"f{number}", enum) for number in range(count)] for count in (60, 120))
    grammar = plan_tools(parse_tools(few, "required", None), TemplateFacts(), []).grammar
    assert GrammarUnderTest(grammar).accepts(call("hermes", "f59", {"x": 99}))
    with pytest.raises(InvalidRequestError, match="more than 8192 parts"):
        plan_tools(parse_tools(many, "required", None), TemplateFacts(), [])


def test_a_grammar_that_is_too_long_is_refused() -> None:
    """Below the limit as tools, above it as a grammar with the body."""
    tools = parse_tools([tool("f", {"description": "x" * 200_000}, strict=True)], "auto", None)
    body = json.dumps({"grammars": [{"json_schema": {"description": "y" * 100_000}}]})
    with pytest.raises(InvalidRequestError, match="262144") as caught:
        plan_tools(tools, TemplateFacts(), [], body)
    assert caught.value.param == "tools"


def test_markers_that_are_special_tokens_have_to_be_shown() -> None:
    facts = TemplateFacts("hermes", added_markers=frozenset(MARKERS), special_markers=frozenset({"<tool_call>"}))
    tools = parse_tools([tool("f", None)], None, None)
    assert plan_tools(tools, facts, []).shows_special_tokens
    assert not plan_tools(None, facts, []).shows_special_tokens
    plain = msgspec.structs.replace(facts, special_markers=frozenset())
    assert not plan_tools(tools, plain, []).shows_special_tokens
