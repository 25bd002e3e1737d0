"""Every supported shape, rendered by helm 3 and 4: valid for whoever reads it, the same as Python says, and short."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config import load
from cluster.k8s import values
from cluster.k8s.check import check_text
from cluster.k8s.operator_rules import environment, groups, ray_container
from cluster.k8s.serve_config import serve_config
from cluster.serve_env import SERVE_ENV
from tests.k8s import kinds, tools
from tests.k8s.conftest import CHART, CI, HELMS, MONITORING, documents, rendered, serve_config_of, service_of

ROOT = CHART.parents[2]
NAMES = [path.stem for path in CI]


def given(path: Path) -> dict[str, Any]:
    found = yaml.safe_load(path.read_text())
    assert isinstance(found, dict)
    return found


def all_values(path: Path) -> dict[str, Any]:
    """With the chart's own defaults."""
    return values.merged(given(CHART / "values.yaml"), given(path))


@pytest.mark.parametrize("path", CI, ids=NAMES)
def test_both_helms_render_the_same(path: Path) -> None:
    three, four = (documents(rendered(helm, path, MONITORING)) for helm in HELMS)
    key = lambda one: (one["kind"], one["metadata"]["name"])  # noqa: E731
    assert sorted(three, key=key) == sorted(four, key=key)


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize("path", CI, ids=NAMES)
def test_shoal_k8s_check_finds_nothing(helm: str, path: Path) -> None:
    found = [str(one) for document in check_text(rendered(helm, path, MONITORING), "f") for one in document.findings]
    assert found == []


@pytest.mark.parametrize("version", tools.VERSIONS)
@pytest.mark.parametrize("path", CI, ids=NAMES)
def test_kubernetes_accepts_every_document(kubernetes_schemas: Path, version: str, path: Path) -> None:
    for document in documents(rendered("helm4", path, MONITORING)):
        assert kinds.errors(document, kubernetes_schemas / version) == [], document["kind"]


@pytest.mark.parametrize("path", CI, ids=NAMES)
def test_python_derives_the_same_serve_config(path: Path) -> None:
    derived = serve_config(values.load_values(given(path)))
    assert serve_config_of(rendered("helm4", path)) == derived


@pytest.mark.parametrize("path", CI, ids=NAMES)
def test_a_configuration_comes_back_from_its_values(path: Path, tmp_path: Path) -> None:
    """ClusterConfig -> values -> chart -> ClusterConfig. What a configuration does not say, the site's values do."""
    config = load(serve_config_of(rendered("helm4", path))["applications"][0]["args"])
    site = {key: given(path).get(key, {}) for key in ("image", "headState", "pods", "tenants", "cache")}
    made = values.merged(values.values_of(config.model_copy(update={"tenants": load({}).tenants})), site)
    again = tmp_path / "values.yaml"
    again.write_text(yaml.safe_dump(made))
    assert load(serve_config_of(rendered("helm4", again))["applications"][0]["args"]) == config


@pytest.mark.parametrize("path", CI, ids=NAMES)
def test_the_application_builds(path: Path) -> None:
    application = serve_config_of(rendered("helm4", path))["applications"][0]
    module, _, name = application["import_path"].partition(":")
    getattr(importlib.import_module(module), name)(application["args"])


def lines(path: Path) -> int:
    return sum(1 for line in path.read_text().splitlines() if line.strip() and not line.strip().startswith("#"))


def test_few_lines_of_values() -> None:
    assert lines(CHART / "ci" / "n-replicas-tp2.yaml") <= 12
    assert lines(CHART / "ci" / "pd-1p2d.yaml") <= 20


def test_values_schema_is_made_of_our_classes() -> None:
    """If not: python -m tests.k8s.generate."""
    assert json.loads((CHART / "values.schema.json").read_text()) == values.schema()


def open_places(node: Any, path: str = "") -> list[str]:
    """Where a schema takes any key."""
    if isinstance(node, list):
        return [place for item in node for place in open_places(item, path)]
    if not isinstance(node, dict):
        return []
    is_open = node.get("type") == "object" and node.get("additionalProperties", True) is True
    return ([path] if is_open else []) + [p for key, value in node.items() for p in open_places(value, f"{path}/{key}")]


def test_values_schema_takes_no_unknown_key() -> None:
    """Open are what goes to Kubernetes as it is, and `global`, which is helm's."""
    assert {place.rpartition("/properties/")[2] for place in open_places(values.schema())} == {
        "global",
        "affinity",
        "dnsConfig",
        "clients/items",
        "scrapers/items",
        "operator",
    }


def test_values_yaml_has_the_defaults_of_our_classes() -> None:
    written = given(CHART / "values.yaml")
    needed = {"model": {"id": ""}, "image": {"tag": ""}}
    made = values.ChartValues.model_validate(needed).model_dump(mode="json")
    assert written == made


def test_pods_have_the_environment_of_shoal_serve() -> None:
    for _, name, group in groups(service_of(rendered("helm4", CHART / "ci" / "n-replicas-tp2.yaml"))):
        assert environment(ray_container(group)).items() >= SERVE_ENV.items(), name


def test_the_chart_names_the_pinned_versions() -> None:
    version = service_of(rendered("helm4", CI[0]))["spec"]["rayClusterConfig"]["rayVersion"]
    assert f"ray=={version}" in (ROOT / "constraints.txt").read_text().splitlines()
    from cluster import __version__

    assert given(CHART / "Chart.yaml")["appVersion"] == __version__
    assert all(given(path)["image"]["tag"] == f"{__version__}-ray{version}-py311" for path in CI)


@pytest.mark.parametrize("helm", HELMS)
def test_helm_lint(helm: str, chart: Path) -> None:
    command = [str(tools.fetched(helm) / "helm"), "lint", "--strict", str(chart)]
    command += ["--values", str(chart / "ci" / "n-replicas-tp2.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", CI, ids=NAMES)
def test_selectors_select(path: Path) -> None:
    """Budgets, monitors and policies select by labels that pods have: ours, and those the operator sets."""
    everything = documents(rendered("helm4", path, MONITORING))
    pods = []
    for _, name, group in groups(service_of(rendered("helm4", path))):
        kind = "head" if name == "head" else "worker"
        operators = {"ray.io/node-type": kind, "ray.io/group": "headgroup" if name == "head" else name}
        pods.append(group["template"]["metadata"]["labels"] | operators)
    pods += [one["spec"]["template"]["metadata"]["labels"] for one in everything if one["kind"] == "StatefulSet"]
    for one in everything:
        spec = one.get("spec", {})
        selector = spec.get("podSelector") or (spec.get("selector") if one["kind"] != "Service" else None)
        wanted = spec["selector"] if one["kind"] == "Service" else (selector or {}).get("matchLabels")
        if wanted:
            assert any(wanted.items() <= labels.items() for labels in pods), one["metadata"]["name"]


def test_budgets_are_integers_and_let_one_pod_go() -> None:
    budgets = [
        one for one in documents(rendered("helm4", CHART / "ci" / "everything.yaml")) if "minAvailable" in one["spec"]
    ]
    assert {one["metadata"]["name"]: one["spec"]["minAvailable"] for one in budgets} == {
        "shoal-router": 2,
        "shoal-both": 1,
    }
    assert all("maxUnavailable" not in one["spec"] for one in budgets)


def test_no_secret_is_made_and_none_is_written() -> None:
    for path in CI:
        everything = documents(rendered("helm4", path, MONITORING))
        assert not [one for one in everything if one["kind"] == "Secret"]
        for _, _, group in groups(service_of(rendered("helm4", path))):
            env = ray_container(group)["env"]
            assert all("value" not in entry for entry in env if "TOKEN" in entry["name"] or "PASSWORD" in entry["name"])


def test_pods_run_as_nobody_special() -> None:
    for path in CI:
        for _, name, group in groups(service_of(rendered("helm4", path))):
            pod, container = group["template"]["spec"], ray_container(group)
            assert pod["securityContext"]["runAsNonRoot"], name
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }


#: where a pod listens, by container port; the table "What listens where" in k8s/README.md says the same
PORTS = {6379, 8265, 10001, 44217, 44227, 8000, 8080}


def test_the_readme_names_every_port() -> None:
    found = set()
    for path in CI:
        for one in documents(rendered("helm4", path)):
            if one["kind"] == "StatefulSet":
                found |= {port["containerPort"] for port in one["spec"]["template"]["spec"]["containers"][0]["ports"]}
        for _, _, group in groups(service_of(rendered("helm4", path))):
            found |= {port["containerPort"] for port in ray_container(group)["ports"]}
    assert found == PORTS
    text = (ROOT / "k8s" / "README.md").read_text()
    table = text.partition("## What listens where")[2].partition("\n## ")[0]
    assert [port for port in sorted(found) if f"| {port} |" not in table] == []


#: of the operator; everything else in an alert is ours
OPERATORS_METRICS = {"kuberay_service_condition_upgrade_in_progress"}


def test_alerts_name_metrics_that_are_there() -> None:
    """Dead alerts look like good news."""
    everything = documents(rendered("helm4", CHART / "ci" / "single.yaml", MONITORING))
    rules = next(one for one in everything if one["kind"] == "PrometheusRule")["spec"]["groups"][0]["rules"]
    named = {name for rule in rules for name in re.findall(r"(?:vllm:|shoal_|kuberay_)\w+", rule["expr"])}
    glossary = set(re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))
    assert len(named) >= 6
    assert {name.removesuffix("_total") for name in named} - OPERATORS_METRICS <= glossary
    assert all('release="shoal"' in rule["expr"] or "kuberay_" in rule["expr"] for rule in rules)
