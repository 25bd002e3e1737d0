"""PURE. How tools reach the model: what its chat template knows, and plain messages where the template knows nothing.

A template that has no `tools`, or shows them in a call format that the parsers do not read, gets the tools as a system
text of our own, and calls and results of earlier turns as the text a model would have written and read (Hermes format).
So tools are never ignored in silence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from router.message_parts import ToolFormat
from router.tool_grammar import PYTHON_TAG, THINK_CLOSE, THINK_OPEN, TOOL_CLOSE, TOOL_OPEN
from router.tool_request import Tool

RESPONSE_OPEN, RESPONSE_CLOSE = "<tool_response>", "</tool_response>"
#: tokens that carry meaning for the parsers and the grammars
_MARKERS = (TOOL_OPEN, TOOL_CLOSE, PYTHON_TAG, THINK_OPEN, THINK_CLOSE)
_USES_TOOLS = re.compile(r"\{[{%](?:(?![%}]\}).)*\btools\b", re.DOTALL)
#: of a template (without backslashes) that shows the Llama 3 form; Command R's has parameters beside tool_name
_LLAMA_FORM = re.compile(r'"name":.{0,200}?"parameters":', re.DOTALL)


class TemplateFacts(msgspec.Struct, frozen=True):
    """What a model's chat template and vocabulary know."""

    #: the format the template shows tools in; None: no tools, or a format of another family
    tool_format: ToolFormat | None = None
    #: the model may write `<think>...</think>`
    thinks: bool = False
    #: a system message may be given
    takes_system: bool = True
    #: of the markers, those that are tokens of their own
    added_markers: frozenset[str] = frozenset()
    #: and of these, the special ones: `skip_special_tokens` leaves them out of the text
    special_markers: frozenset[str] = frozenset()


def facts_of(source: str, added_tokens: Mapping[str, bool] | None = None) -> TemplateFacts:
    """Facts from a template's text. `added_tokens`: text of each added token of the vocabulary -> is it special."""
    added = added_tokens or {}
    return TemplateFacts(
        tool_format=_tool_format(source),
        thinks=THINK_CLOSE in source or (THINK_OPEN in added and THINK_CLOSE in added),
        added_markers=frozenset(marker for marker in _MARKERS if marker in added),
        special_markers=frozenset(marker for marker in _MARKERS if added.get(marker)),
    )


def _tool_format(source: str) -> ToolFormat | None:
    if not _USES_TOOLS.search(source):
        return None
    plain = source.replace("\\", "")  # quotes are escaped inside of the template's own strings
    # GLM and Qwen3-Coder write <tool_call> too, but tags instead of JSON inside of it
    if TOOL_OPEN in plain and '"arguments"' in plain:
        return "hermes"
    if PYTHON_TAG in plain or (_LLAMA_FORM.search(plain) and "tool_name" not in plain):
        return "llama3_json"
    return None


def template_tool(tool: Tool) -> dict[str, Any]:
    """A tool as templates expect it: OpenAI's form, without `strict`, which is not for the model."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def as_plain_messages(
    messages: Sequence[dict[str, Any]], tools: Sequence[Tool], takes_system: bool
) -> list[dict[str, Any]]:
    """The conversation for a template that knows no tools: roles system, user and assistant with text alone."""
    result: list[dict[str, Any]] = []
    is_after_result = False
    for message in messages:
        if message["role"] == "tool":
            text = f"{RESPONSE_OPEN}\n{message['content']}\n{RESPONSE_CLOSE}"
            if is_after_result:
                # one message for the results of one turn: many templates want user and assistant to alternate
                result[-1]["content"] += "\n" + text
            else:
                result.append({"role": "user", "content": text})
        else:
            result.append(_without_calls(message))
        is_after_result = message["role"] == "tool"
    return _with_system_text(result, _tools_text(tools), takes_system) if tools else result


def _without_calls(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its calls in its content."""
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    if message.get("tool_calls"):
        calls = "\n".join(_call_text(call["function"]) for call in message["tool_calls"])
        content = message["content"]
        plain["content"] = content + ("\n" if content and not content.endswith("\n") else "") + calls
    return plain


def _call_text(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"{TOOL_OPEN}\n{json.dumps(call, ensure_ascii=False)}\n{TOOL_CLOSE}"


def _tools_text(tools: Sequence[Tool]) -> str:
    lines = "\n".join(json.dumps(template_tool(tool)["function"], ensure_ascii=False) for tool in tools)
    return (
        "You can use tools. Each line is one tool: its name, what it does, and the JSON Schema of its arguments.\n"
        f"{lines}\n\n"
        "To use a tool, write a block like this, with the arguments as a JSON object:\n"
        f'{TOOL_OPEN}\n{{"name": "the tool", "arguments": {{"an argument": "its value"}}}}\n{TOOL_CLOSE}\n'
        f"Write one block for each use. You then get each result between {RESPONSE_OPEN} and {RESPONSE_CLOSE}. "
        "When no tool helps, just answer."
    )


def _with_system_text(messages: list[dict[str, Any]], text: str, takes_system: bool) -> list[dict[str, Any]]:
    """`text` at the end of the system message in front, or as one; without a system role, before the first user
    message.
    """
    if messages and messages[0]["role"] == "system":
        first = messages[0]
        merged = f"{first['content']}\n\n{text}" if first["content"] else text
        return [{**first, "content": merged}, *messages[1:]]
    if takes_system:
        return [{"role": "system", "content": text}, *messages]
    for position, message in enumerate(messages):
        if message["role"] == "user":
            changed = {**message, "content": f"{text}\n\n{message['content']}"}
            return [*messages[:position], changed, *messages[position + 1 :]]
    return [{"role": "user", "content": text}, *messages]
