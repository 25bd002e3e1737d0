"""ASYNC. One prepared request until its last byte: handed to the backend, answered, and its books closed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.types import Send

from replica.errors import NeverFitsError, TooManySequencesError
from replica.messages import RequestId
from router.answer import Answer
from router.backend import GenerationStream
from router.edge import Edge
from router.generation import NothingToGenerate, first_events, streamed_answer, whole_answer
from router.http_errors import ErrorRule, error_object, rule_of
from router.http_metrics import RequestRecord
from router.http_middleware import log_error, send_error
from router.journal import ABORTED, FAILED, FINISHED, REFUSED, Journal
from router.prepare import PreparedRequest
from router.sse import error_event
from router.stream_sender import StreamSender
from router.tenant_limits import Visit
from router.tenants import DEFAULT_TENANT

Result = TypeVar("Result")
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold chunks back
]


class Asked:
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


class Exchange:
    """One prepared request until its last byte."""

    def __init__(self, edge: Edge, prepared: PreparedRequest, asked: Asked, send: Send) -> None:
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
        elif isinstance(error, TooManySequencesError) and self._prepared.request.n == 1:
            error = TooManySequencesError(error.message, "prompt")
        rule, journal = rule_of(error), self._edge.backend.journal
        if not self._has_started:
            self._note(f"answered {rule.status}", **told(error))
        else:
            self._note("broken off in the middle of the answer", **told(error))
        journal.end(self._asked.request_id, FAILED if self._has_started else outcome(rule))
        if self._has_started or outcome(rule) == FAILED:
            self._record.end("error")
        else:  # also one that a replica had queued: each request is counted as ended or as refused
            self._record.refuse(rule.code or "refused")
        self._asked.leave(self._edge.clock())
        if self._has_started and self._prepared.request.stream:
            await self._send({"type": "http.response.body", "body": error_event(error_object(error))})
        elif not self._has_started:
            told_of_limit = self._edge.tenants.rate_headers(self._asked.tenant, self._edge.clock())
            await send_error(self._send, error, told_of_limit)


def outcome(rule: ErrorRule) -> str:
    """Of a request that had no byte of an answer."""
    return FAILED if rule.status in (500, 502) else REFUSED


def told(error: Exception) -> dict[str, Any]:
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
