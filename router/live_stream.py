"""ASYNC. One outstanding request: what was emitted, what waits for the reader, and how to continue it elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec

from replica.errors import ShoalError
from replica.messages import GenerateRequest, KVSource, RequestId, SequenceInput, SequenceOutput
from router.backend import TokenEvent
from router.event_buffer import EventBuffer


class LiveStream:
    """Implements `router.backend.GenerationStream`. Holds prompt and emitted tokens, so a lost replica costs a
    pause.
    """

    def __init__(
        self,
        request: GenerateRequest,
        on_finish: Callable[[RequestId, list[int]], None],
        on_abort: Callable[[RequestId], None],
    ) -> None:
        self.request = request
        #: NAME@HOST:PORT of the replica that has it, or had it last
        self.served_by = ""
        self._on_finish = on_finish
        self._on_abort = on_abort
        self._emitted: dict[int, list[int]] = {sequence.index: [] for sequence in request.sequences}
        self._unfinished = set(self._emitted)
        self._events = EventBuffer()
        self._error: ShoalError | None = None
        self._ready = asyncio.Event()
        self._ended = False

    @property
    def is_finished(self) -> bool:
        """Every sequence has its finish reason."""
        return not self._unfinished

    @property
    def has_begun(self) -> bool:
        """A token came."""
        return any(self._emitted.values())

    def wants(self, index: int) -> bool:
        """False for a sequence that ended, here or at the replica."""
        return index in self._unfinished

    def to_submit(self, is_returning: bool, kv_source: KVSource | None = None) -> GenerateRequest:
        """The request as the next replica must see it: the unfinished sequences with their output so far.
        `kv_source`: another one computes the prompts.
        """
        if not is_returning:
            return self.request if kv_source is None else msgspec.structs.replace(self.request, kv_source=kv_source)
        sequences = [
            _continued(sequence, self._emitted[sequence.index])
            for sequence in self.request.sequences
            if sequence.index in self._unfinished
        ]
        return msgspec.structs.replace(self.request, sequences=sequences, is_returning=True)

    def push(self, outputs: list[SequenceOutput]) -> None:
        """Outputs of one step, all of this request."""
        events = []
        for output in outputs:
            if output.index not in self._unfinished:
                continue  # ended here already (stop string), the replica had not heard of it yet
            self._emitted[output.index] += output.new_token_ids
            if output.finish_reason is not None:
                self._unfinished.discard(output.index)
            events.append(
                TokenEvent(
                    output.index,
                    output.new_token_ids,
                    output.finish_reason,
                    output.stop_reason,
                    output.num_cached_tokens,
                    output.logprobs,
                    output.prompt_logprobs,
                    output.stages,
                )
            )
        if events:
            self._events.push(events)
            self._ready.set()

    def fail(self, error: ShoalError) -> None:
        """No more events; the reader gets `error` after those that are there."""
        self._error = error
        self._ready.set()

    async def wait_first(self) -> None:
        """Until there is an event. Raises the error if that comes first.

        No deadline, because the dispatcher has the last word within one: who is held is given up by `HoldTimes`, who is
        at a replica is taken back when that is silent, and a replica that reports makes progress (its steps are
        watched by `Engine.check_health`, its grammars by `GRAMMAR_S`).
        """
        await self._ready.wait()
        if self._error is not None and not self._events:
            raise self._error

    async def __aiter__(self) -> AsyncIterator[list[TokenEvent]]:
        while True:
            while self._events:
                yield self._events.pop()
            if self._error is not None:
                raise self._error
            if not self._unfinished:
                return
            self._ready.clear()
            await self._ready.wait()

    def finish(self, index: int) -> None:
        """A stop string ended the sequence."""
        if index in self._unfinished:
            self._unfinished.discard(index)
            self._ready.set()
            self._on_finish(self.request.request_id, [index])

    def abort(self) -> None:
        if not self._ended:
            self._ended = True
            self._on_abort(self.request.request_id)


def _continued(sequence: SequenceInput, emitted: list[int]) -> SequenceInput:
    """With the output so far. Logprobs of the prompt came with the first output and are not asked for again."""
    sampling = sequence.sampling
    if emitted and sampling.num_prompt_logprobs is not None:
        sampling = msgspec.structs.replace(sampling, num_prompt_logprobs=None)
    return msgspec.structs.replace(sequence, output_token_ids=emitted.copy(), sampling=sampling)
