"""`python -m benchmarks.tiny_models FOLDER [NAME ...]`: small random checkpoints, one for each family that is
served and for what sets families apart, with a tokenizer, so that they can be served too.

Seeded: the same bytes every time. Made by transformers, which writes config.json as people get it. Weights are large
enough that logits differ by whole units: with the usual start near zero, a wrong model would hardly show.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch

VOCAB_SIZE = 272
EOS = 257
MAX_LEN = 512
_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_LEN,
    "bos_token_id": 256,
    "eos_token_id": EOS,
    "pad_token_id": 258,
}
#: shorter than the test's prompts
_WINDOW = 24


class TinyModel(msgspec.Struct, frozen=True):
    """What of transformers makes one checkpoint."""

    config_class: str
    fields: dict[str, Any] = {}
    #: as the checkpoint runs: torch, native (where there is a compiler) or transformers
    decoder: str = "torch"


def _rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **fields}}


_LLAMA3 = _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=128)
_LONGROPE = _rope(
    "longrope",
    short_factor=[1.0 + 0.1 * i for i in range(6)],
    long_factor=[2.0 + 0.5 * i for i in range(6)],
    original_max_position_embeddings=256,
    partial_rotary_factor=0.75,
)
_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 6}

TINY_MODELS: dict[str, TinyModel] = {
    "llama": TinyModel("LlamaConfig", {"head_dim": 32}, "native"),
    "llama-llama3": TinyModel("LlamaConfig", {**_LLAMA3, "head_dim": 32, "tie_word_embeddings": True}, "native"),
    "llama-biased": TinyModel("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama-yarn": TinyModel("LlamaConfig", {**_YARN, "head_dim": 32}, "native"),
    "llama-linear": TinyModel("LlamaConfig", {**_rope("linear", factor=4.0), "head_dim": 32}, "native"),
    "mistral": TinyModel("MistralConfig", {"sliding_window": _WINDOW}),
    "qwen2": TinyModel("Qwen2Config", {"use_sliding_window": True, "sliding_window": _WINDOW, "max_window_layers": 1}),
    "qwen3": TinyModel("Qwen3Config", {"head_dim": 24}),
    "gemma2": TinyModel(
        "Gemma2Config",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": _WINDOW,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
        },
    ),
    "gemma3": TinyModel(
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "query_pre_attn_scalar": 16,
            "sliding_window": _WINDOW,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "phi3": TinyModel("Phi3Config", {**_LONGROPE, "original_max_position_embeddings": 256}),
    "olmo2": TinyModel("Olmo2Config"),
    "smollm3": TinyModel(
        "SmolLM3Config", {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": _WINDOW}
    ),
    "granite": TinyModel(
        "GraniteConfig",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.15,
            "logits_scaling": 0.7,
            "attention_bias": True,
        },
    ),
    "mixtral": TinyModel("MixtralConfig", {**_EXPERTS, "sliding_window": _WINDOW}),
    "qwen3-moe": TinyModel(
        "Qwen3MoeConfig",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "head_dim": 16,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "gpt-neox": TinyModel("GPTNeoXConfig", {"rotary_pct": 0.25, "num_key_value_heads": 4}, "transformers"),
    "starcoder2": TinyModel("Starcoder2Config", {"sliding_window": _WINDOW}, "transformers"),
    "cohere": TinyModel("CohereConfig", {"logit_scale": 1.0}, "transformers"),
    "phi": TinyModel("PhiConfig", {"partial_rotary_factor": 0.5}, "transformers"),
}


def make(folder: Path, name: str, **changes: Any) -> Path:
    """Write checkpoint `name` to `folder`, with `changes` of its fields."""
    import transformers
    from transformers import AutoModelForCausalLM

    tiny = TINY_MODELS[name]
    config = getattr(transformers, tiny.config_class)(**{**_SHAPE, **tiny.fields, **changes})
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(sum(name.encode()))
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * 2 * parameter.shape[-1] ** -0.5)
            else:  # norms stay near what they start with, biases near nothing
                parameter.add_(noise * 0.2)
            if "post_" in path and "Gemma" in tiny.config_class:
                # Gemma's embedding is tied and comes in times 8: layers have to weigh something beside it, or each
                # token is its own likeliest follower whatever they compute
                parameter.add_(4)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """One token a byte, and a few special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<pad>", *(f"<|{i}|>" for i in range(VOCAB_SIZE - 256 - 3))]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def make_all(folder: Path, names: Iterable[str] = ()) -> dict[str, Path]:
    """All of them, each in a folder of its name."""
    return {name: make(folder / name, name) for name in names or TINY_MODELS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(TINY_MODELS)}")
    options = parser.parse_args()
    for name, path in make_all(options.folder, options.names).items():
        print(f"{name:<14} {path}")


if __name__ == "__main__":
    main()
