"""PURE. How long prompts and outputs may be, and how much of one request there may be in all: checked and cut."""

from __future__ import annotations

from collections.abc import Sequence

from replica.errors import InvalidRequestError, NeverFitsError
from replica.messages import MAX_MESSAGE_BYTES, SamplingParams
from router.app_settings import AppSettings
from router.openai_api import ChatOrCompletion, ChatRequest
from router.sentences import short

#: of a token id on the wire, at most
_BYTES_PER_ID = 5
#: most logprobs of prompts, and of outputs, in one answer: about 64 bytes of JSON each
MAX_LOGPROBS = 1 << 20


def check_vocabulary(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises `InvalidRequestError` naming the first id that is no token."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise InvalidRequestError(
            f"{param} holds the token id {short(wrong)}, which is out of vocabulary; allowed: 0 to {vocab_size - 1}.",
            param,
        )


def check_length(num_tokens: int, max_model_len: int, param: str, at_least: bool = False) -> None:
    if num_tokens >= max_model_len:
        raise NeverFitsError(
            f"The prompt has {'at least ' if at_least else ''}{num_tokens} tokens, "
            # litellm knows an overflow by these words of OpenAI's: "this model's maximum context length is"
            f"but this model's maximum context length is {max_model_len} tokens "
            f"and the output needs at least 1 of them.",
            param,
        )


def asked_max_tokens(request: ChatOrCompletion) -> tuple[int | None, str]:
    """The newer field wins (A-13)."""
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return request.max_completion_tokens, "max_completion_tokens"
    return request.max_tokens, "max_tokens"


def check_message_size(request: ChatOrCompletion, prompts: list[list[int]], sampling: SamplingParams) -> None:
    """A replica gets everything once for each sequence, in one message. Raises `InvalidRequestError`."""
    num_ids = len(sampling.allowed_token_ids) + sum(map(len, sampling.bad_words)) + 3 * len(sampling.logit_bias)
    each = 256 + len(sampling.grammar.encode()) + _BYTES_PER_ID * num_ids
    num_bytes = request.n * (each * len(prompts) + _BYTES_PER_ID * sum(map(len, prompts)))
    if num_bytes > MAX_MESSAGE_BYTES // 2:
        raise InvalidRequestError(
            f"The request is about {num_bytes >> 20} MiB for a replica, with prompt, grammar and token ids repeated "
            f"for each of {request.n * len(prompts)} sequences; allowed: {MAX_MESSAGE_BYTES >> 21} MiB. Ask for fewer.",
            "n" if request.n > 1 else "prompt",
        )


def check_logprobs(
    request: ChatOrCompletion, prompts: list[list[int]], limits: list[int], sampling: SamplingParams
) -> None:
    """A whole answer is kept until it is sent, at about 1.5 KB for a token with 20 alternatives, so a short request
    could ask for gigabytes. Raises `InvalidRequestError`.
    """
    for num_top, lengths, what in (
        (sampling.num_prompt_logprobs, map(len, prompts), "prompts"),
        (sampling.num_logprobs, limits, "outputs"),
    ):
        num_told = 0 if num_top is None else request.n * sum(lengths) * (num_top + 1)
        if num_told > MAX_LOGPROBS:
            by_prompt_logprobs = what == "prompts" and request.prompt_logprobs is not None
            raise InvalidRequestError(
                f"The request asks for up to {num_told} logprobs of {what} (tokens x n x alternatives); "
                f"allowed: {MAX_LOGPROBS}.",
                "prompt_logprobs" if by_prompt_logprobs else "logprobs",
            )


def truncated(token_ids: list[int], request: ChatOrCompletion, settings: AppSettings) -> list[int]:
    """The end of a prompt, as `truncate_prompt_tokens` says. -1 leaves room for the output that was asked for."""
    keep = request.truncate_prompt_tokens
    if keep == -1:
        asked, _ = asked_max_tokens(request)
        if asked is None:
            asked = 1 if isinstance(request, ChatRequest) else settings.default_max_tokens
        keep = max(1, settings.max_model_len - max(1, asked))
    return token_ids if keep is None else token_ids[-keep:]


def clip(request: ChatOrCompletion, num_prompt_tokens: int, settings: AppSettings) -> int:
    left = settings.max_model_len - num_prompt_tokens
    limit, _ = asked_max_tokens(request)
    if limit is None:
        limit = left if isinstance(request, ChatRequest) else max(settings.default_max_tokens, request.min_tokens)
    return min(limit, left)
