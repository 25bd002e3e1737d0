"""PURE. Requests of the OpenAI-compatible API: bytes to a checked record, or one sentence that says what is wrong.

`parse_completion` and `parse_chat` know JSON, field types and limits that hold for every model; what depends on the
model served (names, vocabulary, context) is `router/prepare.py`. An explicit null is the same as an absent field.
Numbers are strict: a string or a boolean is no number. Choices made here and in the modules below are told in
`docs/api.md`. A field's description is the `allowed` part of its error message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, PrivateAttr, ValidationError, WithJsonSchema

from replica.errors import InvalidRequestError
from router import field_schemas, kv_transfer_params
from router.field_checks import (
    PROMPT_FORMS,
    check_allowed_token_ids,
    check_bad_words,
    check_logit_bias,
    check_prompt,
    check_stop,
    check_stop_token_ids,
)
from router.kv_transfer_params import KVTransferParams, check_kv_transfer_params
from router.message_checks import check_messages
from router.openai_fields import (
    CHAT_REFUSED,
    COMPLETION_REFUSED,
    WITHOUT_EFFECT,
    Refused,
    first_refused,
    nearest_name,
)
from router.schema_bounds import check_schema
from router.sentences import MAX_ECHO_CHARS, WrongValueError, short
from router.structured import Constraint, check_response_format, check_structured_outputs
from router.tool_request import ToolRequest, parse_tools

#: a day
MAX_DEADLINE_MS = 86_400_000
DEADLINE_ALLOWED = f"a number above 0, up to {MAX_DEADLINE_MS} (a day)"
# Here are limits that hold for every model. How large n, max_tokens and others may be depends on model and
# configuration: `prepare.check_request` knows it, and names it, however large the number is.
_INT64 = 1 << 63
_INT64_RANGE = f"an integer from {-_INT64} to {_INT64 - 1}"
#: with the waiting counted in, a number of this size is still exact to a quarter of a second, however slowly it ages
PRIORITIES = 1 << 31
#: vLLM's default
MAX_LOGPROBS = 20
#: the schemas of tools together may take that many times what one schema may
MAX_TOOL_SCHEMAS = 2.0
_STRICT = ConfigDict(strict=True, frozen=True, extra="forbid")


_Stop = Annotated[tuple[str, ...], PlainValidator(check_stop), WithJsonSchema(field_schemas.STOP)]
_StopTokenIds = Annotated[
    tuple[int, ...], PlainValidator(check_stop_token_ids), WithJsonSchema(field_schemas.STOP_TOKEN_IDS)
]
_Prompt = Annotated[list[str] | list[list[int]], PlainValidator(check_prompt), WithJsonSchema(field_schemas.PROMPT)]
_Messages = Annotated[list[dict[str, Any]], PlainValidator(check_messages), WithJsonSchema(field_schemas.MESSAGES)]
_OptionalMessages = Annotated[
    list[dict[str, Any]] | None, PlainValidator(check_messages), WithJsonSchema(field_schemas.MESSAGES)
]
_LogitBias = Annotated[dict[int, float], PlainValidator(check_logit_bias), WithJsonSchema(field_schemas.LOGIT_BIAS)]
_BadWords = Annotated[tuple[str, ...], PlainValidator(check_bad_words), WithJsonSchema(field_schemas.BAD_WORDS)]
_AllowedIds = Annotated[
    tuple[int, ...], PlainValidator(check_allowed_token_ids), WithJsonSchema(field_schemas.ALLOWED_TOKEN_IDS)
]
_ResponseFormat = Annotated[
    Constraint | None, PlainValidator(check_response_format), WithJsonSchema(field_schemas.RESPONSE_FORMAT)
]
_Structured = Annotated[
    Constraint | None, PlainValidator(check_structured_outputs), WithJsonSchema(field_schemas.STRUCTURED_OUTPUTS)
]
_Tools = Annotated[Any, WithJsonSchema(field_schemas.TOOLS)]
_ToolChoice = Annotated[Any, WithJsonSchema(field_schemas.TOOL_CHOICE)]
_KVTransferParams = Annotated[
    KVTransferParams | None, PlainValidator(check_kv_transfer_params), WithJsonSchema(kv_transfer_params.SCHEMA)
]
_BOOL = "true or false"


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = _STRICT

    include_usage: bool = Field(False, description=_BOOL)
    continuous_usage_stats: bool = Field(False, description=_BOOL)


class _CommonFields(BaseModel):
    """Fields of both endpoints."""

    model_config = _STRICT

    model: str | None = Field(None, description="the name of a model that is served; the default is the first one")
    max_tokens: int | None = Field(None, ge=0, description="an integer of at least 0 (chat: 1)")
    min_tokens: int = Field(0, ge=0, description="an integer of at least 0")
    temperature: float | None = Field(None, ge=0, le=2, description="a number from 0 to 2")
    top_p: float | None = Field(None, gt=0, le=1, description="a number above 0 and at most 1")
    top_k: int | None = Field(None, ge=-1, lt=1 << 31, description="an integer from -1 to 2147483647; -1 and 0: off")
    min_p: float | None = Field(None, ge=0, le=1, description="a number from 0 to 1")
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="a number from -2 to 2")
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="a number from -2 to 2")
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, description="a number from 0.01 to 100; 1 is off")
    logit_bias: _LogitBias = Field({}, description="an object of token ids and numbers from -100 to 100")
    bad_words: _BadWords = Field((), description="a list of at most 128 strings of 1 to 128 characters")
    allowed_token_ids: _AllowedIds = Field((), description="a list of at least one token id")
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64, description=f"{_INT64_RANGE}; -1 is none")
    n: int = Field(1, ge=1, description="an integer of at least 1")
    stop: _Stop = Field((), description="a string, or a list of at most 4 strings of 1 to 1024 characters")
    stop_token_ids: _StopTokenIds = Field((), description="a list of at most 128 token ids")
    include_stop_str_in_output: bool = Field(False, description=_BOOL)
    ignore_eos: bool = Field(False, description=_BOOL)
    skip_special_tokens: bool = Field(True, description=_BOOL)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="an integer from 0 to 20")
    echo: bool = Field(False, description=_BOOL)
    return_token_ids: bool = Field(False, description=_BOOL)
    return_tokens_as_token_ids: bool = Field(False, description=_BOOL)
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="an integer of at least 1, or -1 for what the context holds"
    )
    truncation_side: Literal["left"] = Field("left", description="'left': the end of the prompt is kept")
    response_format: _ResponseFormat = Field(
        None, description="an object with type 'text', 'json_object' or 'json_schema'"
    )
    structured_outputs: _Structured = Field(
        None, description="an object with one of json, regex, choice, grammar, json_object"
    )
    stream: bool = Field(False, description=_BOOL)
    stream_options: StreamOptions | None = Field(
        None, description="an object with include_usage, continuous_usage_stats"
    )
    cache_salt: str | None = Field(None, min_length=1, max_length=256, description="a string of 1 to 256 characters")
    priority: int = Field(
        0, ge=-PRIORITIES, lt=PRIORITIES, description=f"an integer from {-PRIORITIES} to {PRIORITIES - 1}"
    )
    deadline_ms: float | None = Field(None, gt=0, le=MAX_DEADLINE_MS, description=DEADLINE_ALLOWED)
    request_id: str | None = Field(None, min_length=1, max_length=128, description="a string of 1 to 128 characters")
    kv_transfer_params: _KVTransferParams = Field(
        None, description="an object with do_remote_decode or do_remote_prefill, and what an answer said of it"
    )

    @property
    def constraint(self) -> Constraint | None:
        """What the text of the answer must look like."""
        return self.response_format or self.structured_outputs


class CompletionRequest(_CommonFields):
    """POST /v1/completions. `prompt` is a list whatever form it was sent in."""

    prompt: _Prompt = Field(description=PROMPT_FORMS)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="an integer from 0 to 20")
    add_special_tokens: bool = Field(True, description=_BOOL)


class ChatRequest(_CommonFields):
    """POST /v1/chat/completions."""

    messages: _Messages = Field(description="a list of at least one message")
    max_completion_tokens: int | None = Field(None, ge=1, description="an integer of at least 1")
    logprobs: bool = Field(False, description=_BOOL)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="an integer from 0 to 20")
    tools: _Tools = Field(None, description="a list of at most 128 functions")
    tool_choice: _ToolChoice = Field(None, description="'none', 'auto', 'required', or an object that names a function")
    parallel_tool_calls: bool = Field(True, description=_BOOL)
    reasoning_effort: Literal["none"] | None = Field(None, description="'none', since the model has no levels of it")
    add_generation_prompt: bool = Field(True, description=_BOOL)
    continue_final_message: bool = Field(False, description=_BOOL)
    add_special_tokens: bool = Field(False, description=_BOOL)
    chat_template_kwargs: dict[str, Any] = Field({}, description="an object")

    _tool_request: ToolRequest | None = PrivateAttr(None)

    def model_post_init(self, context: Any, /) -> None:
        self._tool_request = _checked_tools(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def tool_request(self) -> ToolRequest | None:
        """What the three fields of tools say together."""
        return self._tool_request

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """What the chat template gets beside the messages. Qwen's name for thoughts; other templates do not look."""
        off = {"enable_thinking": False} if self.reasoning_effort == "none" else {}
        return {**off, **self.chat_template_kwargs}


class TokenizeRequest(BaseModel):
    """POST /tokenize: a prompt, or messages."""

    model_config = _STRICT

    model: str | None = Field(None, description="the name of a model that is served")
    prompt: str | None = Field(None, description="a string")
    messages: _OptionalMessages = Field(None, description="a list of at least one message")
    tools: _Tools = Field(None, description="a list of at most 128 functions")
    tool_choice: _ToolChoice = Field(None, description="'none', 'auto', 'required', or an object that names a function")
    add_special_tokens: bool | None = Field(None, description=_BOOL)
    add_generation_prompt: bool = Field(True, description=_BOOL)
    continue_final_message: bool = Field(False, description=_BOOL)
    chat_template_kwargs: dict[str, Any] = Field({}, description="an object")
    return_token_strs: bool = Field(False, description=_BOOL)

    _tool_request: ToolRequest | None = PrivateAttr(None)

    def model_post_init(self, context: Any, /) -> None:
        self._tool_request = _checked_tools(self.tools, self.tool_choice, None)

    @property
    def tool_request(self) -> ToolRequest | None:
        return self._tool_request

    @property
    def template_kwargs(self) -> dict[str, Any]:
        return self.chat_template_kwargs


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model_config = _STRICT

    model: str | None = Field(None, description="the name of a model that is served")
    tokens: list[int] = Field(description="a list of token ids")


AnyRequest = TypeVar("AnyRequest", bound=BaseModel)


def _checked_tools(tools: Any, choice: Any, parallel: bool | None) -> ToolRequest | None:
    """The three fields together; schemas that would become part of a grammar are looked at."""
    request = parse_tools(tools, choice, parallel)
    if request is None:
        return None
    taken = 0.0
    for tool in request.callable:
        if request.choice == "auto" and not tool.strict:
            continue
        try:
            taken += check_schema(tool.parameters, f"tools: the parameters of {tool.name}")
        except WrongValueError as error:
            raise InvalidRequestError(str(error), "tools") from error
    if taken > MAX_TOOL_SCHEMAS:
        raise InvalidRequestError(
            "tools has schemas that are too large together to hold the answer to; allowed: fewer strict tools, or "
            "tool_choice 'auto'.",
            "tools",
        )
    return request


def parse_json_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises `InvalidRequestError`: not JSON, not UTF-8, a lone surrogate, too deep, or no
    object.
    """
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        hint = " (or an unpaired surrogate escape)" if b"\\ud" in body.lower() else ""
        raise InvalidRequestError(f"The request body is not valid JSON{hint}: {error}.") from error
    except RecursionError as error:
        raise InvalidRequestError("The request body is nested too deeply.") from error
    if not isinstance(value, dict):
        raise InvalidRequestError(f"The request body is {short(value)}; allowed: a JSON object.")
    return value


def parse_completion(body: bytes) -> CompletionRequest:
    """Bytes to a checked request. Raises `InvalidRequestError` with the field in `param`."""
    request = _validate(CompletionRequest, parse_json_object(body), COMPLETION_REFUSED)
    _check_together(request, request.max_tokens)
    if request.max_tokens == 0 and not request.echo:
        raise InvalidRequestError("max_tokens is 0; allowed: at least 1 (0 only with echo).", "max_tokens")
    if request.max_tokens == 0 and request.stop:
        return request.model_copy(update={"stop": ()})
    return request


def parse_chat(body: bytes) -> ChatRequest:
    """Bytes to a checked request. Raises `InvalidRequestError` with the field in `param`."""
    request = _validate(ChatRequest, parse_json_object(body), CHAT_REFUSED)
    if request.max_tokens == 0:
        raise InvalidRequestError("max_tokens is 0; allowed: at least 1.", "max_tokens")
    _check_together(request, request.max_completion_tokens or request.max_tokens)
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequestError(
            f"top_logprobs is {request.top_logprobs} without logprobs; allowed: only with logprobs true.",
            "top_logprobs",
        )
    if (
        request.continue_final_message
        and "add_generation_prompt" in request.model_fields_set
        and request.add_generation_prompt
    ):
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt are both true; allowed: one of them.",
            "continue_final_message",
        )
    return request


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """Bytes to a checked request. Raises `InvalidRequestError`."""
    request = _validate(TokenizeRequest, parse_json_object(body), {})
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequestError("The request needs prompt or messages, and not both.", "prompt")
    return request


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    """Bytes to a checked request. Raises `InvalidRequestError`."""
    return _validate(DetokenizeRequest, parse_json_object(body), {})


def _check_together(request: _CommonFields, max_tokens: int | None) -> None:
    """Rules over more than one field."""
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError(
            "stream_options is given without stream; allowed: only with stream true.", "stream_options"
        )
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequestError(
            f"prompt_logprobs is {request.prompt_logprobs} with stream; allowed: only without stream.",
            "prompt_logprobs",
        )
    if max_tokens is not None and request.min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens is {request.min_tokens}, above max_tokens {max_tokens}; allowed: at most max_tokens.",
            "min_tokens",
        )
    if request.truncate_prompt_tokens == 0:
        raise InvalidRequestError(
            "truncate_prompt_tokens is 0, which leaves no prompt; allowed: at least 1, or -1 for the context.",
            "truncate_prompt_tokens",
        )
    if request.response_format is not None and request.structured_outputs is not None:
        raise InvalidRequestError(
            "response_format and structured_outputs both say what the output looks like; allowed: one of them.",
            "structured_outputs",
        )


def _validate(model: type[AnyRequest], body: dict[str, Any], refused: Mapping[str, Refused]) -> AnyRequest:
    fields = model.model_fields
    wanted: dict[str, Any] = {}
    for name, value in body.items():
        if name in fields:
            if value is not None:
                wanted[name] = value
        elif name not in refused and name not in WITHOUT_EFFECT:
            near = nearest_name(name, [*fields, *refused, *WITHOUT_EFFECT])
            hint = f" Did you mean {near!r}?" if near else ""
            raise InvalidRequestError(f"The request has an unknown field {short(name)}.{hint}", name[:MAX_ECHO_CHARS])
    wrong = first_refused(body, refused)
    if wrong is not None:
        raise InvalidRequestError(f"{wrong} is {short(body[wrong])}: {refused[wrong].sentence}.", wrong)
    options = wanted.get("stream_options")
    if isinstance(options, dict):
        known = StreamOptions.model_fields
        wanted["stream_options"] = {n: value for n, value in options.items() if value is not None or n not in known}
    try:
        return model.model_validate(wanted)
    except ValidationError as error:
        raise _sentence(model, wanted, error) from error


def _sentence(model: type[BaseModel], body: Mapping[str, Any], error: ValidationError) -> InvalidRequestError:
    """The first of pydantic's complaints, as our one sentence: field, value, what is allowed."""
    first = error.errors(include_url=False, include_input=False)[0]
    name = str(first["loc"][0])
    wrong = first.get("ctx", {}).get("error")
    if isinstance(wrong, WrongValueError):
        return InvalidRequestError(str(wrong), name)
    if first["type"] == "missing":
        return InvalidRequestError(f"{name} is missing; the request needs it.", name)
    allowed = model.model_fields[name].description
    where, value = name, body[name]
    for step in first["loc"][1:]:
        inside = (isinstance(step, str) and isinstance(value, dict)) or (
            isinstance(step, int) and isinstance(value, list)
        )
        if not inside or (isinstance(value, dict) and step not in value):
            break
        where, value = (f"{where}[{step}]" if isinstance(step, int) else f"{where}.{step}"), value[step]
    return InvalidRequestError(f"{where} is {short(value)}; allowed: {allowed}.", name)


ChatOrCompletion = ChatRequest | CompletionRequest
