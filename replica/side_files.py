"""PURE. What may lie beside a model's weights, looked at before anything is started: generation_config.json and
tokenizer_config.json. Routers read their texts and sampling defaults; a replica wants the end tokens only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replica.config_checks import MAX_CONFIG_BYTES
from replica.config_fields import check_eos, short
from replica.errors import ModelLoadError
from replica.json_file import read_json

GENERATION_NAME = "generation_config.json"
TOKENIZER_NAME = "tokenizer_config.json"
#: Llama 4's, with its added tokens, has 0.2 MB; some old tokenizers list every token in it
_MAX_TOKENIZER_BYTES = 64 << 20
#: sampling defaults of a model
_NUMBERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "typical_p")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def check_side_files(folder: Path) -> None:
    """Raises ModelLoadError with file, field and value for what neither routers nor replicas can read."""
    generation, tokenizer = folder / GENERATION_NAME, folder / TOKENIZER_NAME
    if generation.exists():
        _check_generation(generation, read_json(generation, MAX_CONFIG_BYTES))
    if tokenizer.exists():
        _check_tokenizer(tokenizer, read_json(tokenizer, _MAX_TOKENIZER_BYTES))


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """From generation_config.json, else config.json. Raises ModelLoadError."""
    for path in (folder / GENERATION_NAME, folder / "config.json"):
        if not path.exists():
            continue
        raw = read_json(path, MAX_CONFIG_BYTES)
        check_eos(path, raw)
        eos = raw.get("eos_token_id")
        if eos is not None:
            return tuple(eos) if isinstance(eos, list) else (eos,)
    return ()


def _check_generation(path: Path, raw: Mapping[str, Any]) -> None:
    check_eos(path, raw)
    for field in _NUMBERS:
        value = raw.get(field)
        if value is not None and type(value) not in (int, float):
            raise ModelLoadError(f"{path}: {field}={short(value)} cannot be; allowed are a number and null")


def _check_tokenizer(path: Path, raw: Mapping[str, Any]) -> None:
    for field in _SPECIAL_TOKENS:
        value = raw.get(field)
        text = value.get("content") if isinstance(value, dict) else value
        if text is not None and not isinstance(text, str):
            raise ModelLoadError(
                f"{path}: {field}={short(value)} cannot be; allowed are a text, an object with its `content`, and null"
            )
    template = raw.get("chat_template")
    named = template if isinstance(template, list) else []
    is_list = isinstance(template, list) and all(
        isinstance(one, dict) and isinstance(one.get("name"), str) and isinstance(one.get("template"), str)
        for one in named
    )
    if template is not None and not isinstance(template, str) and not is_list:
        raise ModelLoadError(
            f"{path}: chat_template={short(template)} cannot be; allowed are a text, "
            "a list of objects with `name` and `template`, and null"
        )
