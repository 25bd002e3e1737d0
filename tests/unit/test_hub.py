"""Hugging Face ids: out of the cache without a word to the network, and sentences where that does not work."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from cluster import hub, model_store
from replica.errors import ModelLoadError, UnknownModelError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def nobody(*_: object, **__: object) -> Any:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", nobody)
    return tmp_path


def put(cache: Path, *names: str, branch: str = "main") -> Path:
    """What `hf download org/name` leaves."""
    repository = cache / "models--org--name"
    folder = repository / "snapshots" / COMMIT
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("{}")
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / branch).write_text(COMMIT)
    return folder


COMPLETE = ("config.json", "tokenizer.json", "model.safetensors")


@pytest.mark.parametrize(
    ("text", "is_id"),
    [
        ("org/name", True),
        ("Qwen/Qwen3-0.6B", True),
        ("org/name@main", True),
        ("org/name@refs/pr/3", True),
        (f"org/name@{COMMIT}", True),
        ("name", False),
        ("./org/name", False),
        ("../name", False),
        ("/org/name", False),
        ("org/name/more", False),
        ("org/..", False),
        ("org/na me", False),
        ("org/name@", False),
        ("~/name", False),
    ],
)
def test_what_is_an_id(text: str, is_id: bool) -> None:
    assert hub.is_id(text) is is_id


def test_a_cached_model_is_served_without_the_network(cache: Path) -> None:
    folder = put(cache, *COMPLETE)
    assert model_store.resolve("org/name") == folder
    assert model_store.resolve(f"org/name@{COMMIT}") == folder
    assert hub.pinned("org/name@main", folder) == f"org/name@{COMMIT}"
    put(cache, branch="v1")
    assert model_store.resolve("org/name@v1") == folder


def test_a_folder_of_that_name_comes_first(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    for name in COMPLETE:
        (tmp_path / "org" / "name" / name).write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert not model_store.is_hub_id("org/name")
    assert model_store.resolve("org/name") == Path("org/name")


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ((), "is only in part in the local cache .config.json, tokenizer.json missing"),
        (("config.json", "tokenizer.json"), r"is only in part in the local cache .*no \.safetensors"),
        (("config.json", "tokenizer.json", "pytorch_model.bin"), "is only in part .*pickle only"),
    ],
)
def test_half_a_model_offline(
    cache: Path, names: tuple[str, ...], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    put(cache, *names)
    with pytest.raises(ModelLoadError, match=rf"'org/name' {sentence}.*HF_HUB_OFFLINE forbids"):
        model_store.resolve("org/name")


def test_a_shard_that_is_missing_makes_it_half_a_model(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = put(cache, "config.json", "tokenizer.json", "model-00001-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00002\.safetensors, which is not there"):
        model_store.resolve("org/name")


def answer(monkeypatch: pytest.MonkeyPatch, outcome: Any) -> None:
    def model_info(*_: object, **__: object) -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)


def hub_error(kind: type[Exception]) -> Exception:
    error = kind.__new__(kind)
    Exception.__init__(error, "token hf_secret")
    return error


@pytest.mark.parametrize(
    ("outcome", "kind", "sentence"),
    [
        (
            OSError("Name or service not known\nmore"),
            ModelLoadError,
            "cannot be reached: Name or service not known; fetch",
        ),
        (TimeoutError(), ModelLoadError, "cannot be reached: TimeoutError; fetch"),
        (hub_error(errors.RepositoryNotFoundError), UnknownModelError, "knows none of this name"),
        (hub_error(errors.RevisionNotFoundError), UnknownModelError, "no such revision"),
        (
            hub_error(errors.GatedRepoError),
            ModelLoadError,
            "is gated: accept its terms at .*/org/name and set HF_TOKEN",
        ),
    ],
)
def test_what_the_hub_answers(
    cache: Path, outcome: Exception, kind: type[Exception], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, outcome)
    with pytest.raises(kind, match=sentence) as caught:
        model_store.resolve("org/name")
    assert "org/name" in str(caught.value)
    assert "hf_secret" not in str(caught.value)


def test_a_hub_that_never_answers_is_given_up(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_ANSWER_S", -1.95)  # 0.05 s in all
    gone = threading.Event()
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: gone.wait(20))
    with pytest.raises(ModelLoadError, match=r"cannot be reached: no answer in 0\.05 s"):
        model_store.resolve("org/name")
    gone.set()


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["config.json", "tokenizer.json", "pytorch_model.bin"], "as a pickle only"),
        (["q4.gguf", "config.json"], "only .gguf files"),
        (["onnx/model.safetensors", "config.json"], "no .safetensors file"),
        (["model.safetensors", "config.json", "tokenizer.model"], "no tokenizer.json"),
    ],
)
def test_a_repository_that_could_not_be_served_is_not_fetched(
    cache: Path, names: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, SimpleNamespace(sha=COMMIT, siblings=[SimpleNamespace(rfilename=name) for name in names]))
    with pytest.raises(ModelLoadError, match=sentence):
        model_store.resolve("org/name")


def test_only_what_is_needed_is_fetched(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own filter decides, on a listing with everything that repositories have."""
    from huggingface_hub.utils._paths import filter_repo_objects

    names = [*COMPLETE, "model.safetensors.index.json", "chat_template.jinja", "tokenizer.model", "merges.txt"]
    others = ["pytorch_model.bin", "modeling_x.py", "onnx/model.onnx", "original/consolidated.safetensors", "README.md",
              "consolidated.safetensors", "model.pt", "q4.gguf", "training_args.bin", "sub/config.json"]  # fmt: skip
    wanted: dict[str, Any] = {}

    def download(name: str, revision: str | None = None, local_files_only: bool = False, **patterns: list[str]) -> str:
        if local_files_only:
            raise errors.LocalEntryNotFoundError("not there")
        wanted.update(patterns)
        assert (name, revision) == ("org/name", COMMIT)
        return str(put(cache, *COMPLETE))

    answer(monkeypatch, SimpleNamespace(sha=COMMIT, siblings=[SimpleNamespace(rfilename=n) for n in [*names, *others]]))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert model_store.resolve("org/name@v1").name == COMMIT
    assert set(filter_repo_objects([*names, *others], **wanted)) == set(names)


def test_a_cluster_serves_the_commit_under_the_id(cache: Path) -> None:
    """Other nodes have caches of their own: they are told the commit, and no path of this machine."""
    from cluster.config import ClusterConfig
    from cluster.serve import _localize

    put(cache, *COMPLETE)
    config = _localize(ClusterConfig(model="org/name@main", runner="fake"))
    assert (config.model, config.served_name) == (f"org/name@{COMMIT}", "org/name")
    named = _localize(ClusterConfig(model="org/name", runner="fake", served_model_name="mine"))
    assert named.served_name == "mine"
