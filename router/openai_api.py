"""PURE. Requests of the OpenAI-compatible API: bytes to a checked record, or one sentence that says what is wrong.

`parse_completion` and `parse_chat` know JSON, field types and limits that hold for every model; what depends on the
model served (names, vocabulary, context) is `router/prepare.py`. An explicit null is the same as an absent field.
Numbers are strict: a string or a boolean is no number. Choices made here: content parts are joined with "" (A-21); at
most 4 stop strings (A-03); `stream_options` without `stream` is refused (A-04); an empty prompt is refused (A-39);
unknown fields are refused (A-36).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from replica.errors import InvalidRequestError
from router.openai_fields import (
    CHAT_NOT_SUPPORTED,
    COMPLETION_NOT_SUPPORTED,
    WITHOUT_EFFECT,
    first_refused,
    nearest_name,
)

#: OpenAI's limit.
MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
#: How much of a wrong value an error repeats, in characters.
MAX_ECHO_CHARS = 60
_INT64 = 1 << 63


class _Wrong(ValueError):
    """A finished sentence; `_sentence` passes it on as it is."""


def short(value: object) -> str:
    """A value as an error message shows it: never long, and never walked through (it may be megabytes, or nested
    deeply).
    """
    if isinstance(value, (list, dict)):
        if len(value) > 4 or any(
            isinstance(item, (list, dict)) for item in (value if isinstance(value, list) else value.values())
        ):
            kind = "list" if isinstance(value, list) else "object"
            return f"a {kind} of {len(value)} entr{'y' if len(value) == 1 else 'ies'}"
        if isinstance(value, list):
            text = "[" + ", ".join(map(short, value)) + "]"
        else:
            text = "{" + ", ".join(f"{short(key)}: {short(item)}" for key, item in value.items()) + "}"
    elif isinstance(value, str):
        text = repr(value[: MAX_ECHO_CHARS + 1])
    else:
        text = repr(value)
        text = {"None": "null", "True": "true", "False": "false"}.get(text, text)
    return text if len(text) <= MAX_ECHO_CHARS else text[:MAX_ECHO_CHARS] + "..."


def _check_stop(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise _Wrong(f"stop is {short(value)}; allowed: a string or a list of at most {MAX_STOP_STRINGS} strings.")
    if len(stops) > MAX_STOP_STRINGS:
        raise _Wrong(f"stop has {len(stops)} entries; allowed: at most {MAX_STOP_STRINGS}.")
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise _Wrong(f"stop contains {short(stop)}; allowed: strings of 1 to {MAX_STOP_CHARS} characters.")
    return tuple(stops)


def _check_stop_token_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_STOP_TOKEN_IDS or not _all_integers(value):
        raise _Wrong(f"stop_token_ids is {short(value)}; allowed: a list of at most {MAX_STOP_TOKEN_IDS} integers.")
    return tuple(value)


_PROMPT_FORMS = (
    "allowed: a string, a list of strings, a list of token ids, or a list of lists of token ids; none of them empty"
)


def _all_integers(values: list[Any]) -> bool:
    return all(type(value) is int for value in values)  # a bool is an int to isinstance


def _check_prompt(value: object) -> list[str] | list[list[int]]:
    """Every form becomes a list of prompts. The number of prompts is checked later, against the settings, before any
    work.
    """
    wrong = _Wrong(f"prompt is {short(value)}; {_PROMPT_FORMS}.")
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise wrong
    if type(value[0]) is int:
        value = [value]
    if isinstance(value[0], str):
        for position, prompt in enumerate(value):
            if not isinstance(prompt, str):
                raise _Wrong(f"prompt[{position}] is {short(prompt)} beside strings; {_PROMPT_FORMS}.")
            if not prompt:
                raise _Wrong("prompt is an empty string, which has no tokens; allowed: at least one character.")
        return value
    for position, prompt in enumerate(value):
        if not isinstance(prompt, list) or not prompt or not _all_integers(prompt):
            raise _Wrong(f"prompt[{position}] is {short(prompt)}; {_PROMPT_FORMS}.")
    return value


ROLES = ("system", "developer", "user", "assistant")
#: Keys that answers of OpenAI servers carry and clients send back; they have no text for the template unless noted.
_MESSAGE_KEYS_EMPTY = frozenset({"tool_calls", "function_call", "audio", "refusal", "annotations", "tool_call_id"})
_MESSAGE_KEYS_TEXT = frozenset({"name", "reasoning", "reasoning_content"})


def _check_messages(value: object) -> list[dict[str, str]]:
    """Messages as the chat template gets them: `role`, a string `content`, and what else templates read."""
    if not isinstance(value, list) or not value:
        raise _Wrong(f"messages is {short(value)}; allowed: a list of at least one message.")
    return [_check_message(message, f"messages[{position}]") for position, message in enumerate(value)]


def _check_message(message: object, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise _Wrong(f"{where} is {short(message)}; allowed: an object with role and content.")
    role = message.get("role")
    if role in ("tool", "function"):
        raise _Wrong(f"{where}.role is {role!r}: tools are not supported yet.")
    if role not in ROLES:
        raise _Wrong(f"{where}.role is {short(role)}; allowed: {', '.join(ROLES)}.")
    # Small open models know no developer role; OpenAI gives it the place of the system message.
    result = {"role": "system" if role == "developer" else role}
    result["content"] = _check_content(message.get("content"), role, f"{where}.content")
    for key, item in message.items():
        if key in ("role", "content") or item is None:
            continue
        if key in _MESSAGE_KEYS_TEXT:
            if not isinstance(item, str):
                raise _Wrong(f"{where}.{key} is {short(item)}; allowed: a string.")
            result[key] = item
        elif key in _MESSAGE_KEYS_EMPTY:
            if item:
                raise _Wrong(f"{where}.{key} is not supported yet; allowed: null or empty.")
        else:
            raise _Wrong(f"{where} has an unknown field {short(key)}; allowed: role, content, name.")
    return result


def _check_content(content: object, role: str, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        if role == "assistant":  # what a server answers that only called tools
            return ""
        raise _Wrong(f"{where} is missing; allowed: a string or a list of text parts.")
    if not isinstance(content, list):
        raise _Wrong(f"{where} is {short(content)}; allowed: a string or a list of text parts.")
    texts = []
    for position, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part, dict):
            raise _Wrong(
                f"{where}[{position}] has type {short(kind)}; allowed: parts of type 'text' (the model reads text)."
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise _Wrong(f"{where}[{position}].text is {short(text)}; allowed: a string.")
        texts.append(text)
    return "".join(texts)


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    include_usage: bool = Field(False, description="true or false")
    continuous_usage_stats: bool = Field(False, description="true or false")


class _CommonFields(BaseModel):
    """Fields of both endpoints. A field's description is the `allowed` part of its error message."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    model: str | None = Field(None, description="a string")
    max_tokens: int | None = Field(None, ge=0, lt=_INT64, description="an integer of at least 0 (chat: 1)")
    min_tokens: int = Field(0, ge=0, lt=_INT64, description="an integer of at least 0")
    temperature: float | None = Field(None, ge=0, le=2, description="a number from 0 to 2")
    top_p: float | None = Field(None, gt=0, le=1, description="a number above 0 and at most 1")
    top_k: int | None = Field(None, ge=-1, lt=1 << 31, description="an integer: -1 or 0 for off, or at least 1")
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64, description="a 64-bit signed integer")
    n: int = Field(1, ge=1, lt=_INT64, description="an integer of at least 1")
    stop: Annotated[tuple[str, ...], PlainValidator(_check_stop)] = ()
    stop_token_ids: Annotated[tuple[int, ...], PlainValidator(_check_stop_token_ids)] = ()
    include_stop_str_in_output: bool = Field(False, description="true or false")
    ignore_eos: bool = Field(False, description="true or false")
    skip_special_tokens: bool = Field(True, description="true or false")
    return_token_ids: bool = Field(False, description="true or false")
    stream: bool = Field(False, description="true or false")
    stream_options: StreamOptions | None = Field(
        None, description="an object with include_usage, continuous_usage_stats"
    )
    cache_salt: str | None = Field(None, min_length=1, max_length=256, description="a string of 1 to 256 characters")


class CompletionRequest(_CommonFields):
    """POST /v1/completions. `prompt` is a list whatever form it was sent in."""

    prompt: Annotated[list[str] | list[list[int]], PlainValidator(_check_prompt)]
    echo: bool = Field(False, description="true or false")
    add_special_tokens: bool = Field(True, description="true or false")


class ChatRequest(_CommonFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, str]], PlainValidator(_check_messages)]
    max_completion_tokens: int | None = Field(None, ge=1, lt=_INT64, description="an integer of at least 1")
    add_generation_prompt: bool = Field(True, description="true or false")
    continue_final_message: bool = Field(False, description="true or false")
    add_special_tokens: bool = Field(False, description="true or false")
    chat_template_kwargs: dict[str, Any] = Field({}, description="an object")


class TokenizeRequest(BaseModel):
    """POST /tokenize: a prompt, or messages."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    model: str | None = Field(None, description="a string")
    prompt: str | None = Field(None, description="a string")
    messages: Annotated[list[dict[str, str]] | None, PlainValidator(_check_messages)] = None
    add_special_tokens: bool | None = Field(None, description="true or false")
    add_generation_prompt: bool = Field(True, description="true or false")
    continue_final_message: bool = Field(False, description="true or false")
    chat_template_kwargs: dict[str, Any] = Field({}, description="an object")
    return_token_strs: bool = Field(False, description="true or false")


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    model: str | None = Field(None, description="a string")
    tokens: list[int] = Field(description="a list of token ids")


AnyRequest = TypeVar("AnyRequest", bound=BaseModel)


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
    request = _validate(CompletionRequest, parse_json_object(body), COMPLETION_NOT_SUPPORTED)
    _check_together(request, request.max_tokens)
    if request.max_tokens == 0 and not request.echo:
        raise InvalidRequestError("max_tokens is 0; allowed: at least 1 (0 only with echo).", "max_tokens")
    if request.max_tokens == 0 and request.stop:
        return request.model_copy(update={"stop": ()})
    return request


def parse_chat(body: bytes) -> ChatRequest:
    """Bytes to a checked request. Raises `InvalidRequestError` with the field in `param`."""
    request = _validate(ChatRequest, parse_json_object(body), CHAT_NOT_SUPPORTED)
    if request.max_tokens == 0:
        raise InvalidRequestError("max_tokens is 0; allowed: at least 1.", "max_tokens")
    _check_together(request, request.max_completion_tokens or request.max_tokens)
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
    if max_tokens is not None and request.min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens is {request.min_tokens}, above max_tokens {max_tokens}; allowed: at most max_tokens.",
            "min_tokens",
        )


def _validate(
    model: type[AnyRequest], body: dict[str, Any], not_supported: Mapping[str, tuple[object, ...]]
) -> AnyRequest:
    fields = model.model_fields
    wanted: dict[str, Any] = {}
    for name, value in body.items():
        if name in fields:
            if value is not None:
                wanted[name] = value
        elif name not in not_supported and name not in WITHOUT_EFFECT:
            near = nearest_name(name, [*fields, *not_supported, *WITHOUT_EFFECT])
            hint = f" Did you mean {near!r}?" if near else ""
            raise InvalidRequestError(f"The request has an unknown field {short(name)}.{hint}", name[:MAX_ECHO_CHARS])
    refused = first_refused(body, not_supported)
    if refused is not None:
        raise InvalidRequestError(f"{refused} is {short(body[refused])}: this is not supported yet.", refused)
    options = wanted.get("stream_options")
    if isinstance(options, dict):
        wanted["stream_options"] = {name: value for name, value in options.items() if value is not None}
    try:
        return model.model_validate(wanted)
    except ValidationError as error:
        raise _sentence(model, wanted, error) from error


def _sentence(model: type[BaseModel], body: Mapping[str, Any], error: ValidationError) -> InvalidRequestError:
    """The first of pydantic's complaints, as our one sentence: field, value, what is allowed."""
    first = error.errors(include_url=False, include_input=False)[0]
    name = str(first["loc"][0])
    wrong = first.get("ctx", {}).get("error")
    if isinstance(wrong, _Wrong):
        return InvalidRequestError(str(wrong), name)
    if first["type"] == "missing":
        return InvalidRequestError(f"{name} is missing; the request needs it.", name)
    allowed = model.model_fields[name].description
    where, value = name, body[name]
    for step in first["loc"][1:]:
        inside = (isinstance(step, str) and isinstance(value, dict)) or (
            isinstance(step, int) and isinstance(value, list)
        )
        if not inside:
            break
        where, value = (f"{where}[{step}]" if isinstance(step, int) else f"{where}.{step}"), value[step]
    return InvalidRequestError(f"{where} is {short(value)}; allowed: {allowed}.", name)


ChatOrCompletion = ChatRequest | CompletionRequest
Endpoint = Literal["chat", "completion"]
