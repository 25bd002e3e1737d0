"""Models through transformers' layers: which are refused, and that the trial after loading finds what does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.family_check import make_runner
from replica.check_model import check
from replica.errors import ModelLoadError
from replica.models import transformers_decoder
from replica.models.decoder import read_config

FolderOf = Callable[[str], Path]


def folder_with(tmp_path: Path, architecture: str, **fields: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], **fields}))
    return tmp_path


@pytest.mark.parametrize(
    ("architecture", "fields", "sentence"),
    [
        ("MambaForCausalLM", {"model_type": "mamba"}, "keep a state other than keys and values"),
        ("MptForCausalLM", {"model_type": "mpt"}, "do not go through transformers' attention interface"),
        ("T5ForConditionalGeneration", {"model_type": "t5"}, "nor a causal language model of transformers"),
        ("StableLmForCausalLM", {"model_type": "stablelm"}, "do not go through transformers' attention interface"),
        (
            "OwnForCausalLM",
            {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "own.OwnForCausalLM"}},
            "code of its own",
        ),
        ("DeepseekV3ForCausalLM", {"model_type": "deepseek_v3"}, r"it has latent attention \(kv_lora_rank=512\)"),
        (
            "OlmoeForCausalLM",
            {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 5},
            "num_experts_per_tok=5 cannot be; the model has 4 experts",
        ),
        ("CohereForCausalLM", {"model_type": "cohere", "quantization_config": {"bits": 4}}, "quantization_config"),
        ("CohereForCausalLM", {"model_type": "cohere", "hidden_size": "wide"}, "CohereForCausalLM|hidden_size"),
    ],
)
def test_what_cannot_run_on_our_cache_is_refused(
    architecture: str, fields: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=sentence) as caught:
        make_runner(folder_with(tmp_path, architecture, **fields))
    assert len(str(caught.value).splitlines()) == 1


def test_no_code_of_a_folder_is_run(tiny_folder: FolderOf, tmp_path: Path) -> None:
    """A name that transformers knows with an auto_map beside: its own class serves, the folder's file is not run."""
    source = tiny_folder("starcoder2")
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    raw = json.loads((source / "config.json").read_text())
    raw["auto_map"] = {"AutoModelForCausalLM": "evil.Evil", "AutoConfig": "evil.EvilConfig"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "evil.py").write_text("from pathlib import Path\nPath(__file__).with_name('ran').touch()\n")
    assert "transformers" in make_runner(tmp_path).info.description
    assert not (tmp_path / "ran").exists()


def test_missing_tensors_are_named(tiny_folder: FolderOf, tmp_path: Path) -> None:
    source = tiny_folder("gpt-neox")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    del tensors["gpt_neox.layers.1.attention.dense.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"missing keys .*layers\.1.attention.dense.weight"):
        make_runner(tmp_path)


def test_a_folder_is_checked_without_its_weights(tiny_folder: FolderOf, tmp_path: Path) -> None:
    check(tiny_folder("phi"), 512)
    (tmp_path / "config.json").write_bytes((tiny_folder("phi") / "config.json").read_bytes())
    with pytest.raises(ModelLoadError, match=r"no \.safetensors file"):
        check(tmp_path, None)


def test_shape_of_a_model_by_other_names(tiny_folder: FolderOf) -> None:
    shape = read_config(tiny_folder("gpt-neox"))
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.max_position_embeddings) == (3, 4, 16, 512)


def test_attention_that_asks_for_more_is_refused(tiny_folder: FolderOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """As attention sinks would: a layer hands on something that changes the result."""
    ours = transformers_decoder._attend
    monkeypatch.setattr(transformers_decoder, "_attend", lambda *a, **k: ours(*a, **k, s_aux=torch.ones(4)))
    with pytest.raises(ModelLoadError, match="asks attention for s_aux, which ours does not have"):
        make_runner(tiny_folder("phi"))


def test_a_wrong_result_is_found_by_the_trial(tiny_folder: FolderOf, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = transformers_decoder._attend
    monkeypatch.setattr(transformers_decoder, "_attend", lambda *a, **k: ours(*a, **{**k, "scaling": 0.3}))
    with pytest.raises(ModelLoadError, match="of their range away from transformers' own"):
        make_runner(tiny_folder("phi"))
