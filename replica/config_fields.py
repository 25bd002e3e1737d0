"""PURE. Numbers out of a config.json, each refused by its name. Knows no family."""

from __future__ import annotations

import math
from collections.abc import Mapping
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


def short(value: Any) -> str:
    """As a sentence shows it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
