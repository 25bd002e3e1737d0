"""ASYNC. What surrounds every endpoint, as plain ASGI: request id, limits of the head, request counting, API keys
and their tenants, and errors that nobody expected.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Coroutine
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from replica.errors import RefusedError, ShoalError
from router.http_errors import ErrorResponse, HttpError, error_response, rule_of
from router.http_metrics import HttpMetrics
from router.tenant_desk import TenantDesk

logger = logging.getLogger(__name__)
REQUEST_ID_HEADER = b"x-request-id"
MAX_REQUEST_ID_CHARS = 128
_SCOPE_KEY = "shoal.request_id"
_TENANT_KEY = "shoal.tenant"
#: longest head of a request: all header names and values together, and the path with its query
MAX_HEADER_BYTES = 64 << 10
MAX_TARGET_BYTES = 8 << 10
#: Probes and scrapers have no key.
OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics", "/load"})
#: what shows the requests of all tenants, or changes something for all
OPERATOR_PATHS = ("/reset_prefix_cache", "/debug/")


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of this (lower-case) name. Blanks around a value are not part of it (RFC 9110, 5.5), and not
    every server takes them away.
    """
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value).strip(b" \t")
    return None


def route_path(scope: Scope) -> str:
    """The path below the mount point (Serve's route prefix)."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(root) else path


def request_id_of(scope: Scope) -> str:
    """The client's `X-Request-Id` when it is 1 to 128 printable ASCII characters, else a new one; the same one for all
    who ask behind `EdgeMiddleware`.

    It is repeated to the client, logged, and found by `shoal why`: ids inside the cluster are ours, so that two clients
    cannot collide.
    """
    if (known := scope.get(_SCOPE_KEY)) is not None:
        return str(known)
    value = header(scope, REQUEST_ID_HEADER)
    if value is not None and 0 < len(value) <= MAX_REQUEST_ID_CHARS and all(0x20 <= byte < 0x7F for byte in value):
        return value.decode("ascii")
    return uuid.uuid4().hex


def check_head(scope: Scope) -> None:
    """Raises `HttpError` 431 or 414 for a head that is longer than any client of ours has reason to send."""
    num_bytes = sum([len(name) + len(value) for name, value in scope["headers"]])
    if num_bytes > MAX_HEADER_BYTES:
        message = f"The request headers have {num_bytes} bytes; allowed: {MAX_HEADER_BYTES}."
        raise HttpError(431, message, "headers_too_large", {"connection": "close"})
    num_bytes = len(scope["path"]) + len(scope.get("query_string", b""))
    if num_bytes > MAX_TARGET_BYTES:
        message = f"The path and its query have {num_bytes} bytes; allowed: {MAX_TARGET_BYTES}."
        raise HttpError(414, message, "uri_too_long", {"connection": "close"})


class EdgeMiddleware:
    """Outermost: puts `X-Request-Id` on every answer, refuses heads that are too long, counts answers by handler,
    method and status, and turns a mistake of ours into a 500 of the same shape as all errors.
    """

    def __init__(self, app: ASGIApp, metrics: HttpMetrics, handlers: frozenset[str], set_header: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._handlers = handlers
        self._set_header = set_header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope[_SCOPE_KEY] = request_id_of(scope)
        id_header = (REQUEST_ID_HEADER, request_id.encode("ascii"))
        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                if self._set_header:
                    message["headers"] = [*message.get("headers", ()), id_header]
                path = route_path(scope)
                # the label's values must be few, whatever paths and methods clients invent
                handler = path if path in self._handlers else "other"
                method = scope["method"] if scope["method"] in ("GET", "POST", "OPTIONS", "HEAD") else "other"
                self._metrics.answered(handler, method, message["status"])
            await send(message)

        try:
            check_head(scope)
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            log_error(error, request_id)
            if has_started:
                raise  # nothing can be said any more: the server closes the connection
            await send_error(send_with_id, error)


class TenantMiddleware:
    """Writes down whose request it is (`tenant_of`). 401 without a key where one is needed, except on `OPEN_PATHS`; 403
    where a tenant's key asks for what concerns all tenants.
    """

    def __init__(self, app: ASGIApp, tenants: TenantDesk) -> None:
        self._app = app
        self._tenants = tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (path := route_path(scope)) in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        name = self._tenants.name_of(header(scope, b"authorization"))
        if name is None:
            await send_error(send, unknown_key())
        elif path.startswith(OPERATOR_PATHS) and not self._tenants.opens_everything(name):
            message = f"{path[:100]} tells of all tenants, or changes it for all; allowed: a key of http.api_keys."
            await send_error(send, HttpError(403, message, "operator_key_needed"))
        else:
            scope[_TENANT_KEY] = name
            await self._app(scope, receive, send)


def tenant_of(scope: Scope) -> str:
    """The tenant's name; behind `TenantMiddleware`."""
    return str(scope[_TENANT_KEY])


def unknown_key() -> HttpError:
    """No tenant has this key, or there is none."""
    return HttpError(
        401,
        "The API key is missing or wrong; allowed: a header 'Authorization: Bearer KEY' with a key of this server.",
        "invalid_api_key",
        {"www-authenticate": "Bearer"},
    )


async def send_bytes(
    send: Send, status: int, body: bytes, content_type: str, headers: dict[str, str] | None = None
) -> None:
    """One complete response."""
    raw = [(b"content-type", content_type.encode("latin-1")), (b"content-length", b"%d" % len(body))]
    raw += [(name.encode("latin-1"), value.encode("latin-1")) for name, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: BaseException, headers: dict[str, str] | None = None) -> ErrorResponse:
    """The error as a complete response, with `headers` beside its own; returned for who wants to count it."""
    response = error_response(error)
    await send_bytes(send, response.status, response.body, "application/json", {**response.headers, **(headers or {})})
    return response


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, and cancel it as soon as the client goes away. Raises what `work` raises; a disconnect raises
    nothing.

    The body must have been read: the next message can then only be `http.disconnect`.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
    if not task.cancelled():
        task.result()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def log_error(error: BaseException, *request_ids: str) -> None:
    """Only what is neither the client's fault nor expected gets a stack trace. `request_ids`: ours, where the request
    has one, and the `X-Request-Id` of its answer.
    """
    names = ", X-Request-Id ".join(request_ids)
    if not isinstance(error, (ShoalError, HttpError)):
        logger.error("request %s: internal error in the HTTP edge", names, exc_info=error)
    elif (rule := rule_of(error)).status >= 500 and not isinstance(error, RefusedError):
        logger.warning("request %s failed with %d: %s", names, rule.status, error)
