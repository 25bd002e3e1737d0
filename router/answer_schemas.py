"""PURE. JSON Schemas of answers, for `/openapi.json`. A test holds real answers of the application against them."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_IDS: Schema = {"type": "array", "items": _COUNT}
_REASON: Schema = {"enum": ["stop", "length", "tool_calls", None]}
_STOP_REASON: Schema = {
    "type": ["string", "integer", "null"],
    "description": "the stop string or stop token id that ended the choice",
}


def _object(properties: dict[str, Schema], optional: tuple[str, ...] = ()) -> Schema:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


_TOKEN = {"token": _TEXT, "logprob": {"type": "number"}, "bytes": _or_null(_list(_COUNT))}
_CALL = _object(
    {
        "id": _TEXT,
        "type": {"const": "function"},
        "function": _object({"name": _TEXT, "arguments": _TEXT}),
    }
)
_CALL_DELTA = _object(
    {
        "index": _COUNT,
        "id": _TEXT,
        "type": {"const": "function"},
        "function": _object({"name": _TEXT, "arguments": _TEXT}, ("name",)),
    },
    ("id", "type"),
)
_HEAD = {"id": _TEXT, "object": _TEXT, "created": _COUNT, "model": _TEXT}
_PROMPT_LOGPROBS = _or_null(_list({"type": ["object", "null"]}))
#: where it was asked for: what another request carries
_PARAMS: Schema = {"type": "object"}
_ENDING = {"finish_reason": _REASON, "stop_reason": _STOP_REASON}

ANSWERS: dict[str, Schema] = {
    "Error": _object(
        {
            "error": _object(
                {
                    "message": _TEXT,
                    "type": _TEXT,
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                }
            )
        }
    ),
    "Usage": _object(
        {
            "prompt_tokens": _COUNT,
            "completion_tokens": _COUNT,
            "total_tokens": _COUNT,
            "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
            "completion_tokens_details": _object({"reasoning_tokens": _COUNT}),
        },
        ("completion_tokens_details",),
    ),
    "CompletionLogprobs": _object(
        {
            "tokens": _list(_TEXT),
            "token_logprobs": _list({"type": ["number", "null"]}),
            "top_logprobs": _list({"type": ["object", "null"]}),
            "text_offset": _IDS,
        }
    ),
    "ChatLogprobs": _object(
        {"content": _list(_object({**_TOKEN, "top_logprobs": _list(_object(_TOKEN))})), "refusal": {"type": "null"}}
    ),
    "Completion": _object(
        {
            **_HEAD,
            "choices": _list(
                _object(
                    {
                        "index": _COUNT,
                        "text": _TEXT,
                        "logprobs": _or_null(_ref("CompletionLogprobs")),
                        **_ENDING,
                        "token_ids": _or_null(_IDS),
                        "prompt_token_ids": _IDS,
                        "prompt_logprobs": _PROMPT_LOGPROBS,
                    },
                    # chunks have `stop_reason` only at their end
                    ("stop_reason", "token_ids", "prompt_token_ids", "prompt_logprobs"),
                )
            ),
            "usage": _ref("Usage"),
            "kv_transfer_params": _PARAMS,
        },
        ("usage", "kv_transfer_params"),  # of a stream only when asked for
    ),
    "ChatCompletion": _object(
        {
            **_HEAD,
            "choices": _list(
                _object(
                    {
                        "index": _COUNT,
                        "message": _object(
                            {
                                "role": {"const": "assistant"},
                                "content": {"type": ["string", "null"]},
                                "refusal": {"type": "null"},
                                "reasoning": {"type": ["string", "null"]},
                                "tool_calls": _list(_CALL),
                            },
                            ("reasoning", "tool_calls"),
                        ),
                        "logprobs": _or_null(_ref("ChatLogprobs")),
                        **_ENDING,
                        "token_ids": _or_null(_IDS),
                    },
                    ("token_ids",),
                )
            ),
            "usage": _ref("Usage"),
            "prompt_token_ids": _IDS,
            "prompt_logprobs": _PROMPT_LOGPROBS,
            "kv_transfer_params": _PARAMS,
        },
        ("prompt_token_ids", "prompt_logprobs", "kv_transfer_params"),
    ),
    "ChatCompletionChunk": _object(
        {
            **_HEAD,
            "choices": _list(
                _object(
                    {
                        "index": _COUNT,
                        "delta": _object(
                            {
                                "role": {"const": "assistant"},
                                "content": _TEXT,
                                "reasoning": _TEXT,
                                "tool_calls": _list(_CALL_DELTA),
                            },
                            ("role", "content", "reasoning", "tool_calls"),
                        ),
                        "logprobs": _or_null(_ref("ChatLogprobs")),
                        **_ENDING,
                        "token_ids": _or_null(_IDS),
                    },
                    ("stop_reason", "token_ids"),
                )
            ),
            "usage": _ref("Usage"),
            "prompt_token_ids": _IDS,
        },
        ("usage", "prompt_token_ids"),
    ),
    "Model": _object(
        {
            "id": _TEXT,
            "object": {"const": "model"},
            "created": _COUNT,
            "owned_by": _TEXT,
            "root": _TEXT,
            "parent": {"type": "null"},
            "max_model_len": _COUNT,
        }
    ),
    "ModelList": _object({"object": {"const": "list"}, "data": _list(_ref("Model"))}),
    "Tokens": _object(
        {
            "count": _COUNT,
            "max_model_len": _COUNT,
            "tokens": _IDS,
            "token_strs": _or_null(_list({"type": ["string", "null"]})),
        }
    ),
    "Text": _object({"prompt": _TEXT}),
    "Any": {"type": "object"},
}
