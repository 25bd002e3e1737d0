"""PURE. Numbers out of a config.json, each refused by its name. Knows no family."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replica.errors import ModelLoadError


def count(raw: Mapping[str, Any], field: str, least: int = 1) -> int:
    """A whole number from `least` on. Raises ModelLoadError for anything else."""
    value = raw[field]
    if type(value) is not int or value < least:
        raise ModelLoadError(f"config.json: {field}={short(value)} cannot be; allowed are whole numbers from {least}")
    return value


def positive(raw: Mapping[str, Any], field: str) -> float:
    """A finite number above 0. Raises ModelLoadError for anything else."""
    value = raw[field]
    if type(value) not in (int, float) or not (value > 0 and math.isfinite(value)):
        raise ModelLoadError(f"config.json: {field}={short(value)} cannot be; allowed are finite numbers above 0")
    return float(value)


def check_experts(per_token: int, num_experts: int) -> None:
    """Raises ModelLoadError for a token that wants more experts than there are."""
    if per_token > num_experts:
        raise ModelLoadError(
            f"config.json: num_experts_per_tok={per_token} cannot be; the model has {num_experts} experts, "
            f"so allowed are 1 to {num_experts}"
        )


def check_eos(where: Path | str, raw: Mapping[str, Any]) -> None:
    """`eos_token_id` of `raw`, read from the file `where`. Raises ModelLoadError for what is neither a token id nor a
    list of them.
    """
    eos = raw.get("eos_token_id")
    for one in eos if isinstance(eos, list) else [eos]:
        if one is not None and not (type(one) is int and one >= 0):
            raise ModelLoadError(
                f"{where}: eos_token_id={short(eos)} cannot be; allowed are a token id or a list of them"
            )


def short(value: Any) -> str:
    """As a sentence shows it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
