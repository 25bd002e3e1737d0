"""ASYNC. From token events to an answer: whole (`whole_answer`) or as server-sent events (`streamed_answer`).

Holds no sockets: it reads a `GenerationStream` and returns or yields bytes. Whoever drives it must abort the stream
when it stops early; `Answer.is_complete` says whether there is anything left to abort.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import msgspec

from replica.errors import EngineError
from replica.messages import FinishReason
from router.backend import GenerationStream, TokenEvent
from router.choice import Choice
from router.http_metrics import RequestRecord
from router.openai_api import ChatRequest
from router.prepare import PreparedRequest, TextCodec
from router.sse import DONE, ChunkEncoder, usage_object

_encode = msgspec.json.Encoder().encode
#: (choice, text that may be shown now, token ids counted)
Delta = tuple[Choice, str, list[int]]


class NothingToGenerate:
    """A `GenerationStream` for max_tokens 0 (echo alone): every sequence ends at once, without a replica."""

    def __init__(self, num_sequences: int) -> None:
        self._num_sequences = num_sequences

    async def __aiter__(self) -> AsyncIterator[list[TokenEvent]]:
        yield [TokenEvent(index, [], FinishReason.LENGTH) for index in range(self._num_sequences)]

    def finish(self, index: int) -> None:
        """Nothing runs."""

    def abort(self) -> None:
        """Nothing runs."""


class Answer:
    """All choices of one request while their tokens arrive."""

    def __init__(
        self, prepared: PreparedRequest, codec: TextCodec, stream: GenerationStream, record: RequestRecord
    ) -> None:
        request = prepared.request
        self.prepared = prepared
        self.record = record
        self._stream = stream
        self._num_unfinished = prepared.num_choices
        self.choices = [
            Choice(
                index,
                codec.detokenizer(request.skip_special_tokens),
                request.stop,
                request.include_stop_str_in_output,
                request.min_tokens,
            )
            for index in range(prepared.num_choices)
        ]

    @property
    def is_complete(self) -> bool:
        return self._num_unfinished == 0

    def take(self, events: list[TokenEvent], now_s: float) -> list[Delta]:
        """One step's events. Events of a finished choice are dropped: they were under way when it was ended.

        Raises `EngineError` when a replica gave a sequence up.
        """
        deltas: list[Delta] = []
        for event in events:
            choice = self.choices[event.index]
            if choice.finish_reason is not None:
                continue
            reason = event.finish_reason
            if reason is not None and reason is not FinishReason.STOP and reason is not FinishReason.LENGTH:
                raise EngineError(
                    f"The server gave up on this request before it was complete (finish reason {reason.value!r})."
                )
            before = choice.num_tokens
            if not before:
                choice.num_cached_tokens = event.num_cached_tokens
            text = choice.push(event.token_ids, reason, event.stop_reason)
            num_new = choice.num_tokens - before
            self.record.tokens(choice.index, num_new, now_s)
            if choice.finish_reason is not None:
                self._num_unfinished -= 1
                if choice.stopped_here and reason is None:
                    self._stream.finish(choice.index)
            deltas.append((choice, text, event.token_ids[:num_new]))
        return deltas

    def usage(self) -> dict[str, object]:
        """Each prompt counts once, with the cached tokens of its first sample."""
        n = self.prepared.request.n
        return usage_object(
            self.prepared.num_prompt_tokens,
            sum(choice.num_tokens for choice in self.choices),
            sum(choice.num_cached_tokens for choice in self.choices[::n]),
        )

    def echo_text(self, choice: Choice) -> str:
        texts = self.prepared.echo_texts
        return texts[choice.index // self.prepared.request.n] if texts else ""

    def check_complete(self) -> None:
        """After the stream's end. Raises `EngineError` when a choice never finished: a short text must not look
        whole.
        """
        if not self.is_complete:
            raise EngineError("The server ended this request before it was complete.")


async def first_events(steps: AsyncIterator[list[TokenEvent]]) -> list[TokenEvent]:
    """Wait for the first step of the request: only after it may a status line go out. Raises what the stream raises."""
    events = await anext(steps, None)
    if events is None:
        raise EngineError("The server ended this request before its first token.")
    return events


async def whole_answer(
    answer: Answer, first: list[TokenEvent], steps: AsyncIterator[list[TokenEvent]], clock: Callable[[], float]
) -> bytes:
    """The JSON body of a request without `stream`."""
    texts: list[list[str]] = [[answer.echo_text(choice)] for choice in answer.choices]
    token_ids: list[list[int]] = [[] for _ in answer.choices]
    events: list[TokenEvent] | None = first
    while events is not None:
        for choice, text, ids in answer.take(events, clock()):
            texts[choice.index].append(text)
            token_ids[choice.index] += ids
        events = None if answer.is_complete else await anext(steps, None)
    answer.check_complete()
    prepared = answer.prepared
    make = _chat_choice if prepared.is_chat else _completion_choice
    body: dict[str, object] = {
        "id": prepared.response_id,
        "object": "chat.completion" if prepared.is_chat else "text_completion",
        "created": prepared.created_s,
        "model": prepared.model,
        "choices": [
            make(answer, choice, "".join(texts[choice.index]), token_ids[choice.index]) for choice in answer.choices
        ],
        "usage": answer.usage(),
    }
    if prepared.request.return_token_ids and prepared.is_chat:
        body["prompt_token_ids"] = prepared.prompts[0]
    return _encode(body)


def _ending(choice: Choice) -> dict[str, object]:
    return {"logprobs": None, "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}


def _chat_choice(answer: Answer, choice: Choice, text: str, token_ids: list[int]) -> dict[str, object]:
    message = {"role": "assistant", "content": text, "refusal": None}
    result: dict[str, object] = {"index": choice.index, "message": message, **_ending(choice)}
    if answer.prepared.request.return_token_ids:
        result["token_ids"] = token_ids
    return result


def _completion_choice(answer: Answer, choice: Choice, text: str, token_ids: list[int]) -> dict[str, object]:
    prepared = answer.prepared
    result: dict[str, object] = {"index": choice.index, "text": text, **_ending(choice)}
    if prepared.request.return_token_ids:
        result["token_ids"] = token_ids
        result["prompt_token_ids"] = prepared.prompts[choice.index // prepared.request.n]
    return result


class _ChunkWriter:
    """What a request's chunks carry beside text: role, echo, token ids, running usage. One step in, bytes of one
    write out.
    """

    def __init__(self, answer: Answer) -> None:
        request = answer.prepared.request
        options = request.stream_options
        self._answer = answer
        self._encoder = ChunkEncoder(answer.prepared)
        self._with_ids = request.return_token_ids
        self._running_usage = options is not None and options.include_usage and options.continuous_usage_stats
        self._final_usage = options is not None and options.include_usage
        self._plain = not (self._with_ids or self._running_usage or answer.prepared.echo_texts)
        self._waiting_ids: list[list[int]] = [[] for _ in answer.choices] if self._with_ids else []
        self._begun = [False] * len(answer.choices)

    def opening(self) -> bytes:
        """Role chunks of a chat; nothing for a completion."""
        if not isinstance(self._answer.prepared.request, ChatRequest):
            return b""
        extra: dict[str, object] | None = None
        if self._with_ids:
            extra = {"prompt_token_ids": self._answer.prepared.prompts[0]}
        usage = self._answer.usage() if self._running_usage else None
        return b"".join(self._encoder.role(choice.index, extra, usage) for choice in self._answer.choices)

    def step(self, deltas: list[Delta]) -> bytes:
        """Chunks of one step; b"" when no text came out of it."""
        if self._plain:
            encoder = self._encoder
            return b"".join(
                [
                    encoder.text(choice.index, text) if choice.finish_reason is None else encoder.full(choice, text)
                    for choice, text, _ in deltas
                    if text or choice.finish_reason is not None
                ]
            )
        return b"".join([self._rich(*delta) for delta in deltas])

    def _rich(self, choice: Choice, text: str, token_ids: list[int]) -> bytes:
        index, n = choice.index, self._answer.prepared.request.n
        is_first = not self._begun[index]
        if is_first:
            text = self._answer.echo_text(choice) + text
        if self._with_ids:
            self._waiting_ids[index] += token_ids
        if not text and choice.finish_reason is None:
            return b""
        self._begun[index] = True
        extra: dict[str, object] = {}
        if self._with_ids:
            extra["token_ids"] = self._waiting_ids[index]
            self._waiting_ids[index] = []
            if is_first and not self._answer.prepared.is_chat:
                extra["prompt_token_ids"] = self._answer.prepared.prompts[index // n]
        return self._encoder.full(choice, text, extra, self._answer.usage() if self._running_usage else None)

    def ending(self) -> bytes:
        """After the last choice has finished."""
        return (self._encoder.usage(self._answer.usage()) if self._final_usage else b"") + DONE


async def streamed_answer(
    answer: Answer, first: list[TokenEvent], steps: AsyncIterator[list[TokenEvent]], clock: Callable[[], float]
) -> AsyncIterator[bytes]:
    """Bytes of the event stream: at most one item per engine step, however many choices it advanced."""
    writer = _ChunkWriter(answer)
    begin = writer.opening()
    events: list[TokenEvent] | None = first
    while events is not None:
        data = begin + writer.step(answer.take(events, clock()))
        begin = b""
        if answer.is_complete:
            yield data + writer.ending()
            return
        if data:
            yield data
        events = await anext(steps, None)
    answer.check_complete()
