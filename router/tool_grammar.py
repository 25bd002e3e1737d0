"""PURE. Grammars of answers that call tools, in llguidance's notation: a model's own call format around the schemas.

A call is one `%json` schema over the whole object, `{"name": <const>, "arguments": <the tool's schema>}`, and not text
around the arguments' schema: llguidance merges the lexemes of `%json` rules that may begin alike, so that calls can
stand beside each other and beside a JSON body. References inside a tool's schema are moved along with it.

Markers. llguidance takes every added token (special or not) for one that no text contains: in a model that has
`<tool_call>` as a token the grammar must name the token, in another one it must spell the text. In both cases free text
is kept from spelling a marker, because the parser would take it for one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

from router.message_parts import ToolFormat
from router.schema_bounds import check_schema, closed
from router.structured import JSON_STYLE
from router.tool_request import Tool

ARGUMENTS_KEYS: dict[ToolFormat, str] = {"hermes": "arguments", "llama3_json": "parameters"}
TOOL_OPEN, TOOL_CLOSE, PYTHON_TAG = "<tool_call>", "</tool_call>", "<|python_tag|>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

#: schema keywords whose values are data, and those whose values are schemas by free names
_DATA_KEYS = frozenset({"const", "enum", "default", "examples"})
_NAMES_KEYS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_TOP_KEYS = frozenset({"$schema", "$id", "x-guidance"})


def call_schema(tool: Tool, arguments_key: str) -> dict[str, Any]:
    """JSON Schema of a whole call of `tool`, keys in the order models write them."""
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, arguments_key: _inside(tool, f"#/properties/{arguments_key}")},
        "required": ["name", arguments_key],
        "additionalProperties": False,
        "x-guidance": JSON_STYLE,
    }


def check_schemas(tools: Sequence[Tool]) -> None:
    """Raises `WrongValueError` when compiling the schemas of `tools` could take too much, all of them together."""
    together = {str(number): _inside(tool, f"#/properties/{number}") for number, tool in enumerate(tools)}
    check_schema({"properties": together}, "tools")


def _inside(tool: Tool, place: str) -> Any:
    """The schema of the arguments as a part of another one, without what counts only at the top of a schema."""
    parameters = {key: value for key, value in closed(tool.parameters).items() if key not in _TOP_KEYS}
    return _moved(parameters, place)


def _moved(schema: Any, to: str, names: bool = False) -> Any:
    """A copy of `schema` whose references into itself begin at `to`. `names`: its keys are names and not keywords."""
    if isinstance(schema, list):
        return [_moved(item, to) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if not names and key == "$ref" and isinstance(value, str) and value.startswith("#"):
            result[key] = to + value[1:]
        elif not names and key in _DATA_KEYS:
            result[key] = value
        else:
            result[key] = _moved(value, to, names=not names and key in _NAMES_KEYS)
    return result


def calls_grammar(
    tool_format: ToolFormat, tools: Sequence[Tool], parallel: bool, added_tokens: Collection[str], body: str = ""
) -> str:
    """At least one call (just one unless `parallel`) of any of `tools`, and nothing else; with `body`, a grammar of
    its own, the answer may follow that one instead.

    Where `body` is no JSON schema but an answer of it may begin like a Llama call, such calls cannot be made.
    """
    call, separator = _call_rule(tool_format, added_tokens)
    more = f" ({_quoted(separator)} call)*" if parallel else ""
    start = "start: calls | @body\n" if body else "start: calls\n"
    lark = f"{start}calls: call{more}\ncall: {call}\n{_tool_rules(tool_format, tools)}"
    return _joined(lark, body, "body") if body else lark


def text_or_calls_grammar(
    tool_format: ToolFormat, tools: Sequence[Tool], parallel: bool, added_tokens: Collection[str]
) -> str:
    """Any text, and calls of `tools` (at most one unless `parallel`). What begins as a call must be a right one."""
    rules = _tool_rules(tool_format, tools)
    if tool_format == "llama3_json":
        call, separator = _call_rule(tool_format, added_tokens)
        more = f" ({_quoted(separator)} call)*" if parallel else ""
        tag = f"{PYTHON_TAG}? " if PYTHON_TAG in added_tokens else ""
        # not the beginning of a call, and without the tag
        text = _text_without(PYTHON_TAG) + r" & ~/\s*(\[\s*)?\{(?s:.*)/"
        return f"start: {tag}calls | TEXT?\ncalls: call{more}\ncall: {call}\nTEXT: {text}\n{rules}"
    text = f"TEXT: {_text_without(TOOL_OPEN)}\n"
    if TOOL_OPEN in added_tokens:
        start = "start: (TEXT? call)* TEXT?\n" if parallel else "start: TEXT? call?\n"
        return f"{start}{text}call: {_call_rule(tool_format, added_tokens)[0]}\n{rules}"
    # lazy: ends at the first marker, and what follows is a call
    start = "start: call* TEXT?\n" if parallel else "start: call | TEXT?\n"
    head = f"head[lazy]: /(?s:.*){_escaped(TOOL_OPEN)}/\n"
    call = f'head "\\n" tool {_quoted(chr(10) + TOOL_CLOSE)}'
    return f"{start}{text}{head}call: {call}\n{rules}"


def thinking_grammar(answer: str, begins_inside: bool, added_tokens: Collection[str]) -> str:
    """`answer` (a grammar) behind thoughts: behind the rest of them, or behind any that the model may open."""
    if THINK_CLOSE in added_tokens:
        rules = rf"thoughts: /(?s:.*)/ {THINK_CLOSE} /\n*/" + "\n"
    else:
        rules = f"thoughts: until /\\n*/\nuntil[lazy]: /(?s:.*){_escaped(THINK_CLOSE)}/\n"
    opening = THINK_OPEN if THINK_OPEN in added_tokens else _quoted(THINK_OPEN)
    start = "start: thoughts @answer\n" if begins_inside else f"start: ({opening} thoughts)? @answer\n"
    return _joined(start + rules, answer, "answer")


def _call_rule(tool_format: ToolFormat, added_tokens: Collection[str]) -> tuple[str, str]:
    """(the `call` rule, what stands between two calls)."""
    if tool_format == "llama3_json":
        return "tool", "; "
    if TOOL_OPEN in added_tokens:
        closing = f'"\\n" {TOOL_CLOSE}' if TOOL_CLOSE in added_tokens else _quoted("\n" + TOOL_CLOSE)
        return f'{TOOL_OPEN} "\\n" tool {closing}', "\n"
    return f"{_quoted(TOOL_OPEN + chr(10))} tool {_quoted(chr(10) + TOOL_CLOSE)}", "\n"


def _tool_rules(tool_format: ToolFormat, tools: Sequence[Tool]) -> str:
    key = ARGUMENTS_KEYS[tool_format]
    rules = [f"tool: {' | '.join(f'tool_{number}' for number in range(len(tools)))}"]
    for number, tool in enumerate(tools):
        rules.append(f"tool_{number}: %json {json.dumps(call_schema(tool, key), ensure_ascii=False)}")
    return "\n".join(rules) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text)


def _escaped(text: str) -> str:
    """`text` inside of a Lark regex."""
    return re.escape(text).replace("/", r"\/")


def _text_without(marker: str) -> str:
    return f"/(?s:.+)/ & ~/(?s:.*){_escaped(marker)}(?s:.*)/"


def _joined(lark: str, other: str, name: str) -> str:
    """`lark`, which refers to `@name`, together with the grammar `other`: Lark text, or llguidance's JSON."""
    grammars: list[dict[str, Any]] = [{"name": "outer", "lark_grammar": lark}]
    if other.lstrip().startswith("{"):
        first, *rest = json.loads(other)["grammars"]
        # `outer` may be taken by an earlier call of this function
        grammars[0]["name"] = f"outer_{name}"
        grammars += [{**first, "name": name}, *rest]
    else:
        grammars.append({"name": name, "lark_grammar": other})
    return json.dumps({"grammars": grammars}, ensure_ascii=False)
