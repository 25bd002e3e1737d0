"""TORCH. Tables of cosines and sines for rotary positions, computed in float32 as Hugging Face does."""

from __future__ import annotations

import math
from typing import Any

import torch

from replica.models.decoder_config import RopeConfig


def rotary_tables(rope: RopeConfig, max_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), float32 [max_len, rotary_dim / 2]. `max_len` is the longest context of the run: longrope takes its
    long factors for all of it or for nothing.
    """
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    frequencies, scale = 1.0 / (rope.theta**exponents), 1.0
    if rope.kind == "linear":
        frequencies = frequencies / float(rope.parameters["factor"])
    elif rope.kind == "llama3":
        frequencies = _llama3(frequencies, rope.parameters)
    elif rope.kind == "yarn":
        frequencies, scale = _yarn(rope), _yarn_scale(rope.parameters)
    elif rope.kind == "longrope":
        frequencies, scale = _longrope(rope, exponents, max_len), _longrope_scale(rope.parameters)
    angles = torch.arange(max_len).float()[:, None] * frequencies[None, :]
    return (angles.cos() * scale).contiguous(), (angles.sin() * scale).contiguous()


def _llama3(frequencies: torch.Tensor, parameters: dict[str, Any]) -> torch.Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended."""
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    original = float(parameters["original_max_position_embeddings"])
    wavelength = 2 * math.pi / frequencies
    share = ((original / wavelength - low) / (high - low)).clamp(0, 1)  # 1: keep, 0: stretch
    return frequencies * (share + (1 - share) / float(parameters["factor"]))


def _yarn(rope: RopeConfig) -> torch.Tensor:
    """Dimensions that turn often within the original context are kept, those that turn rarely are stretched."""
    parameters, dim = rope.parameters, rope.rotary_dim
    original = float(parameters["original_max_position_embeddings"])

    def dimension(turns: float) -> float:
        """That turns so often within the original context (https://arxiv.org/abs/2309.00071)."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(float(parameters.get("beta_fast", 32))), dimension(float(parameters.get("beta_slow", 1)))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / ((high - low) or 0.001)).clamp(0, 1)
    waves = rope.theta ** (torch.arange(0, dim, 2).float() / dim)
    return 1.0 / (float(parameters["factor"]) * waves) * ramp + 1.0 / waves * (1 - ramp)


def _yarn_scale(parameters: dict[str, Any]) -> float:
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    factor = float(parameters["factor"])

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return scale(float(parameters["mscale"])) / scale(float(parameters["mscale_all_dim"]))
    return scale(1.0)


def _longrope(rope: RopeConfig, exponents: torch.Tensor, max_len: int) -> torch.Tensor:
    is_long = max_len > int(rope.parameters["original_max_position_embeddings"])
    factors = torch.tensor(rope.parameters["long_factor" if is_long else "short_factor"], dtype=torch.float32)
    return 1.0 / (factors * rope.theta**exponents)


def _longrope_scale(parameters: dict[str, Any]) -> float:
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    factor, original = float(parameters["factor"]), float(parameters["original_max_position_embeddings"])
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
