"""A model folder that cannot be served is refused with one sentence before anything is started."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cluster import model_store
from cluster.serve import _check_model, _template_text
from replica.check_model import check_tokenizer
from replica.errors import ConfigError, ModelLoadError
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
    with pytest.raises(ModelLoadError, match="10000000"):
        _check_model(good, 10_000_000)


@pytest.mark.parametrize("template", ["no-such-file.jinja", "{{ broken"])
def test_a_bad_template(template: str) -> None:
    with pytest.raises((ConfigError, ModelLoadError)):
        _template_text(template)


def test_a_template_by_path_or_as_text(tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("{{ messages[0].content }}")
    assert _template_text(str(path)) == _template_text("{{ messages[0].content }}") == "{{ messages[0].content }}"
