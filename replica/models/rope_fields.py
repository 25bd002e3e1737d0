"""PURE. The fields of config.json that describe rotary positions, in their old and new spelling, to a `RopeConfig`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from replica.config_fields import short
from replica.errors import ModelLoadError
from replica.models.decoder_config import RopeConfig

#: kind -> fields it cannot do without, fields it may have
_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": ((), ("factor", "original_max_position_embeddings")),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ("original_max_position_embeddings",)),
    "yarn": (
        (),
        (
            "factor",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "original_max_position_embeddings",
            "truncate",
        ),
    ),
    "longrope": (
        ("short_factor", "long_factor"),
        ("factor", "attention_factor", "original_max_position_embeddings"),
    ),
}
_EVERYWHERE = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}


def rope_entry(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_scaling`, or what transformers 5 made of it."""
    return part(raw, "rope_scaling") or part(raw, "rope_parameters")


def part(raw: Mapping[str, Any], field: str) -> dict[str, Any]:
    """The object in `field`, empty where there is none. Raises ModelLoadError for something else."""
    found = raw.get(field)
    if found is not None and not isinstance(found, dict):
        raise ModelLoadError(f"config.json: {field}={short(found)} cannot be; allowed are an object and null")
    return dict(found or {})


def parse_rope(
    raw: Mapping[str, Any],
    head_dim: int,
    default_theta: float = 10_000.0,
    entry: Mapping[str, Any] | None = None,
    may_be_partial: bool = False,
) -> RopeConfig:
    """Of the whole config.json `raw`; `entry` is the part on rotary positions where it is not the usual one.
    `may_be_partial`: the family turns a share of each head where `partial_rotary_factor` says so; transformers' classes
    of the others ignore the field in one rope type and fail in the next.
    """
    entry = rope_entry(raw) if entry is None else entry
    kind = str(entry.get("rope_type") or entry.get("type") or "default")
    if kind not in _FIELDS:
        raise ModelLoadError(
            f"config.json: rope type {kind!r} is not supported; supported are {', '.join(sorted(_FIELDS))}"
        )
    needed, optional = _FIELDS[kind]
    for field, value in entry.items():
        if field not in {*needed, *optional, *_EVERYWHERE} and value is not None:
            raise ModelLoadError(f"config.json: {field}={value!r} is not supported for rope type {kind!r}")
    for field in needed:
        if entry.get(field) is None:
            raise ModelLoadError(f"config.json: rope type {kind!r} needs the field {field!r}")
    _check_numbers(entry)
    theta = _first(entry.get("rope_theta"), raw.get("rope_theta"), default_theta)
    share = _first(entry.get("partial_rotary_factor"), raw.get("partial_rotary_factor"), 1.0)
    for field, value in (("rope_theta", theta), ("factor", entry.get("factor")), ("partial_rotary_factor", share)):
        if value is not None and not (math.isfinite(float(value)) and float(value) > 0):
            raise ModelLoadError(f"config.json: {field}={value!r} cannot be; allowed are numbers above 0")
    if share > 1:
        raise ModelLoadError(f"config.json: partial_rotary_factor={share!r} cannot be; allowed are numbers up to 1")
    if float(share) != 1.0 and not may_be_partial:
        raise ModelLoadError(f"config.json: partial_rotary_factor={share!r} is not supported for this family")
    rotary_dim = int(head_dim * float(share))
    parameters = {f: entry[f] for f in (*needed, *optional) if entry.get(f) is not None}
    if kind in ("llama3", "yarn", "longrope"):
        _fill_lengths(raw, parameters)
    if kind == "longrope":
        for field in ("short_factor", "long_factor"):
            if len(parameters[field]) != rotary_dim // 2:
                raise ModelLoadError(
                    f"config.json: {field} has {len(parameters[field])} numbers, not {rotary_dim // 2}"
                )
    # Dynamic NTK stretches nothing up to max_position_embeddings, and longer contexts are refused.
    return RopeConfig(
        float(theta), rotary_dim, *(("default", {}) if kind in ("default", "dynamic") else (kind, parameters))
    )


def _first(*values: Any) -> Any:
    """Of those that are there; 0 is, and will be refused."""
    return next(value for value in values if value is not None)


def _check_numbers(entry: Mapping[str, Any]) -> None:
    """Whatever the kind, its parameters are numbers, or lists of them (longrope)."""
    for field, value in entry.items():
        if field in ("rope_type", "type", "truncate") or value is None:
            continue
        is_list = field in ("short_factor", "long_factor")
        of_all = value if is_list and isinstance(value, list) else [value]
        if not all(type(one) in (int, float) and math.isfinite(one) for one in of_all):
            what = "is a list of finite numbers" if is_list else "are finite numbers"
            raise ModelLoadError(f"config.json: {field}={short(value)} cannot be; allowed {what}")


def _fill_lengths(raw: Mapping[str, Any], parameters: dict[str, Any]) -> None:
    """Where Phi-3 keeps the original length wins; a missing factor is the ratio of both lengths."""
    longest = int(raw["max_position_embeddings"])
    original = raw.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
    parameters["original_max_position_embeddings"] = int(original or longest)
    parameters.setdefault("factor", longest / int(original or longest))
