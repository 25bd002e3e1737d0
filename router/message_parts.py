"""PURE. What a chat answer is made of beside plain text: reasoning and tool calls, found in the text as it arrives.

The seam between `generation.py`, which has text, and the parsers, which know how a family of models writes tool calls
and thoughts. A `ReplyPlan` is decided with the prompt (`tool_plan.py`) and travels with the prepared request;
`make_parser` (`reply_parser.py`) turns it into a fresh `MessageParser` for each choice.
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

#: how a model writes tool calls: `<tool_call>{...}</tool_call>` (Hermes, Qwen, SmolLM2), or bare JSON with
#: `parameters`, optionally behind `<|python_tag|>` (Llama 3)
ToolFormat = Literal["hermes", "llama3_json"]


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A piece of one tool call. `id` and `name` come with the first piece of call `index`, and only then; `arguments`
    joined over the pieces is the JSON text of the arguments.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


class MessageDelta(msgspec.Struct, frozen=True):
    """What new text adds to the message. Empty when it is held back."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.content or self.reasoning or self.tool_calls)


class MessageParser(Protocol):
    """One choice. Whatever the pieces text is cut into, the joined deltas are the same."""

    def push(self, text: str) -> MessageDelta:
        """New text of the choice."""
        ...

    def flush(self) -> MessageDelta:
        """The choice has ended: what was held back. An unfinished tool call comes out as content, as it was written."""
        ...

    @property
    def num_tool_calls(self) -> int:
        """Complete tool calls so far."""
        ...

    @property
    def is_reasoning(self) -> bool:
        """Whether the text that comes next is reasoning: its tokens count as such."""
        ...


class ReplyPlan(msgspec.Struct, frozen=True):
    """How to read the text of a chat answer. The default reads it as it is."""

    #: None: tool calls are not looked for
    tool_format: ToolFormat | None = None
    #: names that may be called; text that names another is not a call
    tool_names: tuple[str, ...] = ()
    #: False with a named `tool_choice`: OpenAI then says `stop`, otherwise `tool_calls`
    says_tool_calls: bool = True
    #: look for `<think>...</think>`
    splits_reasoning: bool = False
    #: the prompt ends inside of it
    begins_in_reasoning: bool = False

    @property
    def is_plain(self) -> bool:
        return self.tool_format is None and not self.splits_reasoning
