"""Reading answers that were cut anywhere: nothing is lost, nothing depends on the cuts, and no call is made up."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from router.message_parts import MessageDelta, MessageParser, ReplyPlan, ToolFormat
from router.reply_parser import make_parser
from tests.property.lengths import examples

NAMES = ("f", "get_weather")
FORMATS: tuple[ToolFormat, ...] = ("hermes", "llama3_json")
#: what answers are made of where it matters, whole and in parts
FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "<tool_", "call>", "</", "<"),
    *('{"name": "f", "arguments": {', '{"name": "f", "parameters": {}}', '{"name": "f"}', '"name": "get_weather"'),
    *('{"name": "g", "arguments": {}}', '"arguments": ', '{"a": [1, "x"]}', "{", "}", "[", "]", ",", ";", '"', "\\"),
    *(" ", "\n", "a", "é", "0"),
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)
PLANS = st.builds(
    ReplyPlan,
    tool_format=st.sampled_from((None, *FORMATS)),
    tool_names=st.just(NAMES),
    splits_reasoning=st.booleans(),
    begins_in_reasoning=st.booleans(),
)


def reader(plan: ReplyPlan, streams: bool = True) -> MessageParser:
    numbers = itertools.count()
    return make_parser(plan, lambda: str(next(numbers)), streams)


def read(
    parser: MessageParser, pieces: Iterable[str]
) -> tuple[str, str, dict[int, tuple[str | None, str | None, str]]]:
    """(content, reasoning, index -> (id, name, arguments))."""
    content, reasoning = "", ""
    calls: dict[int, tuple[str | None, str | None, str]] = {}
    for delta in [*map(parser.push, pieces), parser.flush()]:
        content += delta.content
        reasoning += delta.reasoning
        for piece in delta.tool_calls:
            call = calls.get(piece.index)
            assert (call is None) == (piece.name is not None) == (piece.id is not None)
            calls[piece.index] = (
                (piece.id, piece.name, piece.arguments)
                if call is None
                else (
                    *call[:2],
                    call[2] + piece.arguments,
                )
            )
    assert list(calls) == list(range(len(calls)))
    return content, reasoning, calls


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted({cut % (len(text) + 1) for cut in cuts})
    return [text[start:end] for start, end in itertools.pairwise([0, *places, len(text)])]


CUTS = st.lists(st.integers(0, 10_000), max_size=6)


@settings(max_examples=examples(300))
@given(PLANS, TEXTS, CUTS, st.booleans())
@example(ReplyPlan("llama3_json", NAMES), '{"name": "f", "arguments": {<tool_call>', [], True)
@example(ReplyPlan("hermes", NAMES), '<tool_call>{"arguments": {"a": 1}, "name": "f"x', [], True)
def test_the_cuts_change_nothing(plan: ReplyPlan, text: str, cuts: list[int], streams: bool) -> None:
    whole, cut, single = (reader(plan, streams) for _ in range(3))
    expected = read(whole, [text])
    assert read(cut, pieces_of(text, cuts)) == expected
    assert read(single, text) == expected
    assert whole.num_tool_calls == cut.num_tool_calls == single.num_tool_calls


def is_within(part: str, text: str) -> bool:
    """Whether `part` is `text` with some characters left out."""
    rest = iter(text)
    return all(char in rest for char in part)


@settings(max_examples=examples(300))
@given(PLANS, TEXTS)
def test_nothing_is_lost_and_no_call_is_made_up(plan: ReplyPlan, text: str) -> None:
    parser = reader(plan, streams=False)
    content, reasoning, calls = read(parser, [text])
    assert parser.num_tool_calls in (len(calls), len(calls) - 1)
    assert is_within(reasoning + content, text)
    for index, (_, name, arguments) in calls.items():
        assert name in NAMES
        assert arguments == "{}" or arguments in text
        if index < parser.num_tool_calls:
            assert isinstance(json.loads(arguments), dict)
        else:  # cut off at the end of the text
            with pytest.raises(ValueError, match="line 1"):
                json.loads(arguments)
    if not calls and not reasoning and not (plan.splits_reasoning and "think>" in text):
        lost_breaks = plan.splits_reasoning and plan.begins_in_reasoning
        assert content == text or (lost_breaks and not text.strip("\n"))


@settings(max_examples=examples(300))
@given(PLANS, TEXTS)
def test_a_call_that_is_cut_off_is_told_alike_in_both_forms(plan: ReplyPlan, text: str) -> None:
    """Not so a call that breaks in the middle: its beginning was streamed before anybody could know."""
    whole, streamed = reader(plan, streams=False), reader(plan, streams=True)
    results = [read(parser, [text]) for parser in (whole, streamed)]
    assert results[0][:2] == results[1][:2]
    if len(results[0][2]) > whole.num_tool_calls:
        assert list(results[0][2].values())[-1][1:] == list(results[1][2].values())[-1][1:]


@settings(max_examples=examples(300))
@given(PLANS, TEXTS)
def test_a_stream_shows_the_same_content_and_the_same_whole_calls(plan: ReplyPlan, text: str) -> None:
    streaming, whole = reader(plan), reader(plan, streams=False)
    content, reasoning, calls = read(streaming, text)
    expected_content, expected_reasoning, expected_calls = read(whole, text)
    assert (content, reasoning) == (expected_content, expected_reasoning)
    assert streaming.num_tool_calls == whole.num_tool_calls
    complete = [(name, arguments) for _, name, arguments in calls.values() if is_object(arguments)]
    assert complete == [call[1:] for call in expected_calls.values()]


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(max_size=4), JSON_VALUES, max_size=3))


@pytest.mark.parametrize("tool_format", FORMATS)
@given(
    calls=st.lists(CALLS, min_size=1, max_size=4),
    before=st.sampled_from(["", "Let me see. ", "1 < 2 {\n"]),
    thought=st.sampled_from(["", "Hm.", "use <tool_call>?"]),
    ascii_only=st.booleans(),
    cuts=CUTS,
)
def test_calls_that_were_written_are_read_back(
    tool_format: ToolFormat,
    calls: list[tuple[str, dict[str, object]]],
    before: str,
    thought: str,
    ascii_only: bool,
    cuts: list[int],
) -> None:
    texts = [json.dumps(arguments, ensure_ascii=ascii_only) for _, arguments in calls]
    pairs = list(zip(calls, texts, strict=True))
    if tool_format == "hermes":
        written = before + "\n".join(
            f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>' for (name, _), text in pairs
        )
    else:
        written = "; ".join(f'{{"name": "{name}", "parameters": {text}}}' for (name, _), text in pairs)
        before = ""
    if thought:
        written = f"<think>{thought}</think>\n\n{written}"
    plan = ReplyPlan(tool_format, NAMES, splits_reasoning=True)
    content, reasoning, found = read(reader(plan), pieces_of(written, cuts))
    assert (content, reasoning) == (before, thought)
    assert [call[1:] for call in found.values()] == [(name, text) for (name, _), text in pairs]
    assert len({call[0] for call in found.values()}) == len(calls)


@pytest.mark.parametrize("tool_format", FORMATS)
@given(st.text(st.characters(exclude_characters="<{[ \t\n\r", exclude_categories=["Cs"]), min_size=1), CUTS)
def test_text_without_markers_is_never_held(tool_format: ToolFormat, text: str, cuts: list[int]) -> None:
    parser = reader(ReplyPlan(tool_format, NAMES, splits_reasoning=True))
    for piece in pieces_of(text, cuts):
        assert parser.push(piece) == MessageDelta(piece)
    assert parser.flush().is_empty
