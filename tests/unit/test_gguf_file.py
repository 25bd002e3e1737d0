"""GGUF headers that lie, tokenizers by hand, and names that have no place."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer

from cluster import gguf_families, gguf_import
from cluster.gguf_file import GgufFile, Metadata
from cluster.gguf_tokenizer import Vocabulary, build, merges_of, tokenizer_config
from replica.errors import ModelLoadError

F32, Q8_0 = 0, 8


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def pair(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, dims: tuple[int, ...], kind: int = F32, offset: int = 0, num_dims: int | None = None) -> bytes:
    count = len(dims) if num_dims is None else num_dims
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", count, *dims, kind, offset)


def gguf_bytes(
    pairs: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: bytes = b"",
    version: int = 3,
    num_tensors: int | None = None,
    num_pairs: int | None = None,
) -> bytes:
    counts = len(tensors) if num_tensors is None else num_tensors, len(pairs) if num_pairs is None else num_pairs
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def test_a_good_one_is_read(tmp_path: Path) -> None:
    array = struct.pack("<IQ", 6, 2) + struct.pack("<2f", 1.5, 1e-6)
    pairs = (pair("a", 8, text("x")), pair("b", 9, array), pair("c", 7, b"\x01"), pair("d", 6, struct.pack("<f", 1e-6)))
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf_bytes(pairs, (tensor("t", (2, 3)),), np.arange(6, dtype=np.float32).tobytes()))
    file = GgufFile(path)
    meta = file.metadata
    assert (meta.text("a"), meta.get("c"), meta.number("d")) == ("x", True, 1e-6)
    assert meta.items("b", float) == [1.5, pytest.approx(1e-6)]
    (found,) = file.tensors
    assert found.shape == (3, 2)
    with path.open("rb") as data:
        assert file.rows(data, found, 1, 2).tolist() == [[2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "claims 4 bytes more and has 0 left"),
        (b"GGML" + bytes(100), "not a readable GGUF"),
        (gguf_bytes(version=1), "version 1; known are 2 and 3"),
        (gguf_bytes(num_tensors=1 << 60), "claims 1152921504606846976 tensors"),
        (gguf_bytes(num_pairs=1 << 60), "1152921504606846976 fields"),
        (gguf_bytes((struct.pack("<Q", 1 << 60),)), "claims a text of"),
        (gguf_bytes((struct.pack("<Q", 5000),)), "claims 5000 bytes more"),
        (gguf_bytes((pair("a", 77, b""),)), "no value of type 77"),
        (gguf_bytes((pair("a", 9, struct.pack("<IQ", 0, 1 << 60)),)), "claims 1152921504606846976 bytes more"),
        (gguf_bytes((pair("a", 9, struct.pack("<IQ", 8, 1 << 60)),)), "claims 9223372036854775808 bytes more"),
        (gguf_bytes((pair("a", 9, struct.pack("<IQIQ", 9, 1, 0, 0)),)), "no arrays of type 9"),
        (gguf_bytes((pair("general.alignment", 4, struct.pack("<I", 0)),)), "general.alignment is 0"),
        (gguf_bytes(tensors=(tensor("t", (2,), num_dims=99),)), "99 dimensions"),
        (gguf_bytes(tensors=(tensor("t", (0,)),)), "is empty"),
        (gguf_bytes(tensors=(tensor("t", (2,), kind=99),), data=bytes(8)), "type 99, which is not known"),
        (gguf_bytes(tensors=(tensor("t", (33,), kind=Q8_0),), data=bytes(99)), "not a multiple of 32"),
        (gguf_bytes(tensors=(tensor("t", (1 << 50, 1 << 50)),), data=bytes(8)), "cut short: tensor t"),
        (gguf_bytes(tensors=(tensor("t", (2,), offset=1 << 60),), data=bytes(8)), "cut short: tensor t"),
        (gguf_bytes(tensors=(tensor("t", (4,)), tensor("u", (4,), offset=8)), data=bytes(32)), "u overlaps another"),
        (gguf_bytes(tensors=(tensor("t", (2,)), tensor("t", (2,), offset=8)), data=bytes(32)), "or is there twice"),
    ],
)
def test_a_header_that_lies(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(ModelLoadError, match=rf"bad\.gguf.*{sentence}"):
        GgufFile(tmp_path / "bad.gguf")


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_scale_that_is_no_number_is_found(tmp_path: Path, scale: float) -> None:
    """One block of 32 in the second row has it: 34 bytes a block, the first two are its scale."""
    block = struct.pack("<e", 1.0) + bytes(range(32))
    bad = struct.pack("<e", scale) + bytes(range(32))
    path = tmp_path / "q.gguf"
    path.write_bytes(gguf_bytes(tensors=(tensor("blk.0.attn_q.weight", (64, 2), Q8_0),), data=block * 3 + bad))
    file = GgufFile(path)
    with path.open("rb") as data:
        assert np.isfinite(file.rows(data, file.tensors[0], 0, 1)).all()
        with pytest.raises(ModelLoadError, match=r"q\.gguf: tensor blk\.0\.attn_q\.weight holds inf or NaN"):
            file.rows(data, file.tensors[0], 0, 2)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda meta: meta.count("text"), "field text is hello; allowed is a whole number"),
        (lambda meta: meta.count("none"), "field none is missing"),
        (lambda meta: meta.count("zero"), "field zero is 0"),
        (lambda meta: meta.number("nan"), "field nan is nan"),
        (lambda meta: meta.text("zero"), "field zero is 0; allowed is a text"),
        (lambda meta: meta.items("list", str), "no list of str"),
    ],
)
def test_fields_of_the_wrong_kind(call: Any, sentence: str) -> None:
    meta = Metadata(Path("x.gguf"), {"text": "hello", "zero": 0, "nan": float("nan"), "list": ["a", 1]})
    with pytest.raises(ModelLoadError, match=rf"x\.gguf: .*{sentence}"):
        call(meta)


def test_tensors_that_have_no_place() -> None:
    family = gguf_families.FAMILIES["qwen2"]
    assert family.hf_name("blk.7.attn_q.bias") == "model.layers.7.self_attn.q_proj.bias"
    for name in ("blk.0.attn_q", "blk.x.attn_q.weight", "blk.0.attn_q_norm.weight", "v.patch_embd.weight", "odd"):
        with pytest.raises(ModelLoadError, match="has no place in Qwen2ForCausalLM"):
            family.hf_name(name)


def llama3_quotients(factor: float, theta: float = 500000.0, half: int = 32) -> list[float]:
    """As llama.cpp's conversion computes them."""
    quotients = []
    for i in range(half):
        wavelength = 2 * np.pi * theta ** (i / half)
        if wavelength < 8192 / 4:
            quotients.append(1.0)
        elif wavelength > 8192:
            quotients.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            quotients.append(1 / ((1 - smooth) / factor + smooth))
    return quotients


def test_llama3_scaling_is_found_again_from_its_quotients() -> None:
    meta = Metadata(Path("x.gguf"), {"llama.rope.freq_base": 500000.0})
    quotients = [float(np.float32(q)) for q in llama3_quotients(32.0)]
    found = gguf_families._llama(meta, {"rope_freqs.weight": quotients})["rope_scaling"]
    assert found["rope_type"] == "llama3"
    assert (found["factor"], found["low_freq_factor"], found["high_freq_factor"]) == (32.0, 1.0, 4.0)
    quotients[16] *= 1.1
    with pytest.raises(ModelLoadError, match="not those of Llama"):
        gguf_families._llama(meta, {"rope_freqs.weight": quotients})


NAMES = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def vocabulary(architecture: str, pieces: list[str], scores: list[float] | None = None, **more: Any) -> Vocabulary:
    names = [*NAMES, *BYTES, *pieces]
    values = {
        "general.architecture": architecture,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.scores": [0.0] * (len(names) - len(pieces)) + (scores or [0.0] * len(pieces)),
        "tokenizer.ggml.token_type": [3] * len(NAMES) + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }
    return Vocabulary(Metadata(Path("x.gguf"), values))


def pieces_of(tokenizer: Tokenizer, content: str, special: bool = False) -> list[str]:
    return tokenizer.encode(content, add_special_tokens=special).tokens


def test_sentence_piece_merges_by_score() -> None:
    """ "ab" and "bc" both fit "abc": the better score wins, in whatever order they are listed."""
    for scores, expected in (([-1.0, -2.0], ["ab", "c"]), ([-2.0, -1.0], ["a", "bc"])):
        words = vocabulary("llama", ["a", "b", "c", "ab", "bc"], [0.0, 0.0, 0.0, *scores], add_space_prefix=False)
        assert pieces_of(build(words), "abc") == expected


def test_space_prefix_bytes_and_bos() -> None:
    tokenizer = build(vocabulary("llama", ["a", "\u2581", "\u2581a"]))
    assert pieces_of(tokenizer, "a a", special=True) == ["<bos>", "\u2581a", "\u2581a"]
    assert pieces_of(tokenizer, "\u00e9") == ["\u2581", "<0xC3>", "<0xA9>"]
    for content in ("a a", "a  a", "a \u00e9\U0001f600"):
        assert tokenizer.decode(tokenizer.encode(content).ids) == content
    bare = build(vocabulary("llama", ["a", "\u2581", "\u2581a"], add_bos_token=False, add_space_prefix=False))
    assert pieces_of(bare, "a a", special=True) == ["a", "\u2581a"]


def test_gemma_keeps_runs_of_spaces_and_the_order_of_ids() -> None:
    """Its GGUF writes tokens of spaces as spaces, and its scores say nothing."""
    words = vocabulary("gemma3", ["a", "b", "c", "\u2581", "  ", "bc", "ab"], [-9.0] * 5 + [-1.0, -2.0])
    tokenizer = build(words)
    assert pieces_of(tokenizer, "a  a", special=True) == ["<bos>", "a", "\u2581\u2581", "a"]
    assert pieces_of(tokenizer, "abc") == ["a", "bc"]
    assert tokenizer.decode(tokenizer.encode(" a  b").ids) == " a  b"


def test_a_gemma_turn_ends_a_reply_and_has_a_template() -> None:
    from router.chat_template import ChatTemplate

    words = vocabulary("gemma3", ["a"])
    assert words.token_ids() == {"bos_token_id": 2, "eos_token_id": [1, 5]}
    config = tokenizer_config(words)
    template = ChatTemplate(config["chat_template"], {"bos_token": "<bos>"})
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": " U "},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "V"},
    ]
    text = template.render(messages)
    assert text == (
        "<bos><start_of_turn>user\nS\n\nU<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n"
        "<start_of_turn>user\nV<end_of_turn>\n<start_of_turn>model\n"
    )
    ids = build(words).encode(text, add_special_tokens=False).ids  # as routers encode what a template made
    assert ids.count(2) == 1


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"model": "bert"}, "tokenizer 'bert' cannot be converted; known are gpt2, llama"),
        ({"scores": [1.0]}, "a score for each token"),
        ({"token_type": [1]}, "and 1 token types"),
        ({"bos_token_id": 99_999}, "bos_token_id 99999 is no token"),
        ({"tokens": []}, "tokens is missing"),
        ({"model": "gpt2"}, "merges is missing"),
        ({"model": "gpt2", "merges": ["q q"]}, "does not fit together"),
        ({"model": "gpt2", "merges": ["a b"], "pre": "odd"}, "does not fit together|pre-tokenizer 'odd' is not known"),
    ],
)
def test_a_vocabulary_that_does_not_fit(more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"x\.gguf.*{sentence}"):
        build(vocabulary("llama", ["a", "b"], **more))


def test_every_way_to_merge_is_listed() -> None:
    ids = {"a": 0, "b": 1, "ab": 2, "aba": 3, "ba": 4}
    assert merges_of(ids, {"ab": 1, "ba": 0, "aba": 2}) == [("b", "a"), ("a", "b"), ("a", "ba"), ("ab", "a")]


def test_more_tokens_than_rows(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_context_length(8)
    writer.add_embedding_length(4)
    writer.add_block_count(1)
    writer.add_feed_forward_length(4)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*NAMES, *BYTES])
    writer.add_token_scores([0.0] * 262)
    writer.add_tensor("token_embd.weight", np.zeros((100, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match="262 tokens and an embedding of 100 rows"):
        gguf_import.convert(tmp_path / "m.gguf", tmp_path)
