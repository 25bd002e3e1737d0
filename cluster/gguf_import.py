"""ASYNC (imports numpy-only tools, no torch). A llama-architecture GGUF file as a plain HF-style folder.

Runs once per file; `cluster/model_store.py` decides when. Heavy imports are inside the functions, since every router
and replica imports the store and only one process converts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replica.errors import ModelLoadError

if TYPE_CHECKING:
    import gguf
    import numpy as np
    from numpy.typing import NDArray

#: raise it whenever a conversion would come out differently
CONVERSION_VERSION = 1

_TOKEN_CONTROL = 3
_TOKEN_USER_DEFINED = 4
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def convert(source: Path, folder: Path) -> None:
    """Write config, generation config, tokenizer and bf16 weights of `source` into the empty `folder`.

    Raises ModelLoadError for a file that is not a llama-architecture GGUF with a byte-level BPE vocabulary.
    """
    import gguf

    try:
        reader = gguf.GGUFReader(source)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{source} is not a readable GGUF file: {error}") from error
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    meta = _Metadata(source, fields)
    if meta.get("general.architecture") != "llama":
        raise ModelLoadError(
            f"{source}: architecture {meta.get('general.architecture')!r}; only llama can be converted"
        )
    if meta.get("tokenizer.ggml.model") != "gpt2":
        raise ModelLoadError(
            f"{source}: tokenizer {meta.get('tokenizer.ggml.model')!r}; only gpt2 (byte BPE) can be converted"
        )
    tied = not any(tensor.name == "output.weight" for tensor in reader.tensors)
    _write_configs(meta, folder, tied)
    _write_tokenizer(meta, folder)
    _write_weights(reader, meta, folder)


class _Metadata:
    """Typed access to a GGUF's key-value part, with the file named in errors."""

    def __init__(self, source: Path, fields: dict[str, Any]) -> None:
        self.source = source
        self._fields = fields

    def get(self, name: str, default: Any = None) -> Any:
        field = self._fields.get(name)
        return default if field is None else field.contents()

    def need(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise ModelLoadError(f"{self.source}: field {name} is missing")
        return value


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_configs(meta: _Metadata, folder: Path, tied: bool) -> None:
    heads = int(meta.need("llama.attention.head_count"))
    hidden = int(meta.need("llama.embedding_length"))
    tokens = {
        f"{name}_token_id": meta.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    tokens = {name: int(value) for name, value in tokens.items() if value is not None}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": int(meta.need("llama.feed_forward_length")),
        "num_hidden_layers": int(meta.need("llama.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(meta.get("llama.attention.head_count_kv", heads)),
        "head_dim": int(meta.get("llama.rope.dimension_count", hidden // heads)),
        "vocab_size": len(meta.need("tokenizer.ggml.tokens")),
        "max_position_embeddings": int(meta.need("llama.context_length")),
        # stored as float32; the decimal that was meant, e.g. 1e-05
        "rms_norm_eps": float(f"{float(meta.need('llama.attention.layer_norm_rms_epsilon')):.6g}"),
        "rope_theta": float(meta.get("llama.rope.freq_base", 10000.0)),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        **tokens,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", tokens)


def _write_tokenizer(meta: _Metadata, folder: Path) -> None:
    import tokenizers
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    names: list[str] = meta.need("tokenizer.ggml.tokens")
    kinds: list[int] = meta.get("tokenizer.ggml.token_type") or [1] * len(names)
    merges = [tuple(line.split(" ", 1)) for line in meta.need("tokenizer.ggml.merges")]
    model = models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=merges)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(meta, pre_tokenizers)
    tokenizer.decoder = decoders.ByteLevel()
    added = [(i, names[i], kinds[i]) for i in range(len(names)) if kinds[i] in (_TOKEN_CONTROL, _TOKEN_USER_DEFINED)]
    for _, name, kind in added:
        token = AddedToken(name, special=kind == _TOKEN_CONTROL, normalized=False)
        if kind == _TOKEN_CONTROL:
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])
    tokenizer.save(str(folder / "tokenizer.json"))

    def name_of(key: str) -> str | None:
        token_id = meta.get(f"tokenizer.ggml.{key}_token_id")
        return None if token_id is None else names[token_id]

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": int(meta.need("llama.context_length")),
        "add_bos_token": bool(meta.get("tokenizer.ggml.add_bos_token", False)),
        "add_prefix_space": bool(meta.get("tokenizer.ggml.add_space_prefix", False)),
        "clean_up_tokenization_spaces": False,
        "bos_token": name_of("bos"),
        "eos_token": name_of("eos"),
        "pad_token": name_of("padding"),
        "unk_token": name_of("unknown"),
        "chat_template": meta.get("tokenizer.chat_template"),
        "added_tokens_decoder": {
            str(i): {
                "content": name,
                "special": kind == _TOKEN_CONTROL,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
            }
            for i, name, kind in added
        },
    }
    _write_json(folder / "tokenizer_config.json", {k: v for k, v in config.items() if v is not None})


def _pre_tokenizer(meta: _Metadata, pre_tokenizers: Any) -> Any:
    """How text is cut before merging. The GGUF only names the rule.

    llama.cpp's rule for "smollm" is two expressions: each numeric character alone, then GPT-2's. As steps of the
    `tokenizers` library that is Digits, then ByteLevel; without the first, spaces before a digit merge differently.
    """
    rule = meta.get("tokenizer.ggml.pre", "default")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if rule == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if rule in ("gpt-2", "default"):
        return byte_level
    raise ModelLoadError(f"{meta.source}: pre-tokenizer {rule!r} is not known; known are smollm, gpt-2")


def _write_weights(reader: gguf.GGUFReader, meta: _Metadata, folder: Path) -> None:
    heads = int(meta.need("llama.attention.head_count"))
    kv_heads = int(meta.get("llama.attention.head_count_kv", heads))
    tensors: dict[str, tuple[str, list[int], bytes]] = {}
    for tensor in reader.tensors:
        name = _hf_name(tensor.name)
        if name is None:
            continue
        values = _dequantized(tensor)
        if ".q_proj." in name:
            values = _undo_rope_order(values, heads)
        elif ".k_proj." in name:
            values = _undo_rope_order(values, kv_heads)
        tensors[name] = ("BF16", list(values.shape), _to_bfloat16(values).tobytes())
    _write_safetensors(folder / "model.safetensors", tensors)


def _hf_name(name: str) -> str | None:
    """Name in a Hugging Face checkpoint; None for what such a checkpoint does not hold (rope factors)."""
    stem = name.removesuffix(".weight")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.weight"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight"
    if stem == "rope_freqs":
        return None
    raise ModelLoadError(f"tensor {name} has no place in a llama-architecture model")


def _dequantized(tensor: Any) -> NDArray[np.float32]:
    import gguf.quants
    import numpy as np

    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    shape = tuple(int(n) for n in reversed(tensor.shape))
    return np.asarray(values, np.float32).reshape(shape)


def _undo_rope_order(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """GGUF pairs dims (0, 1), (2, 3), ... for RoPE; Hugging Face pairs (0, half), (1, half + 1), ... of each head."""
    half = values.shape[0] // heads // 2
    return values.reshape(heads, half, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


def _to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of the nearest bfloat16, ties to even."""
    import numpy as np

    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    return rounded.astype(np.uint16)


def _write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    """A length, a JSON header, the raw bytes. numpy has no bfloat16, so the library's own writer is no help."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for _, _, data in tensors.values():
            file.write(data)
