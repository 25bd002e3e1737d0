"""ASYNC. Guards the Serve proxy, which reads some headers itself before any router sees the request.

Serve loads `middlewares` in each proxy because an environment variable names it (`cluster/serve_env.py`). Without it a
client could hang Serve's own switches on its request (a time-out, or that nobody is told when it leaves), an
`X-Request-Id` that is no text would be answered by a plain 500, and one of any length would be repeated.
"""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.http_errors import HttpError
from router.http_middleware import REQUEST_ID_HEADER, check_head, request_id_of, send_error

#: what Serve takes for an order to itself, in the form it compares
SERVE_SWITCHES = frozenset(
    {b"serve_multiplexed_model_id", b"x_request_timeout_seconds", b"x_request_disconnect_disabled"}
)
#: what Serve decodes as UTF-8 without looking
SERVE_TEXTS = frozenset({b"x_session_id"})


class ProxyGuard:
    """Outermost in the proxy. Touches the head of a request only: a streamed token does not pass here twice."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        request_id = (REQUEST_ID_HEADER, request_id_of(scope).encode("ascii"))
        if scope["type"] == "http":
            try:
                check_head(scope)
            except HttpError as error:
                await send_error(_with_header(send, request_id), error)
                return
        scope["headers"] = [*(item for item in scope["headers"] if _is_for_us(*item)), request_id]
        await self._app(scope, receive, send)


def middlewares() -> list[Middleware]:
    """What Serve asks for."""
    return [Middleware(ProxyGuard)]


def _is_for_us(name: bytes, value: bytes) -> bool:
    same = name.lower().replace(b"-", b"_")
    if same in SERVE_SWITCHES or same == b"x_request_id":
        return False
    if same in SERVE_TEXTS:
        try:
            value.decode()
        except UnicodeDecodeError:
            return False
    return True


def _with_header(send: Send, header: tuple[bytes, bytes]) -> Send:
    async def send_with_header(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), header]
        await send(message)

    return send_with_header
