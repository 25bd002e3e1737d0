"""What is told of the API is what the API does: the page, the OpenAPI description, the checks and answers agree."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.errors import InvalidRequestError
from replica.messages import GenerateRequest
from router.answer_schemas import ANSWERS
from router.api_notes import CHAT_NOTES, ENDPOINTS, NOTES, TOKEN_NOTES
from router.api_reference import markdown
from router.app import create_app
from router.http_errors import RULES
from router.openai_api import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)
from router.openai_fields import CHAT_REFUSED, COMPLETION_REFUSED, WITHOUT_EFFECT
from router.openapi import HTTP_STATUSES, openapi
from router.prepare import check_request, prepare
from tests.unit.http_fakes import Edge, FakeBackend, events, settings, small_tokenizer

ROOT = Path(__file__).resolve().parents[2]
DESCRIPTION = openapi(settings(admin_endpoints=True))
USER = {"role": "user", "content": "Say"}
REQUIRED: dict[str, dict[str, Any]] = {
    "ChatRequest": {"messages": [USER]},
    "CompletionRequest": {"prompt": "x"},
    "TokenizeRequest": {"prompt": "x"},
    "DetokenizeRequest": {"tokens": [5]},
}
PARSERS: dict[str, Any] = {
    "ChatRequest": parse_chat,
    "CompletionRequest": parse_completion,
    "TokenizeRequest": parse_tokenize,
    "DetokenizeRequest": parse_detokenize,
}


def validator(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(
        {"$ref": f"#/components/schemas/{name}", "components": DESCRIPTION["components"]}
    )


VALIDATORS = {name: validator(name) for name in DESCRIPTION["components"]["schemas"]}


def accepts(name: str, body: dict[str, Any]) -> bool:
    try:
        request = PARSERS[name](json.dumps(body).encode())
        if name in ("ChatRequest", "CompletionRequest"):
            check_request(request, settings())
    except InvalidRequestError:
        return False
    return True


def test_the_page_is_what_the_models_say() -> None:
    told = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert told == markdown(), "run: python -m router.api_reference"


def test_every_field_has_a_note_and_every_note_a_field() -> None:
    generating = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    assert set(NOTES) == generating
    assert set(CHAT_NOTES) <= set(ChatRequest.model_fields)
    assert set(TOKEN_NOTES) <= {*TokenizeRequest.model_fields, *DetokenizeRequest.model_fields}
    assert {*TokenizeRequest.model_fields, *DetokenizeRequest.model_fields} <= {*NOTES, *TOKEN_NOTES}


def test_every_field_is_described() -> None:
    for model in (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest):
        for name, field in model.model_fields.items():
            assert field.description, name


def test_every_route_is_described_with_its_methods() -> None:
    app = create_app(settings(admin_endpoints=True), small_tokenizer(), FakeBackend())
    routes = {}
    for route in app.routes:
        path = getattr(route, "path", "").replace(":path", "")
        routes[path] = {method.lower() for method in getattr(route, "methods", None) or ()} - {"head"}
    described = {path: set(operations) for path, operations in DESCRIPTION["paths"].items()}
    assert described == routes
    in_page = {
        path: {m.strip(",").lower() for m in methods} for *methods, path in (row[0].split() for row in ENDPOINTS)
    }
    assert in_page == routes
    assert not {"/reset_prefix_cache", "/debug/requests"} & openapi(settings())["paths"].keys()


def test_every_status_that_is_raised_is_described() -> None:
    raised = {rule.status for rule in RULES.values()}
    for path in (ROOT / "router").glob("*.py"):
        raised |= {int(number) for number in re.findall(r"HttpError\(\s*(\d{3})\b", path.read_text(encoding="utf-8"))}
    assert raised <= {*HTTP_STATUSES, 400, 500, 502, 503, 504}
    told = {status for path in DESCRIPTION["paths"].values() for op in path.values() for status in op["responses"]}
    assert {str(status) for status in raised - {405}} <= told


@pytest.mark.parametrize("name", DESCRIPTION["components"]["schemas"])
def test_schemas_are_schemas(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(DESCRIPTION["components"]["schemas"][name])
    json.dumps(DESCRIPTION)


VALID: list[dict[str, Any]] = [
    {"model": "alias", "n": 3, "temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0.5, "seed": -1, "max_tokens": 256},
    {"logit_bias": {"5": -100, "0": 1.5}, "bad_words": ["x"], "allowed_token_ids": [3], "stop_token_ids": [0]},
    {"stop": "x", "presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 0.5},
    {"stop": ["x"] * 4, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": None}},
    {"stream": True, "stream_options": {}},
    {"prompt_logprobs": 20, "echo": True, "return_token_ids": True, "return_tokens_as_token_ids": True},
    {"truncate_prompt_tokens": -1, "truncation_side": "left", "cache_salt": "s", "priority": 0, "request_id": "r"},
    {"response_format": {"type": "text"}},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": True}}},
    {"structured_outputs": {"json": {"type": "object"}, "disable_any_whitespace": True}},
    {"structured_outputs": {"json": '{"type": "object"}'}},
    {"structured_outputs": {"regex": "a+"}},
    {"structured_outputs": {"choice": ["a"], "json": None}},
    {"structured_outputs": {"grammar": 'start: "a"'}},
    {"structured_outputs": {"json_object": True}},
    dict.fromkeys(WITHOUT_EFFECT, 5),
    {"kv_transfer_params": {"do_remote_decode": True, "remote_host": None, "some_other": 1}},
    {"kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_port": 5600}},
    {"best_of": 1, "suffix": "", "use_beam_search": False, "kv_transfer_params": {}, "guided_json": None},
]
VALID_CHAT: list[dict[str, Any]] = [
    {"logprobs": True, "top_logprobs": 20, "max_completion_tokens": 5, "reasoning_effort": "none"},
    {"tools": [], "tool_choice": "none", "parallel_tool_calls": False, "chat_template_kwargs": {"a": [1]}},
    {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
    {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    },
    {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": []}, {"role": "tool", "content": "x"}]},
    {"messages": [{"role": "developer", "content": [{"type": "text", "text": "x"}], "name": "n"}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]},
    {"messages": [{"role": "assistant", "content": "x", "refusal": None, "annotations": [], "reasoning": "y"}]},
    {"continue_final_message": True, "add_generation_prompt": False, "add_special_tokens": True, "echo": True},
    {"modalities": ["text"], "function_call": "none", "verbosity": "medium"},
]
VALID_COMPLETION: list[dict[str, Any]] = [
    {"prompt": ["a", "b"], "logprobs": 20, "add_special_tokens": False},
    {"prompt": [1, 2], "logprobs": 0},
    {"prompt": [[1], [2, 3]], "max_tokens": 0, "echo": True},
]
INVALID: list[dict[str, Any]] = [
    {"foo": 1},
    {"model": "other"},
    {"model": 5},
    {"n": 129},
    {"n": 0},
    {"max_tokens": 257},
    {"temperature": 2.1},
    {"top_p": 0},
    {"top_k": -2},
    {"min_p": -0.1},
    {"presence_penalty": 3},
    {"repetition_penalty": 0},
    {"seed": 1 << 63},
    {"logit_bias": {"x": 1}},
    {"logit_bias": {"5": 101}},
    {"bad_words": [""]},
    {"bad_words": ["x"] * 129},
    {"allowed_token_ids": []},
    {"allowed_token_ids": [100_000]},
    {"stop_token_ids": [-1]},
    {"stop": ["x"] * 5},
    {"stop": ""},
    {"prompt_logprobs": 21},
    {"priority": 1},
    {"request_id": ""},
    {"truncate_prompt_tokens": 0},
    {"truncate_prompt_tokens": 257},
    {"truncation_side": "right"},
    {"stream": "yes"},
    {"stream": True, "stream_options": {"foo": True}},
    {"response_format": {"type": "yaml"}},
    {"response_format": {"type": "json_schema"}},
    {"structured_outputs": {"structural_tag": "x"}},
    {"structured_outputs": {"choice": []}},
    {"best_of": 2},
    {"guided_json": {"a": 1}},
    {"cache_salt": "x" * 257},
    {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": True}},
    {"kv_transfer_params": {"remote_port": 70000}},
    {"kv_transfer_params": {"remote_block_ids": [1, "x"]}},
    {"kv_transfer_params": "yes"},
]
INVALID_CHAT: list[dict[str, Any]] = [
    {"messages": []},
    {"messages": [{"role": "boss", "content": "x"}]},
    {"messages": [{"role": "user", "content": "x", "foo": 1}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
    {"logprobs": 1},
    {"top_logprobs": 21},
    {"tools": [{"type": "other"}]},
    {"tools": [{"type": "function", "function": {"name": "a b"}}]},
    {"tool_choice": "any"},
    {"parallel_tool_calls": 1},
    {"reasoning_effort": "high"},
    {"max_completion_tokens": 0},
    {"functions": [1]},
    {"prompt": "x"},
]
INVALID_COMPLETION: list[dict[str, Any]] = [
    {"prompt": ""},
    {"prompt": []},
    {"prompt": ["x", 1]},
    {"prompt": [[]]},
    {"prompt": [100_000]},
    {"logprobs": True},
    {"logprobs": 21},
    {"suffix": "x"},
    {"messages": [USER]},
]
BOTH = ("ChatRequest", "CompletionRequest")
GOOD = [
    *((name, body) for name in BOTH for body in VALID if name == "CompletionRequest" or "suffix" not in body),
    *(("ChatRequest", body) for body in VALID_CHAT),
    *(("CompletionRequest", body) for body in VALID_COMPLETION),
    ("TokenizeRequest", {"return_token_strs": True, "add_special_tokens": False}),
    ("TokenizeRequest", {"prompt": None, "messages": [USER], "tools": [], "chat_template_kwargs": {}}),
    ("DetokenizeRequest", {"tokens": []}),
]
BAD = [
    *((name, body) for name in BOTH for body in INVALID),
    *(("ChatRequest", body) for body in INVALID_CHAT),
    *(("CompletionRequest", body) for body in INVALID_COMPLETION),
    ("TokenizeRequest", {"messages": [USER]}),
    ("TokenizeRequest", {"prompt": None}),
    ("TokenizeRequest", {"stream": True}),
    ("DetokenizeRequest", {"tokens": ["x"]}),
    ("DetokenizeRequest", {"tokens": 5}),
]


@pytest.mark.parametrize(("name", "body"), GOOD)
def test_what_is_accepted_fits_the_description(name: str, body: dict[str, Any]) -> None:
    body = {**REQUIRED[name], **body}
    assert accepts(name, body)
    VALIDATORS[name].validate(body)


@pytest.mark.parametrize(("name", "body"), BAD)
def test_what_is_refused_does_not_fit_the_description(name: str, body: dict[str, Any]) -> None:
    body = {**REQUIRED[name], **body}
    assert not accepts(name, body)
    assert not VALIDATORS[name].is_valid(body)


def test_required_fields_are_required_in_both() -> None:
    for name in REQUIRED:
        assert not accepts(name, {})
        assert not VALIDATORS[name].is_valid({})


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.floats(-3, 3, allow_nan=False)
    | st.sampled_from(["", "x", "text", "none", "left", "auto", "function", "json_object", "m", "5"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from("type function name role content text json regex choice grammar json_object 5 7 x".split()),  # noqa: SIM905
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)
#: what a schema cannot say of a single field: JSON Schemas inside, one of several keys, texts of JSON, whole numbers
BEYOND_SCHEMAS = frozenset({"structured_outputs", "response_format", "tools", "tool_choice", "messages"})


@given(st.sampled_from(BOTH), st.data())
def test_one_field_is_accepted_where_the_description_says_so(name: str, data: st.DataObject) -> None:
    """Both ways, where JSON Schema can say it."""
    known = DESCRIPTION["components"]["schemas"][name]["properties"]
    field = data.draw(st.sampled_from(sorted(known)))
    body = {**REQUIRED[name], field: data.draw(json_values)}
    if field == "stream_options":
        body["stream"] = True
    if field == "max_tokens":
        body |= {"echo": True} if name == "CompletionRequest" else {}
    if field == "top_logprobs":
        body["logprobs"] = True
    has_float = isinstance(body[field], float) and body[field].is_integer()
    fits = VALIDATORS[name].is_valid(body)
    if accepts(name, body):
        assert fits, body
    elif field not in BEYOND_SCHEMAS and not has_float and not (name == "ChatRequest" and body.get("max_tokens") == 0):
        assert not fits or re.search(r"\d\.0\b", json.dumps(body[field])), body


@given(st.sampled_from(sorted(PARSERS)), st.data())
def test_any_values_of_any_fields_are_a_request_or_a_sentence(name: str, data: st.DataObject) -> None:
    known = sorted({*DESCRIPTION["components"]["schemas"][name]["properties"], "foo"})
    body = data.draw(st.dictionaries(st.sampled_from(known), json_values, max_size=5))
    accepts(name, body)
    accepts(name, {**REQUIRED[name], **body})


@given(st.sampled_from(BOTH), st.data())
def test_what_is_accepted_can_be_prepared_or_is_refused_with_a_sentence(name: str, data: st.DataObject) -> None:
    """Past the checks: template, tokens, grammar."""
    known = sorted(DESCRIPTION["components"]["schemas"][name]["properties"])
    body = {**REQUIRED[name], **data.draw(st.dictionaries(st.sampled_from(known), json_values, max_size=3))}
    body |= data.draw(st.sampled_from([*VALID, *(VALID_CHAT if name == "ChatRequest" else VALID_COMPLETION)]))
    if not accepts(name, body):
        return
    request = PARSERS[name](json.dumps(body).encode())
    try:
        prepared = prepare(request, settings(), small_tokenizer(), "id", 0.0, lambda: 1)
    except InvalidRequestError:
        return
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(prepared.generate), type=GenerateRequest)
    assert decoded == prepared.generate
    assert len(prepared.generate.sequences) == prepared.num_choices


def call(path: str, **body: Any) -> Any:
    return Edge(max_model_len=4096).request("POST", path, json=body)


MORE: list[dict[str, Any]] = [
    {},
    {"n": 2, "return_token_ids": True, "prompt_logprobs": 1},
    {"logprobs": True, "top_logprobs": 2},
    {"echo": True},
]


@pytest.mark.parametrize("more", MORE)
def test_whole_answers_fit_the_description(more: dict[str, Any]) -> None:
    VALIDATORS["ChatCompletion"].validate(call("/v1/chat/completions", messages=[USER], **more).json())
    own = {key: value for key, value in more.items() if key != "top_logprobs"}
    if "logprobs" in own:
        own["logprobs"] = 2
    VALIDATORS["Completion"].validate(call("/v1/completions", prompt="x", **own).json())


@pytest.mark.parametrize("more", MORE)
def test_chunks_fit_the_description(more: dict[str, Any]) -> None:
    stream = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    more = {**{key: value for key, value in more.items() if key != "prompt_logprobs"}, **stream}
    chunks = events(call("/v1/chat/completions", messages=[USER], **more))
    for chunk in chunks[:-1]:
        VALIDATORS["ChatCompletionChunk"].validate(chunk)
    own = {key: value for key, value in more.items() if key != "top_logprobs"}
    if "logprobs" in own:
        own["logprobs"] = 2
    for chunk in events(call("/v1/completions", prompt="x", **own))[:-1]:
        VALIDATORS["Completion"].validate(chunk)


def test_calls_fit_the_description() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    edge = Edge(FakeBackend(text), max_model_len=4096)
    answer = edge.chat(tools=tools).json()
    assert answer["choices"][0]["message"]["tool_calls"]
    VALIDATORS["ChatCompletion"].validate(answer)
    for chunk in events(edge.chat(tools=tools, stream=True))[:-1]:
        VALIDATORS["ChatCompletionChunk"].validate(chunk)


def test_other_answers_fit_the_description() -> None:
    VALIDATORS["Error"].validate(call("/v1/completions").json())
    VALIDATORS["Tokens"].validate(call("/tokenize", prompt="x", return_token_strs=True).json())
    VALIDATORS["Tokens"].validate(call("/tokenize", messages=[USER]).json())
    VALIDATORS["Text"].validate(call("/detokenize", tokens=[5]).json())
    VALIDATORS["ModelList"].validate(Edge().get("/v1/models").json())
    VALIDATORS["Model"].validate(Edge().get("/v1/models/m").json())
    assert Edge().get("/openapi.json").json() == openapi(settings())


def test_refused_fields_are_where_they_belong() -> None:
    properties = {name: DESCRIPTION["components"]["schemas"][name]["properties"] for name in BOTH}
    assert set(properties["ChatRequest"]) == {*ChatRequest.model_fields, *CHAT_REFUSED, *WITHOUT_EFFECT}
    assert set(properties["CompletionRequest"]) == {
        *CompletionRequest.model_fields,
        *COMPLETION_REFUSED,
        *WITHOUT_EFFECT,
    }
    assert set(ANSWERS) <= set(DESCRIPTION["components"]["schemas"])
