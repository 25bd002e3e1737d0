"""`shoal k8s check` finds what is wrong, each in a sentence that names place, value and what is needed; and nothing is
wrong with the plain manifest. (tests/k8s looks at everything that the chart renders.)

What is checked here is what can be checked without a cluster. That the operator, the scheduler and the network then do
what they should is not (k8s/README.md says so).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import cli
from cluster.config import load
from cluster.k8s import capacity, operator_rules, serve_check
from cluster.k8s.check import Document as Checked
from cluster.k8s.check import schema_of
from cluster.k8s.quantity import quantity
from cluster.k8s.structural import check_object
from cluster.resources import fits

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = ROOT / "k8s" / "rayservice" / "single-cpu.yaml"
TP2 = ROOT / "k8s" / "rayservice" / "tp2.yaml"

Document = dict[str, Any]
Change = Callable[[Document], object]


@functools.cache
def _parsed(path: Path) -> Document:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def read(path: Path) -> Document:
    return copy.deepcopy(_parsed(path))


@pytest.fixture
def service() -> Document:
    """The RayService, free to be changed: two CPU replicas and a router."""
    return read(MANIFEST)


def cluster(service: Document) -> Document:
    spec: Document = service["spec"]["rayClusterConfig"]
    return spec


def head(service: Document) -> Document:
    spec: Document = cluster(service)["headGroupSpec"]
    return spec


def worker(service: Document, index: int = 1) -> Document:
    spec: Document = cluster(service)["workerGroupSpecs"][index]
    return spec


def pod(group: Document) -> Document:
    spec: Document = group["template"]["spec"]
    return spec


def container(group: Document) -> Document:
    first: Document = pod(group)["containers"][0]
    return first


def served(service: Document, change: Change) -> None:
    """`change` is done to what serveConfigV2 holds."""
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    change(config)
    service["spec"]["serveConfigV2"] = yaml.safe_dump(config)


def findings(service: Document) -> str:
    return "\n".join(str(finding) for finding in Checked("file.yaml", service).findings)


@pytest.mark.parametrize("path", [MANIFEST, TP2], ids=lambda path: path.stem)
def test_nothing_is_wrong_with_the_manifest(path: Path) -> None:
    assert findings(read(path)) == ""


def env(group: Document, name: str, value: str) -> None:
    entry = next(one for one in container(group)["env"] if one["name"] == name)
    entry["value"] = value


DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
SCHEMA: list[tuple[Change, str]] = [
    (lambda s: s["spec"].update(serveConfig="x"), "spec.serveConfig: unknown field; did you mean 'serveConfigV2'?"),
    (lambda s: s["spec"].update(serveConfigV2={"applications": []}), "spec.serveConfigV2: must be text"),
    (lambda s: head(s)["rayStartParams"].update({"num-cpus": 0}), "rayStartParams.num-cpus: must be text (got 0)"),
    (lambda s: pod(worker(s)).update(terminationGracePeriod=9), "did you mean 'terminationGracePeriodSeconds'?"),
    (lambda s: container(worker(s)).update(readynessProbe={}), "did you mean 'readinessProbe'?"),
    (lambda s: worker(s).update(minReplicas="2"), "minReplicas: must be a whole number (got '2')"),
    (lambda s: worker(s).update(minReplicas=2**40), "is out of range"),
    (lambda s: container(worker(s)).pop("name"), "containers[0].name: is missing"),
    (lambda s: container(worker(s)).update(env=None), "env: is null, which is not allowed"),
    (lambda s: container(worker(s))["resources"]["limits"].update(memory="12 GB"), "'12 GB' is no quantity"),
    (lambda s: container(worker(s))["resources"]["limits"].update(memory=True), "must be a whole number or text"),
    (lambda s: s["spec"]["upgradeStrategy"].update(strategy="NewCluster"), "upgradeStrategy.strategy: unknown field"),
    (lambda s: s["metadata"].update(name="Shoal_1"), "metadata.name: 'Shoal_1' is no name"),
    (lambda s: s["metadata"]["labels"].update(version=1), "metadata.labels.version: must be text (got 1)"),
    (lambda s: s["metadata"].update(nmae="x"), "metadata.nmae: unknown field; did you mean 'name'?"),
    (lambda s: s["spec"].update(managedBy="me"), "the managedBy field value must be either"),
    (lambda s: s.pop("apiVersion"), "needs apiVersion and kind"),
    (lambda s: s.update(kind="RayServices"), "known here is ray.io/v1 RayService"),
    (lambda s: s.update(apiVersion="ray.io/v1alpha1"), "known here is ray.io/v1 RayService"),
]
OPERATOR: list[tuple[Change, str]] = [
    (lambda s: s["metadata"].update(name="x" * 48), "at most 47 characters"),
    (lambda s: head(s)["rayStartParams"].clear(), "rayStartParams.num-cpus: needs to be '0'"),
    (lambda s: container(head(s))["ports"].pop(5), "none is named serve"),
    (lambda s: container(worker(s))["resources"]["limits"].update(memory="16Gi"), "need to be given and equal"),
    (
        lambda s: container(worker(s)).update(lifecycle={"preStop": {"exec": {"command": ["ray", "stop"]}}}),
        "`ray stop`",
    ),
    (
        lambda s: container(worker(s)).update(
            lifecycle={"preStop": {"exec": {"command": ["sh", "-c", "ray stop; sleep 9"]}}}
        ),
        "`ray stop` kills replicas before they drain",
    ),
    (lambda s: pod(worker(s)).pop("terminationGracePeriodSeconds"), "30 s, then SIGKILL"),
    (lambda s: env(worker(s), DRAIN, "5000"), "need more than 5015 s"),
    (lambda s: cluster(s).update(enableInTreeAutoscaling=True), "autoscalerOptions.version: needs to be v2"),
    (lambda s: worker(s).update(idleTimeoutSeconds=60), "idleTimeoutSeconds: needs autoscalerOptions.version v2"),
    (lambda s: worker(s)["rayStartParams"].update(labels="a=b"), "use the group's own field labels"),
    (lambda s: worker(s).update(replicas=9), "must not fall in that order"),
    (lambda s: cluster(s).update(rayVersion="2.50.0"), "token needs rayVersion 2.52 or newer (got '2.50.0')"),
    (lambda s: cluster(s).update(upgradeStrategy={"type": "Recreate"}), "belongs to spec.upgradeStrategy"),
    (
        lambda s: s["spec"]["upgradeStrategy"].update(type="Rolling"),
        "'Rolling' is not known; allowed: None, NewCluster",
    ),
    (
        lambda s: s["spec"]["upgradeStrategy"].update(type="NewClusterWithIncrementalUpgrade"),
        "enableInTreeAutoscaling: an incremental upgrade needs true",
    ),
    (
        lambda s: container(head(s))["env"].append({"name": "RAY_REDIS_ADDRESS", "value": "r:1"}),
        "RAY_REDIS_ADDRESS belongs to gcsFaultToleranceOptions",
    ),
    (lambda s: cluster(s).update(gcsFaultToleranceOptions={"backend": "rocksdb"}), "alpha feature gate"),
    (lambda s: cluster(s).update(gcsFaultToleranceOptions={}), "gcsFaultToleranceOptions.redisAddress: is missing"),
]
SERVE: list[tuple[Change, str]] = [
    (lambda c: c.update(max_ongoing_request=5), "max_ongoing_request: unknown key, which Serve would pass over"),
    (lambda c: c["http_options"].update(hots="x"), "http_options.hots: unknown key"),
    (lambda c: c["applications"][0].update(arg={}), "did you mean 'args'?"),
    (lambda c: c["applications"][0].update(import_path="cluster.app.build"), "import_path"),
    (lambda c: c["applications"][0].update(import_path="cluster.app:biuld"), "names no function here"),
    (lambda c: c["applications"][0]["deployments"][0].update(num_replica=2), "num_replica: unknown key"),
    (
        lambda c: c["applications"][0]["deployments"][0].update(
            num_replicas="auto", autoscaling_config={"min_replicas": 1, "max_replica": 3}
        ),
        "autoscaling_config.max_replica: unknown key",
    ),
    (
        lambda c: c["applications"][0]["deployments"][0].update(
            num_replicas="auto", autoscaling_config={"min_replicas": 5, "max_replicas": 3}
        ),
        "max_replicas",
    ),
    (
        lambda c: c["applications"][0]["args"].update(drain_sec=5),
        "args: drain_sec: unknown key; did you mean 'drain_s'?",
    ),
    (lambda c: c["applications"][0]["args"].update(replicas={"both": 0}), "args: replicas.both"),
    (lambda c: c["applications"][0]["args"].update(replicas={"prefill": 1}), "nobody would decode"),
    (
        lambda c: c["applications"][0]["args"].update(replicas={"prefill": 1, "decode": 2}),
        "'Replica' is no deployment here; allowed: Prefill, Decode, Router",
    ),
    (lambda c: c["applications"][0]["args"].update(longest_stream_s=4000), "may take 4000 s"),
    (lambda c: c["applications"][0]["args"].update(longest_stream_s=4000), "rayClusterDeletionDelaySeconds: 600 s"),
    (
        lambda c: c["applications"][0]["deployments"][1].update(user_config={"scheduler": {"watermark": 0.1}}),
        "user_config of Replica and Router need to be the same",
    ),
    (lambda c: c["applications"][0]["deployments"][1].update(name="Ruoter"), "'Ruoter' is no deployment here"),
    (lambda c: c.update(applications=[]), "applications: is empty"),
]
CAPACITY: list[tuple[Change, str]] = [
    (
        lambda c: c["applications"][0]["args"].update(replicas={"both": 3}),
        "2 pod(s) of CPU 4, GPU 0 in both hold 2: pending",
    ),
    (lambda c: c["applications"][0]["args"].update(replicas={"both": 1}), "1 would never be ready"),
    (lambda c: c["applications"][0]["args"].update(num_cpus_per_replica=5), "ask for room"),
    (lambda c: c["applications"][0]["args"].update(num_cpus_per_replica=2), "1 would never be ready"),
    (lambda c: c["applications"][0]["args"].update(node_label="other"), "no group has the label other=router"),
    (lambda c: c["applications"][0]["args"].update(router={"replicas": 2}), "2 router replica(s)"),
]


@pytest.mark.parametrize(("change", "expected"), SCHEMA + OPERATOR)
def test_check_finds(service: Document, change: Change, expected: str) -> None:
    change(service)
    found = findings(service)
    assert expected in found


@pytest.mark.parametrize(("change", "expected"), SERVE + CAPACITY)
def test_check_finds_in_the_serve_config(service: Document, change: Change, expected: str) -> None:
    served(service, change)
    assert expected in findings(service)


def test_serve_config_that_is_not_yaml(service: Document) -> None:
    service["spec"]["serveConfigV2"] = "a: [1"
    assert "spec.serveConfigV2: is not YAML" in findings(service)
    service["spec"]["serveConfigV2"] = "- 1"
    assert "holds list; needed: a mapping" in findings(service)
    assert serve_check.parse("a: 1\na: 2")[1][0].text.startswith("is not YAML"), "a key twice"


def test_drain_check_finds_the_defaults_of_ray_and_kubernetes(service: Document) -> None:
    """30 s each: they always lose the race."""
    del pod(worker(service))["terminationGracePeriodSeconds"]
    container(worker(service))["env"] = []
    found = findings(service)
    assert "Ray's drain" in found
    assert f"{DRAIN} is 30 and the work of a node may take 300 s" in found


def test_what_may_not_change_is_refused_at_a_change_alone(service: Document) -> None:
    schema = schema_of("ray.io/v1", "RayService")
    assert schema is not None
    cluster(service)["gcsFaultToleranceOptions"] = {"backend": "redis", "redisAddress": "r:6379"}
    changed = copy.deepcopy(service)
    cluster(changed)["gcsFaultToleranceOptions"]["backend"] = "rocksdb"
    assert check_object(changed, schema) == []
    (finding,) = check_object(changed, schema, old=service)
    assert "backend is immutable" in finding.text


def test_a_rule_nobody_can_evaluate_is_no_pass() -> None:
    schema = {"properties": {"spec": {"type": "string", "x-kubernetes-validations": [{"rule": "size(self) > 3"}]}}}
    with pytest.raises(NotImplementedError, match="size"):
        check_object({"metadata": {"name": "x"}, "spec": "y"}, schema)


@pytest.mark.parametrize(
    ("text", "value"),
    [("500m", 0.5), ("2", 2), (3, 3), ("1.5", 1.5), ("64Gi", 64 * 2**30), ("1k", 1000), ("1e3", 1000), ("2E", 2e18)],
)
def test_quantities(text: str, value: float) -> None:
    assert quantity(text) == value


@pytest.mark.parametrize("text", ["", "12 GB", "Gi", "1gi", "1GB", "0x1"])
def test_what_is_no_quantity(text: str) -> None:
    with pytest.raises(ValueError, match="is no quantity"):
        quantity(text)


@pytest.mark.parametrize(
    ("bundles", "strategy", "rooms", "expected"),
    [
        ([{"CPU": 1}, {"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 1}], "STRICT_PACK", [{"CPU": 8, "GPU": 2}] * 2, (2, 2)),
        ([{"CPU": 1}, {"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 1}], "STRICT_PACK", [{"CPU": 8, "GPU": 1}] * 4, (0, 0)),
        ([{"CPU": 1}, {"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 1}], "PACK", [{"CPU": 8, "GPU": 1}] * 4, (2, 4)),
        ([{"CPU": 1}], "STRICT_PACK", [{"CPU": 2}] * 3, (3, 2)),
    ],
)
def test_what_fits(bundles: list[Any], strategy: str, rooms: list[Any], expected: tuple[int, int]) -> None:
    assert fits(bundles, 3, strategy, rooms) == expected


def test_one_router_in_a_pod() -> None:
    assert fits([{"CPU": 0.1}], 3, "STRICT_PACK", [{"CPU": 4}] * 2, one_each=True) == (2, 2)


def test_the_autoscaler_may_bring_pods_that_are_not_there_yet(service: Document) -> None:
    served(service, lambda c: c["applications"][0]["args"].update(replicas={"both": 3}))
    cluster(service).update(enableInTreeAutoscaling=True, autoscalerOptions={"version": "v2"})
    worker(service).update(maxReplicas=3)
    config = load(yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]["args"])
    assert capacity.check(service, config, {"both": 3}) == []
    worker(service).update(maxReplicas=2)
    assert "pending for ever" in capacity.check(service, config, {"both": 3})[0].text


def test_cases_g_04_a_replica_that_fits_no_pod_is_said_beforehand() -> None:
    """G-04: TP 4 where pods have one GPU each, and 64 CPUs on 2."""
    service = read(TP2)
    group = worker(service)
    for part in container(group)["resources"].values():
        part["nvidia.com/gpu"] = "1"
    assert "CPU 1, GPU 1" in findings(service)
    assert "pending for ever" in findings(service)


def test_cases_g_07_ranks_that_can_not_be_are_refused() -> None:
    """G-07 for a manifest: num_gpus and ranks that differ."""
    service = read(TP2)
    served(service, lambda c: c["applications"][0]["args"].update(tensor_parallel_size=4))
    assert "num_gpus_per_replica is 2 and tensor_parallel_size is 4" in findings(service)


# ---- the command --------------------------------------------------------------------------------------------------


def test_the_command_checks_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], service: Document) -> None:
    assert cli.main(["k8s", "check", str(MANIFEST)]) == 0
    assert "RayService/shoal: ok" in capsys.readouterr().out
    broken = tmp_path / "broken.yaml"
    service["spec"]["serveConfig"] = "x"
    broken.write_text(yaml.safe_dump_all([service, {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"}}]))
    assert cli.main(["k8s", "check", str(broken)]) == 1
    said = capsys.readouterr().out
    assert f"{broken}: RayService/shoal: 1 wrong\n  spec.serveConfig: unknown field" in said
    assert "Service/s: not checked" in said


def test_the_command_names_files_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["k8s", "check", str(tmp_path / "none.yaml")]) == 2
    assert "No such file" in capsys.readouterr().err
    (tmp_path / "empty.yaml").write_text("")
    assert cli.main(["k8s", "check", str(tmp_path / "empty.yaml")]) == 2
    assert "no document" in capsys.readouterr().err
    (tmp_path / "bad.yaml").write_text("a: [1")
    assert cli.main(["k8s", "check", str(tmp_path / "bad.yaml")]) == 1
    assert "is not YAML" in capsys.readouterr().out


def test_the_command_renders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, site = tmp_path / "cluster.yaml", tmp_path / "site.yaml"
    config.write_text("model: m\nreplicas: {both: 2}\nnum_gpus_per_replica: 2\n")
    site.write_text("replicas: 3\nimage: {tag: t}\n")
    assert cli.main(["k8s", "render", "--config", str(config), "--values", str(site)]) == 0
    args = yaml.safe_load(capsys.readouterr().out)["applications"][0]["args"]
    assert (args["model"], args["replicas"], args["num_gpus_per_replica"]) == ("m", {"both": 3}, 2)
    command = ["k8s", "render", "--config", str(config), "--output"]
    assert cli.main([*command, "values"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["model"] == {"id": "m"}
    assert cli.main([*command, "manifests", "--helm", "no-such-helm"]) == 1
    assert "is not on PATH" in capsys.readouterr().err


def test_groups_are_head_and_workers(service: Document) -> None:
    assert [name for _, name, _ in operator_rules.groups(service)] == ["head", "router", "both"]
    assert [(group.name, group.pods, group.room) for group in capacity.groups_of(service)] == [
        ("router", 1, {"CPU": 1, "GPU": 0}),
        ("both", 2, {"CPU": 4, "GPU": 0}),
    ]
