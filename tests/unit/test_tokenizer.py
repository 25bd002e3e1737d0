"""A tokenizer from a model folder, and what its files say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers

from replica.errors import ModelLoadError
from router.detokenizer import ByteDetokenizer
from router.tokenizer import Tokenizer
from tests.unit.http_fakes import TEMPLATE, byte_level_bpe, small_tokenizer


def write_folder(path: Path, **files: Any) -> Path:
    byte_level_bpe().save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_folder_with_everything(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path,
        tokenizer_config={"chat_template": "{{ bos_token }}" + TEMPLATE, "bos_token": {"content": "<|im_start|>"}},
        config={"vocab_size": 400, "max_position_embeddings": 8192, "eos_token_id": 0},
        generation_config={"eos_token_id": [2, 0], "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1},
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.render([{"role": "user", "content": "x"}]).startswith("<|im_start|><|im_start|>user")
    facts = tokenizer.facts
    assert (facts.vocab_size, facts.max_model_len, facts.eos_token_ids) == (400, 8192, (2, 0))
    assert (facts.generation_defaults.temperature, facts.generation_defaults.top_p) == (0.6, 0.9)
    assert facts.generation_defaults.top_k is None
    assert facts.unsupported_defaults == ()
    assert isinstance(tokenizer.detokenizer(), ByteDetokenizer)


def test_folder_with_little_else_takes_eos_from_the_tokenizer_config(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, tokenizer_config={"eos_token": "<|im_end|>"}))
    assert tokenizer.facts.eos_token_ids == (2,)
    assert tokenizer.facts.max_model_len is None
    assert tokenizer.chat_template is None


def test_template_file_and_override_go_before_the_config(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, tokenizer_config={"chat_template": "config"})
    (folder / "chat_template.jinja").write_text("file")
    first = Tokenizer.from_folder(folder).chat_template
    second = Tokenizer.from_folder(folder, "{{ 'override' }}").chat_template
    assert first is not None
    assert second is not None
    assert (first.render([]), second.render([])) == ("file", "override")


def test_named_templates_take_the_default_one(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    template = Tokenizer.from_folder(write_folder(tmp_path, tokenizer_config={"chat_template": named})).chat_template
    assert template is not None
    assert template.render([]) == "d"


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    folder = write_folder(tmp_path, generation_config="{")
    with pytest.raises(ModelLoadError, match=r"generation_config\.json"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(folder)


@given(st.text(max_size=60))
def test_no_text_has_fewer_tokens_than_the_bound_says(text: str) -> None:
    tokenizer = small_tokenizer()
    assert tokenizer.max_bytes_per_token is not None
    assert len(tokenizer.encode(text)) * tokenizer.max_bytes_per_token >= len(text.encode())


def test_bound_is_not_claimed_where_text_may_vanish() -> None:
    normalized = tokenizers.Tokenizer.from_str(byte_level_bpe().to_str())
    normalized.normalizer = normalizers.Strip()
    assert Tokenizer(normalized).max_bytes_per_token is None
    eats_spaces = tokenizers.Tokenizer.from_str(byte_level_bpe().to_str())
    eats_spaces.add_tokens([AddedToken("<tool>", lstrip=True)])
    assert Tokenizer(eats_spaces).max_bytes_per_token is None


def test_added_token_with_a_space_decodes_as_its_text() -> None:
    backend = tokenizers.Tokenizer.from_str(byte_level_bpe().to_str())
    backend.add_tokens([AddedToken("two words é", special=False)])
    tokenizer = Tokenizer(backend)
    ids = tokenizer.encode("a two words é b")
    assert tokenizer.num_tokens - 1 in ids
    assert tokenizer.detokenizer().extend(ids) == tokenizer.decode(ids) == "a two words é b"


def test_router_text_side_imports_neither_torch_nor_transformers() -> None:
    heavy = ("torch", "transformers", "ray")
    code = f"import sys, router.app, router.tokenizer; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert found.stdout.strip() == "[]"


def test_bytes_of_tokens() -> None:
    tokenizer = small_tokenizer()
    text = "a🦙b 삼겹살 two<|im_end|>"
    pieces = [tokenizer.token_bytes(token_id) for token_id in tokenizer.encode(text)]
    assert b"".join(piece or b"?" for piece in pieces) == text.encode()
    assert any(piece and len(piece) == 1 and piece[0] > 127 for piece in pieces)  # a part of a character
    assert tokenizer.token_bytes(10**6) is None


def test_bytes_of_tokens_that_sentencepiece_wrote() -> None:
    vocabulary = {"<s>": 0, "\u2581one": 1, "two": 2, "<0xF0>": 3, "\u2581": 4}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer = Tokenizer(backend)
    assert [tokenizer.token_bytes(token_id) for token_id in range(6)] == [b"<s>", b" one", b"two", b"\xf0", b" ", None]
