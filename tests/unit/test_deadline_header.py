"""`X-Request-Deadline-Ms` and `deadline_ms` take the same numbers and refuse with the same sentence."""

from __future__ import annotations

import pytest

from replica.errors import InvalidRequestError
from router.deadline import header_deadline_ms
from router.openai_api import parse_completion
from tests.unit.http_fakes import Edge

NAME = b"x-request-deadline-ms"


def by_header(value: bytes) -> float | None:
    return header_deadline_ms([(NAME, value)])


def by_field(text: str) -> float | None:
    return parse_completion(b'{"prompt": "x", "deadline_ms": ' + text.encode() + b"}").deadline_ms


@pytest.mark.parametrize("text", ["1", "30", "0.5", "1e3", "1E+3", "2.5e-1", "86400000", "8.64e7"])
def test_both_take_the_same_numbers(text: str) -> None:
    assert by_header(text.encode()) == by_field(text) == float(text)


@pytest.mark.parametrize("text", ["0", "-3", "86400001", "1e9", "-0.0", "99999999999999999999", "true"])
def test_both_refuse_the_same_values_in_the_same_words(text: str) -> None:
    with pytest.raises(InvalidRequestError) as by_the_field:
        by_field(text)
    with pytest.raises(InvalidRequestError) as by_the_header:
        by_header(text.encode())
    shown = str(by_the_header.value).replace("'true'", "true")
    assert shown.replace("X-Request-Deadline-Ms", "deadline_ms") == str(by_the_field.value)
    assert by_the_header.value.param == "X-Request-Deadline-Ms"


@pytest.mark.parametrize(
    "text", ["", " ", "soon", "nan", "inf", "1_000", "1,5", "10, 20", "+5", "030", ".5", "0x1F", "1e400", '"5"', "[5]"]
)
def test_what_is_no_number_in_json_is_none_in_the_header(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="allowed: a number above 0, up to 86400000"):
        by_header(text.encode())


def test_a_header_of_any_bytes_and_any_length_is_refused_with_a_short_sentence() -> None:
    for value in (b"\xff\xfe", b"\xb2", b"[" * 60_000, b"9" * 60_000):
        with pytest.raises(InvalidRequestError) as caught:
            by_header(value)
        assert len(str(caught.value)) < 250


@pytest.mark.parametrize("value", [b" 30", b"30 ", b"\t30 \t", b"  3e1"])
def test_blanks_around_the_value_are_not_part_of_it(value: bytes) -> None:
    assert by_header(value) == 30.0


def test_blanks_around_a_key_are_not_part_of_it_either() -> None:
    edge = Edge(api_keys=("k",))
    headers = {"authorization": " \tBearer k "}
    assert edge.get("/v1/models", headers=headers).status_code == 200


def test_the_earliest_of_several_counts() -> None:
    assert header_deadline_ms([(NAME, b"50"), (NAME, b" 2e1 "), (b"other", b"1")]) == 20.0
    assert header_deadline_ms([(b"other", b"1")]) is None
