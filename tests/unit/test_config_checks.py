"""config.json of a stranger: huge, deep, of the wrong kind, absurd."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from replica import json_file
from replica.config_checks import brings_code, read_model_config
from replica.errors import ModelLoadError
from replica.json_file import read_json

GOOD = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": [4, 8],  # a number for each layer
    "num_key_value_heads": None,
    "vocab_size": 100,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "eos_token_id": [1, 2],
    "num_local_experts": 0,
}


def write(folder: Path, value: Any) -> Path:
    (folder / "config.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


def test_a_good_one_is_given_back(tmp_path: Path) -> None:
    assert read_model_config(write(tmp_path, GOOD)) == GOOD
    assert read_model_config(write(tmp_path, {})) == {}


def test_a_window_of_0_is_none_where_windows_are_off(tmp_path: Path) -> None:
    """So transformers writes Qwen2-MoE's back."""
    off = {"sliding_window": 0, "use_sliding_window": False}
    assert read_model_config(write(tmp_path, off)) == off
    for more in ({}, {"use_sliding_window": True}):
        with pytest.raises(ModelLoadError, match="sliding_window=0 cannot be"):
            read_model_config(write(tmp_path, {"sliding_window": 0, **more}))


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", -1),
        ("hidden_size", 0),
        ("hidden_size", 64.5),
        ("hidden_size", "64"),
        ("hidden_size", True),
        ("hidden_size", 10**400),
        ("hidden_size", {"a": 1}),
        ("num_hidden_layers", 10**12),
        ("n_layer", 10**12),
        ("num_attention_heads", [4, -4]),
        ("num_key_value_heads", [None, "x"]),
        ("vocab_size", 0),
        ("vocab_size", 1 << 40),
        ("max_position_embeddings", 1 << 60),
        ("num_experts", -1),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", "1e-6"),
        ("rope_theta", float("inf")),
        ("rope_theta", -1.0),
        ("logits_scaling", 0),
        ("embedding_multiplier", float("nan")),
        ("partial_rotary_factor", 1.5),
        ("num_experts_per_tok", -1),
        ("architectures", "LlamaForCausalLM"),
        ("architectures", [1]),
        ("eos_token_id", -1),
        ("eos_token_id", "</s>"),
        ("eos_token_id", [1, [2]]),
    ],
)
def test_an_absurd_number_is_named(tmp_path: Path, field: str, value: Any, is_nested: bool) -> None:
    raw = {**GOOD, field: value}
    with pytest.raises(ModelLoadError, match=rf"config\.json: {field}=.* cannot be; allowed") as caught:
        read_model_config(write(tmp_path, {"text_config": raw} if is_nested else raw))
    assert len(str(caught.value)) < 300 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[]", "no JSON object but list"),
        ("3", "no JSON object but int"),
        ("{", "is not JSON"),
        ("", "is not JSON"),
        ('{"a": ' + "1" * 5000 + "}", "is not JSON"),
        ('{"a": ' + "[" * 70 + "]" * 70 + "}", "nested too deep"),
        ("[" * 200_000, "nested too deep"),
    ],
)
def test_what_is_no_configuration(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"config\.json.*{sentence}"):
        read_model_config(write(tmp_path, text))


def test_files_that_are_missing_or_too_large(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="cannot be read: No such file"):
        read_model_config(tmp_path)
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 33)  # sparse: nothing of it may be read
    with pytest.raises(ModelLoadError, match="8589934592 bytes; at most 8388608"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ModelLoadError, match="is not JSON"):
        read_json(tmp_path / "config.json", 100)


def test_depth_is_counted_in_levels() -> None:
    assert [json_file._depth(value) for value in ({}, {"a": 1}, {"a": [1]}, {"a": [1, {"b": {}}]})] == [1, 1, 2, 4]


def test_code_in_a_folder_is_noticed() -> None:
    assert brings_code({"auto_map": {"AutoModelForCausalLM": "modeling_x.XForCausalLM"}})
    assert not brings_code({"auto_map": {}})
    assert not brings_code({})


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ModelLoadError, match="no regular file"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("tie_word_embeddings", "false"), ("attention_bias", "no"), ("sliding_window", 0), ("sliding_window", -1)],
)
def test_a_value_is_not_taken_for_what_it_might_mean(tmp_path: Path, field: str, value: object) -> None:
    with pytest.raises(ModelLoadError, match=f"{field}=.* cannot be; allowed are"):
        read_model_config(write(tmp_path, {**GOOD, field: value}))
