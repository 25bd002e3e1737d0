"""PURE. Request fields that OpenAI or vLLM know and Shoal does not act on.

Two kinds. `WITHOUT_EFFECT`: accepted with any value, because leaving them out changes no answer. `Refused`: accepted
only with a value that asks for nothing (null, the default, an empty container); any other is refused with 400 and the
reason, because ignoring it would give a different answer than asked for. A field in neither and in no model is a
mistake of the client's: refused with the nearest valid name, on both endpoints (case A-36, our choice).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

#: Accepted, no effect -> what it is for elsewhere.
WITHOUT_EFFECT: dict[str, str] = {
    "user": "OpenAI's name for the end user",
    "metadata": "OpenAI's notes on stored answers",
    "store": "OpenAI keeps the answer; nothing is kept here",
    "service_tier": "OpenAI's price class",
    "safety_identifier": "OpenAI's name for the end user",
    "prompt_cache_key": "a hint for OpenAI's cache; prefixes are cached here without one",
    "prompt_cache_retention": "a hint for OpenAI's cache",
    "prompt_cache_options": "a hint for OpenAI's cache",
    "session_id": "a hint for vLLM's routers",
}


class Refused(msgspec.Struct, frozen=True):
    """A field that is refused, and why. `neutral`: values that ask for nothing beside null, [], {} and ""."""

    reason: str
    neutral: tuple[object, ...] = ()
    #: what to use instead
    instead: str = ""

    @property
    def sentence(self) -> str:
        return f"{self.reason}; use {self.instead}" if self.instead else self.reason


_NO_BEAMS = "beam search is not supported"
_NO_TRANSFER = "the caller cannot steer transfers of the KV cache"
_NO_IMAGES = "the model reads text alone"

_COMMON: dict[str, Refused] = {
    "best_of": Refused("no longer in OpenAI's chat API nor in vLLM", (1,), "n"),
    "use_beam_search": Refused(_NO_BEAMS, (False,)),
    "length_penalty": Refused(_NO_BEAMS, (1,)),
    "guided_json": Refused("vLLM's older name", (), "structured_outputs.json or response_format"),
    "guided_regex": Refused("vLLM's older name", (), "structured_outputs.regex"),
    "guided_choice": Refused("vLLM's older name", (), "structured_outputs.choice"),
    "guided_grammar": Refused("vLLM's older name", (), "structured_outputs.grammar"),
    "guided_decoding_backend": Refused("there is one backend"),
    "guided_whitespace_pattern": Refused('JSON is written with ", " and ": " and no other white space'),
    "logprob_token_ids": Refused("logprobs of chosen tokens are not supported", (), "logprobs"),
    "spaces_between_special_tokens": Refused("special tokens are joined as the tokenizer does it", (True,)),
    "return_token_offsets": Refused("not supported", (False,), "logprobs, whose text_offset tells them"),
    "return_prompt_text": Refused("not supported", (False,), "echo, or return_token_ids and /detokenize"),
    "ec_transfer_params": Refused(_NO_TRANSFER),
    "vllm_xargs": Refused("there are no plug-ins that could read it"),
    "repetition_detection": Refused("not supported", (), "frequency_penalty or repetition_penalty"),
    "thinking_token_budget": Refused("the length of thoughts cannot be limited by itself", (), "max_tokens"),
    "stream_interval": Refused("each step is sent at once", (1,)),
    "watermarking": Refused("not supported", (False,)),
    "mm_payload": Refused(_NO_IMAGES),
    "return_mm_kwargs": Refused(_NO_IMAGES, (False,)),
    "routed_experts_prompt_start": Refused("not supported"),
}

_COMPLETION_ONLY: dict[str, Refused] = {
    "suffix": Refused("the model was not trained to fill in the middle"),
    "prompt_embeds": Refused("prompts are text or token ids", (), "prompt"),
}

_CHAT_ONLY: dict[str, Refused] = {
    "functions": Refused("OpenAI's older form", (), "tools"),
    "function_call": Refused("OpenAI's older form", ("none", "auto"), "tool_choice"),
    "modalities": Refused(_NO_IMAGES, (["text"],)),
    "audio": Refused(_NO_IMAGES),
    "prediction": Refused("not supported"),
    "web_search_options": Refused("the server does not search"),
    "moderation": Refused("the server does not moderate"),
    "include_reasoning": Refused("reasoning is always told, apart from the content", (True,)),
    "verbosity": Refused("the model has no levels of it", ("medium",)),
    "documents": Refused("not supported", (), "messages"),
    "chat_template": Refused("a template is a program, so only the server's own is run", (), "chat_template_kwargs"),
    "media_io_kwargs": Refused(_NO_IMAGES),
    "mm_processor_kwargs": Refused(_NO_IMAGES),
}

COMPLETION_REFUSED: dict[str, Refused] = {**_COMMON, **_COMPLETION_ONLY}
CHAT_REFUSED: dict[str, Refused] = {**_COMMON, **_CHAT_ONLY}


def asks_for_nothing(value: object, neutral: tuple[object, ...]) -> bool:
    """True where leaving the field out means the same. `0` and `False` are kept apart, `0` and `0.0` are not."""
    if value is None or (isinstance(value, (str, list, dict)) and not value):
        return True
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)


def first_refused(body: Mapping[str, Any], refused: Mapping[str, Refused]) -> str | None:
    """The first field of `body` that asks for something that is refused."""
    for name, value in body.items():
        rule = refused.get(name)
        if rule is not None and not asks_for_nothing(value, rule.neutral):
            return name
    return None


def nearest_name(name: str, valid: Iterable[str]) -> str | None:
    """The valid name most like `name`, None when none is near."""
    matches = difflib.get_close_matches(name[:64], list(valid), n=1, cutoff=0.6)
    return matches[0] if matches else None
