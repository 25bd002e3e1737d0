"""Answers held against the official client's own types: every field is what OpenAI says, or one we name."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

#: fields that OpenAI does not have, vLLM's names
EXTRA = {"stop_reason", "reasoning", "token_ids", "prompt_token_ids", "prompt_logprobs"}


def _foreign(value: object) -> Iterator[str]:
    """Names that a model of the official client did not know."""
    if isinstance(value, BaseModel):
        yield from value.model_extra or {}
        for name in type(value).model_fields:
            yield from _foreign(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            yield from _foreign(item)


def _checked(model: type[BaseModel], body: dict[str, Any]) -> None:
    assert set(_foreign(model.model_validate(body, strict=True))) <= EXTRA


def check_chat(body: dict[str, Any]) -> None:
    _checked(ChatCompletion, body)


def check_chat_chunk(chunk: dict[str, Any]) -> None:
    _checked(ChatCompletionChunk, chunk)


def check_completion(body: dict[str, Any]) -> None:
    """Also for chunks. The official type has no null where OpenAI itself sends it: the reason of a chunk in the middle,
    and the logprobs of the first echoed token.
    """
    body = copy.deepcopy(body)
    for choice in body["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "stop"
        logprobs = choice["logprobs"]
        if logprobs and logprobs["token_logprobs"] and logprobs["token_logprobs"][0] is None:
            assert logprobs["top_logprobs"][0] is None
            logprobs["token_logprobs"][0], logprobs["top_logprobs"][0] = 0.0, {}
    _checked(Completion, body)


def check_chunks(chunks: list[Any], path: str) -> list[dict[str, Any]]:
    """All events of a stream but "[DONE]", checked."""
    *chunks, done = chunks
    assert done == "[DONE]"
    for chunk in chunks:
        (check_chat_chunk if path == "chat" else check_completion)(chunk)
    return chunks


def joined_choice(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """What a client has of one choice when it joins the chunks, in the shape of a whole answer's choice."""
    text, content, reasoning = "", "", ""
    calls: dict[int, dict[str, Any]] = {}
    ids: list[int] = []
    logprobs: dict[str, Any] | None = None
    last: dict[str, Any] = {}
    for choice in [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]:
        assert not last.get("finish_reason"), "a choice goes on after its end"
        last = choice
        delta = choice.get("delta", {})
        text += choice.get("text", "")
        content += delta.get("content") or ""
        reasoning += delta.get("reasoning") or ""
        ids += choice.get("token_ids", [])
        for call in delta.get("tool_calls", []):
            if call["index"] not in calls:
                calls[call["index"]] = {
                    "id": call["id"],
                    "type": call["type"],
                    "function": {"name": call["function"]["name"], "arguments": ""},
                }
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        for name, values in (choice["logprobs"] or {}).items():
            logprobs = logprobs or {}
            logprobs[name] = (logprobs.get(name) or []) + values if values is not None else None
    result = {"index": index, "logprobs": logprobs, "finish_reason": last["finish_reason"]}
    result["stop_reason"] = last["stop_reason"]
    if "text" in last:
        return {**result, "text": text, "token_ids": ids}
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = list(calls.values())
        message["content"] = content or None
    return {**result, "message": message, "token_ids": ids}
