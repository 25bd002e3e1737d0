"""A request as ASGI messages, for tests that must say how its body comes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.types import Message


def post_scope(path: str = "/v1/chat/completions", *headers: tuple[bytes, bytes], method: str = "POST") -> Any:
    return {
        "type": "http",
        "method": method,
        "path": path,
        "headers": list(headers),
        "query_string": b"",
        "root_path": "",
    }


def receiving(*pieces: bytes, then: str | None = None) -> Callable[[], Awaitable[Message]]:
    """A client that sends `pieces`; the last ends the body, unless something else comes `then` ("wait": nothing)."""
    messages: list[Message] = [
        {"type": "http.request", "body": piece, "more_body": then is not None or position < len(pieces) - 1}
        for position, piece in enumerate(pieces)
    ]
    if then is not None and then != "wait":
        messages.append({"type": then})

    async def receive() -> Message:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop(0)

    return receive
