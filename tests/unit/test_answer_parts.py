"""Ids, logprobs, reasoning and tool calls of a choice: whatever the steps and whenever they are taken, the same."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.messages import FinishReason, TokenLogprobs
from router.answer_parts import AnswerParts, delta_object, joined, message_object
from router.choice import Choice
from router.logprobs import ChatLogprobs, CompletionLogprobs, LogprobList, TokenNames
from router.message_parts import MessageDelta, ReplyPlan, ToolCallDelta
from router.reply_parser import make_parser
from tests.unit.http_fakes import EOS, fake_logprobs, small_tokenizer

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "é🦙 three"}}\n</tool_call>'
TEXTS = [
    " one two three",
    "a🦙b 삼겹살 👩‍👩‍👧",
    "<think>\none two\n</think>\n\nThe sky",
    f"<think>x</think>one {CALL}\n{CALL}",
    f"{CALL} and {CALL[:-20]}",
    '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
    "",
]
PLAN = ReplyPlan(tool_format="hermes", tool_names=("f",), splits_reasoning=True)


class Told:
    """All that was taken of a choice, joined."""

    def __init__(self) -> None:
        self.message = MessageDelta()
        self.texts = ""
        self.token_ids: list[int] = []
        self.logprobs: list[Any] = []
        self.offsets: list[int] = []
        self.num_reasoning_tokens = 0
        self.num_tokens = 0
        self.num_tool_calls = 0
        self.ending: tuple[object, ...] = ()

    def take(self, parts: AnswerParts, is_chat: bool, is_plain: bool) -> None:
        if is_chat and not is_plain:
            self.message = joined([self.message, parts.take_message()])
        else:
            self.texts += parts.take_text()
        self.token_ids += parts.take_token_ids() or []
        value = json.loads(msgspec.json.encode(parts.take_logprobs()))
        if is_chat:
            self.logprobs += value["content"]
        else:
            self.logprobs += zip(value["tokens"], value["token_logprobs"], value["top_logprobs"], strict=True)
            self.offsets += value["text_offset"]


def told(
    text: str,
    sizes: list[int],
    takes: list[bool],
    *,
    stops: tuple[str, ...] = (),
    is_chat: bool = True,
    streams: bool = True,
    with_eos: bool = True,
    is_plain: bool = False,
) -> Told:
    """Put the tokens of `text` through in steps of `sizes`; take what there is after the steps that `takes` names."""
    tokenizer = small_tokenizer()
    names = TokenNames(tokenizer.token_bytes)
    numbers = itertools.count()
    logprobs: LogprobList = ChatLogprobs(names, 2) if is_chat else CompletionLogprobs(names, 2)
    parser = make_parser(PLAN, lambda: str(next(numbers)), streams) if is_chat and not is_plain else None
    parts = AnswerParts(keeps_ids=True, logprobs=logprobs, parser=parser)
    choice = Choice(0, tokenizer.detokenizer(), stops)
    ids = tokenizer.encode(text) + ([EOS] if with_eos else [])
    result = Told()
    steps = [ids[start:end] for start, end in itertools.pairwise([0, *itertools.accumulate(sizes)])]
    steps.append(ids[sum(sizes) :])
    for step, takes_now in zip(steps, [*takes, True], strict=True):
        is_last = step is steps[-1]
        reason = (FinishReason.STOP if with_eos else FinishReason.LENGTH) if is_last else None
        parts.push(choice, step, reason, None, [fake_logprobs(token_id, 2) for token_id in step])
        if choice.finish_reason is not None or (takes_now and parts.has_news):
            result.take(parts, is_chat, is_plain)
        if choice.finish_reason is not None:
            break
    result.num_reasoning_tokens = parts.num_reasoning_tokens
    result.num_tokens, result.num_tool_calls = choice.num_tokens, parts.num_tool_calls
    result.ending = (choice.finish_reason, choice.stop_reason)
    return result


steps = st.lists(st.integers(0, 9), max_size=12)


@given(
    st.sampled_from(TEXTS),
    steps.flatmap(
        lambda sizes: st.tuples(st.just(sizes), st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    ),
    st.sampled_from([(), (" two",), ("three", "e\n"), ("</tool", "🦙")]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_steps_and_chunks_change_nothing(
    text: str, cut: tuple[list[int], list[bool]], stops: tuple[str, ...], is_chat: bool, with_eos: bool, is_plain: bool
) -> None:
    whole = told(text, [], [], stops=stops, is_chat=is_chat, with_eos=with_eos, is_plain=is_plain)
    pieces = told(text, *cut, stops=stops, is_chat=is_chat, with_eos=with_eos, is_plain=is_plain)
    assert vars(pieces) == vars(whole)
    assert len(whole.token_ids) == len(whole.logprobs) == whole.num_tokens
    unstreamed = told(text, [], [], stops=stops, is_chat=is_chat, with_eos=with_eos, is_plain=is_plain, streams=False)
    assert unstreamed.message.content == whole.message.content
    assert unstreamed.num_tool_calls == whole.num_tool_calls


def test_reasoning_and_calls_are_found() -> None:
    answer = told(TEXTS[3], [], [])
    assert (answer.message.reasoning, answer.message.content.strip(), answer.num_tool_calls) == ("x", "one", 2)
    arguments = {"x": "é🦙 three"}
    assert [(call.id, call.name, json.loads(call.arguments)) for call in answer.message.tool_calls] == [
        ("call_0", "f", arguments),
        ("call_1", "f", arguments),
    ]
    num_thought = len(small_tokenizer().encode("x</think>"))
    assert answer.num_reasoning_tokens == num_thought


def test_offsets_say_where_tokens_begin_in_the_text() -> None:
    text = "a🦙b two"
    answer = told(text, [], [], is_chat=False)
    assert answer.texts == text
    ids = small_tokenizer().encode(text)
    whole = [small_tokenizer().decode(ids[:count]).rstrip("\ufffd") for count in range(len(ids) + 1)]
    assert answer.offsets == [len(before) for before in whole]
    stopped = told(text, [], [], is_chat=False, stops=("two",))
    assert (stopped.texts, stopped.ending[1]) == ("a🦙b ", "two")
    assert stopped.offsets == answer.offsets[: stopped.num_tokens]
    held = told(text, [], [], is_chat=False, stops=("a🦙b two,",))  # all of it is held back until the end
    assert (held.texts, held.offsets) == (text, answer.offsets)


def test_held_tokens_are_told_with_the_text_they_end_up_in() -> None:
    names = TokenNames(small_tokenizer().token_bytes)
    ids = small_tokenizer().encode("a🦙b")
    parts = AnswerParts(keeps_ids=True, logprobs=ChatLogprobs(names, 0))
    choice = Choice(0, small_tokenizer().detokenizer())
    seen = []
    for token_id in ids:
        parts.push(choice, [token_id], None, None, [TokenLogprobs(-1.0, 1)])
        if parts.has_news:
            taken = parts.take_logprobs()
            assert taken is not None
            seen.append((parts.take_text(), parts.take_token_ids(), len(taken["content"])))
    assert [text for text, _, _ in seen] == ["a", "🦙", "b"]
    assert [len(token_ids or []) for _, token_ids, _ in seen] == [num for _, _, num in seen] == [1, len(ids) - 2, 1]


def test_logprobs_that_are_missing_are_not_made_up() -> None:
    parts = AnswerParts(logprobs=ChatLogprobs(TokenNames(small_tokenizer().token_bytes), 0))
    with pytest.raises(ValueError, match="shorter"):
        parts.push(Choice(0, small_tokenizer().detokenizer()), [1, 2], None, None, [TokenLogprobs(-1.0, 1)])


def test_message_and_delta_objects() -> None:
    begin = ToolCallDelta(0, "", "call_1", "f")
    more = ToolCallDelta(0, '{"x": 1}')
    assert delta_object(MessageDelta()) == {}
    assert delta_object(MessageDelta("c", "r")) == {"content": "c", "reasoning": "r"}
    assert delta_object(MessageDelta(tool_calls=(begin,)))["tool_calls"] == [
        {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}
    ]
    assert delta_object(MessageDelta(tool_calls=(more,)))["tool_calls"] == [
        {"index": 0, "function": {"arguments": '{"x": 1}'}}
    ]
    whole = joined([MessageDelta("", "r"), MessageDelta(tool_calls=(begin,)), MessageDelta(tool_calls=(more,))])
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    assert message_object(whole, True) == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning": "r",
        "tool_calls": [call],
    }
    assert message_object(MessageDelta(), True) == {
        "role": "assistant",
        "content": "",
        "refusal": None,
        "reasoning": None,
    }
    assert message_object(MessageDelta("x"), False) == {"role": "assistant", "content": "x", "refusal": None}
