"""The guard that runs in Serve's proxy: what of a head never gets there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import pytest
from starlette.types import Message

from router.http_middleware import MAX_HEADER_BYTES, MAX_TARGET_BYTES
from router.proxy_guard import ProxyGuard, middlewares
from tests.unit.asgi import post_scope, receiving


def through_guard(headers: Iterable[tuple[bytes, bytes]], path: str = "/") -> tuple[list[Any], list[Message]]:
    """Headers that the proxy sees, and what the guard answers itself."""
    seen: list[Any] = []
    sent: list[Message] = []

    async def proxy(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["headers"])

    async def send(message: Message) -> None:
        sent.append(message)

    (middleware,) = middlewares()
    guard: Any = middleware.cls
    assert guard is ProxyGuard
    asyncio.run(guard(proxy)(post_scope(path, *headers), receiving(), send))
    return seen, sent


def test_the_guard_passes_a_head_on_and_replaces_a_bad_request_id() -> None:
    kept = [(b"authorization", b"Bearer k"), (b"x-session-id", "ü".encode())]
    ((*others, request_id),), sent = through_guard([*kept, (b"x-request-id", b"mine")])
    assert (others, request_id, sent) == (kept, (b"x-request-id", b"mine"), [])
    for bad in (b"\xff", b"", b"x" * 129):
        ((name, made),) = through_guard([(b"x-request-id", bad)])[0][0]
        assert name == b"x-request-id"
        assert len(made) == 32


@pytest.mark.parametrize(
    "header",
    [
        (b"X-Request-Disconnect-Disabled", b"?1"),
        (b"x-request-timeout-seconds", b"0.001"),
        (b"serve-multiplexed-model-id", b"a"),
        (b"serve_multiplexed_model_id", b"a"),
        (b"x-session-id", b"\xff"),
    ],
)
def test_the_guard_keeps_serves_own_switches_from_clients(header: tuple[bytes, bytes]) -> None:
    ((only,),) = through_guard([header])[0]
    assert only[0] == b"x-request-id"


def test_the_guard_refuses_long_heads_itself() -> None:
    for headers, path, status in [
        ([(b"x-padding", b"x" * MAX_HEADER_BYTES), (b"x-request-id", b"mine")], "/", 431),
        ([(b"x-request-id", b"mine")], "/" + "x" * MAX_TARGET_BYTES, 414),
    ]:
        seen, (start, body) = through_guard(headers, path)
        assert seen == []
        assert start["status"] == status
        assert (b"x-request-id", b"mine") in start["headers"]
        assert set(json.loads(body["body"])["error"]) == {"message", "type", "param", "code"}
