"""A field that a config.json does not have means what transformers' class of the family makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import transformers

from replica.errors import ModelLoadError
from replica.models.decoder_config import DecoderConfig
from replica.models.families import FAMILIES, parse
from replica.models.family_defaults import DEFAULTS

#: what stands in a config.json that has everything; sizes are none of transformers' defaults
FULL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "hidden_act": "gelu",
    "hidden_activation": "gelu",
    "max_position_embeddings": 500,
    "original_max_position_embeddings": 250,
    "rms_norm_eps": 0.25,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": 8,
    "use_sliding_window": True,
    "max_window_layers": 3,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 7,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 4.0,
    "rope_theta": 777.0,
    "rope_local_base_freq": 111.0,
    "no_rope_layers": [1, 1, 0, 1, 1, 0, 1, 1],
    "no_rope_layer_interval": 3,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 3.0,
    "attention_multiplier": 4.0,
    "logits_scaling": 5.0,
    "num_experts_per_tok": 3,
    "num_local_experts": 12,
    "decoder_sparse_step": 2,
    "moe_intermediate_size": 40,
    "mlp_only_layers": [5],
    "norm_topk_prob": True,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
#: what else a file may say, in combinations where a default has something to decide
MORE: dict[str, dict[str, Any]] = {
    "plain": {},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    "llama3": {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 99}},
    "longrope": {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}},
    "layer types": {"layer_types": ["full_attention", "sliding_attention"] * 4},
}
WITH_LAYER_TYPES = (
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "SmolLM3ForCausalLM",
)
#: which families know what
CASES = [
    (family, kind)
    for family in FAMILIES
    for kind in MORE
    if kind == "plain"
    or (kind in ("yarn", "llama3") and family != "Phi3ForCausalLM")
    or (kind == "longrope" and family == "Phi3ForCausalLM")
    or (kind == "layer types" and family in WITH_LAYER_TYPES)
]
#: (family, field): our parser refuses these for reasons of its own
REFUSED_FIELDS = {
    "LlamaForCausalLM": ("sliding_window",),
    "MistralForCausalLM": ("attention_bias", "mlp_bias", "layer_types"),
    "Gemma3ForCausalLM": ("attn_logit_softcapping",),
    "Qwen2ForCausalLM": ("mlp_bias",),
}
#: fields that the class of the family has no say in: an attribute that is there is read, else something follows from
#: others. Phi-3's `head_dim` contradicts its own check of longrope's lengths
NEVER_THERE = {"Phi3ForCausalLM": ("head_dim",)}


class Recording(dict[str, Any]):
    """Notes which fields were asked for."""

    def __init__(self, raw: Mapping[str, Any], asked: set[str]) -> None:
        super().__init__(raw)
        self.asked = asked

    def __getitem__(self, field: str) -> Any:
        self.asked.add(field)
        return super().__getitem__(field)

    def get(self, field: str, default: Any = None) -> Any:
        self.asked.add(field)
        return super().get(field, default)


def full(family: str, more: Mapping[str, Any]) -> dict[str, Any]:
    out = (*REFUSED_FIELDS.get(family, ()), *NEVER_THERE.get(family, ()))
    ties = not DEFAULTS[family]["tie_word_embeddings"]
    fields = {**FULL, "tie_word_embeddings": ties, **more}
    return {"architectures": [family], **{k: v for k, v in fields.items() if k not in out}}


def ours(raw: Mapping[str, Any]) -> DecoderConfig | str:
    try:
        config = parse(raw)
    except ModelLoadError as error:
        return str(error)
    assert config is not None
    return config


def as_transformers_fills_in(family: str, raw: Mapping[str, Any]) -> DecoderConfig | str:
    """The same file as transformers' class would write it back: every field of the class is there."""
    config_class = getattr(transformers, family).config_class
    try:
        told = config_class(**{k: v for k, v in raw.items() if k != "architectures"})
    except Exception as error:
        return f"transformers: {type(error).__name__}: {error}"
    written = {**told.to_dict(), "architectures": [family]}
    return ours(written)


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_a_missing_field_is_transformers_default(family: str, kind: str) -> None:
    raw = full(family, MORE[kind])
    whole = ours(raw)
    assert isinstance(whole, DecoderConfig), whole
    assert whole == as_transformers_fills_in(family, raw)
    wrong = {}
    for field in [name for name in raw if name != "architectures"]:
        without = {name: value for name, value in raw.items() if name != field}
        here, there = ours(without), as_transformers_fills_in(family, without)
        if isinstance(there, str) and (isinstance(here, str) or there.startswith("transformers:")):
            continue  # it cannot do without either
        if here != there:
            wrong[field] = (here, there)
    assert wrong == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_that_names_its_family_only(family: str) -> None:
    assert ours({"architectures": [family]}) == as_transformers_fills_in(family, {"architectures": [family]})


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_that_is_parsed_is_among_those_compared(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the comparison above would say nothing of it."""
    asked: set[str] = set()
    from replica.models import families

    monkeypatch.setattr(families, "filled", lambda name, raw: Recording({**DEFAULTS[name], **raw}, asked))
    for kind in [kind for one, kind in CASES if one == family]:
        ours(full(family, MORE[kind]))
    refused = {"is_causal", "add_cross_attention", "is_encoder_decoder", "use_bidirectional_attention"}
    spellings = {"rope_parameters", "num_experts", "_sliding_window_pattern", "partial_rotary_factor"}
    known = {
        *FULL,
        "tie_word_embeddings",
        *REFUSED_FIELDS.get(family, ()),
        "architectures",
        "rope_scaling",
        "layer_types",
    }
    assert asked - known - refused - spellings == set()
    assert set(DEFAULTS[family]) <= {*FULL, "tie_word_embeddings"}
