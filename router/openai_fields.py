"""PURE. Request fields that OpenAI or vLLM know and Shoal does not act on.

Two kinds. `WITHOUT_EFFECT`: accepted with any value, because leaving them out changes no answer (OpenAI's own
book-keeping fields). `NOT_SUPPORTED`: accepted only with a value that asks for nothing (null, the default, an empty
container); any other is refused with 400, because ignoring it would give a different answer than asked for. A field
in neither and in no model is a mistake of the client's: refused with the nearest valid name, on both endpoints (case
A-36, our choice).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

#: Accepted, no effect.
WITHOUT_EFFECT: frozenset[str] = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "parallel_tool_calls",
        "include_reasoning",
    }
)

#: Field -> values that ask for nothing. null, [] , {} and "" always do.
_COMMON: dict[str, tuple[object, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "logit_bias": (),
    "best_of": (1,),
    "use_beam_search": (False,),
    "allowed_token_ids": (),
    "bad_words": (),
    "prompt_logprobs": (False,),
    "logprob_token_ids": (),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "priority": (0,),
    "request_id": (),
    "session_id": (),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_prompt_text": (False,),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "vllm_xargs": (),
    "repetition_detection": (),
    "thinking_token_budget": (),
    "stream_interval": (1,),
    "watermarking": (False,),
    "mm_payload": (),
    "return_mm_kwargs": (False,),
    "routed_experts_prompt_start": (),
}

_COMPLETION_ONLY: dict[str, tuple[object, ...]] = {
    "logprobs": (False,),
    "suffix": (),
    "prompt_embeds": (),
}

_CHAT_ONLY: dict[str, tuple[object, ...]] = {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": (),
    "tool_choice": ("none", "auto"),
    "functions": (),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "moderation": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "documents": (),
    "chat_template": (),
    "echo": (False,),
    "media_io_kwargs": (),
    "mm_processor_kwargs": (),
}

COMPLETION_NOT_SUPPORTED = {**_COMMON, **_COMPLETION_ONLY}
CHAT_NOT_SUPPORTED = {**_COMMON, **_CHAT_ONLY}


def asks_for_nothing(value: object, neutral: tuple[object, ...]) -> bool:
    """True where leaving the field out means the same. `0` and `False` are kept apart, `0` and `0.0` are not."""
    if value is None or (isinstance(value, (str, list, dict)) and not value):
        return True
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)


def first_refused(body: Mapping[str, Any], not_supported: Mapping[str, tuple[object, ...]]) -> str | None:
    """The first field of `body` that asks for something not supported yet."""
    for name, value in body.items():
        neutral = not_supported.get(name)
        if neutral is not None and not asks_for_nothing(value, neutral):
            return name
    return None


def nearest_name(name: str, valid: Iterable[str]) -> str | None:
    """The valid name most like `name`, None when none is near."""
    matches = difflib.get_close_matches(name[:64], list(valid), n=1, cutoff=0.6)
    return matches[0] if matches else None
