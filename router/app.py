"""ASYNC. The OpenAI-compatible HTTP application: routes, and one request from bytes to bytes.

`create_app` gives a Starlette app for any ASGI server; Ray Serve mounts the same one. A generation goes through these
stages: read the body (415, 413, 408), look whether any request could be admitted (503), parse (400), ask whether its
tenant may have another request (429), look whether this one could be admitted (503), tokenize (400), ask whether the
tenant has tokens left (429), hand it to the backend (503), wait for the first tokens, and only then send the status
line. After the first byte errors are told inside the stream. Whatever ends a request early, a client that left
included, aborts it at the backend.

Bodies above `on_loop_max_bytes` are parsed and tokenized in a thread: 4 KiB take 2 ms, which no running stream
notices. A streamed token costs 3.6 us of CPU from event to the last byte handed to the server, 2.5 of them here.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from replica.errors import DeadlineExceededError, NeverFitsError, RefusedError, ShoalError
from replica.messages import RequestId
from router.app_settings import AppSettings
from router.backend import Backend
from router.deadline import deadline_of, header_deadline_ms, late_body
from router.edge import Edge
from router.exchange import Asked, Exchange, outcome, told
from router.http_errors import HttpError, error_response, rule_of
from router.http_middleware import (
    EdgeMiddleware,
    TenantMiddleware,
    log_error,
    request_id_of,
    send_error,
    tenant_of,
    unknown_key,
    until_disconnect,
)
from router.info_endpoints import InfoEndpoints
from router.openai_api import ChatOrCompletion, parse_chat, parse_completion
from router.prepare import PreparedRequest, TextCodec, check_request, needs_thread, prepare
from router.request_body import Body, ClientGoneError
from router.structured import ReasonAgainst, reason_against
from router.tenant_desk import TenantDesk
from router.tenant_request import for_tenant, most_urgent, priority_of
from router.tenants import default_tenant


class GenerateEndpoint:
    """POST /v1/completions or /v1/chat/completions, as an ASGI application."""

    def __init__(self, edge: Edge, parse: Callable[[bytes], ChatOrCompletion], id_prefix: str) -> None:
        self._edge = edge
        self._parse = parse
        self._id_prefix = id_prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = RequestId(self._id_prefix + uuid.uuid4().hex)
        asked = Asked(request_id, request_id_of(scope), self._edge.clock(), tenant_of(scope))
        await self._edge.entrance.enter(asked.tenant)
        try:
            asked.header_ms = header_deadline_ms(scope["headers"])
            body = await self._read(scope, receive, asked.header_ms)
        except ClientGoneError:
            return
        except Exception as error:
            await self._refuse(send, error, asked)
            return
        try:
            self._look(asked)
        except Exception as error:  # in a flood nearly all end here: no task, nothing parsed, nothing tokenized
            body.release()
            await self._refuse(send, error, asked)
            return
        try:
            await until_disconnect(receive, self._serve(body, send, asked))
        finally:
            body.release()
            asked.leave(self._edge.clock())  # however it ended

    def _look(self, asked: Asked) -> None:
        """Raises RefusedError if no request of this tenant could come in, whatever it says."""
        edge = self._edge
        tenant = edge.tenants.tenant(asked.tenant)
        if tenant is not None and edge.tenants.may_enter(asked.tenant):  # else another answer is due
            edge.backend.may_admit(1, most_urgent(tenant, edge.settings.policy), tenant.name, tenant.weight)

    async def _read(self, scope: Scope, receive: Receive, header_ms: float | None) -> Body:
        """A body that comes slowly does not carry a request over the deadline of its header."""
        try:
            async with asyncio.timeout(None if header_ms is None else header_ms / 1000):
                return await self._edge.read(scope, receive)
        except TimeoutError:  # the limit on bodies as such raises 408
            raise late_body() from None

    async def _serve(self, body: Body, send: Send, asked: Asked) -> None:
        try:
            prepared = await self._prepared(body, asked)
        except Exception as error:
            await self._refuse(send, error, asked)
            return
        await Exchange(self._edge, prepared, asked, send).run()

    async def _prepared(self, body: Body, asked: Asked) -> PreparedRequest:
        edge, is_long = self._edge, body.is_long
        request, num_sequences = await edge.compute(is_long, self._parse_and_check, body.take())
        tenant = edge.tenants.tenant(asked.tenant)
        if tenant is None:  # it was removed while the body came
            raise unknown_key()
        priority = priority_of(request, tenant, edge.settings.policy)
        asked.is_read = True
        visit = asked.visit = edge.tenants.enter(asked.tenant, edge.clock())
        edge.backend.may_admit(num_sequences, priority, visit.tenant.name, visit.tenant.weight)
        deadline_s = deadline_of(request, asked.header_ms, asked.arrived_s, time.time())
        prepared = await edge.compute(
            is_long or needs_thread(request), self._prepare, request, asked.request_id, deadline_s
        )
        body.release()
        visit.charge_prompt(prepared.num_prompt_tokens, edge.clock())
        return for_tenant(prepared, visit.tenant, priority)

    def _parse_and_check(self, body: bytes) -> tuple[ChatOrCompletion, int]:
        request = self._parse(body)
        return request, check_request(request, self._edge.settings)

    def _prepare(self, request: ChatOrCompletion, response_id: RequestId, deadline_s: float | None) -> PreparedRequest:
        edge = self._edge
        seed = functools.partial(secrets.randbits, 63)
        now_s = time.time()
        return prepare(request, edge.settings, edge.codec, response_id, now_s, seed, edge.reason_against, deadline_s)

    async def _refuse(self, send: Send, error: Exception, asked: Asked) -> None:
        edge, journal, rule = self._edge, self._edge.backend.journal, rule_of(error)
        log_error(error, asked.request_id, asked.header_id)
        if isinstance(error, RefusedError | DeadlineExceededError):
            edge.metrics.refused(rule.code or "refused")
            edge.tenants.refused(asked.tenant, rule.code or "refused")
        # a mistake in a field is the client's, who has been told all of it
        if asked.is_read or rule.status >= 500 or isinstance(error, NeverFitsError):
            asked.open_in(journal)
            journal.note(asked.request_id, edge.clock(), f"answered {rule.status}", **told(error))
            journal.end(asked.request_id, outcome(rule))
        asked.leave(edge.clock())
        await send_error(send, error, edge.tenants.rate_headers(asked.tenant, edge.clock()))


async def _on_error(request: Request, error: Exception) -> Response:
    """Errors of the info endpoints and of routing, in the shape of all others."""
    if isinstance(error, ClientGoneError):
        return Response(status_code=499)
    if isinstance(error, HTTPException):
        if request.method == "OPTIONS" and error.status_code == 405:  # of a page's browser it is answered before
            return Response(status_code=204, headers=error.headers)
        what = {
            404: f"There is no {request.method} {request.url.path[:200]} here.",
            405: "This path does not allow this method.",
        }
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        headers = {name.lower(): value for name, value in (error.headers or {}).items()}
        error = HttpError(error.status_code, what.get(error.status_code, str(error.detail)), code, headers)
    log_error(error, request_id_of(request.scope))
    answer = error_response(error)
    return Response(answer.body, answer.status, answer.headers, media_type="application/json")


def create_app(
    settings: AppSettings,
    tokenizer: TextCodec,
    backend: Backend,
    clock: Callable[[], float] = time.monotonic,
    reason_against: ReasonAgainst = reason_against,
    tenants: TenantDesk | None = None,
) -> Starlette:
    """The HTTP application. `clock` gives monotonic seconds; `reason_against` judges clients' grammars: facing
    strangers, let it be `GrammarChecker`'s. Without `tenants` all is one tenant's, whose keys are `settings.api_keys`.
    Holds two idle threads after the first long body.
    """
    if tenants is None:
        tenants = TenantDesk([default_tenant(settings.api_keys)], bool(settings.api_keys), now=clock())
    edge = Edge(settings, tokenizer, backend, clock, reason_against, tenants)
    info = InfoEndpoints(edge)
    routes = [
        Route("/v1/completions", GenerateEndpoint(edge, parse_completion, "cmpl-"), methods=["POST"]),
        Route("/v1/chat/completions", GenerateEndpoint(edge, parse_chat, "chatcmpl-"), methods=["POST"]),
        Route("/v1/models", info.models),
        Route("/v1/models/{name:path}", info.model),
        Route("/health", info.health),
        Route("/ping", info.health, methods=["GET", "POST"]),
        Route("/version", info.version),
        Route("/metrics", info.metrics),
        Route("/load", info.load),
        Route("/status", info.status),
        Route("/tokenize", info.tokenize, methods=["POST"]),
        Route("/detokenize", info.detokenize, methods=["POST"]),
        Route("/reset_prefix_cache", info.reset_prefix_cache, methods=["POST"]),
        Route("/debug/requests", info.debug_requests),
        Route("/debug/requests/{request_id:path}", info.debug_request),
        Route("/openapi.json", info.openapi),
    ]
    handlers = frozenset(route.path for route in routes)
    middleware = [Middleware(EdgeMiddleware, edge.metrics, handlers, settings.set_request_id_header)]
    if settings.cors_allow_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(settings.cors_allow_origins),
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after", "x-ratelimit-remaining-tokens"],
            )
        )
    middleware.append(Middleware(TenantMiddleware, tenants))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        edge.threads.shutdown(wait=False, cancel_futures=True)

    known = (ShoalError, HttpError, HTTPException, ClientGoneError)  # anything else: the middleware
    app = Starlette(
        routes=routes, middleware=middleware, exception_handlers=dict.fromkeys(known, _on_error), lifespan=lifespan
    )
    app.state.edge = edge  # for what may change while it serves
    return app
