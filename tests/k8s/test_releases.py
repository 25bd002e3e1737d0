"""The real helm and kubectl against a stand-in for the API server that validates strictly (api_server.py)."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s import kinds, tools
from tests.k8s.api_server import ApiServer
from tests.k8s.conftest import CHART, HELMS, MONITORING, rendered

VALUES = CHART / "ci" / "n-replicas-tp2.yaml"


@pytest.fixture
def api(kubernetes_schemas: Path) -> Iterator[ApiServer]:
    with ApiServer(lambda one, old: kinds.errors(one, kubernetes_schemas / "1.37", old)) as server:
        yield server


@pytest.fixture
def run(api: ApiServer, tmp_path: Path) -> Any:
    """Runs a tool against `api`; its output, the exit code checked."""
    context = {"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "team"}}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": api.url}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [context],
        "current-context": "c",
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    environment = {"KUBECONFIG": str(tmp_path / "kubeconfig"), "HOME": str(tmp_path), "PATH": os.environ["PATH"]}

    def tool(program: Path, *arguments: str, code: int = 0) -> str:
        command = [str(program), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=50)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return tool


def cluster_hash(service: dict[str, Any]) -> str:
    """As the operator decides whether an upgrade needs a new cluster: of the cluster's spec without numbers of pods."""
    spec = json.loads(json.dumps(service["spec"]["rayClusterConfig"]))
    for group in spec["workerGroupSpecs"]:
        for key in ("replicas", "minReplicas", "maxReplicas", "scaleStrategy"):
            group.pop(key, None)
        group["template"]["spec"].pop("tolerations", None)
    digest = hashlib.sha1(json.dumps(spec, sort_keys=True).encode()).digest()
    return base64.b32hexencode(digest).decode().lower()


@pytest.mark.parametrize("name", HELMS)
def test_helm_install_upgrade_rollback_uninstall(name: str, api: ApiServer, run: Any) -> None:
    helm = tools.fetched(name) / "helm"
    run(helm, "install", "chat", str(CHART), "--values", str(VALUES))
    installed = api.of_kind("RayService")["chat"]
    assert {one["kind"] for one in api.objects.values()} >= {
        "RayService",
        "PodDisruptionBudget",
        "PodMonitor",
        "StatefulSet",
    }

    run(helm, "upgrade", "chat", str(CHART), "--values", str(VALUES), "--set", "config.scheduler.max_num_seqs=32")
    upgraded = api.of_kind("RayService")["chat"]
    assert "max_num_seqs: 32" in upgraded["spec"]["serveConfigV2"]
    assert cluster_hash(upgraded) == cluster_hash(installed), "a knob of serving is changed in place"

    run(helm, "upgrade", "chat", str(CHART), "--values", str(VALUES), "--set", "image.tag=next")
    assert cluster_hash(api.of_kind("RayService")["chat"]) != cluster_hash(installed)

    run(helm, "rollback", "chat", "1")
    assert api.of_kind("RayService")["chat"]["spec"] == installed["spec"]
    assert len(run(helm, "history", "chat", "--output", "json")) > 2

    run(helm, "uninstall", "chat")
    # models are kept: helm.sh/resource-policy
    assert [one["kind"] for one in api.objects.values()] == ["PersistentVolumeClaim"]


@pytest.mark.parametrize(
    ("change", "in_place"),
    [
        ("replicas=6", True),
        ("userConfig.scheduler.watermark=0.05", True),
        ('config.router.policy="round-robin"', True),
        ("model.maxLen=16384", True),
        ('pods.env.X="y"', False),
        ("drain.seconds=100", True),
        ("drain.longestStreamSeconds=900", False),
        ("tensorParallel=4", False),
    ],
)
def test_what_makes_a_new_cluster(change: str, in_place: bool) -> None:
    helm = tools.fetched("helm4") / "helm"
    command = [str(helm), "template", "shoal", str(CHART), "--values", str(VALUES)]
    done = subprocess.run([*command, "--set-json", change], capture_output=True, text=True, check=True)
    before, after = (
        next(one for one in yaml.safe_load_all(text) if one["kind"] == "RayService")
        for text in (rendered("helm4", VALUES), done.stdout)
    )
    assert before != after
    assert (cluster_hash(before) == cluster_hash(after)) is in_place


def test_kubectl_apply_and_diff(api: ApiServer, run: Any, kubectl: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "all.yaml"
    manifest.write_text(rendered("helm4", VALUES, MONITORING))
    run(kubectl, "apply", "--filename", str(manifest))
    assert run(kubectl, "diff", "--filename", str(manifest)) == ""
    manifest.write_text(manifest.read_text().replace("max_model_len: 32768", "max_model_len: 16384"))
    difference = run(kubectl, "diff", "--filename", str(manifest), code=1)
    # all that would change: one line of serveConfigV2, and nothing of the cluster's part
    changed = [line for line in difference.splitlines() if re.match(r"[+-](?![+-]{2} )", line)]
    changed = [line for line in changed if line[1:].split()[0] not in ("generation:", "resourceVersion:")]
    assert [line.split() for line in changed] == [["-", "max_model_len:", "32768"], ["+", "max_model_len:", "16384"]]
    run(kubectl, "apply", "--filename", str(manifest))
    assert "16384" in api.of_kind("RayService")["shoal"]["spec"]["serveConfigV2"]


def test_kubectl_apply_of_what_the_schema_refuses(api: ApiServer, run: Any, kubectl: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "all.yaml"
    manifest.write_text(rendered("helm4", VALUES).replace("serveConfigV2:", "serveConfig:"))
    said = run(kubectl, "apply", "--filename", str(manifest), code=1)
    assert "serveConfig: unknown field; did you mean 'serveConfigV2'?" in said
    assert not api.of_kind("RayService")


def test_the_backend_of_the_heads_state_can_not_be_changed(
    api: ApiServer, run: Any, kubectl: Path, tmp_path: Path
) -> None:
    """A rule that the schema holds for changes alone."""
    manifest = tmp_path / "all.yaml"
    text = rendered("helm4", VALUES).replace("redisAddress:", "backend: redis\n      redisAddress:")
    manifest.write_text(text)
    run(kubectl, "apply", "--filename", str(manifest))
    manifest.write_text(text.replace("backend: redis", "backend: rocksdb"))
    assert "backend is immutable" in run(kubectl, "apply", "--filename", str(manifest), code=1)
