"""ASYNC. All choices of one request while their tokens arrive: what `generation.py` writes, whole or in chunks.

A plain answer (text and nothing else) has no `AnswerParts` and pays nothing for what it does not have.
"""

from __future__ import annotations

import asyncio
import uuid

from replica.errors import EngineError, InvalidRequestError, NotFiniteError, ShoalError
from replica.messages import FinishReason, TokenLogprobs
from router.answer_parts import AnswerParts
from router.backend import GenerationStream, TokenEvent
from router.choice import Choice
from router.http_metrics import RequestRecord
from router.logprobs import ChatLogprobs, CompletionLogprobs, LogprobList, PromptLogprobs, TokenNames, prompt_offsets
from router.prepare import PreparedRequest, TextCodec
from router.reply_parser import make_parser
from router.sse import usage_object

#: (choice, text that may be shown now); the text of a choice with parts is in its parts
Delta = tuple[Choice, str]
#: prompt positions whose logprobs are written in one go: about 1 ms with 20 alternatives each
PROMPT_SLICE = 64


class Answer:
    """Choices of one request, and what was counted."""

    def __init__(
        self, prepared: PreparedRequest, codec: TextCodec, stream: GenerationStream, record: RequestRecord
    ) -> None:
        request = prepared.request
        self.prepared = prepared
        self.record = record
        self._codec = codec
        self._stream = stream
        self._num_unfinished = prepared.num_choices
        skips_special = request.skip_special_tokens and not prepared.shows_special_tokens
        self.choices = [
            Choice(
                index,
                codec.detokenizer(skips_special),
                request.stop,
                request.include_stop_str_in_output,
                request.min_tokens,
            )
            for index in range(prepared.num_choices)
        ]
        #: one for each choice, or empty
        self.parts = _make_parts(prepared, codec)
        #: (choice index, logprobs) of prompts that are not in the parts yet: `write_prompts`
        self.prompts: list[tuple[int, list[TokenLogprobs]]] = []

    @property
    def served_by(self) -> str:
        return self._stream.served_by

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
                raise _given_up(reason)
            before = choice.num_tokens
            if not before:
                choice.num_cached_tokens = event.num_cached_tokens
            text = ""
            if self.parts:
                self._take_parts(choice, event)
            else:
                text = choice.push(event.token_ids, reason, event.stop_reason)
            self.record.tokens(choice.index, choice.num_tokens - before, now_s)
            if event.stages is not None:
                self.record.stages(choice.index, event.stages)
            if choice.finish_reason is not None:
                self._num_unfinished -= 1
                if choice.stopped_here and reason is None:
                    self._stream.finish(choice.index)
            deltas.append((choice, text))
        return deltas

    def _take_parts(self, choice: Choice, event: TokenEvent) -> None:
        parts = self.parts[choice.index]
        if parts.wants_prompt:
            parts.wants_prompt = False
            self.prompts.append((choice.index, event.prompt_logprobs))
        if self.prepared.drops_output:
            choice.end_without_output(event.finish_reason)
        else:
            parts.push(choice, event.token_ids, event.finish_reason, event.stop_reason, event.logprobs)

    async def write_prompts(self) -> None:
        """Put the prompts' logprobs into the parts, with turns for others in between: a prompt may have 100,000 tokens.

        Raises `EngineError` when a replica did not tell them all.
        """
        while self.prompts:
            index, entries = self.prompts.pop()
            position = index // self.prepared.request.n
            prompt = self.prepared.prompts[position]
            if len(entries) != len(prompt) - 1:
                raise EngineError("The server did not give the logprobs of the whole prompt.")
            offsets = self._echo_offsets(position)
            told: list[TokenLogprobs | None] = [None, *entries]
            for start in range(0, len(prompt), PROMPT_SLICE):
                stretch = slice(start, start + PROMPT_SLICE)
                self.parts[index].add_prompt(prompt[stretch], offsets[stretch], told[stretch])
                await asyncio.sleep(0)

    def _echo_offsets(self, position: int) -> list[int]:
        """Where each token of this prompt begins in its echo; zeros when the text is not echoed."""
        prompt, texts = self.prepared.prompts[position], self.prepared.echo_texts
        if not texts:
            return [0] * len(prompt)
        for skips_special in (False, True):
            offsets, text = prompt_offsets(prompt, texts[position], self._codec.detokenizer(skips_special).push)
            if text == texts[position]:
                break
        return offsets

    def usage(self) -> dict[str, object]:
        """Each prompt counts once, with the cached tokens of its first sample."""
        n = self.prepared.request.n
        return usage_object(
            self.prepared.num_prompt_tokens,
            sum(choice.num_tokens for choice in self.choices),
            sum(choice.num_cached_tokens for choice in self.choices[::n]),
            sum(part.num_reasoning_tokens for part in self.parts) if self.prepared.reply.splits_reasoning else None,
        )

    def finish_reason(self, choice: Choice) -> str | None:
        """As the API says it: `tool_calls` when the model stopped after calling tools."""
        reason = choice.finish_reason
        if (
            reason is FinishReason.STOP
            and self.parts
            and self.parts[choice.index].num_tool_calls
            and self.prepared.reply.says_tool_calls
        ):
            return "tool_calls"
        return reason

    def check_complete(self) -> None:
        """After the stream's end. Raises `EngineError` when a choice never finished: a short text must not look
        whole.
        """
        if not self.is_complete:
            raise EngineError("The server ended this request before it was complete.")


def _given_up(reason: FinishReason) -> ShoalError:
    if reason is FinishReason.INVALID:
        return InvalidRequestError("The request cannot be fulfilled as it was asked for.")
    if reason is FinishReason.NOT_FINITE:
        return NotFiniteError("The model computed NaN or infinity for this request.")
    return EngineError(f"The server gave up on this request before it was complete (finish reason {reason.value!r}).")


def _make_parts(prepared: PreparedRequest, codec: TextCodec) -> list[AnswerParts]:
    """Parts for each choice; none when the answer is text and nothing else."""
    request, reply = prepared.request, prepared.reply
    options = request.stream_options
    num_logprobs = prepared.generate.sequences[0].sampling.num_logprobs
    if (
        num_logprobs is None
        and request.prompt_logprobs is None
        and reply.is_plain
        and not (request.return_token_ids or prepared.echo_texts)
        and not (options is not None and options.continuous_usage_stats)
    ):
        return []
    names = TokenNames(codec.token_bytes, request.return_tokens_as_token_ids)
    parts = []
    for index in range(prepared.num_choices):
        logprobs: LogprobList | None = None
        echo_logprobs: CompletionLogprobs | None = None
        if num_logprobs is not None and prepared.is_chat:
            logprobs = ChatLogprobs(names, num_logprobs)
        elif num_logprobs is not None:
            logprobs = CompletionLogprobs(names, num_logprobs)
            echo_logprobs = CompletionLogprobs(names, num_logprobs) if prepared.echo_texts else None
        parts.append(
            AnswerParts(
                echo=prepared.echo_texts[index // request.n] if prepared.echo_texts else "",
                keeps_ids=request.return_token_ids,
                logprobs=logprobs,
                parser=None if reply.is_plain else make_parser(reply, _new_id, request.stream),
                echo_logprobs=echo_logprobs,
                prompt_logprobs=(
                    None if request.prompt_logprobs is None else PromptLogprobs(names, request.prompt_logprobs)
                ),
            )
        )
    return parts


def _new_id() -> str:
    return uuid.uuid4().hex[:24]
