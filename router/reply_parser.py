"""PURE. The parser of one chat answer: reasoning first, then tool calls in what is left."""

from __future__ import annotations

from collections.abc import Callable

from router.message_parts import MessageDelta, MessageParser, ReplyPlan
from router.reasoning import ReasoningSplitter
from router.tool_parser import ToolCallParser


class _PlainReply:
    """Text as it is."""

    num_tool_calls = 0
    is_reasoning = False

    def push(self, text: str) -> MessageDelta:
        return MessageDelta(text)

    def flush(self) -> MessageDelta:
        return MessageDelta()


class _Reply:
    """Reasoning, then content and calls."""

    def __init__(self, splitter: ReasoningSplitter | None, calls: ToolCallParser | None) -> None:
        self._splitter = splitter
        self._calls = calls

    @property
    def num_tool_calls(self) -> int:
        return self._calls.num_tool_calls if self._calls is not None else 0

    @property
    def is_reasoning(self) -> bool:
        return self._splitter is not None and self._splitter.is_reasoning

    def push(self, text: str) -> MessageDelta:
        reasoning, content = self._splitter.push(text) if self._splitter is not None else ("", text)
        return self._with_calls(reasoning, content)

    def flush(self) -> MessageDelta:
        reasoning, content = self._splitter.flush() if self._splitter is not None else ("", "")
        delta = self._with_calls(reasoning, content)
        if self._calls is None:
            return delta
        last = self._calls.flush()
        return MessageDelta(delta.content + last.content, reasoning, delta.tool_calls + last.tool_calls)

    def _with_calls(self, reasoning: str, content: str) -> MessageDelta:
        if self._calls is None or not content:
            return MessageDelta(content, reasoning)
        delta = self._calls.push(content)
        return MessageDelta(delta.content, reasoning, delta.tool_calls)


def make_parser(plan: ReplyPlan, new_id: Callable[[], str], streams: bool = True) -> MessageParser:
    """A fresh parser for one choice. `new_id` gives the random part of a call's id; `streams` false: a call comes out
    only when it is complete (`tool_parser.py`).
    """
    if plan.is_plain:
        return _PlainReply()
    splitter = ReasoningSplitter(plan.begins_in_reasoning) if plan.splits_reasoning else None
    calls = None
    if plan.tool_format is not None:
        calls = ToolCallParser(plan.tool_format, plan.tool_names, new_id, streams)
    return _Reply(splitter, calls)
