"""config.json to a decoder's configuration: what is understood, and what is refused with a sentence."""

from __future__ import annotations

from typing import Any

import pytest

from replica.errors import ModelLoadError
from replica.models.families import parse


def raw(architecture: str = "LlamaForCausalLM", **fields: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        **fields,
    }


def parsed(architecture: str = "LlamaForCausalLM", **fields: Any) -> Any:
    config = parse(raw(architecture, **fields))
    assert config is not None
    return config


def windows(config: Any) -> list[int | None]:
    return [layer.window for layer in config.layers]


def test_an_unknown_family_is_left_to_others() -> None:
    assert parse(raw("GPTNeoXForCausalLM")) is None
    assert parse({}) is None


def test_plain_llama_is_plain_and_others_are_not() -> None:
    assert parsed().is_plain
    assert parsed("MistralForCausalLM", sliding_window=None).is_plain
    for other in (
        parsed(attention_bias=True),
        parsed("MistralForCausalLM", sliding_window=8),
        parsed("Qwen3ForCausalLM"),
        parsed("Olmo2ForCausalLM"),
        parsed("GraniteForCausalLM", residual_multiplier=0.2),
        parsed("Phi3ForCausalLM", partial_rotary_factor=0.5),
    ):
        assert not other.is_plain


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
    ],
)
def test_rope_in_its_three_spellings(fields: dict[str, Any]) -> None:
    (rope,) = parsed(**fields).ropes
    assert (rope.theta, rope.kind, rope.parameters, rope.rotary_dim) == (5e5, "linear", {"factor": 2.0}, 16)


def test_yarn_and_longrope_fill_in_their_lengths() -> None:
    (rope,) = parsed(rope_scaling={"rope_type": "yarn", "original_max_position_embeddings": 128}).ropes
    assert rope.parameters == {"original_max_position_embeddings": 128, "factor": 4.0}
    long = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    phi = parsed("Phi3ForCausalLM", rope_scaling=long, original_max_position_embeddings=256)
    assert phi.ropes[0].kind == "longrope"
    assert phi.ropes[0].parameters["factor"] == 2.0
    assert (phi.usual_length, phi.max_position_embeddings) == (256, 512)


def test_which_layers_have_a_window() -> None:
    assert windows(parsed("MistralForCausalLM", sliding_window=8)) == [8] * 4
    qwen = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
    assert windows(parsed("Qwen2ForCausalLM", **qwen)) == [None, None, None, 8]
    assert windows(parsed("Qwen2ForCausalLM", **{**qwen, "use_sliding_window": False})) == [None] * 4
    gemma = {"query_pre_attn_scalar": 16, "head_dim": 16, "sliding_window": 8}
    assert windows(parsed("Gemma2ForCausalLM", **gemma)) == [8, None, 8, None]
    types = ["full_attention"] * 3 + ["sliding_attention"]
    assert windows(parsed("Gemma2ForCausalLM", **gemma, layer_types=types)) == [None, None, None, 8]


def test_gemma_3_in_its_old_spelling() -> None:
    config = parsed(
        "Gemma3ForCausalLM",
        num_hidden_layers=6,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=8,
        sliding_window_pattern=3,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    assert windows(config) == [8, 8, None, 8, 8, None]
    assert [layer.rope for layer in config.layers] == [1, 1, 0, 1, 1, 0]
    assert [(rope.theta, rope.kind) for rope in config.ropes] == [(1e6, "linear"), (1e4, "default")]


def test_smollm3_skips_rotation_on_every_fourth_layer() -> None:
    assert [layer.rope for layer in parsed("SmolLM3ForCausalLM").layers] == [0, 0, 0, None]


def test_experts_and_what_is_cut_of_them() -> None:
    fields = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "decoder_sparse_step": 2}
    config = parsed("Qwen3MoeForCausalLM", **fields)
    assert [layer.has_experts for layer in config.layers] == [False, True, False, True]
    assert config.to_cut.intermediate_size == 8
    all_experts = parsed("Qwen3MoeForCausalLM", **{**fields, "decoder_sparse_step": 1})
    assert all_experts.to_cut.intermediate_size == 40


@pytest.mark.parametrize(
    ("architecture", "fields", "sentence"),
    [
        ("LlamaForCausalLM", {"hidden_act": "relu2"}, "hidden_act='relu2' is not supported"),
        ("LlamaForCausalLM", {"quantization_config": {"quant_method": "awq"}}, "quant_method='awq'"),
        ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "spiral"}}, "rope type 'spiral'"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "linear", "factor": 2, "twist": 3}}, "twist=3"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "linear"}}, "needs the field 'factor'"),
        ("LlamaForCausalLM", {"num_attention_heads": 5, "head_dim": 16}, "no multiple"),
        ("LlamaForCausalLM", {"rms_norm_eps": []}, r"rms_norm_eps=\[\] cannot be"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "linear", "factor": "two"}}, "factor='two' cannot be"),
        ("LlamaForCausalLM", {"rope_scaling": 5}, "rope_scaling=5 cannot be; allowed are an object and null"),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported for this"),
        ("LlamaForCausalLM", {"is_causal": False}, "is_causal=False"),
        ("LlamaForCausalLM", {"rope_theta": -1.0}, "rope_theta=-1.0 cannot be"),
        ("LlamaForCausalLM", {"rope_parameters": {"rope_theta": 0}}, "rope_theta=0 cannot be"),
        ("Phi3ForCausalLM", {"rope_parameters": {"partial_rotary_factor": 0}}, "partial_rotary_factor=0 cannot be"),
        ("Phi3ForCausalLM", {"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor=1.5 cannot be"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "linear", "factor": float("inf")}}, "factor=inf cannot be"),
        ("LlamaForCausalLM", {"is_encoder_decoder": True}, "encoder-decoder"),
        ("MistralForCausalLM", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("Qwen2ForCausalLM", {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ("Qwen2ForCausalLM", {"layer_types": ["full_attention"] * 3}, "for each of 4 layers"),
        ("Qwen2ForCausalLM", {"layer_types": ["sliding_attention"] * 4}, "sliding_window is not set"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("Gemma2ForCausalLM", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0 cannot be"),
        (
            "Gemma2ForCausalLM",
            {"final_logit_softcapping": 0},
            "final_logit_softcapping=0 cannot be; allowed are finite",
        ),
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": float("nan")}, "attn_logit_softcapping=nan cannot be"),
        ("GraniteForCausalLM", {"logits_scaling": 0}, "logits_scaling=0 cannot be; allowed are finite numbers above 0"),
        ("GraniteForCausalLM", {"residual_multiplier": -1.0}, "residual_multiplier=-1.0 cannot be"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, r"no_rope_layers=\[1\] cannot be; allowed are 4 numbers"),
        (
            "MixtralForCausalLM",
            {"num_local_experts": 4, "num_experts_per_tok": 5},
            "num_experts_per_tok=5 cannot be; the model has 4 experts, so allowed are 1 to 4",
        ),
        (
            "MixtralForCausalLM",
            {"num_local_experts": 0},
            "num_local_experts=0 cannot be; allowed are whole numbers from",
        ),
        ("Qwen3MoeForCausalLM", {"num_experts_per_tok": 129}, "the model has 128 experts"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": "all"}, "mlp_only_layers='all' cannot be"),
        (
            "Gemma2ForCausalLM",
            {"sliding_window": 8, "use_bidirectional_attention": True},
            "use_bidirectional_attention",
        ),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "short_factor has 1 numbers, not 8",
        ),
    ],
)
def test_what_would_change_the_result_is_refused(architecture: str, fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelLoadError, match=sentence) as caught:
        parse(raw(architecture, **fields))
    assert len(str(caught.value).splitlines()) == 1


def test_smollm3_has_the_windows_of_its_layer_types() -> None:
    """transformers makes its mask by `layer_types`, and leaves `use_sliding_window` to layers that have none."""
    types = ["full_attention", "sliding_attention"] * 2
    for more in ({}, {"use_sliding_window": False}, {"use_sliding_window": True}):
        config = parsed("SmolLM3ForCausalLM", sliding_window=8, layer_types=types, **more)
        assert windows(config) == [None, 8, None, 8]
    assert windows(parsed("SmolLM3ForCausalLM", sliding_window=8)) == [None] * 4
    assert windows(parsed("SmolLM3ForCausalLM", sliding_window=8, use_sliding_window=True)) == [None, None, None, 8]


def test_no_experts_are_plain_mlps() -> None:
    config = parsed("Qwen3MoeForCausalLM", num_experts=0)
    assert config.experts is None
    assert not any(layer.has_experts for layer in config.layers)


def test_gemma_2_has_caps_unless_they_are_null() -> None:
    """As transformers' Gemma2Config."""
    gemma = parsed("Gemma2ForCausalLM", sliding_window=8, query_pre_attn_scalar=16)
    assert (gemma.attention_softcap, gemma.logit_softcap) == (50.0, 30.0)
    caps: dict[str, Any] = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    bare = parsed("Gemma2ForCausalLM", sliding_window=8, query_pre_attn_scalar=16, **caps)
    assert (bare.attention_softcap, bare.logit_softcap) == (None, None)
