"""What stands around the RayService: hatches, ways in from outside, dashboards, two releases beside each other."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.k8s_operator import Site, manifest
from benchmarks.pod_plans import Secrets, plans
from cluster.k8s import dashboards
from cluster.k8s.operator_rules import groups, ray_container
from tests.k8s import tools
from tests.k8s.conftest import CHART, documents, rendered, service_of

HATCHES = CHART / "ci" / "hatches.yaml"
ROOT = CHART.parents[2]
PANELS = [(row, panel) for row, panels in dashboards.ROWS.items() for panel in panels]


def pods_of(path: Path) -> dict[str, dict[str, Any]]:
    return {name: group["template"] for _, name, group in groups(service_of(rendered("helm4", path)))}


def test_what_is_given_to_kubernetes_arrives_and_nothing_derived_is_lost() -> None:
    given, plain = pods_of(HATCHES), pods_of(CHART / "ci" / "n-replicas-tp2.yaml")
    pod, container = given["both"]["spec"], ray_container({"template": given["both"]})
    assert {"name": "NCCL_DEBUG", "value": "WARN"} in container["env"]
    assert [next(key for key in source if key.endswith("Ref")) for source in container["envFrom"]] == [
        "secretRef",
        "configMapRef",
    ]
    assert {"certificates", "nvme", "keys", "scratch", "data", "shm", "ray", "models"} == {
        volume["name"] for volume in pod["volumes"]
    }
    assert {"name": "nvme", "mountPath": "/nvme", "subPath": "shoal"} in container["volumeMounts"]
    assert pod["priorityClassName"] == "serving"
    assert given["both"]["metadata"]["labels"].items() >= plain["both"]["metadata"]["labels"].items() | {
        ("team", "chat")
    }
    assert pod["terminationGracePeriodSeconds"] == plain["both"]["spec"]["terminationGracePeriodSeconds"]
    derived = ray_container({"template": plain["both"]})
    assert all(container[key] == derived[key] for key in ("lifecycle", "readinessProbe", "resources", "ports"))
    assert "NCCL_DEBUG" not in json.dumps(given["router"]), "a hatch is of one kind of pods"
    head = given["head"]["metadata"]["annotations"]
    assert head["karpenter.sh/do-not-disrupt"] == "true"
    assert given["router"]["metadata"]["annotations"] == {"sidecar.istio.io/inject": "false"}


def test_ways_in_lead_to_the_service_that_the_operator_makes() -> None:
    everything = {one["kind"]: one for one in documents(rendered("helm4", HATCHES))}
    (rule,) = everything["HTTPRoute"]["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": "shoal-serve-svc", "port": 8000}]
    assert rule["timeouts"] == {"request": "0s"}, "a gateway's own limit would cut long streams"
    (way,) = everything["Ingress"]["spec"]["rules"]
    assert way["host"] == "chat.example.org"
    assert way["http"]["paths"][0]["backend"]["service"] == {"name": "shoal-serve-svc", "port": {"number": 8000}}


def two_releases(tmp_path: Path) -> dict[str, list[dict[str, Any]]]:
    """Several models are several releases: what one has nothing of the other's."""
    found = {}
    for name, model in (("chat", "Qwen/Qwen3-8B"), ("code", "Qwen/Qwen2.5-Coder-7B")):
        values = yaml.safe_load(HATCHES.read_text()) | {"model": {"id": model}}
        values["httpRoute"]["hostnames"] = [f"{name}.example.org"]
        values["ingress"] |= {"host": f"{name}.example.org", "tlsSecret": f"{name}-tls"}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(values))
        found[name] = documents(rendered("helm4", tmp_path / f"{name}.yaml", name=name))
    return found


def test_two_models_are_two_releases_that_do_not_touch(tmp_path: Path) -> None:
    releases = two_releases(tmp_path)
    names = [(one["kind"], one["metadata"]["name"]) for each in releases.values() for one in each]
    assert len(names) == len(set(names))
    for name, each in releases.items():
        other = "code" if name == "chat" else "chat"
        text = yaml.safe_dump([one for one in each if one["kind"] != "ConfigMap"])
        assert f"{other}-" not in text
        for selector in re.findall(r"app\.kubernetes\.io/instance: (\w+)", text):
            assert selector == name


def test_a_node_tier_fits_its_pod_and_lies_on_the_mounted_disk() -> None:
    path = CHART / "ci" / "kv-tier.yaml"
    args = yaml.safe_load(service_of(rendered("helm4", path))["spec"]["serveConfigV2"])["applications"][0]["args"]
    container = ray_container({"template": pods_of(path)["both"]})
    assert container["resources"]["limits"]["memory"] == "256Gi"
    assert any(args["kv_cache"]["disk_folder"].startswith(one["mountPath"]) for one in container["volumeMounts"])


def test_what_runs_live_has_the_chain_that_the_chart_derives(tmp_path: Path) -> None:
    """benchmarks/k8s_operator.py shortens a manifest's waits itself, so that it needs no helm."""
    values = yaml.safe_load((CHART / "ci" / "n-replicas-tp2.yaml").read_text())
    values |= {"drain": {"seconds": 7, "longestStreamSeconds": 31, "preStopSeconds": 3}}
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    site = Site({"router": 2, "both": 4}, {"router": 2, "both": 4}, 2, 7, 31, 3)
    secrets = Secrets("", "")
    live, chart = (
        {plan.group: (plan.grace_s, plan.pre_stop_s, plan.env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"], count)
         for plan, count in plans(service, secrets)}
        for service in (site.fit(manifest("tp2")), service_of(rendered("helm4", tmp_path / "values.yaml")))
    )  # fmt: skip
    assert live == chart


# ---- dashboards ----


def test_the_dashboard_is_in_its_config_map() -> None:
    config_map = next(one for one in documents(rendered("helm4", HATCHES)) if one["kind"] == "ConfigMap")
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(config_map["data"]["shoal.json"]) == dashboards.dashboard()
    assert "ConfigMap" not in {one["kind"] for one in documents(rendered("helm4", CHART / "ci" / "single.yaml"))}


def glossary() -> dict[str, str]:
    """Metric -> kind, of docs/metrics.md."""
    rows = re.findall(r"^\| `([^`]+)` \| (\w+) \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    return dict(rows)


@pytest.mark.parametrize(("row", "panel"), PANELS, ids=[panel.title for _, panel in PANELS])
def test_a_panel_names_metrics_that_are_there_as_prometheus_has_them(row: str, panel: dashboards.Panel) -> None:
    known = glossary()
    exported = {name: name for name in known}
    exported |= {f"{name}_total": name for name, kind in known.items() if kind == "counter"}
    exported |= {f"{name}_bucket": name for name, kind in known.items() if kind == "histogram"}
    for expr in panel.queries.values():
        named = re.findall(r"\b(?:vllm:|shoal_|http_)\w+", expr)
        assert named, expr
        for name in named:
            assert name in exported, f"{row}: {name} is not exported"
            kind = known[exported[name]]
            assert kind == "gauge" or name != exported[name], f"{name}: a {kind} has a suffix in Prometheus"
        is_counted = any(known[exported[name]] in ("counter", "histogram") for name in named)
        assert not is_counted or "rate(" in expr or panel.title == "Leaks", "a counter alone only grows"


@pytest.mark.parametrize("panel", [panel for _, panel in PANELS], ids=[panel.title for _, panel in PANELS])
def test_a_panel_has_a_unit_and_says_what_to_do(panel: dashboards.Panel) -> None:
    assert panel.unit in {"s", "short", "reqps", "ops", "percentunit"}
    assert re.fullmatch(r"[A-Z`\w].{30,150}\.", panel.high), panel.high
    for legend, expr in panel.queries.items():
        assert expr.count("(") == expr.count(")")
        assert expr.count('release="$release"') == len(re.findall(r"\b(?:vllm:|shoal_|http_)\w+", expr))
        assert re.search(r"max by \(|count_values", expr), "two routers tell the same replica: max by, before a sum"
        for label in re.findall(r"\{\{(\w+)\}\}", legend):
            assert re.search(rf"by \([^)]*\b{label}\b", expr), f"{label} is not a label of the result"


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboards.dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken
        taken |= cells
    assert len({panel["id"] for panel in dashboards.dashboard()["panels"]}) == len(PANELS) + len(dashboards.ROWS)


def test_helm_refuses_a_part_of_the_pod_that_the_chart_derives() -> None:
    """By the schema, before anything is rendered; `ci/broken` has one of each."""
    command = [str(tools.fetched("helm4") / "helm"), "template", "shoal", str(CHART), "--values", str(HATCHES)]
    for key in ("containers", "volumes", "terminationGracePeriodSeconds", "restartPolicy", "securityContext"):
        given = [*command, "--set-json", f'pods.podTemplate.spec.{key}="x"']
        done = subprocess.run(given, capture_output=True, text=True, check=False)
        assert done.returncode, key
        assert key in done.stderr
