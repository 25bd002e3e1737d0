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
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from replica.errors import NeverFitsError, RefusedError, ShoalError, TenantLimitError
from replica.messages import RequestId
from router.answer import Answer
from router.app_settings import AppSettings
from router.backend import Backend, GenerationStream
from router.deadline import deadline_of, header_deadline_ms, late_body
from router.edge import Edge
from router.generation import NothingToGenerate, first_events, streamed_answer, whole_answer
from router.http_errors import ErrorRule, HttpError, error_object, error_response, rule_of
from router.http_metrics import RequestRecord
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
from router.journal import ABORTED, FAILED, FINISHED, REFUSED, Journal
from router.openai_api import ChatOrCompletion, parse_chat, parse_completion
from router.prepare import PreparedRequest, TextCodec, check_request, needs_thread, prepare
from router.request_body import Body, ClientGoneError
from router.sse import error_event
from router.stream_sender import StreamSender
from router.structured import ReasonAgainst, reason_against
from router.tenant_desk import TenantDesk
from router.tenant_limits import Visit
from router.tenant_request import for_tenant, most_urgent, priority_of
from router.tenants import DEFAULT_TENANT, default_tenant

Result = TypeVar("Result")
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold chunks back
]


class _Asked:
    """What is known of a request before its body is."""

    __slots__ = ("arrival_s", "arrived_s", "header_id", "header_ms", "is_read", "request_id", "tenant", "visit")

    def __init__(self, request_id: RequestId, header_id: str, arrival_s: float, tenant: str) -> None:
        #: the id of the answer
        self.request_id = request_id
        #: the answer's `X-Request-Id`
        self.header_id = header_id
        #: on the edge's clock, and in seconds since the epoch
        self.arrival_s, self.arrived_s = arrival_s, time.time()
        #: the deadline of its header in milliseconds
        self.header_ms: float | None = None
        #: its fields are right, so that the next question is whether it may be admitted
        self.is_read = False
        self.tenant = tenant
        #: once the tenant's limit of requests at once has let it in
        self.visit: Visit | None = None

    def leave(self, now: float) -> None:
        """Its tenant may have another one: before the client can know that this one has ended. Takes effect once."""
        if self.visit is not None:
            self.visit.end(now)

    def open_in(self, journal: Journal) -> None:
        """Its first entry."""
        journal.open(self.request_id, self.arrival_s, self.header_id)
        whose = {} if self.tenant == DEFAULT_TENANT else {"tenant": self.tenant}
        journal.note(self.request_id, self.arrival_s, "arrived", **whose)


class GenerateEndpoint:
    """POST /v1/completions or /v1/chat/completions, as an ASGI application."""

    def __init__(self, edge: Edge, parse: Callable[[bytes], ChatOrCompletion], id_prefix: str) -> None:
        self._edge = edge
        self._parse = parse
        self._id_prefix = id_prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = RequestId(self._id_prefix + uuid.uuid4().hex)
        asked = _Asked(request_id, request_id_of(scope), self._edge.clock(), tenant_of(scope))
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

    def _look(self, asked: _Asked) -> None:
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

    async def _serve(self, body: Body, send: Send, asked: _Asked) -> None:
        try:
            prepared = await self._prepared(body, asked)
        except Exception as error:
            await self._refuse(send, error, asked)
            return
        await _Exchange(self._edge, prepared, asked, send).run()

    async def _prepared(self, body: Body, asked: _Asked) -> PreparedRequest:
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

    async def _refuse(self, send: Send, error: Exception, asked: _Asked) -> None:
        edge, journal, rule = self._edge, self._edge.backend.journal, rule_of(error)
        log_error(error, asked.request_id, asked.header_id)
        if isinstance(error, RefusedError):
            edge.metrics.refused(rule.code or "refused")
            edge.tenants.refused(asked.tenant, rule.code or "refused")
        # a mistake in a field is the client's, who has been told all of it
        if asked.is_read or rule.status >= 500 or isinstance(error, NeverFitsError):
            asked.open_in(journal)
            journal.note(asked.request_id, edge.clock(), f"answered {rule.status}", **_told(error))
            journal.end(asked.request_id, _outcome(rule))
        asked.leave(edge.clock())
        is_limit = isinstance(error, TenantLimitError)
        await send_error(send, error, edge.tenants.rate_headers(asked.tenant, edge.clock()) if is_limit else None)


class _Exchange:
    """One prepared request until its last byte."""

    def __init__(self, edge: Edge, prepared: PreparedRequest, asked: _Asked, send: Send) -> None:
        self._edge = edge
        self._prepared = prepared
        self._send = send
        self._asked = asked
        self._record: RequestRecord = edge.metrics.start(prepared.model, asked.arrival_s, asked.visit)
        self._has_started = False

    async def run(self) -> None:
        """Ends with an answer, an error answer, an error event, or a cancellation; the record is closed each time."""
        stream: GenerationStream | None = None
        answer: Answer | None = None
        journal, asked = self._edge.backend.journal, self._asked
        asked.open_in(journal)
        try:
            stream = await self._submit()
            answer = Answer(self._prepared, self._edge.codec, stream, self._record)
            await self._answer(answer, stream)
            self._note("last byte")
            self._complete(answer)
            journal.end(asked.request_id, FINISHED)  # the backend has said so before, if it was asked
            self._record.end("length" if any(choice.finish_reason == "length" for choice in answer.choices) else "stop")
        except asyncio.CancelledError:
            self._note("the client left")
            journal.end(asked.request_id, ABORTED)
            self._record.end("abort")
            raise
        except Exception as error:
            await self._fail(error)
        finally:
            # Also after a stop string ended the last choice there may be events under way: `finish` has told the
            # replica.
            if stream is not None and (answer is None or not answer.is_complete):
                stream.abort()

    def _note(self, what: str, **detail: object) -> None:
        self._edge.backend.journal.note(self._asked.request_id, self._edge.clock(), what, **detail)

    async def _submit(self) -> GenerationStream:
        prepared = self._prepared
        if max(prepared.max_tokens) == 0 and not prepared.drops_output:
            return NothingToGenerate(prepared.num_choices)
        stream = await self._edge.backend.generate(prepared.generate)
        self._record.accepted(prepared.num_prompt_tokens, max(prepared.max_tokens), prepared.request.n)
        return stream

    async def _answer(self, answer: Answer, stream: GenerationStream) -> None:
        clock = self._edge.clock
        async with closing(aiter(stream)) as steps:
            first = await first_events(steps)
            sender = StreamSender(self._send)
            if not self._prepared.request.stream:
                body = await whole_answer(answer, first, steps, clock)
                self._asked.leave(clock())
                await self._begin([(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))])
                await sender.end(body)
                return
            async with closing(streamed_answer(answer, first, steps, clock)) as pieces:
                async for data in pieces:
                    if not self._has_started:
                        await self._begin(_SSE_HEADERS)
                    if answer.is_complete:
                        self._asked.leave(clock())
                    await sender.write(data)
            await sender.end()

    async def _begin(self, headers: list[tuple[bytes, bytes]]) -> None:
        self._has_started = True
        self._note("first byte")
        told = self._edge.tenants.rate_headers(self._asked.tenant, self._edge.clock())
        headers = headers + [(name.encode(), value.encode()) for name, value in told.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    def _complete(self, answer: Answer) -> None:
        prompts, n = self._prepared.prompts, self._prepared.request.n
        self._record.complete(
            [choice.num_tokens for choice in answer.choices],
            [len(prompts[choice.index // n]) - choice.num_cached_tokens for choice in answer.choices],
        )

    async def _fail(self, error: Exception) -> None:
        log_error(error, self._asked.request_id, self._asked.header_id)
        if isinstance(error, NeverFitsError) and error.param is None:
            # a replica's word, whose KV cache is smaller than the context: it does not know what the field is called
            error = NeverFitsError(error.message, "messages" if self._prepared.is_chat else "prompt")
        rule, journal = rule_of(error), self._edge.backend.journal
        if not self._has_started:
            self._note(f"answered {rule.status}", **_told(error))
        else:
            self._note("broken off in the middle of the answer", **_told(error))
        journal.end(self._asked.request_id, FAILED if self._has_started else _outcome(rule))
        if isinstance(error, RefusedError) and not self._has_started:
            self._record.refuse(rule.code or "refused")
        else:
            self._record.end("error")
        self._asked.leave(self._edge.clock())
        if self._has_started and self._prepared.request.stream:
            await self._send({"type": "http.response.body", "body": error_event(error_object(error))})
        elif not self._has_started:
            await send_error(self._send, error)


def _outcome(rule: ErrorRule) -> str:
    """Of a request that had no byte of an answer."""
    return FAILED if rule.status in (500, 502) else REFUSED


def _told(error: Exception) -> dict[str, Any]:
    """For the journal: what the client is told, in short."""
    told: Any = error_object(error)["error"]
    return {"code": told["code"] or "", "why": told["message"][:300]}


@asynccontextmanager
async def closing(iterator: AsyncIterator[Result]) -> AsyncIterator[AsyncIterator[Result]]:
    """Close an async generator that is left early; else the garbage collector does it, by a task for each request."""
    try:
        yield iterator
    finally:
        close = getattr(iterator, "aclose", None)
        if close is not None:
            await close()


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
