"""Structured output: what is taken, what the grammar then allows, and that hostile input is refused in little time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import llguidance
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.errors import InvalidRequestError
from replica.messages import GRAMMAR_LIMITS
from router import structured
from router.schema_bounds import check_schema, closed, is_deeper
from router.sentences import WrongValueError
from router.structured import (
    Constraint,
    check_grammar,
    check_response_format,
    check_structured_outputs,
    grammar_of,
    reason_against,
)


def wanted(**parts: Any) -> Constraint:
    constraint = check_structured_outputs(parts)
    assert constraint is not None
    return constraint


def accepts(constraint: Constraint, text: str) -> bool:
    """Whether the grammar takes the whole of `text` and may end there."""
    limits: dict[str, Any] = dict(GRAMMAR_LIMITS)
    tokenizer = structured._bytes_tokenizer()
    matcher = llguidance.LLMatcher(
        tokenizer, grammar_of(constraint, reason_against), log_level=0, limits=llguidance.LLParserLimits(**limits)
    )
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]}


def test_json_is_written_in_one_way() -> None:
    constraint = wanted(json={**SCHEMA, "x-guidance": {"whitespace_flexible": True, "lenient": True}})
    assert accepts(constraint, json.dumps({"a": 1, "b": "x"}))
    for spaced in ('{"a":1}', '{ "a": 1}', '{"a": 1,\n"b": "x"}', '{"a": 1} ', ' {"a": 1}'):
        assert not accepts(constraint, spaced)


def test_objects_that_list_properties_are_closed_unless_they_say_otherwise() -> None:
    more = '{"a": 1, "z": 2}'
    assert not accepts(wanted(json=SCHEMA), more)
    assert not accepts(wanted(json=SCHEMA, disable_additional_properties=False), more)
    assert accepts(wanted(json={**SCHEMA, "additionalProperties": True}), more)
    assert accepts(wanted(json={"type": "object"}), more)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"enum": [10**400]}, r"from -2\^53 to 2\^53"),
        ({"enum": [1, -(2**53) - 1]}, r"from -2\^53 to 2\^53"),
        # llguidance dies of this one
        ({"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}, r"from -2\^53 to 2\^53"),
        ({"properties": {"a": {"maximum": 1e19}}}, r"from -2\^53 to 2\^53"),
        ({"patternProperties": {"^x": {}}, "minProperties": 2}, "minProperties 2 with 0 required"),
    ],
)
def test_what_would_be_followed_wrongly_is_refused(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(WrongValueError, match=said):
        wanted(json=schema)


def test_unknown_formats_are_annotations() -> None:
    assert accepts(wanted(json={"type": "string", "format": "binary"}), '"x"')
    assert not accepts(wanted(json={"type": "string", "format": "date"}), '"x"')
    assert accepts(wanted(json={"type": "object", "properties": {"format": {"const": 1}}}), '{"format": 1}')


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('root ::= "\\u00e9" [\\u00e9-\\u00ff] "\\U0001F600" "\\u0041"', "éé😀A", "e"),
        ('root ::= a\na ::= "x"\n    | "y"', "y", "z"),
        ("root ::= [a\\-z]+", "a-z", "b"),
        ('?start: "a" | b\n?b: "c"', "c", "b"),
    ],
)
def test_forms_that_people_bring_from_elsewhere(grammar: str, good: str, bad: str) -> None:
    assert accepts(wanted(grammar=grammar), good)
    assert not accepts(wanted(grammar=grammar), bad)


def test_limits_that_show_only_while_writing_are_found_before() -> None:
    with pytest.raises(InvalidRequestError, match="cannot be used"):
        grammar_of(wanted(regex="(((a{100}){100}){100})"), reason_against)


def test_nothing_is_closed_that_is_joined_with_something_else() -> None:
    """Each half would forbid the other's properties, and nothing would fit."""
    parts = [{"properties": {name: {"const": 1}}, "required": [name]} for name in "ab"]
    assert accepts(wanted(json={"type": "object", "allOf": parts}), '{"a": 1, "b": 1}')
    joined = {"type": "object", "$ref": "#/$defs/b", **parts[0], "$defs": {"b": parts[1]}}
    assert "additionalProperties" not in closed(joined)


def test_closed_reaches_everywhere_and_no_data() -> None:
    schema = {"$defs": {"d": SCHEMA}, "anyOf": [SCHEMA, {"items": SCHEMA}], "const": {"properties": {}}}
    result = closed(schema)
    for place in (result["$defs"]["d"], result["anyOf"][0], result["anyOf"][1]["items"]):
        assert place["additionalProperties"] is False
    assert result["const"] == {"properties": {}}
    assert "additionalProperties" not in SCHEMA


@pytest.mark.parametrize(
    "value",
    [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"type": "object"}}},
        {"type": "json_schema", "json_schema": {"name": None, "description": "d", "schema": {"type": "object"}}},
    ],
)
def test_response_formats(value: Any) -> None:
    constraint = check_response_format(value)
    assert constraint is not None
    assert accepts(constraint, '{"any": [1, {"thing": null}]}')
    assert not accepts(constraint, "[]")


@pytest.mark.parametrize(
    "choice", ["a", "a b", 'with "quotes" and \\', "line\nbreak\ttab", "\x7f\x00\x85", "é😀日", "/a/ | b"]
)
def test_any_text_may_be_a_choice(choice: str) -> None:
    constraint = wanted(choice=["other", choice])
    assert accepts(constraint, choice)
    assert accepts(constraint, "other")
    assert not accepts(constraint, choice + "x")


@given(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=4))
def test_choices_are_taken_literally(choices: list[str]) -> None:
    constraint = wanted(choice=choices)
    assert all(accepts(constraint, choice) for choice in choices)


def test_a_regex_describes_the_whole_text() -> None:
    constraint = wanted(regex=r"\d{3}-[a-z]/x")
    assert accepts(constraint, "123-b/x")
    assert not accepts(constraint, "123-b/xy")
    assert not accepts(constraint, "٣٣٣-b/x")


GBNF = """
# an assignment
root ::= name " = " expr
name ::= [a-z]+
expr ::= num (("+" | "-") num)*
num ::= [0-9]+
"""


@pytest.mark.parametrize("grammar", [GBNF, 'start: NAME " = " expr\nNAME: /[a-z]+/\nexpr: N ("+" N)*\nN: /[0-9]+/'])
def test_grammars_in_both_notations(grammar: str) -> None:
    constraint = wanted(grammar=grammar)
    assert accepts(constraint, "ab = 1+22")
    assert not accepts(constraint, "ab = 1+")


@pytest.mark.parametrize("value", [{}, {"json": None}, {"json_object": False}, {"disable_any_whitespace": True}])
def test_what_asks_for_nothing(value: Any) -> None:
    assert check_structured_outputs(value) is None


def deep(levels: int) -> Any:
    schema: Any = {}
    for _ in range(levels):
        schema = {"properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("json", "allowed: an object"),
        ({"type": "yaml"}, "type is 'yaml'"),
        ({}, "type is null"),
        ({"type": ["text"]}, "type is ['text']"),
        ({"type": "structural_tag", "structures": []}, "structural tags"),
        ({"type": "text", "schema": {}}, "'schema'"),
        ({"type": "json_schema"}, "json_schema is null"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "schema is null"),
        ({"type": "json_schema", "json_schema": {"schema": True}}, "schema is true"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}, "strict is 'yes'"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "name": 5}}, "name is 5"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "foo": 5}}, "'foo'"),
        ({"type": "json_schema", "json_schema": {"schema": deep(500)}}, "nested deeper than 100 levels"),
    ],
)
def test_wrong_response_formats(value: Any, said: str) -> None:
    with pytest.raises(WrongValueError) as caught:
        check_response_format(value)
    assert said in str(caught.value)
    assert str(caught.value).startswith("response_format")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "allowed: an object"),
        ({"json": SCHEMA, "regex": "a"}, "json and regex; allowed: one of them"),
        ({"json": 5}, "json is 5"),
        ({"json": "{"}, "no JSON"),
        ({"json": "[1]"}, "json is [1]"),
        ({"regex": ""}, "regex is ''"),
        ({"regex": 5}, "regex is 5"),
        ({"regex": "a" * 20_000}, "20000 bytes"),
        ({"choice": []}, "choice is []"),
        ({"choice": "a"}, "choice is 'a'"),
        ({"choice": ["a", ""]}, "contains ''"),
        ({"choice": ["a", 5]}, "contains 5"),
        ({"choice": ["a"] * 1025}, "1 to 1024"),
        ({"grammar": "  "}, "grammar is '  '"),
        ({"grammar": "a: b\n" * 600}, "601 lines"),
        ({"json_object": 1}, "json_object is 1"),
        ({"structural_tag": "x"}, "use tools"),
        ({"whitespace_pattern": " *"}, "white space is always"),
        ({"disable_any_whitespace": "yes"}, "disable_any_whitespace is 'yes'"),
        ({"backend": "xgrammar"}, "unknown field 'backend'"),
        ({"backend": None}, "unknown field 'backend'"),
        ({"json": {"$ref": "http://127.0.0.1:9/x.json"}}, "into the schema itself"),
        ({"json": {"$ref": "other.json"}}, "into the schema itself"),
        ({"json": {"$ref": "#/$defs/none"}}, "not there"),
        ({"json": {"$ref": "#/anyOf/7", "anyOf": []}}, "not there"),
        ({"json": {"items": {"$id": "x"}}}, "$id inside"),
    ],
)
def test_wrong_structured_outputs(value: Any, said: str) -> None:
    with pytest.raises(WrongValueError) as caught:
        check_structured_outputs(value)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"json": {"type": "nonsense"}}, "nonsense"),
        ({"json": {"not": {"type": "string"}}}, '"not"'),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"type": "string", "pattern": "("}}, "regex"),
        ({"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, "nsatisfiable"),
        ({"json": {"$ref": "#"}}, "nothing can satisfy it"),
        ({"json": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}, "use anyOf"),
        ({"json": {"type": "integer", "multipleOf": True}}, "multipleOf"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"regex": "[^\\s\\S]"}, "nothing can satisfy it"),
        ({"grammar": "hello"}, "neither a Lark grammar"),
        ({"grammar": 'root ::= "\\'}, "neither a Lark grammar"),
        ({"grammar": "root ::= other"}, "neither a Lark grammar"),
        ({"grammar": "root ::= " + "(" * 5000}, "neither a Lark grammar"),
        ({"grammar": "start: other"}, "other"),
        ({"grammar": "start: start"}, "nothing can satisfy it"),
        ({"grammar": 'start: %json {"type": "object"}'}, "use structured_outputs.json"),
        ({"grammar": '%llguidance {"no_forcing": true}\nstart: "a"'}, "%llguidance"),
        ({"grammar": "start: @other"}, "other"),
        ({"grammar": '{"grammars": [{"json_schema": {}}]}'}, "neither a Lark grammar"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_the_reason(parts: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        grammar_of(wanted(**parts), reason_against)
    assert caught.value.param == "structured_outputs"
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def chain(length: int, link: Callable[[dict[str, str]], Any]) -> Any:
    """Definitions that lead into each other, `length` of them."""
    links = {f"d{number}": link({"$ref": f"#/$defs/d{number + 1}"}) for number in range(length)}
    return {"$defs": {**links, f"d{length}": {"type": "object"}}, "$ref": "#/$defs/d0"}


def forks(levels: int, width: int) -> Any:
    """A few lines that are width ** levels schemas when they are joined."""
    defs: dict[str, Any] = {f"d{levels}": {"type": "object"}}
    for level in range(levels):
        defs[f"d{level}"] = {
            "type": "object",
            "properties": {
                f"k{number}": {
                    "allOf": [
                        {"$ref": f"#/$defs/d{level + 1}"},
                        {"type": "object", "properties": {f"z{number}_{level}": {"type": "null"}}},
                    ]
                }
                for number in range(width)
            },
        }
    return {"$defs": defs, "$ref": "#/$defs/d0"}


def rules(first: str, rule: str, number: int, last: str) -> str:
    return first + "".join(rule.format(position, position + 1) for position in range(number)) + last


HOSTILE: dict[str, dict[str, Any]] = {
    "deep": {"json": deep(500)},
    "as deep as allowed": {"json": deep(40)},
    "huge enum": {"json": {"enum": [f"value{number}" for number in range(20_000)]}},
    "huge enum of integers": {"json": {"enum": list(range(30_000))}},
    "large enum with a pattern": {"json": {"enum": [f"a{n}" for n in range(8000)], "pattern": ".*(a|b).{25}|.*5"}},
    "many properties": {"json": {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(9000)}}},
    "as many properties as allowed": {
        "json": {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(1024)}}
    },
    "a large constant": {"json": {"const": "x" * 200_000}},
    "regex": {"regex": "(.*a.{40}){20}"},
    "regex that repeats": {"regex": "(((a{1,100000}){1,100}){1,100}){1,100}"},
    "regex of options": {"regex": "a?" * 4000 + "a" * 4000},
    "regex nested": {"regex": "(" * 4000 + "a" + ")*" * 4000},
    "patterns": {"json": {"properties": {f"p{n}": {"pattern": "(.*a.{40}){20}"} for n in range(500)}}},
    "joined patterns": {"json": {"allOf": [{"type": "string", "pattern": f"a.{{{n}}}b"} for n in range(10, 70)]}},
    "as many joined patterns as allowed": {"json": {"allOf": [{"pattern": f"^{c}"} for c in ["a", "ab", "abc", ".b"]]}},
    "pattern properties": {"json": {"patternProperties": {f"^a{n:05}$": {"type": "null"} for n in range(300)}}},
    "a large multiple": {"json": {"type": "integer", "multipleOf": 999_983}},
    "joined multiples": {"json": {"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}},
    "many multiples": {"json": {"prefixItems": [{"type": "integer", "multipleOf": 997 + n} for n in range(1000)]}},
    "a multiple as large as allowed": {"json": {"type": "integer", "multipleOf": 49_999}},
    "a long list": {"json": {"type": "array", "items": {"type": "object"}, "minItems": 100_000, "maxItems": 10**9}},
    "a long string": {"json": {"type": "string", "minLength": 100_000, "maxLength": 10**9}},
    "references in a circle": {"json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
    "a chain of references": {"json": chain(5000, lambda ref: ref)},
    "a chain of references, as long as allowed": {"json": chain(390, lambda ref: ref)},
    "a chain of joins": {"json": chain(1500, lambda ref: {"allOf": [ref, {"type": "object"}]})},
    "a chain of joins, as long as allowed": {"json": chain(190, lambda ref: {"allOf": [ref, {"type": "object"}]})},
    "a chain of objects": {"json": chain(1500, lambda ref: {"type": "object", "properties": {"x": ref}})},
    "a chain of objects, as long as allowed": {"json": chain(190, lambda ref: {"properties": {"x": ref}})},
    "forks": {"json": forks(8, 6)},
    "forks as wide as allowed": {"json": forks(8, 2)},
    "products": {"json": {"allOf": [{"anyOf": [{"required": [f"p{i}{j}"]} for j in range(9)]} for i in range(9)]}},
    "many choices": {"choice": [f"{number}" * 40 for number in range(1024)]},
    "grammar nested": {"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000},
    "grammar of a chain": {"grammar": rules("start: r0\n", "r{}: r{}\n", 500, 'r500: "x"')},
    "grammar that doubles": {"grammar": rules("start: T0\n", "T{0}: T{1} T{1}\n", 40, 'T40: "x"')},
    "grammar that repeats": {"grammar": 'start: x{1000}\nx: y{1000}\ny: z{100000}\nz: "a"'},
    "grammar of regexes": {"grammar": "start: A\nA: /(.*a.{30})/ & ~/(.*b.{30}){20}/"},
    "GBNF of a chain": {"grammar": rules("root ::= r0\n", "r{} ::= r{}\n", 500, 'r500 ::= "x"')},
    "GBNF nested": {"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_input_is_followed_or_refused_in_little_time(name: str) -> None:
    """In a thread, as in the server, whose stack is the smaller one."""
    outcome: list[str] = []

    started = time.process_time()
    thread = threading.Thread(
        target=lambda: outcome.append(outcome_of(lambda: grammar_of(wanted(**HOSTILE[name]), reason_against)))
    )
    thread.start()
    thread.join()
    assert time.process_time() - started < 2
    assert len(outcome) == 1  # nothing else was raised
    if "as allowed" in name:
        assert outcome == [""]
    else:
        assert len(outcome[0]) < 400


@pytest.mark.parametrize(
    "schema",
    [
        {
            "$defs": {"n": {"properties": {"next": {"$ref": "#/$defs/n", "description": "the rest"}}}},
            "$ref": "#/$defs/n",
        },
        {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#"}}}},
        {"$id": "http://x/y", "$ref": "#/$defs/a%20b~1c", "$defs": {"a b/c": {"type": "object"}}},
        {
            "type": "object",
            "properties": {"$id": {"type": "string"}, "enum": {"type": "integer"}, "const": {"const": 1}},
        },
        {"anyOf": [{"type": "object", "properties": {"at": {"type": "string", "format": "date-time"}}}] * 12},
        {"oneOf": [{"properties": {"k": {"const": k}}, "required": ["k"], "type": "object"} for k in "ab"]},
        {"type": ["object", "null"], "properties": {"a": {"type": "number", "multipleOf": 0.01, "minimum": 0}}},
    ],
)
def test_schemas_that_people_write_are_taken(schema: Any) -> None:
    grammar_of(wanted(json=schema), reason_against)


def test_patterns_of_other_properties_do_not_count_as_joined() -> None:
    times = {f"at{number}": {"type": "string", "format": "date-time"} for number in range(20)}
    codes = {f"code{number}": {"type": "string", "pattern": f"^[A-Z]{{{number + 1}}}$"} for number in range(20)}
    check_schema({"allOf": [{"properties": {**times, **codes}}, {"properties": {"b": {}}}]}, "x")


@pytest.mark.parametrize(("levels", "expected"), [(4, False), (3, False), (2, True)])
def test_levels(levels: int, expected: bool) -> None:
    assert is_deeper({"a": [1]}, levels) is expected


def test_a_grammar_of_the_models_own_tokens_is_taken() -> None:
    check_grammar('start: <tool_call> "a" </tool_call>', "tools", reason_against)
    with pytest.raises(InvalidRequestError):
        check_grammar("start: <tool_call> other", "tools", reason_against)


def test_a_grammar_that_is_too_long_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="allowed: at most 262144"):
        check_grammar("start: /" + "a" * 300_000 + "/", "tools", reason_against)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYWORDS = """type properties items enum const $ref allOf anyOf oneOf $defs pattern format multipleOf minimum maxLength
minItems required additionalProperties patternProperties $id"""
keywords = st.sampled_from(KEYWORDS.split())
words = st.sampled_from(["string", "object", "array", "integer", "#", "#/$defs/a", "^a+$", "date-time", "a"])
schemas = st.recursive(
    words | st.integers(-5, 50) | st.booleans() | json_values,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(keywords, inner, max_size=4)
        | st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2)
    ),
    max_leaves=15,
)


def outcome_of(function: Callable[[], object]) -> str:
    """The sentence of a refusal, empty when there was none. Anything else is raised."""
    try:
        function()
    except (InvalidRequestError, WrongValueError) as error:
        return str(error)
    return ""


@given(st.dictionaries(keywords, schemas, max_size=5))
def test_any_schema_is_followed_or_refused(schema: dict[str, Any]) -> None:
    for flag in (False, True):
        parts = {"json": schema, "disable_additional_properties": flag}
        assert len(outcome_of(lambda: grammar_of(wanted(**parts), reason_against))) < 400  # noqa: B023


@given(st.text(alphabet="ab(){}[]|*+?\\.^$-,019/\n\"': ~&<>@%_", max_size=40))
def test_any_text_is_a_regex_and_a_grammar_or_refused(text: str) -> None:
    for parts in ({"regex": text}, {"grammar": text}, {"grammar": "start: " + text}, {"grammar": "root ::= " + text}):
        assert len(outcome_of(lambda: grammar_of(wanted(**parts), reason_against))) < 400  # noqa: B023


@given(json_values)
def test_any_value_is_taken_or_refused(value: Any) -> None:
    for check in (check_response_format, check_structured_outputs):
        assert len(outcome_of(lambda: check(value))) < 400  # noqa: B023
