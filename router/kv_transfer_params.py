"""PURE. vLLM's `kv_transfer_params`: an outside proxy has one request compute a prompt and keep its KV, and gives what
the answer says of it to another one.

Here blocks are found by the hashes of the prompt, whoever has them, so `remote_*` is for the proxy's own books: it is
checked and passed on, and nothing depends on it. A prompt whose blocks are gone is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from router.sentences import WrongValueError, short

Schema = dict[str, Any]

_MAX_CHARS = 256
_MAX_BLOCKS = 1 << 20


class KVTransferParams(msgspec.Struct, frozen=True):
    """What is asked for."""

    #: its KV is kept for another request, which the answer tells of
    do_remote_decode: bool = False
    #: another request has computed the prompt
    do_remote_prefill: bool = False


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_CHARS


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _is_port(value: object) -> bool:
    return type(value) is int and 0 <= value <= 65535


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _are_blocks(value: object) -> bool:
    """Ids, or a list of them for each group of layers."""
    if not isinstance(value, list) or len(value) > _MAX_BLOCKS:
        return False
    inner = [one for part in value for one in (part if isinstance(part, list) else [part])]
    return len(inner) <= _MAX_BLOCKS and all(map(_is_count, inner))


_COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": (1 << 31) - 1}
_TEXT: Schema = {"type": "string", "maxLength": _MAX_CHARS}
_IDS: Schema = {"type": "array", "items": {"anyOf": [_COUNT, {"type": "array", "items": _COUNT}]}}
#: whether a value may be there, what is allowed, its schema
_Rule = tuple[Callable[[object], bool], str, Schema]
_A_BOOL: _Rule = (lambda value: isinstance(value, bool), "true or false", {"type": "boolean"})
_A_TEXT: _Rule = (_is_text, f"a string of at most {_MAX_CHARS} characters, or null", _TEXT)
_A_COUNT: _Rule = (_is_count, "an integer of at least 0, or null", _COUNT)
_KEYS: dict[str, _Rule] = {
    **dict.fromkeys(("do_remote_decode", "do_remote_prefill"), _A_BOOL),
    **dict.fromkeys(("remote_engine_id", "remote_request_id", "remote_host", "transfer_mode"), _A_TEXT),
    **dict.fromkeys(("remote_num_tokens", "tp_size", "dcp_size", "pp_size"), _A_COUNT),
    "remote_port": (_is_port, "an integer from 0 to 65535, or null", {**_COUNT, "maximum": 65535}),
    "remote_block_ids": (_are_blocks, "a list of integers, or of lists of integers, or null", _IDS),
    "remote_blocks_expiry_time": (_is_number, "a number, or null", {"type": "number"}),
}

SCHEMA: Schema = {
    "type": "object",
    "properties": {name: {"anyOf": [schema, {"type": "null"}]} for name, (_, _, schema) in _KEYS.items()},
    "not": {
        "properties": {"do_remote_decode": {"const": True}, "do_remote_prefill": {"const": True}},
        "required": ["do_remote_decode", "do_remote_prefill"],
    },
    "description": "as vLLM's: do_remote_decode or do_remote_prefill, with remote_* of an answer",
}


def check_kv_transfer_params(value: object) -> KVTransferParams | None:
    """Keys that nobody here knows are of another version of vLLM, and passed over. Raises WrongValueError."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise WrongValueError(f"kv_transfer_params is {short(value)}; allowed: an object, or null.")
    for name, (is_allowed, allowed, _) in _KEYS.items():
        if (given := value.get(name)) is not None and not is_allowed(given):
            raise WrongValueError(f"kv_transfer_params.{name} is {short(given)}; allowed: {allowed}.")
    decode, prefill = bool(value.get("do_remote_decode")), bool(value.get("do_remote_prefill"))
    if decode and prefill:
        raise WrongValueError(
            "kv_transfer_params.do_remote_prefill is true, and so is do_remote_decode; allowed: one of them."
        )
    return KVTransferParams(decode, prefill) if decode or prefill else None


def answered(request_id: str, served_by: str, prompts: list[list[int]]) -> Mapping[str, Any]:
    """What the second request is to carry. `served_by`: NAME@HOST:PORT of the replica that has computed the prompt."""
    name, _, address = served_by.partition("@")
    host, _, port = address.rpartition(":")
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": name,
        "remote_request_id": request_id,
        "remote_host": host,
        "remote_port": int(port or 0),
        "remote_block_ids": [],
        "remote_num_tokens": sum(map(len, prompts)),
        "tp_size": 1,
    }
