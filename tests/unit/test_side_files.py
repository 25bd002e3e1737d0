"""generation_config.json and tokenizer_config.json of a stranger, refused with file, field and value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster import model_store
from replica.errors import ModelLoadError
from replica.side_files import check_side_files, eos_token_ids


def folder_with(tmp_path: Path, name: str, value: Any) -> Path:
    (tmp_path / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        (
            "generation_config.json",
            {"eos_token_id": "abc"},
            "eos_token_id='abc' cannot be; allowed are a token id or a",
        ),
        ("generation_config.json", {"eos_token_id": [1, "2"]}, r"eos_token_id=\[1, '2'\] cannot be"),
        ("generation_config.json", {"eos_token_id": True}, "eos_token_id=True cannot be"),
        (
            "generation_config.json",
            {"temperature": "hot"},
            "temperature='hot' cannot be; allowed are a number and null",
        ),
        ("generation_config.json", [], "holds no JSON object but list"),
        ("generation_config.json", "{", "is not JSON"),
        ("tokenizer_config.json", "[1", "is not JSON"),
        ("tokenizer_config.json", {"eos_token": 5}, "eos_token=5 cannot be; allowed are a text, an object with"),
        ("tokenizer_config.json", {"bos_token": {"content": []}}, "bos_token=.* cannot be"),
        ("tokenizer_config.json", {"chat_template": 7}, "chat_template=7 cannot be; allowed are a text, a list"),
        ("tokenizer_config.json", {"chat_template": [{"name": "default"}]}, "chat_template=.* cannot be"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, value: Any, sentence: str) -> None:
    folder = folder_with(tmp_path, name, value)
    with pytest.raises(ModelLoadError, match=rf"{name}.*{sentence}") as caught:
        check_side_files(folder)
    assert len(str(caught.value).splitlines()) == 1


def test_it_is_refused_where_a_name_becomes_a_folder(tmp_path: Path) -> None:
    """Which `shoal serve`, routers and replicas do alike."""
    for name in ("config.json", "tokenizer.json"):
        folder_with(tmp_path, name, {})
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert model_store.resolve(str(tmp_path)) == tmp_path
    folder_with(tmp_path, "generation_config.json", {"eos_token_id": "abc"})
    with pytest.raises(ModelLoadError, match="eos_token_id='abc'"):
        model_store.resolve(str(tmp_path))


def test_what_models_have_is_let_through(tmp_path: Path) -> None:
    check_side_files(tmp_path)
    generation = {"eos_token_id": [1, 2], "temperature": 0.6, "top_k": 20, "top_p": None, "do_sample": True}
    folder_with(tmp_path, "generation_config.json", generation)
    special = {"eos_token": {"content": "<end>", "lstrip": False}, "pad_token": None, "bos_token": "<s>"}
    template = [{"name": "default", "template": "{{ messages }}"}]
    folder_with(tmp_path, "tokenizer_config.json", {**special, "chat_template": template})
    check_side_files(tmp_path)


def test_end_tokens_are_the_generation_configs_first(tmp_path: Path) -> None:
    assert eos_token_ids(tmp_path) == ()
    folder_with(tmp_path, "config.json", {"eos_token_id": 7})
    assert eos_token_ids(tmp_path) == (7,)
    folder_with(tmp_path, "generation_config.json", {})
    assert eos_token_ids(tmp_path) == (7,)
    folder_with(tmp_path, "generation_config.json", {"eos_token_id": [1, 2]})
    assert eos_token_ids(tmp_path) == (1, 2)
