"""PURE. A checked request to what the replicas get: prompts as token ids, sampling parameters, seeds, a grammar.

`check_request` is cheap and comes first: everything that can be refused without tokenizing (model name, counts,
vocabulary). `prepare` does the work and may run in a thread (`needs_thread`). Prompt + max_tokens beyond the context is
clipped, as vLLM does; a prompt that leaves no room for a token is refused with both numbers, unless
`truncate_prompt_tokens` cuts it, and so is a max_tokens that is alone above the context.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from replica.errors import InvalidRequestError, UnknownModelError, UnsupportedValueError
from replica.messages import GenerateRequest, KVSink, RequestId, SequenceInput
from router.app_settings import AppSettings
from router.detokenizer import Detokenizer
from router.message_parts import ReplyPlan
from router.openai_api import ChatOrCompletion, ChatRequest, CompletionRequest, TokenizeRequest
from router.prompt_limits import (
    asked_max_tokens,
    check_length,
    check_logprobs,
    check_message_size,
    check_vocabulary,
    clip,
    truncated,
)
from router.sampling import num_prompt_logprobs, resolved, sequence_seed
from router.sentences import short
from router.structured import Constraint, ReasonAgainst, check_grammar, grammar_of, reason_against
from router.tool_plan import TemplateFacts, ToolPlan, ToolRequest, plan_tools

#: tokenizing so many bad words (twice each, with and without a space) takes about 1 ms
MAX_BAD_WORDS_ON_LOOP = 16


class ChatRenderer(Protocol):
    """What `prepare` needs of a chat template."""

    @property
    def facts(self) -> TemplateFacts: ...

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> str: ...


class TextCodec(Protocol):
    """What the HTTP edge needs of a tokenizer; `router.tokenizer.Tokenizer` is one."""

    @property
    def max_bytes_per_token(self) -> int | None: ...

    @property
    def special_texts(self) -> frozenset[str]: ...

    @property
    def chat_template(self) -> ChatRenderer | None: ...

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]: ...

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str: ...

    def token_text(self, token_id: int) -> str | None: ...

    def token_bytes(self, token_id: int) -> bytes | None: ...

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
    #: how to read the text of a chat answer
    reply: ReplyPlan = ReplyPlan()
    tool_request: ToolRequest | None = None
    #: `max_tokens` 0 with logprobs: a replica has to compute the prompt, and the one token it then samples is not told
    drops_output: bool = False
    #: special tokens are markers that the parsers of the answer need
    shows_special_tokens: bool = False

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
    limit, field = asked_max_tokens(request)
    if limit is not None and limit > settings.max_model_len:
        raise InvalidRequestError(
            f"{field} is {limit}, above the model's context of {settings.max_model_len} tokens; allowed: at most that.",
            field,
        )
    for name in ("stop_token_ids", "allowed_token_ids"):
        check_vocabulary(getattr(request, name), settings.vocab_size, name)
    check_vocabulary(list(request.logit_bias), settings.vocab_size, "logit_bias")
    if request.priority and settings.policy != "priority":
        raise UnsupportedValueError(
            f"priority is {request.priority}, which the policy {settings.policy!r} here does not look at; allowed: 0.",
            "priority",
        )
    if request.stream and request.kv_transfer_params is not None and request.kv_transfer_params.do_remote_decode:
        raise InvalidRequestError(
            "kv_transfer_params.do_remote_decode is true and stream is true, but only a whole answer tells what was "
            "kept; allowed: stream false.",
            "kv_transfer_params",
        )
    if (request.truncate_prompt_tokens or 0) > settings.max_model_len:
        raise InvalidRequestError(
            f"truncate_prompt_tokens is {request.truncate_prompt_tokens}, above the model's context of "
            f"{settings.max_model_len} tokens; allowed: at most that.",
            "truncate_prompt_tokens",
        )
    if isinstance(request, CompletionRequest):
        for prompt in request.prompt:
            if isinstance(prompt, list):
                check_vocabulary(prompt, settings.vocab_size, "prompt")
                if request.truncate_prompt_tokens is None:
                    check_length(len(prompt), settings.max_model_len, "prompt")
    return num_sequences


def needs_thread(request: ChatOrCompletion) -> bool:
    """Whether `prepare` may take longer than a millisecond or two although the body is short."""
    has_tools = isinstance(request, ChatRequest) and request.tool_request is not None
    return request.constraint is not None or has_tools or len(request.bad_words) > MAX_BAD_WORDS_ON_LOOP


class _Prompts(NamedTuple):
    """What a request is to the model: one entry a prompt."""

    token_ids: list[list[int]]
    #: in front of the answer, or empty
    echo_texts: list[str]
    grammar: str = ""
    plan: ToolPlan | None = None


def prepare(
    request: ChatOrCompletion,
    settings: AppSettings,
    codec: TextCodec,
    response_id: str,
    now_s: float,
    random_seed: Callable[[], int],
    against: ReasonAgainst = reason_against,
    deadline_s: float | None = None,
) -> PreparedRequest:
    """Render, tokenize and resolve. `random_seed` gives 63 random bits, `against` judges grammars. Call `check_request`
    before. By `deadline_s` (seconds since the epoch) the answer must have begun.

    Raises `InvalidRequestError` (template, empty prompt, grammar) or `NeverFitsError`.
    """
    if isinstance(request, ChatRequest):
        prompts = _chat_prompts(request, settings, codec, against)
    else:
        prompts = _completion_prompts(request, settings, codec, against)
    limits = [clip(request, len(prompt), settings) for prompt in prompts.token_ids]
    drops_output = request.max_tokens == 0 and num_prompt_logprobs(request) is not None
    common = resolved(request, settings, codec.encode, prompts.grammar)
    check_message_size(request, prompts.token_ids, common)
    check_logprobs(request, prompts.token_ids, limits, common)
    sequences = []
    for position, prompt in enumerate(prompts.token_ids):
        limit = 1 if drops_output else limits[position]
        for sample in range(request.n):
            sampling = msgspec.structs.replace(
                common,
                max_tokens=limit,
                min_tokens=min(request.min_tokens, limit),
                seed=sequence_seed(request, sample, random_seed),
            )
            sequences.append(SequenceInput(position * request.n + sample, prompt, sampling))
    plan = prompts.plan
    return PreparedRequest(
        request=request,
        response_id=response_id,
        created_s=int(now_s),
        model=model_name(request.model, settings),
        prompts=prompts.token_ids,
        max_tokens=limits,
        generate=GenerateRequest(
            request_id=RequestId(response_id),
            sequences=sequences,
            order_key=(0.0, request.priority, now_s),
            cache_salt=request.cache_salt or "",
            deadline_s=deadline_s,
            kv_sink=(
                KVSink(response_id)
                if request.kv_transfer_params is not None and request.kv_transfer_params.do_remote_decode
                else None
            ),
        ),
        echo_texts=prompts.echo_texts,
        reply=ReplyPlan() if plan is None else plan.reply,
        tool_request=request.tool_request if isinstance(request, ChatRequest) else None,
        drops_output=drops_output,
        shows_special_tokens=plan is not None and plan.shows_special_tokens,
    )


def plan_chat(request: ChatRequest | TokenizeRequest, codec: TextCodec, grammar: str = "") -> tuple[str, ToolPlan]:
    """Prompt text of a request with `messages`, and how to read the answer. `grammar`: what the text must follow.

    Raises `InvalidRequestError`.
    """
    template = codec.chat_template
    if template is None:
        raise InvalidRequestError(
            "This model has no chat template: use /v1/completions, or start with --chat-template.", "messages"
        )
    plan = plan_tools(request.tool_request, template.facts, request.messages or [], grammar)
    continues = request.continue_final_message
    text = template.render(
        plan.messages, request.add_generation_prompt, continues, request.template_kwargs, plan.template_tools
    )
    return text, plan.for_prompt(text, continues)


def render_chat(request: ChatRequest | TokenizeRequest, codec: TextCodec) -> str:
    """Prompt text of a request with `messages`. Raises `InvalidRequestError`."""
    return plan_chat(request, codec)[0]


def _body_grammar(constraint: Constraint | None, codec: TextCodec, against: ReasonAgainst) -> str:
    """The grammar of `response_format` or `structured_outputs`; empty without one. Raises `InvalidRequestError`."""
    if constraint is None:
        return ""
    written = json.dumps(constraint.value, ensure_ascii=False).replace("\\", "")
    for text in codec.special_texts:
        if text in written:
            raise InvalidRequestError(
                f"{constraint.param} holds {text!r}, the text of a special token, which an output cannot spell; "
                "allowed: any other text.",
                constraint.param,
            )
    return grammar_of(constraint, against)


def _chat_prompts(request: ChatRequest, settings: AppSettings, codec: TextCodec, against: ReasonAgainst) -> _Prompts:
    grammar = _body_grammar(request.constraint, codec, against)
    text, plan = plan_chat(request, codec, grammar)
    if plan.grammar and plan.grammar != grammar:
        param = "tools" if request.tool_request is not None else "response_format"
        check_grammar(plan.grammar, param, against)
    token_ids = _encode_prompt(text, request, codec, settings, "messages")
    echo = ""
    if request.echo and request.messages[-1]["role"] == "assistant":
        echo = request.messages[-1]["content"]
    return _Prompts([token_ids], [echo] if echo else [], plan.grammar, plan)


def _completion_prompts(
    request: CompletionRequest, settings: AppSettings, codec: TextCodec, against: ReasonAgainst
) -> _Prompts:
    prompts: list[list[int]] = []
    echoes: list[str] = []
    for prompt in request.prompt:
        if isinstance(prompt, str):
            token_ids = _encode_prompt(prompt, request, codec, settings, "prompt")
        else:
            token_ids = truncated(prompt, request, settings)
            check_length(len(token_ids), settings.max_model_len, "prompt")
        prompts.append(token_ids)
        if request.echo:
            is_whole = isinstance(prompt, str) and request.truncate_prompt_tokens is None
            echoes.append(str(prompt) if is_whole else codec.decode(token_ids, request.skip_special_tokens))
    return _Prompts(prompts, echoes, _body_grammar(request.constraint, codec, against))


def _encode_prompt(
    text: str, request: ChatOrCompletion, codec: TextCodec, settings: AppSettings, param: str
) -> list[int]:
    """Token ids of one prompt. A text that cannot possibly fit, and is not to be cut, is refused before tokenizing.

    Raises `NeverFitsError`, or `InvalidRequestError` when the text has no tokens.
    """
    longest, may_be_cut = codec.max_bytes_per_token, request.truncate_prompt_tokens is not None
    if longest and not may_be_cut and len(text) >= settings.max_model_len:  # cheap: no token is less than a byte
        least = -(-len(text.encode("utf-8")) // longest)
        check_length(least, settings.max_model_len, param, at_least=True)
    token_ids = truncated(codec.encode(text, request.add_special_tokens), request, settings)
    if not token_ids:
        raise InvalidRequestError(f"{param} has no tokens; allowed: at least one.", param)
    check_length(len(token_ids), settings.max_model_len, param)
    return token_ids
