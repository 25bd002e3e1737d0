"""ASYNC. From token events to an answer: whole (`whole_answer`) or as server-sent events (`streamed_answer`).

Holds no sockets: it reads a `GenerationStream` and returns or yields bytes. Whoever drives it must abort the stream
when it stops early; `Answer.is_complete` says whether there is anything left to abort.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import msgspec

from replica.errors import EngineError
from replica.messages import FinishReason
from router.answer import Answer, Delta
from router.answer_parts import delta_object, message_object
from router.backend import TokenEvent
from router.choice import Choice
from router.kv_transfer_params import answered
from router.message_parts import MessageDelta
from router.sse import DONE, ChunkEncoder

_encode = msgspec.json.Encoder().encode


class NothingToGenerate:
    """A `GenerationStream` for max_tokens 0 (echo alone): every sequence ends at once, without a replica."""

    served_by = ""

    def __init__(self, num_sequences: int) -> None:
        self._num_sequences = num_sequences

    async def __aiter__(self) -> AsyncIterator[list[TokenEvent]]:
        yield [TokenEvent(index, [], FinishReason.LENGTH) for index in range(self._num_sequences)]

    def finish(self, index: int) -> None:
        """Nothing runs."""

    def abort(self) -> None:
        """Nothing runs."""


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
    texts: list[list[str]] = [[] for _ in answer.choices]
    events: list[TokenEvent] | None = first
    while events is not None:
        for choice, text in answer.take(events, clock()):
            texts[choice.index].append(text)
        if answer.prompts:
            await answer.write_prompts()
        events = None if answer.is_complete else await anext(steps, None)
    answer.check_complete()
    prepared = answer.prepared
    body: dict[str, object] = {
        "id": prepared.response_id,
        "object": "chat.completion" if prepared.is_chat else "text_completion",
        "created": prepared.created_s,
        "model": prepared.model,
        "choices": [_whole_choice(answer, choice, "".join(texts[choice.index])) for choice in answer.choices],
        "usage": answer.usage(),
    }
    if prepared.is_chat:
        if prepared.request.return_token_ids:
            body["prompt_token_ids"] = prepared.prompts[0]
        if prepared.request.prompt_logprobs is not None:
            body["prompt_logprobs"] = answer.parts[0].take_prompt_logprobs()
    params = prepared.request.kv_transfer_params
    if params is not None and params.do_remote_decode:
        body["kv_transfer_params"] = answered(prepared.response_id, answer.served_by, prepared.prompts)
    return _encode(body)


def _whole_choice(answer: Answer, choice: Choice, text: str) -> dict[str, object]:
    """An entry of `choices`."""
    prepared, request = answer.prepared, answer.prepared.request
    parts = answer.parts[choice.index] if answer.parts else None
    result: dict[str, object] = {"index": choice.index}
    if prepared.is_chat:
        message = parts.take_message() if parts is not None else MessageDelta(text)
        result["message"] = message_object(message, prepared.reply.splits_reasoning)
    else:
        result["text"] = parts.take_text() if parts is not None else text
    result["logprobs"] = parts.take_logprobs() if parts is not None else None
    result["finish_reason"] = answer.finish_reason(choice)
    result["stop_reason"] = choice.stop_reason
    if parts is not None and request.return_token_ids:
        result["token_ids"] = parts.take_token_ids()
        if not prepared.is_chat:
            result["prompt_token_ids"] = prepared.prompts[choice.index // request.n]
    if parts is not None and request.prompt_logprobs is not None and not prepared.is_chat:
        result["prompt_logprobs"] = parts.take_prompt_logprobs()
    return result


class _ChunkWriter:
    """One step in, bytes of one write out."""

    def __init__(self, answer: Answer) -> None:
        request = answer.prepared.request
        options = request.stream_options
        self._answer = answer
        self._encoder = ChunkEncoder(answer.prepared)
        self._running_usage = options is not None and options.include_usage and options.continuous_usage_stats
        self._final_usage = options is not None and options.include_usage
        self._begun = [False] * len(answer.choices)

    def _usage(self) -> dict[str, object] | None:
        return self._answer.usage() if self._running_usage else None

    def opening(self) -> bytes:
        """Role chunks of a chat; nothing for a completion."""
        prepared = self._answer.prepared
        if not prepared.is_chat:
            return b""
        extra: dict[str, object] = {}
        if prepared.request.return_token_ids:
            extra["prompt_token_ids"] = prepared.prompts[0]
        usage = self._usage()
        if usage is not None:
            extra["usage"] = usage
        return b"".join([self._encoder.role(choice.index, extra) for choice in self._answer.choices])

    def step(self, deltas: list[Delta]) -> bytes:
        """Chunks of one step; b"" when nothing to read came out of it."""
        encoder = self._encoder
        if self._answer.parts:
            return b"".join([self._from_parts(choice) for choice, _ in deltas])
        return b"".join(
            [
                encoder.text(choice.index, text) if choice.finish_reason is None else encoder.end(choice, text)
                for choice, text in deltas
                if text or choice.finish_reason is not None
            ]
        )

    def _from_parts(self, choice: Choice) -> bytes:
        prepared = self._answer.prepared
        parts = self._answer.parts[choice.index]
        has_ended = choice.finish_reason is not None
        if not (has_ended or parts.has_news):
            return b""
        fields: dict[str, object] = {"index": choice.index}
        if prepared.is_chat:
            fields["delta"] = delta_object(parts.take_message())
        else:
            fields["text"] = parts.take_text()
        fields["logprobs"] = parts.take_logprobs()
        fields["finish_reason"] = self._answer.finish_reason(choice)
        if has_ended:
            fields["stop_reason"] = choice.stop_reason
        if prepared.request.return_token_ids:
            fields["token_ids"] = parts.take_token_ids()
        if not self._begun[choice.index]:
            self._begun[choice.index] = True
            if prepared.request.return_token_ids and not prepared.is_chat:
                fields["prompt_token_ids"] = prepared.prompts[choice.index // prepared.request.n]
        return self._encoder.chunk(fields, self._usage())

    def ending(self) -> bytes:
        """After the last choice has finished."""
        return (self._encoder.usage(self._answer.usage()) if self._final_usage else b"") + DONE


async def streamed_answer(
    answer: Answer, first: list[TokenEvent], steps: AsyncIterator[list[TokenEvent]], clock: Callable[[], float]
) -> AsyncIterator[bytes]:
    """Bytes of the event stream: at most one item per list of `steps`, however many choices it advanced."""
    writer = _ChunkWriter(answer)
    begin = writer.opening()
    events: list[TokenEvent] | None = first
    while events is not None:
        deltas = answer.take(events, clock())
        if answer.prompts:
            await answer.write_prompts()
        data = begin + writer.step(deltas)
        begin = b""
        if answer.is_complete:
            yield data + writer.ending()
            return
        if data:
            yield data
        events = await anext(steps, None)
    answer.check_complete()
