"""TORCH. What transformers says of a model whose family has no decoder of ours, and whether it can run on our cache."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replica.checkpoint import Checkpoint
from replica.config_fields import check_experts
from replica.errors import ModelLoadError
from replica.models.decoder_config import ModelShape
from replica.models.families import FAMILIES
from replica.tensor_names import refuse_quantized

#: layers with another state than keys and values, or another mask than causal ones and windows, are not ours to run
_LAYER_TYPES = {"full_attention", "sliding_attention"}


class TransformersShape(ModelShape, frozen=True, kw_only=True):
    """Of a model that transformers computes."""


def read_shape(folder: Path, raw: Mapping[str, Any]) -> TransformersShape:
    """Raises ModelLoadError with the reason if the model cannot run through transformers on our cache."""
    import transformers

    transformers.logging.set_verbosity_error()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    name = str((raw.get("architectures") or ["(none)"])[0])
    if raw.get("quantization_config"):
        raise ModelLoadError("config.json: quantization_config is not supported")
    model_class = _model_class(name, raw)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # whatever a strange config.json makes of it
        raise ModelLoadError(f"{folder}: transformers cannot read config.json: {_one_line(error)}") from error
    if config.get_text_config(decoder=True) is not config:
        raise _refusal(name, "it is made of several models (text beside images or sound)")
    _check_attention(name, model_class, config)
    _check_experts(config)
    context = _first(config, "max_position_embeddings", "n_positions", "max_sequence_length")
    if context is None:
        raise _refusal(name, "config.json does not say how long its context is (max_position_embeddings)")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # transformers changes factors by the longest position in the batch
        context = min(int(context), int(rope.get("original_max_position_embeddings") or context))
    heads = int(config.num_attention_heads)
    kv_heads = 1 if getattr(config, "multi_query", False) else getattr(config, "num_key_value_heads", None) or heads
    return TransformersShape(
        architecture=name,
        hidden_size=int(config.hidden_size),
        num_layers=int(config.num_hidden_layers),
        num_heads=heads,
        num_kv_heads=int(kv_heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        intermediate_size=int(_first(config, "intermediate_size", "ffn_dim", "n_inner") or 4 * config.hidden_size),
        vocab_size=int(config.vocab_size),
        max_position_embeddings=int(context),
    )


def check_folder(folder: Path) -> None:
    """Whether the weights can be opened and are plain numbers; names and shapes are checked when they are read. Raises
    ModelLoadError.
    """
    refuse_quantized(Checkpoint(folder).dtypes())


def _model_class(name: str, raw: Mapping[str, Any]) -> Any:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        if raw.get("auto_map"):
            raise _refusal(name, "it brings code of its own (auto_map), which is not run")
        raise ModelLoadError(
            f"config.json: architecture {name} is not supported: neither of our own decoders "
            f"({', '.join(FAMILIES)}) nor a causal language model of transformers {transformers.__version__}"
        )
    return getattr(transformers, name)


def _check_attention(name: str, model_class: Any, config: Any) -> None:
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise _refusal(name, "it is an encoder-decoder model")
    if getattr(model_class, "_is_stateful", False):
        raise _refusal(name, "its layers keep a state other than keys and values")
    if not getattr(model_class, "_supports_attention_backend", False):
        raise _refusal(name, "its layers do not go through transformers' attention interface")
    if getattr(config, "kv_lora_rank", None):
        raise _refusal(
            name, f"it has latent attention (kv_lora_rank={config.kv_lora_rank}), for which there is no cache"
        )
    other = {kind for kind in getattr(config, "layer_types", None) or () if kind not in _LAYER_TYPES}
    if other:
        raise _refusal(name, f"it has layers of another kind: {', '.join(sorted(other))}")


def _check_experts(config: Any) -> None:
    num_experts, per_token = _first(config, "num_local_experts", "num_experts"), _first(config, "num_experts_per_tok")
    if isinstance(num_experts, int) and isinstance(per_token, int) and num_experts:  # 0: no experts
        check_experts(per_token, num_experts)


def _first(config: Any, *names: str) -> Any:
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return None


def _refusal(name: str, why: str) -> ModelLoadError:
    return ModelLoadError(f"config.json: architecture {name} is not supported: {why}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
