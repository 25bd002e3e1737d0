"""TORCH. What a decoder is: its configuration, read from an HF-style config.json, and the protocol of its forward pass.

Llama-type models only for now; another family adds a parser to `_PARSERS` and a forward pass of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from replica.errors import ModelLoadError
from replica.input_batch import InputBatch


class DecoderConfig(msgspec.Struct, frozen=True):
    """Shape of a Llama-type decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    #: the rope_scaling entry of config.json, or empty
    rope_scaling: dict[str, Any] = {}

    @property
    def q_dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_dim


class Decoder(Protocol):
    """A loaded model with its KV pool. Not thread-safe; always called from the same thread."""

    #: part of the model fingerprint: other kernels, other bits
    kernels: str

    def forward(self, batch: InputBatch) -> tuple[NDArray[np.int32], torch.Tensor]:
        """Compute one step: write K and V of its tokens, choose a token for each of the first `batch.num_chosen` rows
        of `batch.sample_rows`; but for a batch with `ruled` sequences leave the choice to `choose`.

        Returns (tokens [num_chosen], float32 logits [num_samples, vocab_size]); the next call overwrites the logits.
        """
        ...

    def choose(self, batch: InputBatch) -> NDArray[np.int32]:
        """Tokens [num_chosen] from the logits of the last `forward`, which the caller may have changed in place."""
        ...


def read_config(folder: Path) -> DecoderConfig:
    """Parse `folder/config.json`. Raises ModelLoadError saying which field cannot be served."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    names = raw.get("architectures") or ["(none)"]
    parser = _PARSERS.get(names[0])
    if parser is None:
        raise ModelLoadError(f"{path}: architecture {names[0]} is not supported; supported are {', '.join(_PARSERS)}")
    try:
        return parser(raw)
    except KeyError as error:
        raise ModelLoadError(f"{path}: field {error} is missing") from error


def _parse_llama(raw: dict[str, Any]) -> DecoderConfig:
    unsupported = {
        "attention_bias": not raw.get("attention_bias"),
        "mlp_bias": not raw.get("mlp_bias"),
        "hidden_act": raw.get("hidden_act", "silu") == "silu",
        "sliding_window": raw.get("sliding_window") is None,
        "quantization_config": not raw.get("quantization_config"),
    }
    for field, is_fine in unsupported.items():
        if not is_fine:
            raise ModelLoadError(f"config.json: {field}={raw[field]!r} is not supported by the Llama-type decoder")
    heads = int(raw["num_attention_heads"])
    # transformers 5 moved both under rope_parameters
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = rope.get("rope_theta", raw.get("rope_theta", 10000.0))
    scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ModelLoadError(f"config.json: rope type {kind!r} is not supported; supported are default, linear, llama3")
    return DecoderConfig(
        architecture=raw["architectures"][0],
        hidden_size=int(raw["hidden_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
        intermediate_size=int(raw["intermediate_size"]),
        vocab_size=int(raw["vocab_size"]),
        max_position_embeddings=int(raw["max_position_embeddings"]),
        rms_norm_eps=float(raw["rms_norm_eps"]),
        rope_theta=float(theta),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        rope_scaling={} if kind == "default" else {**scaling, "rope_type": kind},
    )


_PARSERS: dict[str, Callable[[dict[str, Any]], DecoderConfig]] = {
    "LlamaForCausalLM": _parse_llama,
    "MistralForCausalLM": _parse_llama,
}


def rotary_tables(config: DecoderConfig, max_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), float32 [max_len, head_dim / 2], computed in float32 as Hugging Face does."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    kind = config.rope_scaling.get("rope_type")
    if kind == "linear":
        frequencies = frequencies / float(config.rope_scaling["factor"])
    elif kind == "llama3":
        frequencies = _llama3_frequencies(frequencies, config.rope_scaling)
    angles = torch.arange(max_len).float()[:, None] * frequencies[None, :]
    return angles.cos().contiguous(), angles.sin().contiguous()


def _llama3_frequencies(frequencies: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended."""
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    wavelength = 2 * math.pi / frequencies
    share = ((original / wavelength - low) / (high - low)).clamp(0, 1)  # 1: keep, 0: stretch
    return frequencies * (share + (1 - share) / float(scaling["factor"]))
