"""A model folder that cannot be served is refused with one sentence before anything is started."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cluster import model_store
from cluster.serve import _check_model, _template_text
from replica.errors import ConfigError, ModelLoadError

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
