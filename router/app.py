"""ASYNC. The OpenAI-compatible HTTP application: routes, and one request from bytes to bytes.

`create_app` gives a Starlette app for any ASGI server; Ray Serve mounts the same one. A generation goes through these
stages: read the body (413), parse (400), look whether it could be admitted (503), tokenize (400), hand it to the
backend (503), wait for the first tokens, and only then send the status line. After the first byte errors are told
inside the stream. Whatever ends a request early, a client that left included, aborts it at the backend.

Bodies above `on_loop_max_bytes` are parsed and tokenized in a thread: 4 KiB take 2 ms, which no running stream
notices. A streamed token costs 3.6 us of CPU from event to the last byte handed to the server, 2.5 of them here.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from replica.errors import RefusedError, ShoalError
from router.app_settings import AppSettings
from router.backend import Backend, GenerationStream
from router.generation import Answer, NothingToGenerate, first_events, streamed_answer, whole_answer
from router.http_errors import HttpError, error_object, error_response, rule_of
from router.http_metrics import HttpMetrics, RequestRecord
from router.http_middleware import (
    ApiKeyMiddleware,
    ClientGoneError,
    EdgeMiddleware,
    read_body,
    send_bytes,
    send_error,
    until_disconnect,
)
from router.openai_api import (
    ChatOrCompletion,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)
from router.prepare import (
    PreparedRequest,
    TextCodec,
    check_request,
    check_vocabulary,
    model_name,
    prepare,
    render_chat,
)
from router.sse import error_event

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
_encode = msgspec.json.Encoder().encode
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold chunks back
]


class Edge:
    """What all endpoints share."""

    def __init__(self, settings: AppSettings, codec: TextCodec, backend: Backend, clock: Callable[[], float]) -> None:
        self.settings = settings
        self.codec = codec
        self.backend = backend
        #: monotonic seconds, for latencies
        self.clock = clock
        self.metrics = HttpMetrics(settings.metrics_prefix, settings.router_name)
        self.started_s = int(time.time())
        self.threads = ThreadPoolExecutor(settings.num_tokenizer_threads, thread_name_prefix="tokenizer")

    async def compute(self, size: int, function: Callable[..., Result], *args: Any) -> Result:
        """Call `function` here when the body had few bytes, else in a thread."""
        if size <= self.settings.on_loop_max_bytes:
            return function(*args)
        return await asyncio.get_running_loop().run_in_executor(self.threads, function, *args)


class GenerateEndpoint:
    """POST /v1/completions or /v1/chat/completions, as an ASGI application."""

    def __init__(self, edge: Edge, parse: Callable[[bytes], ChatOrCompletion], id_prefix: str) -> None:
        self._edge = edge
        self._parse = parse
        self._id_prefix = id_prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        edge = self._edge
        arrival_s = edge.clock()
        try:
            body = await read_body(scope, receive, edge.settings.max_body_bytes)
            request, num_sequences = await edge.compute(len(body), self._parse_and_check, body)
            edge.backend.may_admit(num_sequences)
            prepared = await edge.compute(len(body), self._prepare, request)
        except ClientGoneError:
            return
        except Exception as error:
            await self._refuse(send, error)
            return
        await until_disconnect(receive, _Exchange(edge, prepared, arrival_s, send).run())

    def _parse_and_check(self, body: bytes) -> tuple[ChatOrCompletion, int]:
        request = self._parse(body)
        return request, check_request(request, self._edge.settings)

    def _prepare(self, request: ChatOrCompletion) -> PreparedRequest:
        edge = self._edge
        response_id = self._id_prefix + uuid.uuid4().hex
        return prepare(
            request, edge.settings, edge.codec, response_id, time.time(), functools.partial(secrets.randbits, 63)
        )

    async def _refuse(self, send: Send, error: Exception) -> None:
        _log_if_ours(error)
        if isinstance(error, RefusedError):
            self._edge.metrics.refused(rule_of(error).code or "refused")
        await send_error(send, error)


class _Exchange:
    """One prepared request until its last byte."""

    def __init__(self, edge: Edge, prepared: PreparedRequest, arrival_s: float, send: Send) -> None:
        self._edge = edge
        self._prepared = prepared
        self._send = send
        self._record: RequestRecord = edge.metrics.start(prepared.model, arrival_s)
        self._has_started = False

    async def run(self) -> None:
        """Ends with an answer, an error answer, an error event, or a cancellation; the record is closed each time."""
        stream: GenerationStream | None = None
        answer: Answer | None = None
        try:
            stream = await self._submit()
            answer = Answer(self._prepared, self._edge.codec, stream, self._record)
            await self._answer(answer, stream)
            self._record.end("length" if any(choice.finish_reason == "length" for choice in answer.choices) else "stop")
        except asyncio.CancelledError:
            self._record.end("abort")
            raise
        except Exception as error:
            await self._fail(error)
        finally:
            # Also after a stop string ended the last choice there may be events under way: `finish` has told the
            # replica.
            if stream is not None and (answer is None or not answer.is_complete):
                stream.abort()

    async def _submit(self) -> GenerationStream:
        prepared = self._prepared
        if max(prepared.max_tokens) == 0:
            return NothingToGenerate(prepared.num_choices)
        stream = await self._edge.backend.generate(prepared.generate)
        self._record.accepted(prepared.num_prompt_tokens, max(prepared.max_tokens), prepared.request.n)
        return stream

    async def _answer(self, answer: Answer, stream: GenerationStream) -> None:
        clock = self._edge.clock
        async with closing(aiter(stream)) as steps:
            first = await first_events(steps)
            if not self._prepared.request.stream:
                body = await whole_answer(answer, first, steps, clock)
                self._has_started = True
                await send_bytes(self._send, 200, body, "application/json")
                return
            async with closing(streamed_answer(answer, first, steps, clock)) as pieces:
                async for data in pieces:
                    if not self._has_started:
                        self._has_started = True
                        await self._send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
                    await self._send({"type": "http.response.body", "body": data, "more_body": True})
            await self._send({"type": "http.response.body", "body": b""})

    async def _fail(self, error: Exception) -> None:
        _log_if_ours(error)
        if isinstance(error, RefusedError) and not self._has_started:
            self._record.refuse(rule_of(error).code or "refused")
        else:
            self._record.end("error")
        if self._has_started and self._prepared.request.stream:
            await self._send({"type": "http.response.body", "body": error_event(error_object(error))})
        elif not self._has_started:
            await send_error(self._send, error)


@asynccontextmanager
async def closing(iterator: AsyncIterator[Result]) -> AsyncIterator[AsyncIterator[Result]]:
    """Close an async generator that is left early; else the garbage collector does it, by a task for each request."""
    try:
        yield iterator
    finally:
        close = getattr(iterator, "aclose", None)
        if close is not None:
            await close()


def _log_if_ours(error: Exception) -> None:
    """Only what is neither the client's fault nor expected gets a stack trace."""
    if not isinstance(error, (ShoalError, HttpError)):
        logger.error("internal error in the HTTP edge", exc_info=error)
    elif rule_of(error).status >= 500 and not isinstance(error, RefusedError):
        logger.warning("request failed: %s", error)


class InfoEndpoints:
    """Everything that generates nothing."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    def _card(self, name: str) -> dict[str, object]:
        edge = self._edge
        return {
            "id": name,
            "object": "model",
            "created": edge.started_s,
            "owned_by": "shoal",
            "root": edge.settings.served_model_names[0],
            "parent": None,
            "max_model_len": edge.settings.max_model_len,
        }

    async def models(self, request: Request) -> Response:
        cards = [self._card(name) for name in self._edge.settings.served_model_names]
        return json_response({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        return json_response(self._card(model_name(request.path_params["name"], self._edge.settings)))

    async def health(self, request: Request) -> Response:
        health = self._edge.backend.health()
        return json_response({**health.detail, "ok": health.ok}, 200 if health.ok else 503)

    async def version(self, request: Request) -> Response:
        return json_response({"version": self._edge.settings.version})

    async def load(self, request: Request) -> Response:
        return json_response({"server_load": self._edge.backend.load()})

    async def status(self, request: Request) -> Response:
        """For `shoal status`: what this router knows of the replicas."""
        return json_response(self._edge.backend.status())

    async def metrics(self, request: Request) -> Response:
        text = self._edge.metrics.text() + self._edge.backend.metrics_text()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def tokenize(self, request: Request) -> Response:
        body = await read_body(request.scope, request.receive, self._edge.settings.max_body_bytes)
        return json_response(await self._edge.compute(len(body), self._tokenize, body))

    def _tokenize(self, body: bytes) -> dict[str, object]:
        codec, settings = self._edge.codec, self._edge.settings
        request = parse_tokenize(body)
        model_name(request.model, settings)
        text = request.prompt if request.prompt is not None else render_chat(request, codec)
        add_special = request.add_special_tokens
        if add_special is None:
            add_special = request.prompt is not None
        tokens = codec.encode(text, add_special)
        strings = [codec.token_text(token_id) for token_id in tokens] if request.return_token_strs else None
        return {"count": len(tokens), "max_model_len": settings.max_model_len, "tokens": tokens, "token_strs": strings}

    async def detokenize(self, request: Request) -> Response:
        body = await read_body(request.scope, request.receive, self._edge.settings.max_body_bytes)
        return json_response(await self._edge.compute(len(body), self._detokenize, body))

    def _detokenize(self, body: bytes) -> dict[str, object]:
        request = parse_detokenize(body)
        model_name(request.model, self._edge.settings)
        check_vocabulary(request.tokens, self._edge.settings.vocab_size, "tokens")
        return {"prompt": self._edge.codec.decode(request.tokens, False)}


def json_response(value: object, status: int = 200) -> Response:
    return Response(_encode(value), status, media_type="application/json")


async def _on_error(request: Request, error: Exception) -> Response:
    """Errors of the info endpoints and of routing, in the shape of all others."""
    if isinstance(error, ClientGoneError):
        return Response(status_code=499)
    if isinstance(error, HTTPException):
        what = {
            404: f"There is no {request.method} {request.url.path[:200]} here.",
            405: "This path does not allow this method.",
        }
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        headers = {name.lower(): value for name, value in (error.headers or {}).items()}
        error = HttpError(error.status_code, what.get(error.status_code, str(error.detail)), code, headers)
    _log_if_ours(error)
    answer = error_response(error)
    return Response(answer.body, answer.status, answer.headers, media_type="application/json")


def create_app(
    settings: AppSettings, tokenizer: TextCodec, backend: Backend, clock: Callable[[], float] = time.monotonic
) -> Starlette:
    """The HTTP application. `clock` gives monotonic seconds. Holds two idle threads after the first long body."""
    edge = Edge(settings, tokenizer, backend, clock)
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
                expose_headers=["x-request-id", "retry-after"],
            )
        )
    if settings.api_keys:
        middleware.append(Middleware(ApiKeyMiddleware, settings.api_keys))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        edge.threads.shutdown(wait=False, cancel_futures=True)

    known = (ShoalError, HttpError, HTTPException, ClientGoneError, Exception)
    return Starlette(
        routes=routes, middleware=middleware, exception_handlers=dict.fromkeys(known, _on_error), lifespan=lifespan
    )
