"""ASYNC. What each GGUF architecture is called at Hugging Face: config.json, and the names of its tensors.

Sources: the tensor tables of the gguf package, llama.cpp's convert_hf_to_gguf.py for what it changes in values, and the
configuration classes of transformers. Tests hold every family against transformers' own reading of the same file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.gguf_file import GgufTensor, Metadata
from replica.errors import ModelLoadError

_PROJECTIONS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_PLAIN = {**_PROJECTIONS, "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
#: norms before and after each half of a layer
_GEMMA = {
    **_PROJECTIONS,
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3 = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
#: tables of rotary frequencies: part of the configuration at Hugging Face
ROPE_TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

#: values of the rotary tables that the file has, by tensor name
Tables = Mapping[str, list[float]]


@dataclass(frozen=True)
class Family:
    """One GGUF architecture."""

    architecture: str
    model_type: str
    layer_names: Mapping[str, str]
    #: what this family says beside `base_config`
    extra: Callable[[Metadata, Tables], dict[str, Any]]
    #: rows of q and k come in the order of llama.cpp's rotary embedding (see gguf_import)
    has_rope_order: bool = False
    #: norm weights were stored plus 1 (Gemma multiplies by 1 + weight)
    has_shifted_norms: bool = False
    activation: tuple[str, str] = ("hidden_act", "silu")

    def hf_name(self, tensor: str) -> str:
        """Name in a Hugging Face checkpoint. Raises ModelLoadError for a tensor that has no place in this family."""
        stem, _, suffix = tensor.rpartition(".")
        if suffix in ("weight", "bias"):
            if stem in _TOP:
                return f"{_TOP[stem]}.{suffix}"
            parts = stem.split(".")
            if len(parts) == 3 and parts[0] == "blk" and parts[1].isdecimal() and parts[2] in self.layer_names:
                return f"model.layers.{parts[1]}.{self.layer_names[parts[2]]}.{suffix}"
        raise ModelLoadError(f"tensor {tensor} has no place in {self.architecture}")


def config_json(meta: Metadata, tensors: Mapping[str, GgufTensor], tables: Tables) -> dict[str, Any]:
    """`config.json` without token ids. Raises ModelLoadError for a field that is missing or cannot be served."""
    name = meta.text("general.architecture")
    family = family_of(meta)
    heads = meta.count(f"{name}.attention.head_count")
    hidden = meta.count(f"{name}.embedding_length")
    if meta.get(f"{name}.expert_count"):
        raise ModelLoadError(f"{meta.source}: {name} with experts cannot be converted; take its .safetensors")
    head_dim = meta.count(f"{name}.attention.key_length", _head_dim(meta, name, hidden // heads))
    if name != "phi3":  # which says what share of a head turns
        _check_rotary(meta, name, tensors, heads, head_dim)
    field, activation = family.activation
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "hidden_size": hidden,
        "intermediate_size": meta.count(f"{name}.feed_forward_length"),
        "num_hidden_layers": meta.count(f"{name}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.count(f"{name}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": meta.count(f"{name}.context_length"),
        "rms_norm_eps": meta.number(f"{name}.attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.number(f"{name}.rope.freq_base", 10000.0),
        field: activation,
        "attention_bias": False,
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": "bfloat16",
        **_scaling(meta, name),
        **family.extra(meta, tables),
    }


def family_of(meta: Metadata) -> Family:
    """Raises ModelLoadError for an architecture that is not known."""
    name = meta.text("general.architecture")
    if name is None or name not in FAMILIES:
        raise ModelLoadError(
            f"{meta.source}: architecture {name!r} cannot be converted; known are {', '.join(FAMILIES)}"
        )
    return FAMILIES[name]


def _head_dim(meta: Metadata, name: str | None, default: int) -> int:
    """Only in llama files is the rotary dimension the head's; elsewhere it may be a part of it."""
    return meta.count("llama.rope.dimension_count", default) if name == "llama" else default


def _check_rotary(
    meta: Metadata, name: str | None, tensors: Mapping[str, GgufTensor], heads: int, head_dim: int
) -> None:
    """Raises ModelLoadError if the file turns a part of each head only, for which these families have no field. How
    wide a head really is shows in the projection of the queries.
    """
    if meta.get(f"{name}.rope.dimension_count") is None:
        return
    rotary = meta.count(f"{name}.rope.dimension_count")
    queries = tensors.get("blk.0.attn_q.weight")
    width = queries.shape[0] // heads if queries is not None else head_dim
    if rotary != width:
        raise ModelLoadError(
            f"{meta.source}: {name}.rope.dimension_count={rotary} cannot be; heads are {width} wide, and turning a "
            f"part of each is not supported for {name}; allowed: {width}"
        )


def _scaling(meta: Metadata, name: str | None) -> dict[str, Any]:
    kind = meta.text(f"{name}.rope.scaling.type")
    if kind in (None, "none", "longrope"):  # longrope: see _phi3
        return {}
    if kind not in ("linear", "yarn"):
        raise ModelLoadError(f"{meta.source}: rope scaling {kind!r} cannot be converted; known are linear, yarn")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": meta.number(f"{name}.rope.scaling.factor")}
    if (original := meta.get(f"{name}.rope.scaling.original_context_length")) is not None:
        scaling["original_max_position_embeddings"] = original
    return {"rope_scaling": scaling}


def _llama(meta: Metadata, tables: Tables) -> dict[str, Any]:
    scaling: dict[str, Any] = {"mlp_bias": False}
    if (found := tables.get("rope_freqs.weight")) is not None:
        scaling["rope_scaling"] = _llama3_scaling(meta, found)
    return scaling


def _llama3_scaling(meta: Metadata, found: list[float]) -> dict[str, Any]:
    """Llama 3.1's file holds the quotients and not the four numbers they come from. All its models share three of them
    (1, 4, 8192), and the fourth is the largest quotient; whether that is right shows by computing them again.
    """
    import math

    theta = meta.number("llama.rope.freq_base", 10000.0)
    factor, low, high, original = max(found), 1.0, 4.0, 8192
    for i, quotient in enumerate(found):
        wavelength = 2 * math.pi * theta ** (i / len(found))
        share = min(1.0, max(0.0, (original / wavelength - low) / (high - low)))
        if not math.isclose(quotient, 1 / ((1 - share) / factor + share), rel_tol=1e-3):
            raise ModelLoadError(f"{meta.source}: rope_freqs are not those of Llama 3.1; take the model's .safetensors")
    return {
        "rope_type": "llama3",
        "factor": round(factor, 4),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _qwen(meta: Metadata, tables: Tables) -> dict[str, Any]:
    return {"use_sliding_window": False}


def _query_scalar(meta: Metadata, name: str, layers_of_27b: int) -> int:
    """What the scores are divided by the root of: the head's width, but in the 27B models hidden / heads (llama.cpp
    tells them by their number of layers too).
    """
    if meta.count(f"{name}.block_count") == layers_of_27b:
        return meta.count(f"{name}.embedding_length") // meta.count(f"{name}.attention.head_count")
    return meta.count(f"{name}.attention.key_length")


def _gemma2(meta: Metadata, tables: Tables) -> dict[str, Any]:
    layers = meta.count("gemma2.block_count")
    return {
        "attn_logit_softcapping": meta.number("gemma2.attn_logit_softcapping", 50.0),
        "final_logit_softcapping": meta.number("gemma2.final_logit_softcapping", 30.0),
        "sliding_window": meta.count("gemma2.attention.sliding_window", 4096),
        "query_pre_attn_scalar": _query_scalar(meta, "gemma2", 46),
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)],
    }


def _gemma3(meta: Metadata, tables: Tables) -> dict[str, Any]:
    layers = meta.count("gemma3.block_count")
    pattern = meta.count("gemma3.attention.sliding_window_pattern", 6)
    cap = meta.get("gemma3.final_logit_softcapping")
    return {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None if cap is None else meta.number("gemma3.final_logit_softcapping"),
        "sliding_window": meta.count("gemma3.attention.sliding_window"),
        "sliding_window_pattern": pattern,
        "layer_types": ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)],
        "query_pre_attn_scalar": _query_scalar(meta, "gemma3", 62),
        "rope_local_base_freq": meta.number("gemma3.rope.freq_base_swa", 10000.0),
    }


def _phi3(meta: Metadata, tables: Tables) -> dict[str, Any]:
    heads, hidden = meta.count("phi3.attention.head_count"), meta.count("phi3.embedding_length")
    rotary = meta.count("phi3.rope.dimension_count", hidden // heads)
    context = meta.count("phi3.context_length")
    extra: dict[str, Any] = {
        "original_max_position_embeddings": meta.count("phi3.rope.scaling.original_context_length", context),
        "partial_rotary_factor": rotary / (hidden // heads),
        "sliding_window": meta.get("phi3.attention.sliding_window") or None,
    }
    if "rope_factors_long.weight" in tables:
        extra["rope_scaling"] = {
            "rope_type": "longrope",
            "long_factor": tables["rope_factors_long.weight"],
            "short_factor": tables.get("rope_factors_short.weight", []),
        }
    return extra


_GELU = ("hidden_activation", "gelu_pytorch_tanh")
FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", "llama", _PLAIN, _llama, has_rope_order=True),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", _PLAIN, _qwen),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", {**_PLAIN, **_QK_NORMS}, _qwen),
    "gemma2": Family("Gemma2ForCausalLM", "gemma2", _GEMMA, _gemma2, has_shifted_norms=True, activation=_GELU),
    "gemma3": Family(
        "Gemma3ForCausalLM", "gemma3_text", {**_GEMMA, **_QK_NORMS}, _gemma3, has_shifted_norms=True, activation=_GELU
    ),
    "phi3": Family("Phi3ForCausalLM", "phi3", _PHI3, _phi3),
}
