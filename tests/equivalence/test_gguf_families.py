"""Our conversion of GGUF files against transformers' own reading of the same files: logits, and tokens of text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from cluster import gguf_import, model_store

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTER, LAYERS = 64, 4, 2, 32, 96, 7
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]


def pieces() -> tuple[list[str], list[int], list[float]]:
    """A small SentencePiece vocabulary: tokens, types, scores."""
    words = [
        "\u2581",
        *"abcdehlorstw.,",
        "he",
        "ll",
        "hell",
        "hello",
        "\u2581hello",
        "\u2581w",
        "or",
        "\u2581wor",
        "\u2581world",
    ]
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    kinds = [3] * len(SPECIAL) + [6] * 256 + [1] * len(words)
    return names, kinds, [-float(i) for i in range(len(names))]


def write(path: Path, architecture: str, head_dim: int, extra: Callable[[gguf.GGUFWriter], None]) -> None:
    """Random weights in the shapes that `architecture` has; norms around 1, as every GGUF stores them."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    extra(writer)
    names, kinds, scores = pieces()
    writer.add_tokenizer_model("llama")
    writer.add_token_list(names)
    writer.add_token_types(kinds)
    writer.add_token_scores(scores)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_space_prefix(not architecture.startswith("gemma"))
    rng = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        value = rng.standard_normal(shape) * 0.2 + (1.0 if "norm" in name else 0.0)
        exact = value.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)  # survives bfloat16
        if "norm" in name and architecture.startswith("gemma"):
            exact = (np.round(value * 64) / 64).astype(np.float32).view(np.uint32)  # and so does this, minus 1
        writer.add_tensor(name, exact.view(np.float32))

    q_dim, kv_dim = HEADS * head_dim, KV_HEADS * head_dim
    add("token_embd.weight", len(names), HIDDEN)
    add("output_norm.weight", HIDDEN)
    if architecture in ("llama", "phi3"):
        add("output.weight", len(names), HIDDEN)
    for i in range(LAYERS):
        layer = f"blk.{i}."
        add(layer + "attn_norm.weight", HIDDEN)
        add(layer + "ffn_norm.weight", HIDDEN)
        add(layer + "attn_output.weight", HIDDEN, q_dim)
        add(layer + "ffn_down.weight", HIDDEN, INTER)
        if architecture == "phi3":
            add(layer + "attn_qkv.weight", q_dim + 2 * kv_dim, HIDDEN)
            add(layer + "ffn_up.weight", 2 * INTER, HIDDEN)
            continue
        add(layer + "ffn_gate.weight", INTER, HIDDEN)
        add(layer + "ffn_up.weight", INTER, HIDDEN)
        for letter, rows in (("q", q_dim), ("k", kv_dim), ("v", kv_dim)):
            add(f"{layer}attn_{letter}.weight", rows, HIDDEN)
            if architecture == "qwen2":
                add(f"{layer}attn_{letter}.bias", rows)
            if architecture in ("qwen3", "gemma3") and letter != "v":
                add(f"{layer}attn_{letter}_norm.weight", head_dim)
        if architecture.startswith("gemma"):
            add(layer + "post_attention_norm.weight", HIDDEN)
            add(layer + "post_ffw_norm.weight", HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def widths(writer: gguf.GGUFWriter) -> None:
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)


def gemma(writer: gguf.GGUFWriter) -> None:
    widths(writer)
    writer.add_sliding_window(4)


def gemma2(writer: gguf.GGUFWriter) -> None:
    gemma(writer)
    writer.add_attn_logit_softcapping(50.0)
    writer.add_final_logit_softcapping(30.0)


def nothing(writer: gguf.GGUFWriter) -> None:
    pass


def llama(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_dimension_count(HIDDEN // HEADS)


FAMILIES: dict[str, tuple[int, Callable[[gguf.GGUFWriter], None]]] = {
    "llama": (HIDDEN // HEADS, llama),
    "qwen2": (HIDDEN // HEADS, nothing),
    "qwen3": (HEAD_DIM, widths),
    "gemma2": (HEAD_DIM, gemma2),
    "gemma3": (HEAD_DIM, gemma),
    "phi3": (HIDDEN // HEADS, nothing),
}
#: what transformers' reading leaves at defaults of its own, though the file says otherwise or llama.cpp fixes it
GIVEN: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": HEAD_DIM},
    "gemma2": {"query_pre_attn_scalar": HEAD_DIM},
    "gemma3": {"query_pre_attn_scalar": HEAD_DIM},
}


def read_by_transformers(path: Path, architecture: str) -> Any:
    """In float32, by its parts: the whole wants `accelerate`."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, **GIVEN.get(architecture, {}))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert missing in ([], ["lm_head.weight"]), "tied"
    return model.eval()


@pytest.mark.parametrize("architecture", FAMILIES)
def test_logits_are_those_of_transformers(tmp_path: Path, architecture: str) -> None:
    from transformers import AutoModelForCausalLM

    head_dim, extra = FAMILIES[architecture]
    write(tmp_path / "m.gguf", architecture, head_dim, extra)
    folder = tmp_path / "converted"
    folder.mkdir()
    gguf_import.convert(tmp_path / "m.gguf", folder)
    theirs = read_by_transformers(tmp_path / "m.gguf", architecture)
    ours, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    assert type(ours) is type(theirs)
    tokens = torch.tensor([[2, *range(250, 280), 7, 9]])
    with torch.inference_mode():
        expected, found = theirs(tokens).logits, ours(tokens).logits
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "phi3"])
def test_tokens_are_those_of_transformers(tmp_path: Path, architecture: str) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    head_dim, extra = FAMILIES[architecture]
    write(tmp_path / "m.gguf", architecture, head_dim, extra)
    folder = tmp_path / "converted"
    folder.mkdir()
    gguf_import.convert(tmp_path / "m.gguf", folder)
    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in ("hello world", "  hello\n\nworld.", "he\u00dflo \U0001f600", "<start_of_turn>hello<end_of_turn>", ""):
        found = ours.encode(text, add_special_tokens=False).ids
        assert found == theirs.encode(text, add_special_tokens=False), text
        assert ours.encode(text).ids == [2, *found]


@pytest.mark.model
def test_gemma_speaks_sense() -> None:
    """The second real model. Greedy words of transformers on our folder, in float32."""
    from transformers import AutoModelForCausalLM

    from router.tokenizer import Tokenizer

    folder = model_store.resolve("gemma3-270m")
    tokenizer = Tokenizer.from_folder(folder)
    tokens = tokenizer.encode("The capital of France is", add_special_tokens=True)
    assert tokens == [2, 818, 5279, 529, 7001, 563]
    assert tokenizer.facts.eos_token_ids == (1, 106)
    assert tokenizer.chat_template is not None
    chat = tokenizer.encode(tokenizer.chat_template.render([{"role": "user", "content": "Hi"}]))
    assert chat.count(2) == 1
    assert chat[0] == 2
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    written = model.generate(torch.tensor([tokens]), max_new_tokens=24, do_sample=False)[0, len(tokens) :].tolist()
    text = tokenizer.decode(written)
    assert "France" in text
    assert "city" in text
    detokenizer = tokenizer.detokenizer()
    assert "".join([*map(detokenizer.push, written), detokenizer.flush()]) == text
