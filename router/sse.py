"""PURE. Chunks of a streamed answer as server-sent events, cheap enough to write one a token.

Everything of a chunk but the new text is constant over a request, so it is made once; a plain chunk costs three bytes
objects and one JSON escape (0.3 us). Shapes (A-37): chat begins with a role chunk per choice, the finish chunk
carries the last text too; `usage` is present only when asked for; the stream ends with `data: [DONE]`, or with `data:
{"error": ...}` alone when it failed.
"""

from __future__ import annotations

import msgspec

from router.choice import Choice
from router.prepare import PreparedRequest

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def usage_object(
    num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int, num_reasoning_tokens: int | None = None
) -> dict[str, object]:
    """The `usage` of an answer or chunk. Reasoning tokens are told where reasoning is looked for."""
    usage: dict[str, object] = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }
    if num_reasoning_tokens is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning_tokens}
    return usage


def error_event(error: dict[str, object]) -> bytes:
    """The last event of a stream that failed: OpenAI clients raise on it. Nothing follows."""
    return b"data: " + _encode(error) + b"\n\n"


class ChunkEncoder:
    """Writes the chunks of one request."""

    def __init__(self, prepared: PreparedRequest) -> None:
        kind = "chat.completion.chunk" if prepared.is_chat else "text_completion"
        fields = {"id": prepared.response_id, "object": kind, "created": prepared.created_s, "model": prepared.model}
        self._head = b"data: " + _encode(fields)[:-1] + b',"choices":['
        self._is_chat = prepared.is_chat
        text_key = b',"delta":{"content":' if self._is_chat else b',"text":'
        self._heads = [self._head + b'{"index":%d' % index + text_key for index in range(prepared.num_choices)]
        after_text = b"}" if self._is_chat else b""
        self._plain_tail = after_text + b',"logprobs":null,"finish_reason":null}]}\n\n'

    def role(self, index: int, extra: dict[str, object]) -> bytes:
        """The first chunk of a chat choice. `extra` holds more fields of the chunk (`prompt_token_ids`, `usage`)."""
        return b"".join(
            (
                self._head,
                b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]' % index,
                _more_fields(extra),
                b"}\n\n",
            )
        )

    def text(self, index: int, text: str) -> bytes:
        """A chunk with new text and nothing else: the hot path."""
        return b"".join((self._heads[index], _encode(text), self._plain_tail))

    def end(self, choice: Choice, text: str) -> bytes:
        """The last chunk of a choice that is only text; the delta of a chat is empty when no text is left."""
        fields: dict[str, object] = {"index": choice.index}
        if self._is_chat:
            fields["delta"] = {"content": text} if text else {}
        else:
            fields["text"] = text
        fields["logprobs"] = None
        fields["finish_reason"] = choice.finish_reason
        fields["stop_reason"] = choice.stop_reason
        return self.chunk(fields)

    def chunk(self, choice: dict[str, object], usage: dict[str, object] | None = None) -> bytes:
        """A chunk with this entry of `choices`."""
        return b"".join((self._head, _encode(choice), b"]", _more_fields({"usage": usage} if usage else {}), b"}\n\n"))

    def usage(self, usage: dict[str, object]) -> bytes:
        """The extra chunk of `include_usage`: no choices."""
        return self._head + b"]" + _more_fields({"usage": usage}) + b"}\n\n"


def _more_fields(fields: dict[str, object]) -> bytes:
    """`,"name":value` for each field, to go on inside an open JSON object."""
    return b"," + _encode(fields)[1:-1] if fields else b""
