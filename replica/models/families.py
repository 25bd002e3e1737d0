"""PURE. One parser for each family: its config.json to a `DecoderConfig`. A field that would change the result and that
the decoder does not have is refused; one that transformers' own class of the family does not read is ignored. What is
absent is what transformers takes then (`family_defaults.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from replica.config_fields import check_experts, count, positive
from replica.errors import ModelLoadError
from replica.models.decoder_config import Activation, DecoderConfig, ExpertsConfig, LayerConfig
from replica.models.family_defaults import filled
from replica.models.rope_fields import parse_rope, part, rope_entry

Raw = Mapping[str, Any]
Parser = Callable[[Raw], DecoderConfig]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_QWEN_MATRICES = ("gate_proj", "up_proj", "down_proj")


def parse(raw: Raw) -> DecoderConfig | None:
    """The configuration of a family that this decoder knows, or None. `raw` went through `replica/config_checks.py`.
    Raises ModelLoadError naming the field."""
    name = (raw.get("architectures") or [""])[0]
    parser = FAMILIES.get(name)
    if parser is None:
        return None
    if raw.get("quantization_config"):
        method = (raw["quantization_config"] or {}).get("quant_method", "unknown")
        raise ModelLoadError(f"config.json: quantization_config is not supported (quant_method={method!r})")
    if raw.get("is_causal") is False:
        raise ModelLoadError("config.json: is_causal=False is not supported: only what looks backwards can be served")
    if raw.get("add_cross_attention") or raw.get("is_encoder_decoder"):
        raise ModelLoadError("config.json: encoder-decoder models are not supported")
    try:
        return parser(filled(name, raw))
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise ModelLoadError(f"config.json: a field has a value of the wrong kind: {error}") from error


def _activation(raw: Raw, field: str = "hidden_act", where_null: str = "silu") -> Activation:
    name = raw.get(field) or where_null
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ModelLoadError(f"config.json: {field}={name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _refuse(raw: Raw, *fields: str) -> None:
    """Fields that mean something to transformers and nothing here."""
    for field in fields:
        if raw.get(field):
            raise ModelLoadError(f"config.json: {field}={raw[field]!r} is not supported")


def _layer_types(raw: Raw, otherwise: Callable[[int], bool]) -> list[bool]:
    """For each layer whether it is windowed: from `layer_types`, else from its index."""
    num_layers = count(raw, "num_hidden_layers")
    types = raw.get("layer_types")
    if types is None:
        return [otherwise(i) for i in range(num_layers)]
    if (
        not isinstance(types, list)
        or len(types) != num_layers
        or not set(types) <= {"full_attention", "sliding_attention"}
    ):
        raise ModelLoadError(
            f"config.json: layer_types={types!r} is not supported; needs full_attention or sliding_attention for each "
            f"of {num_layers} layers"
        )
    return [name == "sliding_attention" for name in types]


def _window(raw: Raw) -> int | None:
    return count(raw, "sliding_window") if raw.get("sliding_window") else None


def _windowed(is_windowed: list[bool], window: int | None) -> tuple[LayerConfig, ...]:
    if any(is_windowed) and not window:
        raise ModelLoadError("config.json: layer_types names sliding_attention, but sliding_window is not set")
    return tuple(LayerConfig(window=window if windowed else None) for windowed in is_windowed)


def _decoder(raw: Raw, **more: Any) -> DecoderConfig:
    """What all families have in common."""
    heads = count(raw, "num_attention_heads")
    head_dim = _head_dim(raw)
    fields: dict[str, Any] = {
        "architecture": raw["architectures"][0],
        "hidden_size": count(raw, "hidden_size"),
        "num_layers": count(raw, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": count(raw, "num_key_value_heads") if raw.get("num_key_value_heads") else heads,
        "head_dim": head_dim,
        "intermediate_size": count(raw, "intermediate_size"),
        "vocab_size": count(raw, "vocab_size"),
        "max_position_embeddings": count(raw, "max_position_embeddings"),
        "rms_norm_eps": positive(raw, "rms_norm_eps"),
        "tie_word_embeddings": bool(raw["tie_word_embeddings"]),
        "layers": (LayerConfig(),) * count(raw, "num_hidden_layers"),
        "attention_scale": head_dim**-0.5,
        **more,
    }
    if "ropes" not in fields:
        fields["ropes"] = (parse_rope(raw, head_dim),)
    if "activation" not in fields:
        fields["activation"] = _activation(raw)
    if fields["num_heads"] % fields["num_kv_heads"]:
        raise ModelLoadError(
            f"config.json: num_attention_heads={heads} is no multiple of num_key_value_heads={fields['num_kv_heads']}"
        )
    return DecoderConfig(**fields)


def _head_dim(raw: Raw) -> int:
    if raw.get("head_dim"):
        return count(raw, "head_dim")
    return count(raw, "hidden_size") // count(raw, "num_attention_heads")


def _biased(raw: Raw) -> dict[str, bool]:
    return {"qkv_bias": bool(raw.get("attention_bias")), "o_bias": bool(raw.get("attention_bias"))}


def _llama(raw: Raw) -> DecoderConfig:
    _refuse(raw, "sliding_window")
    return _decoder(raw, **_biased(raw), mlp_bias=bool(raw.get("mlp_bias")))


def _mistral(raw: Raw) -> DecoderConfig:
    _refuse(raw, "attention_bias", "mlp_bias", "layer_types")
    layers = (LayerConfig(window=_window(raw)),) * count(raw, "num_hidden_layers")
    return _decoder(raw, layers=layers)


def _qwen_layers(raw: Raw) -> tuple[LayerConfig, ...]:
    window = _window(raw) if raw.get("use_sliding_window") else None
    first = 0 if window is None else count(raw, "max_window_layers", least=0)
    return _windowed(_layer_types(raw, lambda i: window is not None and i >= first), window)


def _qwen2(raw: Raw) -> DecoderConfig:
    _refuse(raw, "mlp_bias")
    return _decoder(raw, layers=_qwen_layers(raw), qkv_bias=True)


def _qwen3(raw: Raw) -> DecoderConfig:
    return _decoder(raw, layers=_qwen_layers(raw), qk_norm="head", **_biased(raw))


def _gemma(raw: Raw, **more: Any) -> DecoderConfig:
    """What Gemma 2 and 3 share. HF reads `hidden_activation`; `hidden_act` is a leftover."""
    _refuse(raw, "use_bidirectional_attention")
    return _decoder(
        raw,
        activation=_activation(raw, "hidden_activation", "gelu_pytorch_tanh"),
        norms="both",
        norm_offset=1.0,
        attention_scale=positive(raw, "query_pre_attn_scalar") ** -0.5,
        embedding_multiplier=count(raw, "hidden_size") ** 0.5,
        **{"logit_softcap": _cap(raw, "final_logit_softcapping"), **_biased(raw), **more},
    )


def _cap(raw: Raw, field: str) -> float | None:
    """null is no cap."""
    return None if raw.get(field) is None else positive(raw, field)


def _gemma2(raw: Raw) -> DecoderConfig:
    is_windowed = _layer_types(raw, lambda i: i % 2 == 0)
    return _gemma(
        raw,
        layers=_windowed(is_windowed, _window(raw)),
        attention_softcap=_cap(raw, "attn_logit_softcapping"),
    )


def _gemma3(raw: Raw) -> DecoderConfig:
    """Windowed layers rotate by a table of their own."""
    _refuse(raw, "attn_logit_softcapping")
    pattern = "_sliding_window_pattern" if raw.get("_sliding_window_pattern") else "sliding_window_pattern"
    period = 6 if raw[pattern] is None else count(raw, pattern)
    is_windowed = _layer_types(raw, lambda i: (i + 1) % period != 0)
    head_dim = _head_dim(raw)
    entry = part(raw, "rope_parameters")
    far = {**part(entry, "full_attention"), **part(raw, "rope_scaling")}
    near = dict(part(entry, "sliding_attention"))
    far.setdefault("rope_theta", raw["rope_theta"])
    near.setdefault("rope_theta", raw["rope_local_base_freq"])
    layers = _windowed(is_windowed, _window(raw))
    return _gemma(
        raw,
        ropes=(parse_rope(raw, head_dim, entry=far), parse_rope(raw, head_dim, entry=near)),
        layers=tuple(LayerConfig(rope=int(layer.window is not None), window=layer.window) for layer in layers),
        qk_norm="head",
    )


def _phi3(raw: Raw) -> DecoderConfig:
    """Phi-3 wrote `su`, and early on `yarn`, for what became longrope."""
    entry = rope_entry(raw)
    if (entry.get("rope_type") or entry.get("type")) in ("su", "yarn"):
        entry["rope_type"] = "longrope"
    head_dim = _head_dim(raw)
    return _decoder(
        raw,
        ropes=(parse_rope(raw, head_dim, entry=entry, may_be_partial=True),),
        layers=(LayerConfig(window=_window(raw)),) * count(raw, "num_hidden_layers"),
        has_fused_tensors=True,
    )


def _olmo2(raw: Raw) -> DecoderConfig:
    return _decoder(raw, norms="behind", qk_norm="row", **_biased(raw))


def _smollm3(raw: Raw) -> DecoderConfig:
    """`no_rope_layers` holds 1 for layers that do rotate. Which layers are windowed `layer_types` alone decides, if it
    is there: transformers makes the mask by it, whatever `use_sliding_window` says.
    """
    num_layers = count(raw, "num_hidden_layers")
    period = count(raw, "no_rope_layer_interval")
    rotates = raw.get("no_rope_layers") or [int((i + 1) % period != 0) for i in range(num_layers)]
    if not isinstance(rotates, list) or len(rotates) != num_layers or not set(rotates) <= {0, 1}:
        raise ModelLoadError(
            f"config.json: no_rope_layers={rotates!r} cannot be; allowed are {num_layers} numbers, one a layer, 0 or 1"
        )
    uses_window = bool(raw.get("use_sliding_window") and raw.get("sliding_window"))
    is_windowed = _layer_types(raw, lambda i: uses_window and not rotates[i])
    windowed = _windowed(is_windowed, _window(raw))
    layers = tuple(LayerConfig(rope=0 if rotates[i] else None, window=layer.window) for i, layer in enumerate(windowed))
    return _decoder(raw, layers=layers, mlp_bias=bool(raw.get("mlp_bias")), **_biased(raw))


def _granite(raw: Raw) -> DecoderConfig:
    return _decoder(
        raw,
        mlp_bias=bool(raw.get("mlp_bias")),
        embedding_multiplier=positive(raw, "embedding_multiplier"),
        residual_multiplier=positive(raw, "residual_multiplier"),
        attention_scale=positive(raw, "attention_multiplier"),
        logits_scaling=positive(raw, "logits_scaling"),
        **_biased(raw),
    )


def _per_token(raw: Raw, num_experts: int) -> int:
    per_token = count(raw, "num_experts_per_tok")
    check_experts(per_token, num_experts)
    return per_token


def _mixtral(raw: Raw) -> DecoderConfig:
    num_experts = count(raw, "num_experts" if "num_experts" in raw else "num_local_experts")
    return _decoder(
        raw,
        layers=(LayerConfig(window=_window(raw), has_experts=True),) * count(raw, "num_hidden_layers"),
        experts=ExpertsConfig(
            count=num_experts,
            per_token=_per_token(raw, num_experts),
            intermediate_size=count(raw, "intermediate_size"),
            normalises=True,
            router_name="block_sparse_moe.gate",
            expert_name="block_sparse_moe.experts",
            matrix_names=("w1", "w3", "w2"),
        ),
    )


def _qwen3_moe(raw: Raw) -> DecoderConfig:
    """Layers of `mlp_only_layers`, and those between the steps, have a plain MLP; so have all if there are no
    experts.
    """
    num_layers, plain = count(raw, "num_hidden_layers"), raw.get("mlp_only_layers") or []
    if not isinstance(plain, list) or not all(type(i) is int for i in plain):
        raise ModelLoadError(f"config.json: mlp_only_layers={plain!r} cannot be; allowed is a list of layers' numbers")
    period = count(raw, "decoder_sparse_step")
    window = _window(raw) if raw.get("use_sliding_window") else None
    num_experts = count(raw, "num_experts" if "num_experts" in raw else "num_local_experts", least=0)
    layers = tuple(
        LayerConfig(window=window, has_experts=bool(num_experts) and i not in plain and (i + 1) % period == 0)
        for i in range(num_layers)
    )
    experts = None
    if any(layer.has_experts for layer in layers):
        experts = ExpertsConfig(
            count=num_experts,
            per_token=_per_token(raw, num_experts),
            intermediate_size=count(raw, "moe_intermediate_size"),
            normalises=bool(raw.get("norm_topk_prob")),
            router_name="mlp.gate",
            expert_name="mlp.experts",
            matrix_names=_QWEN_MATRICES,
        )
    return _decoder(raw, layers=layers, qk_norm="head", experts=experts, **_biased(raw))


FAMILIES: dict[str, Parser] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Phi3ForCausalLM": _phi3,
    "Olmo2ForCausalLM": _olmo2,
    "SmolLM3ForCausalLM": _smollm3,
    "GraniteForCausalLM": _granite,
    "MixtralForCausalLM": _mixtral,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}
