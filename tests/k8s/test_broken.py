"""Values that can not work are refused, when they are rendered or checked, with the sentence that a person needs.

Each file of `ci/broken` begins with a comment that holds the sentence, or a part of it. They are laid over
`ci/n-replicas-tp2.yaml`.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from cluster.k8s.check import check_text
from cluster.k8s.helm import reason
from cluster.k8s.values import DERIVED, load_values, merged
from replica.errors import ConfigError
from tests.k8s import tools
from tests.k8s.conftest import CHART, MONITORING

BROKEN = sorted((CHART / "ci" / "broken").glob("*.yaml"))
BASE = CHART / "ci" / "n-replicas-tp2.yaml"


def refusal(helm: str, path: Path, name: str = "shoal") -> str:
    """What helm or our check says; empty if both take it."""
    command = [str(tools.fetched(helm) / "helm"), "template", name, str(CHART), "--api-versions", MONITORING]
    done = subprocess.run(
        [*command, "--values", str(BASE), "--values", str(path)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return reason(done.stderr)
    return "\n".join(str(one) for document in check_text(done.stdout, path.name) for one in document.findings)


def expected(path: Path) -> str:
    first = path.read_text().splitlines()[0]
    assert first.startswith("# "), f"{path}: the first line is the sentence"
    return first.removeprefix("# ")


def test_there_are_enough() -> None:
    assert len(BROKEN) >= 25


@pytest.mark.parametrize("path", BROKEN, ids=lambda path: path.stem)
def test_refused_with_its_sentence(path: Path) -> None:
    assert expected(path) in refusal("helm4", path)


@pytest.mark.parametrize("path", [path for path in BROKEN if " " not in expected(path)], ids=lambda path: path.stem)
def test_helm_3_words_a_violated_schema_differently_and_names_the_key(path: Path) -> None:
    assert expected(path) in refusal("helm3", path)


@pytest.mark.parametrize("name", ["x" * 48, "1shoal"])
def test_a_bad_release_name_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text("{}")
    said = refusal("helm4", tmp_path / "values.yaml", name)
    assert "the release name" in said or "invalid release name" in said


@pytest.mark.parametrize("key", DERIVED)
def test_a_derived_key_in_config_is_refused_by_both(key: str, tmp_path: Path) -> None:
    numbers = (
        "replicas.both",
        "replicas.prefill",
        "replicas.decode",
        "tensor_parallel_size",
        "num_gpus_per_replica",
        "router.replicas",
        "drain_s",
    )
    value: object = (
        2
        if key in (*numbers, "longest_stream_s", "autoscaling.max_replicas")
        else 4096
        if key == "max_model_len"
        else "PACK"
    )
    value = ["k"] if key == "http.api_keys" else value
    config: dict[str, object] = {key.partition(".")[0]: {key.partition(".")[2]: value} if "." in key else value}
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump({"config": config}))
    assert refusal("helm4", path) == f"config.{key}: set {DERIVED[key]}"
    with pytest.raises(ConfigError, match=rf"config\.{key}: set"):
        load_values(merged(yaml.safe_load(BASE.read_text()), {"config": config}))
