"""PURE. The `messages` of a chat: any JSON value to what chat templates read, or one sentence that says what is wrong.

Choices made here: text parts are joined with "" (A-21); an assistant's missing or null content is an empty text (A-22);
the developer role is the system role, since open models know no other; `tool_call_id` and the `id` of a call may be
missing, since results are told apart by their order. Arguments of earlier calls become objects, the form templates
expect. A text that is no JSON object stays as it is: an answer that was cut by its length has such, and clients send it
back.
"""

from __future__ import annotations

from typing import Any

import msgspec

from router.sentences import WrongValueError, short

ROLES = ("system", "developer", "user", "assistant", "tool")
#: OpenAI's limit for tools; more calls than that come from no model
MAX_CALLS = 128
#: Keys that answers of OpenAI servers carry and clients send back; they hold nothing that templates read.
_KEYS_EMPTY = frozenset({"function_call", "audio", "refusal", "annotations"})
#: Keys that client libraries put into their own message objects, which users send back; `content` says the same.
_KEYS_OF_LIBRARIES = frozenset({"parsed", "provider_specific_fields"})
_KEYS_TEXT = frozenset({"name", "reasoning", "reasoning_content"})
_KNOWN = "role, content, name, tool_calls, tool_call_id, reasoning"


def check_messages(value: object) -> list[dict[str, Any]]:
    """Messages as the chat template gets them: `role`, a string `content`, and what else templates read."""
    if not isinstance(value, list) or not value:
        raise WrongValueError(f"messages is {short(value)}; allowed: a list of at least one message.")
    return [_check_message(message, f"messages[{position}]") for position, message in enumerate(value)]


def _check_message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise WrongValueError(f"{where} is {short(message)}; allowed: an object with role and content.")
    role = message.get("role")
    if role == "function":
        raise WrongValueError(f"{where}.role is 'function', OpenAI's older form; use role 'tool' with tool_call_id.")
    if not isinstance(role, str) or role not in ROLES:
        raise WrongValueError(f"{where}.role is {short(role)}; allowed: {', '.join(ROLES)}.")
    result: dict[str, Any] = {"role": "system" if role == "developer" else role}
    result["content"] = _check_content(message.get("content"), role, f"{where}.content")
    for key, item in message.items():
        if key in ("role", "content") or key in _KEYS_OF_LIBRARIES or item is None:
            continue
        if key in _KEYS_TEXT or (key == "tool_call_id" and role == "tool"):
            if not isinstance(item, str):
                raise WrongValueError(f"{where}.{key} is {short(item)}; allowed: a string.")
            result[key] = item
        elif key == "tool_calls":
            calls = _check_calls(item, role, f"{where}.tool_calls")
            if calls:
                result["tool_calls"] = calls
        elif key in _KEYS_EMPTY or key == "tool_call_id":
            if item:
                raise WrongValueError(f"{where}.{key} is {short(item)}; allowed here: null or empty.")
        elif role != "assistant":  # servers and client libraries add fields to an answer, and it comes back with them
            raise WrongValueError(f"{where} has an unknown field {short(key)}; allowed: {_KNOWN}.")
    if "reasoning" in result:  # our answers call it so, templates read the older name
        result.setdefault("reasoning_content", result["reasoning"])
    return result


def _check_content(content: object, role: str, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        if role == "assistant":  # what a server answers that only called tools
            return ""
        raise WrongValueError(f"{where} is missing; allowed: a string or a list of text parts.")
    if not isinstance(content, list):
        raise WrongValueError(f"{where} is {short(content)}; allowed: a string or a list of text parts.")
    texts = []
    for position, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part, dict):
            raise WrongValueError(
                f"{where}[{position}] has type {short(kind)}; allowed: parts of type 'text' (the model reads text)."
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise WrongValueError(f"{where}[{position}].text is {short(text)}; allowed: a string.")
        texts.append(text)
    return "".join(texts)


def _check_calls(calls: object, role: str, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or len(calls) > MAX_CALLS:
        raise WrongValueError(f"{where} is {short(calls)}; allowed: a list of at most {MAX_CALLS} calls.")
    if calls and role != "assistant":
        raise WrongValueError(f"{where} belongs to role 'assistant', not {role!r}.")
    return [_check_call(call, f"{where}[{position}]") for position, call in enumerate(calls)]


def _check_call(call: object, where: str) -> dict[str, Any]:
    kind = call.get("type", "function") if isinstance(call, dict) else None
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or kind not in ("function", None) or not isinstance(function, dict):
        raise WrongValueError(
            f'{where} is {short(call)}; allowed: {{"id": ..., "type": "function", "function": {{"name": ..., '
            f'"arguments": ...}}}}.'
        )
    name, call_id = function.get("name"), call.get("id")
    if not isinstance(name, str) or not name:
        raise WrongValueError(f"{where}.function.name is {short(name)}; allowed: a string of at least one character.")
    if call_id is not None and not isinstance(call_id, str):
        raise WrongValueError(f"{where}.id is {short(call_id)}; allowed: a string.")
    arguments = _check_arguments(function.get("arguments"), f"{where}.function.arguments")
    result: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return result if call_id is None else {"id": call_id, **result}


def _check_arguments(arguments: object, where: str) -> dict[str, Any] | str:
    """An object where it is one, or the text of one; else the text. Missing or empty: no arguments, as in vLLM."""
    if isinstance(arguments, dict):
        return arguments
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        raise WrongValueError(f"{where} is {short(arguments)}; allowed: the text of a JSON object.")
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return arguments
    return value if isinstance(value, dict) else arguments
