"""PURE. What a config.json may say before anybody allocates by it. Knows no architecture: only what is absurd in all.

Fields that are absent are not missed here; the decoder that needs them says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replica.config_fields import check_eos, short
from replica.errors import ModelLoadError
from replica.json_file import read_json

#: the longest seen have 0.5 MB (labels of an image classifier)
MAX_CONFIG_BYTES = 8 << 20
#: counts: at least 1 (but for `_MAY_BE_0`), at most this; several models give a list, a number for each layer
_MOST: Mapping[str, int] = {
    "hidden_size": 1 << 20,
    "n_embd": 1 << 20,
    "num_hidden_layers": 10_000,
    "n_layer": 10_000,
    "num_attention_heads": 1 << 16,
    "n_head": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "intermediate_size": 1 << 24,
    "moe_intermediate_size": 1 << 24,
    "num_experts": 1 << 16,
    "num_local_experts": 1 << 16,
    "num_experts_per_tok": 1 << 16,
    "vocab_size": 1 << 26,
    "max_position_embeddings": 1 << 31,
}
#: such a model has plain MLPs (GraniteMoeHybrid, Qwen3-MoE)
_MAY_BE_0 = ("num_experts", "num_local_experts", "num_experts_per_tok")
_SWITCHES = (
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "use_sliding_window",
    "norm_topk_prob",
    "is_causal",
    "use_bidirectional_attention",
)
#: numbers above 0, at most this
_POSITIVE: Mapping[str, float] = {
    "rms_norm_eps": 1.0,
    "layer_norm_eps": 1.0,
    "rope_theta": 1e12,
    "rope_local_base_freq": 1e12,
    "partial_rotary_factor": 1.0,
    "query_pre_attn_scalar": 1e9,
    "embedding_multiplier": 1e9,
    "residual_multiplier": 1e9,
    "attention_multiplier": 1e9,
    "logits_scaling": 1e9,
}


def read_model_config(folder: Path) -> dict[str, Any]:
    """`config.json` of `folder`, with no absurd number in it or in its `text_config`. Raises ModelLoadError."""
    path = folder / "config.json"
    raw = read_json(path, MAX_CONFIG_BYTES)
    check_numbers(path, raw)
    nested = raw.get("text_config")
    if isinstance(nested, dict):
        check_numbers(path, nested)
    return raw


def check_numbers(path: Path, raw: Mapping[str, Any]) -> None:
    """Raises ModelLoadError with the first field whose type or size no model has."""
    for field, most in _MOST.items():
        value, least = raw.get(field), int(field not in _MAY_BE_0)
        for one in value if isinstance(value, list) else [value]:
            if one is not None and not (type(one) is int and least <= one <= most):
                raise ModelLoadError(
                    f"{path}: {field}={short(value)} cannot be; allowed are whole numbers {least} to {most}"
                )
    for field, most_float in _POSITIVE.items():
        value = raw.get(field)
        is_number = type(value) in (int, float)
        if value is not None and not (is_number and 0 < value <= most_float):
            raise ModelLoadError(
                f"{path}: {field}={short(value)} cannot be; allowed are numbers above 0, up to {most_float:g}"
            )
    for field in _SWITCHES:
        value = raw.get(field)
        if value is not None and not isinstance(value, bool):
            raise ModelLoadError(f"{path}: {field}={short(value)} cannot be; allowed are true and false")
    window = raw.get("sliding_window")
    is_off = window == 0 and raw.get("use_sliding_window") is False  # as transformers writes Qwen2-MoE back
    if window is not None and not is_off and not (type(window) is int and window > 0):
        raise ModelLoadError(
            f"{path}: sliding_window={short(window)} cannot be; allowed are whole numbers from 1, or null"
        )
    for field in ("architectures",):
        value = raw.get(field)
        if value is not None and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
            raise ModelLoadError(f"{path}: {field}={short(value)} cannot be; allowed is a list of names")
    check_eos(path, raw)


def brings_code(raw: Mapping[str, Any]) -> bool:
    """Does the folder want Python files of its own run (`auto_map`)? Shoal never does that."""
    return bool(raw.get("auto_map"))
