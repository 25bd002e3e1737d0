"""PURE. JSON Schemas of the fields that have a check of their own instead of a plain type: what `/openapi.json` tells.

A test holds them against the checks: what a check accepts, its schema accepts, and the other way round where JSON
Schema can say it.
"""

from __future__ import annotations

from typing import Any

from router.field_checks import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_BIASES,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from router.message_checks import MAX_CALLS, ROLES
from router.structured import MAX_CHOICES, MAX_REGEX_BYTES, MAX_TEXT_BYTES
from router.tool_request import MAX_NAME_CHARS, MAX_TOOLS

Schema = dict[str, Any]


def _strings(min_chars: int, max_chars: int) -> Schema:
    return {"type": "string", "minLength": min_chars, "maxLength": max_chars}


def _optional(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _object(properties: dict[str, Schema], required: list[str], **more: Any) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": properties, "required": required, **more}


_REFUSED: Schema = {"type": "null", "description": "refused"}
_BOOL = _optional({"type": "boolean"})
_TEXT = _optional({"type": "string"})
_ANY_SCHEMA: Schema = {"type": "object", "description": "a JSON Schema"}
_TOKEN_ID: Schema = {"type": "integer", "minimum": 0}
_SOME_STRINGS: Schema = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1}
_SOME_IDS: Schema = {"type": "array", "items": _TOKEN_ID, "minItems": 1}

STOP: Schema = {
    "anyOf": [
        _strings(1, MAX_STOP_CHARS),
        {"type": "array", "items": _strings(1, MAX_STOP_CHARS), "maxItems": MAX_STOP_STRINGS},
    ]
}
STOP_TOKEN_IDS: Schema = {"type": "array", "items": _TOKEN_ID, "maxItems": MAX_STOP_TOKEN_IDS}
PROMPT: Schema = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        _SOME_STRINGS,
        _SOME_IDS,
        {"type": "array", "items": _SOME_IDS, "minItems": 1},
    ]
}
LOGIT_BIAS: Schema = {
    "type": "object",
    "patternProperties": {"^(0|[1-9][0-9]*)$": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS}},
    "additionalProperties": False,
    "maxProperties": MAX_BIASES,
}
BAD_WORDS: Schema = {"type": "array", "items": _strings(1, MAX_BAD_WORD_CHARS), "maxItems": MAX_BAD_WORDS}
ALLOWED_TOKEN_IDS: Schema = _SOME_IDS

_CONTENT: Schema = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
            },
        },
        {"type": "null", "description": "of an assistant only"},
    ]
}
_CALL: Schema = {
    "type": "object",
    "properties": {
        "id": _TEXT,
        "type": {"enum": ["function", None]},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 1},
                "arguments": {
                    "anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}],
                    "description": "a JSON object or its text",
                },
            },
            "required": ["name"],
        },
    },
    "required": ["function"],
}
MESSAGES: Schema = {
    "type": "array",
    "minItems": 1,
    "items": _object(
        {
            "role": {"enum": list(ROLES)},
            "content": _CONTENT,
            "name": _TEXT,
            "tool_calls": _optional({"type": "array", "items": _CALL, "maxItems": MAX_CALLS}),
            "tool_call_id": _TEXT,
            "reasoning": _TEXT,
            "reasoning_content": _TEXT,
            **{key: {"description": "null or empty"} for key in ("function_call", "audio", "refusal", "annotations")},
            **{key: {"description": "without effect"} for key in ("parsed", "provider_specific_fields")},
        },
        ["role"],
        additionalProperties={"type": "null"},
    ),
}

RESPONSE_FORMAT: Schema = {
    "anyOf": [
        _object({"type": {"enum": ["text", "json_object"]}, "json_schema": {}}, ["type"]),
        _object(
            {
                "type": {"const": "json_schema"},
                "json_schema": _object(
                    {"name": _TEXT, "schema": _ANY_SCHEMA, "strict": _BOOL, "description": _TEXT}, ["schema"]
                ),
            },
            ["type", "json_schema"],
        ),
    ]
}
STRUCTURED_OUTPUTS: Schema = _object(
    {
        "json": {"anyOf": [_ANY_SCHEMA, {"type": "string"}, {"type": "null"}]},
        "regex": _optional(_strings(1, MAX_REGEX_BYTES)),
        "choice": _optional(
            {
                "type": "array",
                "items": {"type": "string", "minLength": 1},
                "minItems": 1,
                "maxItems": MAX_CHOICES,
            }
        ),
        "grammar": _optional({**_strings(1, MAX_TEXT_BYTES), "description": "Lark or GBNF"}),
        "json_object": _BOOL,
        "structural_tag": _REFUSED,
        "whitespace_pattern": _REFUSED,
        "disable_any_whitespace": _BOOL,
        "disable_additional_properties": _BOOL,
    },
    [],
    description="one of json, regex, choice, grammar, json_object",
)

_NAME: Schema = {"type": "string", "pattern": f"^[A-Za-z0-9_-]{{1,{MAX_NAME_CHARS}}}$"}
TOOLS: Schema = {
    "type": "array",
    "maxItems": MAX_TOOLS,
    "items": _object(
        {
            "type": {"const": "function"},
            "function": _object(
                {"name": _NAME, "description": _TEXT, "parameters": _optional(_ANY_SCHEMA), "strict": _BOOL}, ["name"]
            ),
        },
        ["type", "function"],
    ),
}
TOOL_CHOICE: Schema = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        _object({"type": {"const": "function"}, "function": _object({"name": _NAME}, ["name"])}, ["type", "function"]),
    ]
}
