"""PURE. What a chat request's tools mean for its prompt, its grammar and the reading of its answer, decided in one
place.

`plan_tools` is called for every chat request, `ToolPlan.for_prompt` once its prompt is rendered. Choices made here:

- `tool_choice` none: the model does not see the tools, so that it cannot write calls, which would come out as text.
- auto: the answer is free, and no grammar is used, unless there is something to hold: a `strict` tool (its arguments
  follow the schema then; other tools get any object), `parallel_tool_calls` false (at most one call), or a body grammar
  from `response_format` (the answer is calls, or the body).
- required and named: calls whose arguments follow the schemas, and nothing else. A body grammar has no say, since there
  is no body. named: exactly one call.
- A model that thinks may do so before a grammar begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from replica.errors import InvalidRequestError
from replica.messages import MAX_GRAMMAR_BYTES
from router.message_parts import ReplyPlan, ToolFormat
from router.sentences import WrongValueError
from router.tool_grammar import (
    PYTHON_TAG,
    THINK_CLOSE,
    THINK_OPEN,
    TOOL_CLOSE,
    TOOL_OPEN,
    calls_grammar,
    check_schemas,
    text_or_calls_grammar,
    thinking_grammar,
)
from router.tool_prompt import TemplateFacts, as_plain_messages, facts_of, template_tool
from router.tool_request import Tool, ToolRequest, parse_tools

__all__ = [
    "TemplateFacts",
    "Tool",
    "ToolPlan",
    "ToolRequest",
    "facts_of",
    "parse_tools",
    "plan_tools",
    "reply_for_prompt",
]


class ToolPlan(msgspec.Struct, frozen=True):
    """How to ask, and how to read the answer."""

    #: for the chat template
    messages: list[dict[str, Any]]
    #: its `tools` variable
    template_tools: list[dict[str, Any]] | None
    #: `SamplingParams.grammar`
    grammar: str
    reply: ReplyPlan
    #: markers that the parsers need are special tokens: detokenize with them in the text
    shows_special_tokens: bool = False
    #: markers that are tokens of their own
    added_markers: frozenset[str] = frozenset()

    def for_prompt(self, prompt_text: str, continues: bool = False) -> ToolPlan:
        """The plan once the prompt is known; `continues`: it goes on with the last message. Raises
        `InvalidRequestError` when the grammar gets too long.
        """
        reply = reply_for_prompt(self.reply, prompt_text, self.messages[-1]["content"] if continues else "")
        grammar = self.grammar
        if grammar and reply.splits_reasoning:
            grammar = _checked(thinking_grammar(grammar, reply.begins_in_reasoning, self.added_markers))
        return msgspec.structs.replace(self, reply=reply, grammar=grammar)


def plan_tools(
    request: ToolRequest | None, facts: TemplateFacts, messages: Sequence[dict[str, Any]], body_grammar: str = ""
) -> ToolPlan:
    """`body_grammar`: what `response_format` or `structured_outputs` ask of the text.

    Raises `InvalidRequestError` when a schema could take too much to compile, or the grammar gets too long. Whether
    llguidance can follow it is `structured.check_grammar`.
    """
    tools = request.callable if request is not None else ()
    shown = request.tools if request is not None and tools else ()
    tool_format: ToolFormat = facts.tool_format or "hermes"
    if facts.tool_format is not None:
        template_tools = [template_tool(tool) for tool in shown] or None
        given = list(messages)
    else:
        template_tools = None
        given = as_plain_messages(messages, shown, facts.takes_system)
    reply = ReplyPlan(splits_reasoning=facts.thinks)
    grammar = body_grammar
    if request is not None and tools:
        grammar = _checked(_grammar(request, tool_format, facts, body_grammar))
        reply = ReplyPlan(
            tool_format=tool_format,
            tool_names=tuple(tool.name for tool in tools),
            says_tool_calls=request.choice != "named",
            splits_reasoning=facts.thinks,
        )
    return ToolPlan(given, template_tools, grammar, reply, _needs_special(reply, facts), facts.added_markers)


def reply_for_prompt(reply: ReplyPlan, prompt_text: str, continued: str = "") -> ReplyPlan:
    """Where the prompt's end leaves the model: inside of a thought, behind one, or before any. `continued`: the text of
    the message the prompt ends with, when that goes on.
    """
    if not reply.splits_reasoning:
        return reply
    end = prompt_text.rstrip()
    begins = end.endswith(THINK_OPEN)
    thought = continued[continued.rfind(THINK_OPEN) :] if THINK_OPEN in continued else ""
    if thought and THINK_CLOSE not in thought and prompt_text.endswith(thought):
        begins = True
    is_over = end.endswith(THINK_CLOSE) or (bool(continued.strip()) and not begins)
    return msgspec.structs.replace(reply, begins_in_reasoning=begins, splits_reasoning=not is_over)


def _grammar(request: ToolRequest, tool_format: ToolFormat, facts: TemplateFacts, body: str) -> str:
    added, parallel, tools = facts.added_markers, request.parallel, request.callable
    if request.choice == "auto":
        if parallel and not body and not any(tool.strict for tool in tools):
            return ""
        free = {"type": "object"}
        tools = tuple(tool if tool.strict else msgspec.structs.replace(tool, parameters=free) for tool in tools)
    try:
        check_schemas(tools)
    except WrongValueError as error:
        raise InvalidRequestError(str(error), "tools") from error
    if request.choice != "auto":
        return calls_grammar(tool_format, tools, parallel and request.choice == "required", added)
    if body:
        return calls_grammar(tool_format, tools, parallel, added, body)
    return text_or_calls_grammar(tool_format, tools, parallel, added)


def _needs_special(reply: ReplyPlan, facts: TemplateFacts) -> bool:
    needed: set[str] = set()
    if reply.tool_format == "hermes":
        needed |= {TOOL_OPEN, TOOL_CLOSE}
    if reply.tool_format == "llama3_json":
        needed |= {PYTHON_TAG}
    if reply.splits_reasoning:
        needed |= {THINK_OPEN, THINK_CLOSE}
    return not needed.isdisjoint(facts.special_markers)


def _checked(grammar: str) -> str:
    num_bytes = len(grammar.encode())
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidRequestError(
            f"The grammar of tools and response_format has {num_bytes} bytes; allowed: {MAX_GRAMMAR_BYTES}.", "tools"
        )
    return grammar
