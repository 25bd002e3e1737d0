"""Limits and oddities at the HTTP edge: heads, bodies, media types, time, memory, threads, and who is told what."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.routing import Route

from replica.errors import NeverFitsError, TooManySequencesError
from router.http_middleware import MAX_HEADER_BYTES, MAX_TARGET_BYTES
from tests.unit.http_fakes import Edge, assert_error

CHAT = b'{"messages": [{"role": "user", "content": "Say"}], "max_tokens": 2}'
GENERATE = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]


# ---- what a body says it is ----


@pytest.mark.parametrize(
    "content_type",
    [
        "application/json",
        "Application/JSON; charset=UTF-8",
        'application/json; charset="utf-8"',
        "application/vnd.api+json",
        "",
        None,
    ],
)
def test_json_by_any_of_its_names_is_taken(content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    assert Edge().request("POST", "/v1/chat/completions", content=CHAT, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("content-type", "text/plain"),
        ("content-type", "application/x-www-form-urlencoded"),
        ("content-type", "multipart/form-data; boundary=x"),
        ("content-type", "application/json; charset=latin-1"),
        ("content-encoding", "gzip"),
        ("content-encoding", "identity, br"),
    ],
)
@pytest.mark.parametrize("path", GENERATE)
def test_other_media_types_and_encodings_are_415_with_what_is_allowed(path: str, header: str, value: str) -> None:
    edge = Edge()
    response = edge.request("POST", path, content=CHAT, headers={header: value})
    message = assert_error(response, 415, code="unsupported_media_type")
    assert value in message
    assert "allowed" in message
    assert edge.backend.requests == []


def test_identity_is_no_encoding() -> None:
    response = Edge().request("POST", "/v1/chat/completions", content=CHAT, headers={"content-encoding": "identity"})
    assert response.status_code == 200


# ---- memory for bodies ----


def test_a_flood_of_long_bodies_is_503_with_retry_after_and_counted() -> None:
    edge = Edge(max_pending_body_bytes=100, on_loop_max_bytes=200)
    long = {"messages": [{"role": "user", "content": "Say " * 100}], "max_tokens": 1}
    for path in GENERATE[:1] + GENERATE[2:]:
        response = edge.request("POST", path, json=long)
        assert_error(response, 503, code="router_busy")
        assert response.headers["retry-after"] == "2"
    assert edge.chat().status_code == 200
    text = edge.get("/metrics").text
    assert 'vllm:admission_rejections_total{reason="router_busy",router=""} 1.0' in text
    assert 'shoal_pending_body_bytes{router=""} 0.0' in text
    assert len(edge.backend.requests) == 1


@pytest.mark.parametrize("body", [CHAT, b"{" * 300, CHAT[:-1] + b', "n": 0}'])
def test_memory_is_given_back_however_a_request_ends(body: bytes) -> None:
    edge = Edge(on_loop_max_bytes=0)
    edge.request("POST", "/v1/chat/completions", content=body)
    edge.request("POST", "/tokenize", content=body)
    assert 'shoal_pending_body_bytes{router=""} 0.0' in edge.get("/metrics").text


# ---- heads, methods, request ids ----


def test_heads_that_are_too_long() -> None:
    edge = Edge()
    long = {"x-padding": "x" * MAX_HEADER_BYTES}
    assert_error(edge.get("/health", headers=long), 431, code="headers_too_large")
    many = [("x-h", "v" * 97)] * (MAX_HEADER_BYTES // 100 + 1)
    assert_error(edge.get("/health", headers=many), 431, code="headers_too_large")
    assert_error(edge.get("/v1/models/" + "m" * MAX_TARGET_BYTES), 414, code="uri_too_long")
    assert_error(edge.get("/v1/models?" + "m" * MAX_TARGET_BYTES), 414, code="uri_too_long")
    assert edge.get("/health", headers={"x-padding": "x" * (MAX_HEADER_BYTES - 1000)}).status_code == 200


def request_with(edge: Edge, status: int) -> Any:
    """Some request that is answered with `status`."""
    match status:
        case 404:
            return edge.get("/nothing", headers={"x-request-id": "mine"})
        case 405:
            return edge.get("/v1/completions", headers={"x-request-id": "mine"})
        case 413:
            headers = {"x-request-id": "mine"}
            return edge.request("POST", "/v1/completions", content=b"x" * 2000, headers=headers)
        case 414:
            return edge.get("/" + "m" * MAX_TARGET_BYTES, headers={"x-request-id": "mine"})
        case 415:
            headers = {"x-request-id": "mine", "content-type": "text/plain"}
            return edge.request("POST", "/tokenize", content=b"x", headers=headers)
        case 431:
            return edge.get("/health", headers={"x-padding": "x" * MAX_HEADER_BYTES, "x-request-id": "mine"})
        case 500:
            edge.backend.health = None  # type: ignore[method-assign,assignment]  # a mistake of ours
            return edge.get("/health", headers={"x-request-id": "mine"})
        case _:
            return edge.get("/v1/models", headers={"x-request-id": "mine"})


@pytest.mark.parametrize("status", [401, 404, 405, 413, 414, 415, 431, 500])
def test_every_error_has_the_shape_the_request_id_and_its_place_in_the_metrics(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    edge = Edge(max_body_bytes=1024, api_keys=("k",) if status == 401 else ())
    response = request_with(edge, status)
    assert_error(response, status)
    assert response.headers.get_list("x-request-id") == ["mine"]
    assert f'status="{status}"' in edge.get("/metrics").text
    assert len(caplog.records) == (status == 500), "one log line for a mistake of ours, none for theirs"


def test_a_mistake_of_ours_tells_nothing_of_itself(caplog: pytest.LogCaptureFixture) -> None:
    response = request_with(Edge(), 500)
    assert "NoneType" not in response.text
    assert "internal error" in caplog.text


@pytest.mark.parametrize(
    ("path", "allow"),
    [("/v1/completions", {"POST"}), ("/v1/models", {"GET", "HEAD"}), ("/ping", {"GET", "HEAD", "POST"})],
)
def test_options_says_what_is_allowed(path: str, allow: set[str]) -> None:
    response = Edge(cors_allow_origins=()).request("OPTIONS", path)
    assert (response.status_code, response.content) == (204, b"")
    assert set(response.headers["allow"].split(", ")) == allow


def test_head_is_get_without_a_body_for_the_server_to_cut() -> None:
    edge = Edge()
    for path in ("/health", "/v1/models", "/version", "/metrics"):
        head, get = edge.request("HEAD", path), edge.get(path)
        assert (head.status_code, head.headers["content-type"]) == (200, get.headers["content-type"])
    assert edge.request("HEAD", "/v1/completions").status_code == 405


@pytest.mark.parametrize("has_admin", [True, False])
def test_openapi_describes_every_path_that_is_there_and_no_other(has_admin: bool) -> None:
    edge = Edge(admin_endpoints=has_admin)
    for _ in range(2):
        response = edge.get("/openapi.json")
        assert response.status_code == 200
        assert response.headers["content-type"] == "application/json"
        described = {
            (path, method.upper())
            for path, item in response.json()["paths"].items()
            for method in item
            if method != "parameters"
        }
    routed = {
        (route.path.replace(":path}", "}"), method)
        for route in edge.app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD" and (has_admin or not route.path.startswith(("/reset_prefix_cache", "/debug/")))
    }
    assert described == routed


# ---- honest refusals ----


def test_what_a_replica_finds_too_long_names_the_same_field_as_the_router() -> None:
    edge = Edge()
    edge.backend.refusal = NeverFitsError("the prompt has 40 tokens, but the KV cache of a replica holds 32", None)
    assert_error(edge.chat(), 400, "messages", "context_length_exceeded")
    assert_error(edge.complete(), 400, "prompt", "context_length_exceeded")


def test_more_sequences_than_a_queue_holds_is_not_a_matter_of_length() -> None:
    edge = Edge()
    edge.backend.refusal = TooManySequencesError("100 sequences in one request, but ... at most 64", "n")
    assert_error(edge.chat(n=100), 400, "n", "too_many_sequences")
