"""PURE. The OpenAPI 3.1 description of the server: request schemas from the models that check requests, with the
limits of this server put in, and what it answers.

JSON Schema cannot say everything that is checked: rules over two fields are told in words (`RULES_OVER_FIELDS`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from router.answer_schemas import ANSWERS
from router.app_settings import AppSettings
from router.http_errors import RULES
from router.openai_api import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from router.openai_fields import CHAT_REFUSED, COMPLETION_REFUSED, WITHOUT_EFFECT, Refused

Schema = dict[str, Any]

RULES_OVER_FIELDS = (
    "stream_options only with stream true",
    "prompt_logprobs only without stream",
    "kv_transfer_params.do_remote_decode only without stream",
    "top_logprobs above 0 only with logprobs true",
    "min_tokens at most max_tokens",
    "max_tokens 0 only in a completion with echo",
    "continue_final_message and add_generation_prompt: not both true",
    "response_format and structured_outputs: one of them",
    "tool_choice other than none only with tools",
    "prompts x n at most 1024 (max_sequences), and 32 MiB with what is repeated for each of them",
    "logprobs of prompts, and of outputs (tokens x n x alternatives, the token itself too), at most 1048576 each",
    "the prompt and one token fit the context",
)
#: what the HTTP layer answers by itself: status -> when
HTTP_STATUSES: dict[int, str] = {
    401: "no API key, or a wrong one (where the server has keys)",
    403: "a key that concerns one tenant, where all are concerned",
    404: "no such model, or no such path",
    405: "no such method for this path",
    408: "the body did not arrive in time",
    413: "the body is too large",
    414: "the path is too long",
    415: "the body is not JSON, or is compressed",
    429: "a limit of the tenant: code tenant_concurrency, tenant_tokens",
    431: "the headers are too large",
}
_TOKEN_ID: Schema = {"type": "integer", "minimum": 0}


def openapi(settings: AppSettings) -> dict[str, Any]:
    """The whole description, as plain data."""
    requests: dict[str, tuple[type[BaseModel], Mapping[str, Refused], Mapping[str, str]]] = {
        "CompletionRequest": (CompletionRequest, COMPLETION_REFUSED, WITHOUT_EFFECT),
        "ChatRequest": (ChatRequest, CHAT_REFUSED, WITHOUT_EFFECT),
        "TokenizeRequest": (TokenizeRequest, {}, {}),
        "DetokenizeRequest": (DetokenizeRequest, {}, {}),
    }
    schemas = {name: request_schema(*parts, settings) for name, parts in requests.items()}
    description: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Shoal", "version": settings.version, "description": "An OpenAI-compatible LLM server."},
        "paths": _paths(settings),
        "components": {"schemas": {**schemas, **copy.deepcopy(ANSWERS)}},
    }
    if settings.api_keys:
        description["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        description["security"] = [{"key": []}]
    return description


def request_schema(
    model: type[BaseModel], refused: Mapping[str, Refused], without_effect: Mapping[str, str], settings: AppSettings
) -> Schema:
    """What a request of this model may be. `refused` fields appear with the values that ask for nothing."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})
    properties: dict[str, Schema] = {}
    for name, field in schema["properties"].items():
        field.pop("title", None)
        _fill_in(field, definitions)
        _limit(name, field, settings)
        properties[name] = field if name in schema.get("required", ()) else _or_null(field)
    if isinstance(properties.get("stream_options"), dict):
        _allow_nulls_inside(properties["stream_options"])
    for name, rule in refused.items():
        neutral = [None, "", [], {}, *rule.neutral]
        properties[name] = {"enum": neutral, "description": f"anything else is refused: {rule.sentence}"}
    for name, purpose in without_effect.items():
        properties[name] = {"description": f"without effect: {purpose}"}
    schema["properties"] = properties
    schema["description"] = (model.__doc__ or "").strip()
    if model is TokenizeRequest:
        schema["oneOf"] = [
            {"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in ("prompt", "messages")
        ]
    return schema


def _or_null(field: Schema) -> Schema:
    """An explicit null is the same as an absent field."""
    if {"type": "null"} in field.get("anyOf", ()):
        return field
    kept: Schema = {key: field.pop(key) for key in ("description", "default") if key in field}
    return {"anyOf": [field, {"type": "null"}], **kept}


def _fill_in(field: Schema, definitions: Mapping[str, Schema]) -> None:
    """Put definitions where they are referred to: each is used once."""
    for part in [field, *field.get("anyOf", ())]:
        reference = part.pop("$ref", None)
        if reference is not None:
            part.update(copy.deepcopy(definitions[reference.rpartition("/")[2]]))


def _allow_nulls_inside(field: Schema) -> None:
    for part in field["anyOf"]:
        for name, inner in part.get("properties", {}).items():
            inner.pop("title", None)
            part["properties"][name] = _or_null(inner)


def _limit(name: str, field: Schema, settings: AppSettings) -> None:
    """Put in what depends on the model and on the configuration."""
    _limit_ids(field, settings.vocab_size)
    most = {
        "n": settings.max_n,
        "max_tokens": settings.max_model_len,
        "max_completion_tokens": settings.max_model_len,
        "truncate_prompt_tokens": settings.max_model_len,
    }.get(name)
    for part in [field, *field.get("anyOf", ())]:
        if most is not None and part.get("type") == "integer":
            part.pop("exclusiveMaximum", None)
            part["maximum"] = most
            if name == "truncate_prompt_tokens":
                part["not"] = {"const": 0}
        if name == "prompt" and part.get("type") == "array" and part["items"] != field_id(settings):
            part["maxItems"] = settings.max_prompts
        if name == "priority" and settings.policy != "priority" and part.get("type") == "integer":
            part["maximum"] = part["minimum"] = 0
            part.pop("exclusiveMaximum", None)
        if name == "model" and part.get("type") == "string":
            part["enum"] = ["", *settings.served_model_names]


def field_id(settings: AppSettings) -> Schema:
    """Schema of a token id of the model."""
    return {**_TOKEN_ID, "maximum": settings.vocab_size - 1}


def _limit_ids(value: Any, vocab_size: int) -> None:
    """Every token id inside is one of the vocabulary."""
    if isinstance(value, dict):
        if value == _TOKEN_ID:
            value["maximum"] = vocab_size - 1
            return
        for inner in value.values():
            _limit_ids(inner, vocab_size)
    elif isinstance(value, list):
        for inner in value:
            _limit_ids(inner, vocab_size)


def _json(name: str) -> Schema:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def _statuses() -> dict[int, str]:
    """Every status that is an error, and when. Errors of the tree share a status."""
    found = dict(HTTP_STATUSES)
    for rule in RULES.values():
        if rule.status not in found:
            codes = sorted(other.code for other in RULES.values() if other.status == rule.status and other.code)
            found[rule.status] = "code " + ", ".join(codes)
    found[400] = "a field is wrong: param names it, message says what is allowed"
    return dict(sorted(found.items()))


def _errors(*statuses: int) -> dict[str, Schema]:
    told = _statuses()
    return {
        str(status): {
            "description": told[status],
            "content": _json("Error"),
            **({"headers": {"Retry-After": {"schema": {"type": "integer"}}}} if status in (429, 503) else {}),
        }
        for status in statuses
    }


def _operation(summary: str, answer: str, *statuses: int, body: str = "", stream: str = "") -> Schema:
    content = _json(answer) if answer else {"text/plain": {"schema": {"type": "string"}}}
    if stream:
        content["text/event-stream"] = {}  # OpenAPI 3.1 has no words for the schema of an event
    responses = {"200": {"description": "done", "content": content}, **_errors(*sorted({401, 414, 431, *statuses}))}
    operation: Schema = {"summary": summary, "responses": responses}
    if stream:
        operation["description"] = (
            f"With stream true the answer is server-sent events: each is `data: ` and a {stream}, the last is "
            "`data: [DONE]`. A stream that fails ends with `data: ` and an Error instead. "
            f"Rules over fields: {'; '.join(RULES_OVER_FIELDS)}."
        )
    if body:
        operation["requestBody"] = {"required": True, "content": _json(body)}
    return operation


def _paths(settings: AppSettings) -> dict[str, Any]:
    of_body = (400, 404, 408, 413, 415, 503)
    generating = (*of_body, 429, 500, 502)
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    health = _operation("whether requests can be served", "Any", 503)
    # an answer of this path, not an error
    health["responses"]["503"]["content"] = _json("Any")
    health["responses"]["503"].pop("headers")
    paths: dict[str, Any] = {
        "/v1/completions": {
            "post": _operation("a completion", "Completion", *generating, body="CompletionRequest", stream="Completion")
        },
        "/v1/chat/completions": {
            "post": _operation(
                "a chat", "ChatCompletion", *generating, body="ChatRequest", stream="ChatCompletionChunk"
            )
        },
        "/v1/models": {"get": _operation("names that are served", "ModelList", 503)},
        "/v1/models/{name}": {"get": {**_operation("one of them", "Model", 404, 503), "parameters": [name]}},
        "/tokenize": {"post": _operation("to token ids", "Tokens", *of_body, body="TokenizeRequest")},
        "/detokenize": {"post": _operation("to text", "Text", *of_body, body="DetokenizeRequest")},
        "/health": {"get": health},
        "/ping": {"get": copy.deepcopy(health), "post": copy.deepcopy(health)},
        "/version": {"get": _operation("the server's version", "Any")},
        "/load": {"get": _operation("requests in this router", "Any")},
        "/status": {"get": _operation("what this router knows of its replicas", "Any")},
        "/metrics": {"get": _operation("Prometheus metrics", "")},
        "/openapi.json": {"get": _operation("this", "Any")},
    }
    if settings.admin_endpoints:
        paths["/reset_prefix_cache"] = {"post": _operation("forget cached prefixes", "Any", 400, 403, 503, 504)}
        request_id = {"name": "request_id", "in": "path", "required": True, "schema": {"type": "string"}}
        limit = {"name": "limit", "in": "query", "schema": {"type": "integer"}}
        oldest = _operation("what the oldest unfinished requests wait for", "Any", 400, 403)
        why = _operation("where the time of a request went", "Any", 403, 404)
        paths["/debug/requests"] = {"get": {**oldest, "parameters": [limit]}}
        paths["/debug/requests/{request_id}"] = {"get": {**why, "parameters": [request_id]}}
    return paths
