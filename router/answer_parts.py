"""PURE. What an answer says of one choice beside plain text: token ids, logprobs, echo, reasoning and tool calls.

`AnswerParts` gathers all of it between two writes. A stream takes what there is whenever it writes a chunk, a whole
answer takes it once at the end: so the joined stream and the whole answer cannot differ, and tokens whose text is held
back (half a character, the beginning of a stop string) are told with the chunk they end up in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from replica.messages import FinishReason, TokenLogprobs
from router.choice import Choice
from router.logprobs import CompletionLogprobs, LogprobList, PromptLogprobs
from router.message_parts import MessageDelta, MessageParser, ToolCallDelta


class AnswerParts:
    """One choice. `parser` reads a chat message that is more than plain text."""

    def __init__(
        self,
        *,
        echo: str = "",
        keeps_ids: bool = False,
        logprobs: LogprobList | None = None,
        parser: MessageParser | None = None,
        echo_logprobs: CompletionLogprobs | None = None,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> None:
        #: content, or the text of a completion
        self._text: list[str] = [echo] if echo else []
        #: characters of it so far, taken or not
        self._num_chars = len(echo)
        self._deltas: list[MessageDelta] = []
        self._token_ids: list[int] | None = [] if keeps_ids else None
        self._logprobs = logprobs
        self._parser = parser
        #: logprobs of the echoed prompt: a list of their own, because they are written after the first tokens arrived
        self._echo_logprobs = echo_logprobs
        self._prompt_logprobs = prompt_logprobs
        #: whether logprobs of the prompt are still to come, with the first event
        self.wants_prompt = echo_logprobs is not None or prompt_logprobs is not None
        #: whether tokens have to be looked at one by one
        self._each_token = parser is not None or (logprobs is not None and logprobs.needs_offsets)
        #: output tokens that were reasoning
        self.num_reasoning_tokens = 0

    @property
    def has_news(self) -> bool:
        """Whether there is something a client can read. Ids and logprobs alone wait for it."""
        return bool(self._text or self._deltas)

    @property
    def num_tool_calls(self) -> int:
        """Complete ones."""
        return self._parser.num_tool_calls if self._parser is not None else 0

    def push(
        self,
        choice: Choice,
        token_ids: list[int],
        finish_reason: FinishReason | None,
        stop_reason: int | None,
        logprobs: list[TokenLogprobs],
    ) -> None:
        """Put one step's tokens through `choice` and keep what came of them."""
        before = choice.num_tokens
        offsets: list[int] = []
        if self._each_token and len(token_ids) > 1:
            for token_id in token_ids[:-1]:
                offsets.append(self._push_some(choice, [token_id], None, None))
                if choice.finish_reason is not None:
                    break
            else:
                offsets.append(self._push_some(choice, token_ids[-1:], finish_reason, stop_reason))
        else:
            offsets = [self._push_some(choice, token_ids, finish_reason, stop_reason)] * len(token_ids)
        counted = token_ids[: choice.num_tokens - before]
        if self._token_ids is not None:
            self._token_ids += counted
        if self._logprobs is not None and counted:
            told = zip(counted, offsets[: len(counted)], logprobs[: len(counted)], strict=True)
            for token_id, offset, entry in told:
                self._logprobs.add(token_id, offset, entry)
        if choice.finish_reason is not None and self._parser is not None:
            self._add_delta(self._parser.flush())

    def _push_some(
        self, choice: Choice, token_ids: list[int], finish_reason: FinishReason | None, stop_reason: int | None
    ) -> int:
        """Returns the number of characters before these tokens, those held back included."""
        offset = self._num_chars + choice.num_held_chars
        parser = self._parser
        if parser is not None and parser.is_reasoning:
            self.num_reasoning_tokens += len(token_ids)
        text = choice.push(token_ids, finish_reason, stop_reason)
        if text:
            self._num_chars += len(text)
            if parser is None:
                self._text.append(text)
            else:
                self._add_delta(parser.push(text))
        return offset

    def _add_delta(self, delta: MessageDelta) -> None:
        if not delta.is_empty:
            self._deltas.append(delta)

    def add_prompt(
        self, token_ids: Sequence[int], offsets: Sequence[int], entries: Sequence[TokenLogprobs | None]
    ) -> None:
        """Logprobs of (a stretch of) the prompt; no entry for its first token."""
        for token_id, offset, entry in zip(token_ids, offsets, entries, strict=True):
            if self._echo_logprobs is not None:
                self._echo_logprobs.add(token_id, offset, entry)
            if self._prompt_logprobs is not None:
                self._prompt_logprobs.add(token_id, entry)

    def take_text(self) -> str:
        """Text of a completion since the last call."""
        text, self._text = "".join(self._text), []
        return text

    def take_message(self) -> MessageDelta:
        """What a chat message has gained since the last call."""
        delta = joined(self._deltas)
        self._deltas = []
        if self._text:
            return MessageDelta(self.take_text() + delta.content, delta.reasoning, delta.tool_calls)
        return delta

    def take_logprobs(self) -> dict[str, Any] | None:
        """The value of the field `logprobs` for all since the last call; None when nobody asked."""
        if self._logprobs is None:
            return None
        taken = self._logprobs.take()
        if self._echo_logprobs is None:
            return taken
        echo, self._echo_logprobs = self._echo_logprobs.take(), None
        return {name: [*echo[name], *values] for name, values in taken.items()}

    def take_prompt_logprobs(self) -> list[msgspec.Raw | None] | None:
        """The value of the field `prompt_logprobs`, once; None when nobody asked."""
        told, self._prompt_logprobs = self._prompt_logprobs, None
        return told.positions if told is not None else None

    def take_token_ids(self) -> list[int] | None:
        """Token ids since the last call; None when nobody asked."""
        taken = self._token_ids
        if taken is not None:
            self._token_ids = []
        return taken


def joined(deltas: Iterable[MessageDelta]) -> MessageDelta:
    """Several deltas as one: pieces of one tool call become one piece."""
    content, reasoning = [], []
    calls: dict[int, ToolCallDelta] = {}
    for delta in deltas:
        content.append(delta.content)
        reasoning.append(delta.reasoning)
        for call in delta.tool_calls:
            known = calls.get(call.index)
            if known is None:
                calls[call.index] = call
            else:
                calls[call.index] = ToolCallDelta(
                    call.index, known.arguments + call.arguments, known.id or call.id, known.name or call.name
                )
    return MessageDelta("".join(content), "".join(reasoning), tuple(calls.values()))


def delta_object(delta: MessageDelta) -> dict[str, object]:
    """`delta` of a chat chunk: only what is new."""
    result: dict[str, object] = {}
    if delta.reasoning:
        result["reasoning"] = delta.reasoning
    if delta.content:
        result["content"] = delta.content
    if delta.tool_calls:
        result["tool_calls"] = [_call_delta(call) for call in delta.tool_calls]
    return result


def _call_delta(call: ToolCallDelta) -> dict[str, object]:
    function: dict[str, object] = {"arguments": call.arguments}
    if call.name is None:
        return {"index": call.index, "function": function}
    return {
        "index": call.index,
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, **function},
    }


def message_object(delta: MessageDelta, with_reasoning: bool) -> dict[str, object]:
    """`message` of a whole chat answer. `tool_calls` is there only when there are some (A-22), and `content` is then
    null if there is no text; `reasoning` is there for models that reason, null when they did not.
    """
    content = delta.content if delta.content or not delta.tool_calls else None
    message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
    if with_reasoning:
        message["reasoning"] = delta.reasoning or None
    if delta.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in delta.tool_calls
        ]
    return message
