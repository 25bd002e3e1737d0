"""JSON in pieces: what is taken is what the standard library takes, and the first wrong character is where it stops."""

from __future__ import annotations

import json

import pytest

from router.json_scan import CallObject, JsonObject

VALID = [
    "{}",
    '{ "a" : [ ] , "b" : { } }',
    '{"a": -0.5e+10, "b": 0, "c": 1E5, "d": [true, false, null]}',
    '{"text": "\\"\\\\\\/\\b\\f\\n\\r\\t\\u00e9 é \U0001f999"}',
    '{"a": {"a": {"a": [[[1], 2], 3]}}}',
]
BROKEN = [
    ("[1]", 0),
    (" []", 1),
    ('{"a" 1}', 5),
    ('{"a": 01}', 7),
    ('{"a": 1.}', 8),
    ('{"a": +1}', 6),
    ('{"a": -}', 7),
    ('{"a": 1e}', 8),
    ('{"a": nul}', 9),
    ('{"a": NaN}', 6),
    ('{"a": "\n"}', 7),
    ('{"a": "\\x"}', 8),
    ('{"a": "\\u12g4"}', 11),
    ('{"a": "\\u123"}', 12),
    ('{"a": 1,}', 8),
    ("{,}", 1),
    ('{"a": [1,]}', 9),
    ('{"a": [1}', 8),
    ("{a: 1}", 1),
]


def is_object(text: str) -> bool:
    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        return isinstance(json.loads(text, parse_constant=refuse), dict)
    except ValueError:
        return False


@pytest.mark.parametrize("text", VALID)
def test_an_object_is_taken_to_its_end_and_no_further(text: str) -> None:
    assert is_object(text)
    whole = JsonObject()
    assert whole.push(text + " {", 0) == len(text)
    assert whole.status == "done"
    by_character = JsonObject()
    assert [by_character.push(char, 0) for char in text] == [1] * len(text)
    assert by_character.status == "done"


@pytest.mark.parametrize(("text", "position"), BROKEN)
def test_the_first_character_that_cannot_be_is_where_it_breaks(text: str, position: int) -> None:
    assert not is_object(text)
    scan = JsonObject()
    assert scan.push(text, 0) == position
    assert scan.status == "broken"


def test_nesting_needs_no_recursion() -> None:
    depth = 100_000
    scan = JsonObject()
    scan.push('{"a":' * depth + "{}" + "}" * depth, 0)
    assert scan.status == "done"


def read(text: str, *names: str) -> tuple[str, str | None, str, int]:
    scan = CallObject(names)
    end = scan.push(text, 0)
    return scan.status, scan.name, scan.take_arguments(), end


def test_a_call_in_every_order_of_its_keys() -> None:
    arguments = '{"x": [1]}'
    for text in (
        f'"name": "f", "arguments": {arguments}}}',
        f'"arguments": {arguments}, "name": "f"}}',
        f'\n "type":"function","name":"f","parameters":{arguments} }}',
        f'"id": "1", "name": "f", "arguments": {arguments}}}',
    ):
        assert read(text + "rest", "f", "g") == ("done", "f", arguments, len(text))


def test_a_call_without_arguments_has_none() -> None:
    assert read('"name": "f"}', "f") == ("done", "f", "{}", 12)


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ('"name": "g"', 9),
        ('"name": "fo"', 11),
        ('"name": "foo2"', 12),
        ('"name": 1', 8),
        ('"nome"', 2),
        ('"name": "foo", "name": "foo"', 20),
        ('"arguments": {}, "parameters": {}', 28),
        ('"arguments": [1]', 13),
        ('"arguments": "{}"', 13),
        ('"arguments": null', 13),
        ('"arguments": {}}', 15),
        ('"type": "a\\n"', 10),
        ('"type": "a\n"', 10),
        ('"name": "foo",}', 14),
        ("}", 0),
    ],
)
def test_what_is_no_call_breaks_as_early_as_can_be(text: str, position: int) -> None:
    status, _, _, end = read(text, "foo", "bar")
    assert (status, end) == ("broken", position)


def test_a_call_can_be_told_once_name_and_first_arguments_are_there() -> None:
    scan = CallObject(["f"])
    told = []
    for char in '"name": "f", "arguments": {"a": 1}}':
        scan.push(char, 0)
        told.append(scan.has_begun)
    assert told.index(True) == len('"name": "f", "arguments": ')
    assert scan.take_arguments() == '{"a": 1}'
    assert scan.take_arguments() == ""
