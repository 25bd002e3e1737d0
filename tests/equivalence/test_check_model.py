"""A model folder that cannot be served is refused with one sentence before anything is started."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.family_check import make_runner
from cluster import model_store
from cluster.config import load
from cluster.serve import _check_model, _prepare_model, _template_text
from replica.check_model import check, check_tokenizer
from replica.config import CacheConfig, EngineConfig, ModelConfig
from replica.errors import ConfigError, ModelLoadError
from replica.model_runner import TorchModelRunner
from replica.safetensors_header import read_header

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def good() -> Path:
    return model_store.resolve("smollm2-135m-instruct")


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """A copy whose weights are links: cheap to break."""
    for path in good.iterdir():
        target = tmp_path / path.name
        if path.suffix == ".safetensors":
            target.symlink_to(path)
        else:
            shutil.copy(path, target)
    return tmp_path


def test_a_good_folder_passes(good: Path) -> None:
    _check_model(good, 1024)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, "q_proj.bias is missing"),
        (
            {"architectures": ["SomethingForCausalLM"], "model_type": "something"},
            "SomethingForCausalLM is not supported",
        ),
        ({"num_hidden_layers": 31}, "layers.30"),
        ({"vocab_size": 100}, "shape"),
    ],
)
def test_a_configuration_that_does_not_fit_the_weights(folder: Path, change: dict, sentence: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelLoadError, match=sentence) as caught:
        _check_model(folder, None)
    assert len(str(caught.value).splitlines()) == 1


def test_truncated_weights_name_the_file(folder: Path, good: Path) -> None:
    (weights,) = folder.glob("*.safetensors")
    weights.unlink()
    with (good / weights.name).open("rb") as file:
        weights.write_bytes(file.read(1 << 20))
    with pytest.raises(ModelLoadError, match=weights.name):
        _check_model(folder, None)


def test_numbers_that_no_model_has(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    for change in ({"hidden_size": -1}, {"num_hidden_layers": 10**12}, {"vocab_size": 0}, {"intermediate_size": "big"}):
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ModelLoadError, match=rf"config\.json: {next(iter(change))}=.* cannot be"):
            _check_model(folder, None)


def test_an_index_that_leads_out_of_the_folder(folder: Path) -> None:
    weight_map = {"model.norm.weight": "../../outside.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelLoadError, match=r"is said to be in '\.\./\.\./outside\.safetensors'"):
        _check_model(folder, None)


def test_a_header_that_claims_terabytes(folder: Path) -> None:
    (weights,) = folder.glob("*.safetensors")
    weights.unlink()
    header = {"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4 << 40]}}
    text = json.dumps(header).encode()
    weights.write_bytes(len(text).to_bytes(8, "little") + text + bytes(100))
    with pytest.raises(ModelLoadError, match="cut short: tensor a ends at byte"):
        _check_model(folder, None)


def test_a_norm_that_is_no_number(folder: Path, good: Path) -> None:
    """In place, in a copy: the same header, one value changed to NaN."""
    (weights,) = folder.glob("*.safetensors")
    weights.unlink()
    shutil.copy(good / weights.name, weights)
    place = read_header(weights)["model.layers.7.input_layernorm.weight"]
    with weights.open("r+b") as file:
        file.seek(place.start + 10)
        file.write(b"\xc0\x7f")
    with pytest.raises(ModelLoadError, match=r"layers\.7\.input_layernorm\.weight holds inf or NaN"):
        _check_model(folder, None)


def test_code_of_the_folder_is_never_run(folder: Path) -> None:
    """Refused where nobody else knows the model; not looked at where transformers does."""
    (folder / "modeling_odd.py").write_text("raise SystemExit('this was run')")
    config = json.loads((folder / "config.json").read_text())
    code = {"auto_map": {"AutoConfig": "modeling_odd.OddConfig", "AutoModelForCausalLM": "modeling_odd.Odd"}}
    (folder / "config.json").write_text(json.dumps(config | code))
    _check_model(folder, None)
    (folder / "config.json").write_text(json.dumps(config | code | {"model_type": "odd", "architectures": ["Odd"]}))
    with pytest.raises(ModelLoadError, match=r"only the folder's own code \(auto_map\) knows model_type='odd'"):
        _check_model(folder, None)


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {"type": "BPE"}}', ""])
def test_a_tokenizer_that_is_broken(folder: Path, text: str) -> None:
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        check_tokenizer(folder, 49152)


def test_a_tokenizer_that_knows_more_than_the_embedding(folder: Path) -> None:
    check_tokenizer(folder, 49152)
    with pytest.raises(ModelLoadError, match="knows token 49151 and the model's embedding has 49151 rows"):
        check_tokenizer(folder, 49151)


def test_a_context_longer_than_the_models(good: Path) -> None:
    with pytest.raises(ConfigError, match="10000000"):
        _check_model(good, 10_000_000)


@pytest.mark.parametrize("template", ["no-such-file.jinja", "{{ broken"])
def test_a_bad_template(template: str) -> None:
    with pytest.raises((ConfigError, ModelLoadError)):
        _template_text(template)


def test_a_template_by_path_or_as_text(tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("{{ messages[0].content }}")
    assert _template_text(str(path)) == _template_text("{{ messages[0].content }}") == "{{ messages[0].content }}"


FolderOf = Callable[[str], Path]


def changed(source: Path, target: Path, tensors: Mapping[str, torch.Tensor | None], **config: Any) -> Path:
    """A copy of a tiny folder with some tensors more, others (None) fewer, and other fields."""
    for path in source.iterdir():
        shutil.copy(path, target / path.name)
    weights = {**load_file(source / "model.safetensors"), **tensors}
    save_file({n: t for n, t in weights.items() if t is not None}, target / "model.safetensors")
    raw = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**raw, **config}))
    return target


def test_ranks_of_a_model_that_runs_through_transformers(tiny_folder: FolderOf) -> None:
    """By the check, and not 38 s later by the ranks."""
    assert check(tiny_folder("phi"), None, 1) == []
    with pytest.raises(ConfigError, match="tensor_parallel_size=2: PhiForCausalLM runs through transformers"):
        check(tiny_folder("phi"), None, 2)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2: PhiForCausalLM .* allowed: 1"):
        _check_model(tiny_folder("phi"), None, 2)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.weight_scale",
        "model.layers.0.self_attn.q_proj.weight_scale_inv",
        "model.layers.1.mlp.up_proj.qweight",
        "model.layers.1.mlp.up_proj.qzeros",
        "model.layers.1.mlp.up_proj.scales",
        "model.layers.1.mlp.up_proj.weight.quant_state.bitsandbytes__nf4",
    ],
)
@pytest.mark.parametrize("source", ["llama", "phi"])
def test_scales_beside_the_weights(tiny_folder: FolderOf, tmp_path: Path, source: str, name: str) -> None:
    folder = changed(tiny_folder(source), tmp_path, {name: torch.ones(4)})
    with pytest.raises(ModelLoadError, match=f"tensor {re.escape(name)} belongs to a quantized checkpoint"):
        check(folder, None)


@pytest.mark.parametrize("source", ["llama", "phi"])
@pytest.mark.parametrize(
    ("dtype", "shown"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.float8_e5m2, "F8_E5M2"), (torch.int8, "I8")]
)
def test_weights_of_eight_bits(
    tiny_folder: FolderOf, tmp_path: Path, source: str, dtype: torch.dtype, shown: str
) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    weight = load_file(tiny_folder(source) / "model.safetensors")[name]
    folder = changed(tiny_folder(source), tmp_path, {name: weight.to(dtype)})
    with pytest.raises(ModelLoadError, match=f"q_proj.weight has dtype {shown}, so the checkpoint is quantized"):
        check(folder, None)


def test_a_bias_of_integers(tiny_folder: FolderOf, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    bias = load_file(tiny_folder("llama-biased") / "model.safetensors")[name]
    folder = changed(tiny_folder("llama-biased"), tmp_path, {name: bias.to(torch.int32)})
    with pytest.raises(ModelLoadError, match=r"q_proj\.bias has dtype I32; allowed are F64, F32, F16, BF16"):
        check(folder, None)


def test_tensors_that_nobody_reads_are_told(
    tiny_folder: FolderOf, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    more = {"model.layers.9.mlp.up_proj.weight": torch.ones(2), "vision.patch": torch.ones(2)}
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}  # as old checkpoints have it
    folder = changed(tiny_folder("llama"), tmp_path, {**more, **table})
    names = "model.layers.9.mlp.up_proj.weight, vision.patch"
    _check_model(folder, None)
    told = f"this model does not read 2 tensors of its files: {names}"
    assert f"warning: {folder.name}: {told}" in capsys.readouterr().err
    make_runner(folder).close()
    assert told in caplog.text
    assert check(tiny_folder("llama"), None) == []


def test_a_model_through_transformers_tells_them_too(
    tiny_folder: FolderOf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_runner(changed(tiny_folder("phi"), tmp_path, {"vision.patch": torch.ones(2)})).close()
    assert "does not read 1 tensors of its files: vision.patch" in caplog.text


def test_end_tokens_and_texts_of_the_wrong_kind(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": "abc"}')
    with pytest.raises(ModelLoadError, match=r"generation_config\.json: eos_token_id='abc' cannot be"):
        _check_model(folder, None)


def test_experts_that_are_not_there(tiny_folder: FolderOf, tmp_path: Path) -> None:
    folder = changed(tiny_folder("mixtral"), tmp_path, {}, num_experts_per_tok=99)
    with pytest.raises(ModelLoadError, match="num_experts_per_tok=99 cannot be; the model has"):
        check(folder, None)


def test_a_cache_larger_than_the_machine(tiny_folder: FolderOf) -> None:
    """Before Ray is started, for a folder in blocks as well."""
    for field, value in (("kv_cache_gib", 1e6), ("num_blocks", 1 << 30)):
        config = load({"model": str(tiny_folder("llama")), "kv_cache": {field: value}})
        with pytest.raises(ConfigError, match=rf"for KV \(kv_cache\.{field}=.* each\); available are"):
            _prepare_model(config, True)


def test_the_runner_asks_too(tiny_folder: FolderOf) -> None:
    """For who starts replicas otherwise."""
    config = EngineConfig(model=ModelConfig(dtype="float32"), cache=CacheConfig(num_blocks=1 << 30))
    with pytest.raises(ConfigError, match=r"kv_cache\.num_blocks=1073741824 asks for"):
        TorchModelRunner(config, tiny_folder("llama"))
