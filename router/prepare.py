"""PURE. A checked request to what the replicas get: prompts as token ids, sampling parameters, seeds.

`check_request` is cheap and comes first: everything that can be refused without tokenizing (model name, counts,
vocabulary). `prepare` does the work and may run in a thread. Prompt + max_tokens beyond the context is clipped, as
vLLM does; a prompt that leaves no room for a token is refused with both numbers, and so is a
max_tokens that is alone above the context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from replica.errors import InvalidRequestError, NeverFitsError, UnknownModelError
from replica.messages import GenerateRequest, RequestId, SamplingParams, SequenceInput
from router.app_settings import AppSettings
from router.detokenizer import Detokenizer
from router.openai_api import ChatOrCompletion, ChatRequest, CompletionRequest, short

_MASK64 = (1 << 64) - 1
#: Below this a temperature means greedy; from here to 0.01 it is lifted to 0.01, where the logits still divide
#: without overflow.
GREEDY_BELOW = 1e-5
LOWEST_TEMPERATURE = 0.01


class ChatRenderer(Protocol):
    """What `prepare` needs of a chat template."""

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str: ...


class TextCodec(Protocol):
    """What the HTTP edge needs of a tokenizer; `router.tokenizer.Tokenizer` is one."""

    @property
    def max_bytes_per_token(self) -> int | None: ...

    @property
    def chat_template(self) -> ChatRenderer | None: ...

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]: ...

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str: ...

    def token_text(self, token_id: int) -> str | None: ...

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer: ...


class PreparedRequest(msgspec.Struct, frozen=True):
    """A request ready to be sent, and what is needed to answer it. Choice index = prompt x n + sample."""

    request: ChatOrCompletion
    response_id: str
    #: seconds since the epoch
    created_s: int
    model: str
    prompts: list[list[int]]
    #: output limit of each prompt's sequences, after clipping
    max_tokens: list[int]
    generate: GenerateRequest
    #: text in front of each prompt's output (`echo`), else empty
    echo_texts: list[str]

    @property
    def is_chat(self) -> bool:
        return isinstance(self.request, ChatRequest)

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.request.n

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


def model_name(name: str | None, settings: AppSettings) -> str:
    """The served name a request asks for. Raises `UnknownModelError`."""
    if not name:
        return settings.served_model_names[0]
    if name not in settings.served_model_names:
        served = ", ".join(settings.served_model_names[:5])
        raise UnknownModelError(f"The model {short(name)} does not exist here; served: {served}.", "model")
    return name


def check_request(request: ChatOrCompletion, settings: AppSettings) -> int:
    """Everything that needs no tokenizer. Returns the number of sequences.

    Raises `UnknownModelError` or `InvalidRequestError`; takes time linear in the number of token ids given, at most.
    """
    model_name(request.model, settings)
    num_prompts = 1
    if isinstance(request, CompletionRequest):
        num_prompts = len(request.prompt)
        if num_prompts > settings.max_prompts:
            raise InvalidRequestError(
                f"prompt holds {num_prompts} prompts; allowed: at most {settings.max_prompts}.", "prompt"
            )
    if request.n > settings.max_n:
        raise InvalidRequestError(f"n is {request.n}; allowed: 1 to {settings.max_n}.", "n")
    num_sequences = num_prompts * request.n
    if num_sequences > settings.max_sequences:
        raise InvalidRequestError(
            f"{num_prompts} prompts x n {request.n} are {num_sequences} sequences; "
            f"allowed: at most {settings.max_sequences}.",
            "n",
        )
    limit, field = _asked_max_tokens(request)
    if limit is not None and limit > settings.max_model_len:
        raise InvalidRequestError(
            f"{field} is {limit}, above the model's context of {settings.max_model_len} tokens; allowed: at most that.",
            field,
        )
    check_vocabulary(request.stop_token_ids, settings.vocab_size, "stop_token_ids")
    if isinstance(request, CompletionRequest):
        for prompt in request.prompt:
            if isinstance(prompt, list):
                check_vocabulary(prompt, settings.vocab_size, "prompt")
                _check_length(len(prompt), settings.max_model_len, "prompt")
    return num_sequences


def check_vocabulary(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises `InvalidRequestError` naming the first id that is no token."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise InvalidRequestError(
            f"{param} holds the token id {short(wrong)}, which is out of vocabulary; allowed: 0 to {vocab_size - 1}.",
            param,
        )


def _check_length(num_tokens: int, max_model_len: int, param: str, at_least: bool = False) -> None:
    if num_tokens >= max_model_len:
        raise NeverFitsError(
            f"The prompt has {'at least ' if at_least else ''}{num_tokens} tokens, "
            f"but the model's context is {max_model_len} tokens "
            f"and the output needs at least 1 of them.",
            param,
        )


def _asked_max_tokens(request: ChatOrCompletion) -> tuple[int | None, str]:
    """The newer field wins (A-13)."""
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return request.max_completion_tokens, "max_completion_tokens"
    return request.max_tokens, "max_tokens"


def prepare(
    request: ChatOrCompletion,
    settings: AppSettings,
    codec: TextCodec,
    response_id: str,
    now_s: float,
    random_seed: Callable[[], int],
) -> PreparedRequest:
    """Render, tokenize and resolve. `random_seed` gives 63 random bits. Call `check_request` before.

    Raises `InvalidRequestError` (template, empty prompt) or `NeverFitsError`.
    """
    prompts, texts = _tokenize(request, settings, codec)
    limits = [_clip(request, len(prompt), settings) for prompt in prompts]
    sequences = []
    for position, prompt in enumerate(prompts):
        for sample in range(request.n):
            index = position * request.n + sample
            sampling = sampling_params(request, settings, limits[position], sample, random_seed)
            sequences.append(SequenceInput(index=index, prompt_token_ids=prompt, sampling=sampling))
    return PreparedRequest(
        request=request,
        response_id=response_id,
        created_s=int(now_s),
        model=model_name(request.model, settings),
        prompts=prompts,
        max_tokens=limits,
        generate=GenerateRequest(
            request_id=RequestId(response_id),
            sequences=sequences,
            order_key=(0.0, 0, now_s),
            cache_salt=request.cache_salt or "",
        ),
        echo_texts=_echo_texts(request, prompts, texts, codec),
    )


def render_chat(request: Any, codec: TextCodec) -> str:
    """Prompt text of a request with `messages`. Raises `InvalidRequestError`."""
    if codec.chat_template is None:
        raise InvalidRequestError(
            "This model has no chat template: use /v1/completions, or start with --chat-template.", "messages"
        )
    return codec.chat_template.render(
        request.messages, request.add_generation_prompt, request.continue_final_message, request.chat_template_kwargs
    )


def encode_checked(
    text: str, codec: TextCodec, settings: AppSettings, param: str, add_special_tokens: bool
) -> list[int]:
    """Token ids of one prompt; a text that cannot possibly fit is refused before it is tokenized.

    Raises `NeverFitsError`, or `InvalidRequestError` when the text has no tokens.
    """
    longest = codec.max_bytes_per_token
    if longest and len(text) >= settings.max_model_len:  # cheap look first: no token is less than a byte
        least = -(-len(text.encode("utf-8")) // longest)
        _check_length(least, settings.max_model_len, param, at_least=True)
    token_ids = codec.encode(text, add_special_tokens)
    if not token_ids:
        raise InvalidRequestError(f"{param} has no tokens; allowed: at least one.", param)
    _check_length(len(token_ids), settings.max_model_len, param)
    return token_ids


def _tokenize(
    request: ChatOrCompletion, settings: AppSettings, codec: TextCodec
) -> tuple[list[list[int]], list[str | None]]:
    """Prompts as ids, and their texts where they were sent as text."""
    if isinstance(request, ChatRequest):
        text = render_chat(request, codec)
        return [encode_checked(text, codec, settings, "messages", request.add_special_tokens)], [None]
    prompts: list[list[int]] = []
    texts: list[str | None] = []
    for prompt in request.prompt:
        if isinstance(prompt, str):
            texts.append(prompt)
            prompts.append(encode_checked(prompt, codec, settings, "prompt", request.add_special_tokens))
        else:
            texts.append(None)
            prompts.append(prompt)
    return prompts, texts


def _clip(request: ChatOrCompletion, num_prompt_tokens: int, settings: AppSettings) -> int:
    left = settings.max_model_len - num_prompt_tokens
    limit, _ = _asked_max_tokens(request)
    if limit is None:
        limit = left if isinstance(request, ChatRequest) else max(settings.default_max_tokens, request.min_tokens)
    return min(limit, left)


def _echo_texts(
    request: ChatOrCompletion, prompts: list[list[int]], texts: list[str | None], codec: TextCodec
) -> list[str]:
    if not isinstance(request, CompletionRequest) or not request.echo:
        return []
    return [
        codec.decode(prompt, request.skip_special_tokens) if text is None else text
        for text, prompt in zip(texts, prompts, strict=True)
    ]


def sampling_params(
    request: ChatOrCompletion, settings: AppSettings, max_tokens: int, sample: int, random_seed: Callable[[], int]
) -> SamplingParams:
    """Request fields, then the model's defaults, then neutral values."""
    temperature = settings.default_temperature if request.temperature is None else request.temperature
    if temperature < GREEDY_BELOW:
        temperature = 0.0
    elif temperature < LOWEST_TEMPERATURE:
        temperature = LOWEST_TEMPERATURE
    top_k = settings.default_top_k if request.top_k is None else request.top_k
    seed = request.seed
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=max(0, top_k),
        top_p=settings.default_top_p if request.top_p is None else request.top_p,
        seed=random_seed() if seed is None or seed == -1 else mixed_seed(seed, sample),
        min_tokens=min(request.min_tokens, max_tokens),
        ignore_eos=request.ignore_eos,
        stop_token_ids=request.stop_token_ids,
    )


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
