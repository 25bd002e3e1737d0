"""PURE. The sampling parameters of a request: its fields, then the model's defaults, then neutral values; seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from replica.messages import SamplingParams
from router.app_settings import AppSettings
from router.openai_api import ChatOrCompletion, ChatRequest, CompletionRequest

_MASK64 = (1 << 64) - 1
#: Below this a temperature means greedy; from here to 0.01 it is lifted to 0.01, where the logits still divide
#: without overflow.
GREEDY_BELOW = 1e-5
LOWEST_TEMPERATURE = 0.01


def num_prompt_logprobs(request: ChatOrCompletion) -> int | None:
    """`echo` with `logprobs` tells those of the prompt too."""
    asked = [request.prompt_logprobs]
    if isinstance(request, CompletionRequest) and request.echo:
        asked.append(request.logprobs)
    return max((number for number in asked if number is not None), default=None)


def _num_logprobs(request: ChatOrCompletion) -> int | None:
    if isinstance(request, ChatRequest):
        return (request.top_logprobs or 0) if request.logprobs else None
    return request.logprobs


def bad_word_tokens(words: Sequence[str], encode: Callable[[str], list[int]]) -> tuple[tuple[int, ...], ...]:
    """Each word as it is written behind a space and without one, which are different tokens, as vLLM does."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ")
        for text in (bare, " " + bare) if bare else (word,):
            found[tuple(encode(text))] = None
    found.pop((), None)
    return tuple(found)


def resolved(
    request: ChatOrCompletion, settings: AppSettings, encode: Callable[[str], list[int]], grammar: str
) -> SamplingParams:
    """All that is the same for every sequence of a request. `encode` gives the token ids of a text."""
    temperature = settings.default_temperature if request.temperature is None else request.temperature
    if temperature < GREEDY_BELOW:
        temperature = 0.0
    elif temperature < LOWEST_TEMPERATURE:
        temperature = LOWEST_TEMPERATURE
    top_k = settings.default_top_k if request.top_k is None else request.top_k
    penalty = request.repetition_penalty
    return SamplingParams(
        max_tokens=1,
        temperature=temperature,
        top_k=max(0, top_k),
        top_p=settings.default_top_p if request.top_p is None else request.top_p,
        min_p=settings.default_min_p if request.min_p is None else request.min_p,
        ignore_eos=request.ignore_eos,
        stop_token_ids=request.stop_token_ids,
        repetition_penalty=settings.default_repetition_penalty if penalty is None else penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=request.logit_bias,
        allowed_token_ids=request.allowed_token_ids,
        bad_words=bad_word_tokens(request.bad_words, encode),
        num_logprobs=_num_logprobs(request),
        num_prompt_logprobs=num_prompt_logprobs(request),
        grammar=grammar,
    )


def sequence_seed(request: ChatOrCompletion, sample: int, random_seed: Callable[[], int]) -> int:
    return random_seed() if request.seed is None or request.seed == -1 else mixed_seed(request.seed, sample)


def mixed_seed(seed: int, sample: int) -> int:
    """64-bit seed of one sample of a prompt. Sample 0 uses `seed` as it is, so that n does not change the first answer;
    the others differ by a bijective mix (splitmix64's finalizer). The position of the prompt in a batch does not enter.
    """
    value = seed & _MASK64
    if sample == 0:
        return value
    value = (value + sample * 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
