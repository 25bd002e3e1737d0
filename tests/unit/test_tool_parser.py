"""Tool calls and reasoning read from an answer: what is a call, what is text, what the client sees when."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence

import pytest

from router.message_parts import MessageDelta, MessageParser, ReplyPlan, ToolFormat
from router.reply_parser import make_parser

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CALL2 = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
LLAMA = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
LLAMA2 = '{"name": "get_time", "parameters": {}}'
PARIS = ("get_weather", '{"city": "Paris"}')
TIME = ("get_time", "{}")


def parser(
    tool_format: ToolFormat | None = "hermes", thinks: bool = False, inside: bool = False, streams: bool = True
) -> MessageParser:
    ids = (f"{number:04}" for number in itertools.count())
    plan = ReplyPlan(tool_format, ("get_weather", "get_time"), splits_reasoning=thinks, begins_in_reasoning=inside)
    return make_parser(plan, lambda: next(ids), streams)


def deltas(parser: MessageParser, pieces: Iterable[str]) -> list[MessageDelta]:
    return [*(parser.push(piece) for piece in pieces), parser.flush()]


def joined(parts: Sequence[MessageDelta]) -> tuple[str, str, list[tuple[str | None, str]]]:
    """(content, reasoning, calls); checks that id and name come with the first piece of a call and never again."""
    calls: list[tuple[str | None, str]] = []
    for part in parts:
        for piece in part.tool_calls:
            if piece.index == len(calls):
                assert piece.name
                assert piece.id == f"call_{len(calls):04}"
                calls.append((piece.name, piece.arguments))
            else:
                assert piece.index == len(calls) - 1
                assert piece.name is None
                assert piece.id is None
                assert piece.arguments
                calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
    return "".join(part.content for part in parts), "".join(part.reasoning for part in parts), calls


CASES: list[tuple[ToolFormat, str, str, list[tuple[str, str]]]] = [
    ("hermes", "", "", []),
    ("hermes", " \n", " \n", []),
    ("hermes", "Hello <b> & a < b", "Hello <b> & a < b", []),
    ("hermes", CALL, "", [PARIS]),
    ("hermes", f"\n\n{CALL}\n{CALL2}\n", "", [PARIS, TIME]),
    ("hermes", CALL + CALL2, "", [PARIS, TIME]),
    ("hermes", f"Let me see.\n{CALL}", "Let me see.\n", [PARIS]),
    ("hermes", f"a{CALL}b{CALL2} c", "ab c", [PARIS, TIME]),
    ("hermes", '<tool_call>{"name":"get_time","arguments":{}}</tool_call>', "", [TIME]),
    ("hermes", '<tool_call>\n{"name": "get_time"}\n</tool_call>', "", [TIME]),
    ("hermes", '<tool_call>\n{"arguments": {"city": "Paris"}, "name": "get_weather"}\n</tool_call>', "", [PARIS]),
    # the closing tag may be missing
    ("hermes", CALL.removesuffix("</tool_call>"), "", [PARIS]),
    ("hermes", CALL.removesuffix("</tool_call>") + CALL2, "", [PARIS, TIME]),
    ("hermes", CALL.removesuffix("</tool_call>") + "Done.", "\nDone.", [PARIS]),
    ("hermes", CALL + "</tool_call>", "</tool_call>", [PARIS]),
    # no calls
    ("hermes", CALL.replace("get_weather", "get_money"), CALL.replace("get_weather", "get_money"), []),
    ("hermes", "<tool_call>\nnot JSON</tool_call>", "<tool_call>\nnot JSON</tool_call>", []),
    ("hermes", f"<tool_call>\n{CALL}", "<tool_call>\n", [PARIS]),
    ("hermes", '<tool_call>{"x": 1}</tool_call>' + CALL, '<tool_call>{"x": 1}</tool_call>', [PARIS]),
    ("hermes", "<tool_call> <tool_ca", "<tool_call> <tool_ca", []),
    ("hermes", '{"name": "get_time", "arguments": {}}', '{"name": "get_time", "arguments": {}}', []),
    ("llama3_json", LLAMA, "", [PARIS]),
    ("llama3_json", f" <|python_tag|>{LLAMA}", "", [PARIS]),
    ("llama3_json", f"{LLAMA}; {LLAMA2}", "", [PARIS, TIME]),
    ("llama3_json", f"{LLAMA}\n{LLAMA2}\n", "", [PARIS, TIME]),
    ("llama3_json", f"[{LLAMA}, {LLAMA2}]", "", [PARIS, TIME]),
    ("llama3_json", f"[{LLAMA},{LLAMA2}]; {LLAMA2}", "", [PARIS, TIME, TIME]),
    ("llama3_json", f"<|python_tag|>[{LLAMA}]", "", [PARIS]),
    ("llama3_json", LLAMA.replace("parameters", "arguments"), "", [PARIS]),
    ("llama3_json", LLAMA.replace("{", '{"type": "function", ', 1), "", [PARIS]),
    ("llama3_json", f"Look: <|python_tag|>{LLAMA}", "Look: ", [PARIS]),
    ("llama3_json", f"Look: {LLAMA}", f"Look: {LLAMA}", []),
    ("llama3_json", f"{LLAMA} is it", " is it", [PARIS]),
    ("llama3_json", f"{LLAMA}; or", "; or", [PARIS]),
    ("llama3_json", f"{LLAMA};", ";", [PARIS]),
    ("llama3_json", '[{"a": 1}]', '[{"a": 1}]', []),
    ("llama3_json", f"[{LLAMA}, 3]", ", 3]", [PARIS]),
    ("llama3_json", "[1, 2]", "[1, 2]", []),
    ("llama3_json", '{"answer": 1}', '{"answer": 1}', []),
    ("llama3_json", '<|python_tag|>brave_search.call("x")', '<|python_tag|>brave_search.call("x")', []),
]


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize(("tool_format", "text", "content", "calls"), CASES)
def test_calls_and_content(
    tool_format: ToolFormat, text: str, content: str, calls: list[tuple[str, str]], streams: bool
) -> None:
    for pieces in ([text], list(text), [text[:7], text[7:]]):
        reader = parser(tool_format, streams=streams)
        assert joined(deltas(reader, pieces)) == (content, "", calls)
        assert reader.num_tool_calls == len(calls)


def test_arguments_are_told_as_they_arrive_and_nothing_of_the_call_is_content() -> None:
    reader = parser()
    seen = [(char, reader.push(char)) for char in CALL]
    assert not any(delta.content for _, delta in seen)
    streamed = [delta.tool_calls[0].arguments if delta.tool_calls else "" for _, delta in seen]
    start = CALL.index('{"city')
    assert streamed[start : start + len(PARIS[1])] == [*PARIS[1][:-1], ""]
    assert "".join(streamed) == PARIS[1]
    assert reader.flush().is_empty


def test_whole_calls_come_at_once_when_they_are_complete() -> None:
    reader = parser(streams=False)
    calls = [delta.tool_calls for delta in deltas(reader, CALL) if delta.tool_calls]
    assert [[(piece.name, piece.arguments) for piece in pieces] for pieces in calls] == [[PARIS]]


def test_a_call_that_is_cut_off_stays_as_far_as_it_came_in_both_forms() -> None:
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par'
    for streams, pieces in ((True, list(text)), (True, [text]), (False, [text])):
        reader = parser(streams=streams)
        content, _, calls = joined(deltas(reader, pieces))
        assert (content, calls, reader.num_tool_calls) == ("", [("get_weather", '{"city": "Par')], 0)


@pytest.mark.parametrize("broken", ['{"city": tru}', '{"city": "Paris"} x', '{"city": "\n'])
def test_a_call_that_breaks_half_way_is_content_in_full_and_not_counted(broken: str) -> None:
    """A streaming client has seen its beginning; the index is used up, so that no later call is mixed with it."""
    text = '<tool_call>\n{"name": "get_weather", "arguments": ' + broken
    text += CALL if "tru}" in broken else ""
    for streams, pieces in ((True, list(text)), (True, [text]), (False, [text])):
        reader = parser(streams=streams)
        content, _, calls = joined(deltas(reader, pieces))
        complete = [PARIS] if text.endswith(CALL) else []
        assert content == text.removesuffix(CALL)
        assert reader.num_tool_calls == len(complete)
        if streams:
            assert broken.startswith(calls[0][1])
            with pytest.raises(ValueError, match="line 1"):
                json.loads(calls[0][1])
            assert calls[1:] == complete
        else:
            assert calls == complete


@pytest.mark.parametrize("arguments", ["[1]", '"{}"', "null", "x"])
def test_a_call_whose_arguments_do_not_even_begin_is_never_told(arguments: str) -> None:
    text = f'<tool_call>{{"name": "get_time", "arguments": {arguments}}}</tool_call>'
    for pieces in ([text], list(text)):
        assert joined(deltas(parser(), pieces)) == (text, "", [])


def test_text_is_held_back_only_while_it_may_become_a_marker() -> None:
    reader = parser()
    shown = [reader.push(piece).content for piece in (" ", "Hi", " <", "tool", "_x", " <tool_call", ">", "x")]
    assert shown == ["", " Hi", " ", "", "<tool_x", " ", "", "<tool_call>x"]


def test_llama_json_is_held_back_only_until_it_is_no_call() -> None:
    reader = parser("llama3_json")
    shown = [reader.push(piece).content for piece in ('{"', "na", "me", "s", '": 1}')]
    assert shown == ["", "", "", '{"names', '": 1}']


THOUGHTS = [
    ("<think>a b</think>c", False, "a b", "c"),
    ("\n<think>\nhm\n</think>\n\n Yes", False, "hm\n", " Yes"),
    ("<think></think>c", False, "", "c"),
    ("<think>never closed < </thin", False, "never closed < </thin", ""),
    ("no <think>thought</think>", False, "", "no <think>thought</think>"),
    ("  plain", False, "", "  plain"),
    (" \n", False, "", " \n"),
    ("<thi", False, "", "<thi"),
    ("<thing>", False, "", "<thing>"),
    ("</think>x", False, "", "</think>x"),
    ("hm</think>\nyes", True, "hm", "yes"),
    ("\n\nhm", True, "hm", ""),
    ("<think>\nhm</think>yes", True, "hm", "yes"),
    ("\n<thi", True, "<thi", ""),
    ("</think>\n\nyes", True, "", "yes"),
    ("a</think>b</think>c", True, "a", "b</think>c"),
]


@pytest.mark.parametrize(("text", "inside", "reasoning", "content"), THOUGHTS)
def test_reasoning_is_split_off(text: str, inside: bool, reasoning: str, content: str) -> None:
    for tool_format in (None, "hermes"):
        for pieces in ([text], list(text), [text[:9], text[9:]]):
            reader = parser(tool_format, thinks=True, inside=inside)  # type: ignore[arg-type]
            assert joined(deltas(reader, pieces)) == (content, reasoning, [])


def test_reasoning_comes_as_it_arrives_and_its_tokens_can_be_counted() -> None:
    reader = parser(thinks=True, inside=True)
    pieces = ["Hm", ", well", " </", "b></", "think", ">", "\n", "Yes"]
    kinds, shown = [], []
    for piece in pieces:
        kinds.append(reader.is_reasoning)
        delta = reader.push(piece)
        shown.append((delta.reasoning, delta.content))
    assert kinds == [True] * 6 + [False] * 2
    assert shown == [("Hm", ""), (", well", ""), (" ", ""), ("</b>", ""), ("", ""), ("", ""), ("", ""), ("", "Yes")]


def test_reasoning_begins_with_its_tag() -> None:
    reader = parser(thinks=True)
    kinds = []
    for piece in ("<think>", "\n", "a", "</think>"):
        reader.push(piece)
        kinds.append(reader.is_reasoning)
    assert kinds == [True, True, True, False]


def test_calls_behind_reasoning_are_found_and_calls_inside_of_it_are_not() -> None:
    text = f"<think>I could {CALL}</think>\n\n{CALL2}"
    for pieces in ([text], list(text)):
        reader = parser(thinks=True)
        assert joined(deltas(reader, pieces)) == ("", f"I could {CALL}", [TIME])


def test_a_plain_reply_is_passed_through() -> None:
    reader = make_parser(ReplyPlan(), lambda: "x")
    assert joined(deltas(reader, ["<think>", CALL])) == ("<think>" + CALL, "", [])
    assert (reader.num_tool_calls, reader.is_reasoning) == (0, False)
