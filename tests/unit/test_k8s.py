"""The Kubernetes manifest: valid for the CRD, for Ray's parser, for our own config, and with a drain chain that holds.

What is checked here is what can be checked without a cluster. That the operator, the scheduler and the network then do
what they should is not (k8s/README.md says so).
"""

from __future__ import annotations

import copy
import functools
import importlib
import json
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import BaseModel

from cluster.config import load
from cluster.live_knobs import lay_over
from cluster.serve_env import SERVE_ENV
from replica.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = ROOT / "k8s" / "rayservice.yaml"

Document = dict[str, Any]


def documents() -> list[Document]:
    return [d for d in yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8")) if d]


@pytest.fixture
def service() -> Document:
    """The RayService, free to be changed."""
    return next(d for d in documents() if d["kind"] == "RayService")


@pytest.fixture
def config(service: Document) -> Document:
    """Its serveConfigV2, parsed."""
    parsed = yaml.safe_load(service["spec"]["serveConfigV2"])
    assert isinstance(parsed, dict)
    return parsed


def groups(service: Document) -> Iterator[tuple[str, Document]]:
    cluster = service["spec"]["rayClusterConfig"]
    yield "head", cluster["headGroupSpec"]
    for group in cluster["workerGroupSpecs"]:
        yield group["groupName"], group


# ---- the custom resource ------------------------------------------------------------------------------------------


def as_json_schema(schema: Any) -> Any:
    """A structural CRD schema as plain JSON schema that refuses unknown fields, as a strict API server does."""
    if isinstance(schema, list):
        return [as_json_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {
        key: value if key in ("enum", "required", "default") else as_json_schema(value) for key, value in schema.items()
    }
    if isinstance(schema.get("properties"), dict):
        plain["properties"] = {name: as_json_schema(sub) for name, sub in schema["properties"].items()}
    if schema.get("x-kubernetes-int-or-string"):
        plain["type"] = ["integer", "string"]
        plain.pop("anyOf", None)
    if schema.get("nullable") and isinstance(plain.get("type"), str):
        plain["type"] = [plain["type"], "null"]
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields") or schema.get("x-kubernetes-embedded-resource")
    if (
        schema.get("type") == "object"
        and "properties" in schema
        and "additionalProperties" not in schema
        and not open_ended
    ):
        plain["additionalProperties"] = False
    return plain


@functools.cache
def crd_validator(path: Path) -> jsonschema.Draft7Validator:
    strict = as_json_schema(json.loads(path.read_text(encoding="utf-8")))
    strict["properties"]["metadata"] = {"type": "object"}  # the API server's own type, not the CRD's
    return jsonschema.Draft7Validator(strict)


def crd_errors(document: Document, schemas: Path) -> list[str]:
    group, _, version = document["apiVersion"].rpartition("/")
    validator = crd_validator(schemas / f"{group}_{version}_{document['kind']}.json")
    return [f"{'.'.join(map(str, e.absolute_path))}: {e.message[:200]}" for e in validator.iter_errors(document)]


def operator_errors(service: Document) -> list[str]:
    """What KubeRay 1.7 or its users' experience refuse beyond the schema, each with the reason."""
    errors = []
    name = service["metadata"]["name"]
    if len(name) > 47 or not name.replace("-", "a").isalnum() or not name[0].isalpha() or name != name.lower():
        errors.append(f"name {name!r}: must be a DNS label of at most 47 characters")
    for group_name, group in groups(service):
        params = group.get("rayStartParams") or {}
        errors += [
            f"{group_name}: rayStartParams.{k} must be a string" for k, v in params.items() if not isinstance(v, str)
        ]
        pod = group["template"]["spec"]
        container = pod["containers"][0]
        if not any(port["name"] == "serve" for port in container["ports"]):
            errors.append(f"{group_name}: lists ports but none named serve, so no Service is made")
        if container["resources"]["requests"] != container["resources"]["limits"]:
            errors.append(f"{group_name}: requests differ from limits; Ray schedules by limits")
        if "ray stop" in str(container.get("lifecycle")):
            errors.append(f"{group_name}: ray stop in preStop kills replicas before they drain")
        if not pod["securityContext"].get("runAsNonRoot"):
            errors.append(f"{group_name}: runs as root")
    if service["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParams"].get("num-cpus") != "0":
        errors.append("head: num-cpus must be 0, or replicas are placed beside the GCS")
    return errors


def drain_errors(service: Document, config: Document) -> list[str]:
    """Each stage must be longer than what it waits for."""
    errors = []
    args = config["applications"][0]["args"]
    # graceful_shutdown_timeout_s of the two deployments
    serve_s = max(args["drain_s"] + 10, args["longest_stream_s"])
    for name, group in groups(service):
        pod = group["template"]["spec"]
        container = pod["containers"][0]
        env = {entry["name"]: entry.get("value") for entry in container["env"]}
        ray_s = float(env.get("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S") or 30)
        pre_stop = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        grace_s = pod.get("terminationGracePeriodSeconds", 30)
        if ray_s <= serve_s:
            errors.append(f"{name}: Ray waits {ray_s:g} s for a node whose work may take {serve_s} s")
        if grace_s <= ray_s + float(pre_stop[1]):
            errors.append(
                f"{name}: SIGKILL after {grace_s} s, but preStop and drain take {ray_s + float(pre_stop[1]):g} s"
            )
    if service["spec"].get("rayClusterDeletionDelaySeconds", 60) < serve_s:
        errors.append("an upgrade deletes the old cluster before it can have drained")
    return errors


def test_manifest_has_the_kinds_it_should() -> None:
    assert [d["kind"] for d in documents()] == ["RayService", "PodDisruptionBudget"]


def test_crd_accepts_the_manifest(service: Document, shared_dir: Path) -> None:
    assert crd_errors(service, shared_dir / "k8s" / "schemas") == []


def test_operator_accepts_the_manifest(service: Document) -> None:
    assert operator_errors(service) == []


def test_the_drain_chain_holds(service: Document, config: Document) -> None:
    assert drain_errors(service, config) == []


def head(service: Document) -> Document:
    spec: Document = service["spec"]["rayClusterConfig"]["headGroupSpec"]
    return spec


def worker(service: Document) -> Document:
    spec: Document = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    return spec


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda s: s["spec"].update(serveConfig="x"), "serveConfig"),
        (lambda s: s["spec"].update(serveConfigV2={"applications": []}), "is not of type 'string'"),
        (lambda s: head(s)["rayStartParams"].update({"num-cpus": 0}), "is not of type 'string'"),
        (lambda s: worker(s)["template"]["spec"].update(terminationGracePeriod=9), "terminationGracePeriod"),
        (lambda s: worker(s)["template"]["spec"]["containers"][0].update(readynessProbe={}), "readynessProbe"),
        (lambda s: worker(s).update(minReplicas="2"), "is not of type 'integer'"),
        (lambda s: worker(s)["template"]["spec"]["containers"][0].pop("name"), "'name' is a required property"),
        (lambda s: s["spec"]["upgradeStrategy"].update(strategy="NewCluster"), "strategy"),
    ],
)
def test_crd_check_finds(
    service: Document, shared_dir: Path, change: Callable[[Document], object], expected: str
) -> None:
    broken = copy.deepcopy(service)
    change(broken)
    assert expected in "\n".join(crd_errors(broken, shared_dir / "k8s" / "schemas"))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda s: s["metadata"].update(name="x" * 48), "47 characters"),
        (lambda s: head(s)["rayStartParams"].clear(), "num-cpus"),
        (lambda s: head(s)["template"]["spec"]["containers"][0]["ports"].pop(3), "none named serve"),
        (
            lambda s: worker(s)["template"]["spec"]["containers"][0]["resources"]["limits"].update(memory="16Gi"),
            "requests differ",
        ),
        (
            lambda s: worker(s)["template"]["spec"]["containers"][0].update(
                lifecycle={"preStop": {"exec": {"command": ["ray", "stop"]}}} | {"note": "ray stop"}
            ),
            "ray stop",
        ),
        (lambda s: worker(s)["template"]["spec"]["securityContext"].clear(), "runs as root"),
    ],
)
def test_operator_check_finds(service: Document, change: Callable[[Document], object], expected: str) -> None:
    broken = copy.deepcopy(service)
    change(broken)
    assert expected in "\n".join(operator_errors(broken))


def test_drain_check_finds_kubernetes_defaults(service: Document, config: Document) -> None:
    """The defaults of Kubernetes and Ray, 30 s each, always lose the race."""
    broken = copy.deepcopy(service)
    pod = worker(broken)["template"]["spec"]
    del pod["terminationGracePeriodSeconds"]
    assert any("SIGKILL after 30 s" in error for error in drain_errors(broken, config))
    pod["containers"][0]["env"] = []
    assert any("Ray waits 30 s" in error for error in drain_errors(broken, config))


def test_disruption_budget_selects_the_workers(service: Document) -> None:
    budget = next(d for d in documents() if d["kind"] == "PodDisruptionBudget")
    selector = dict(budget["spec"]["selector"]["matchLabels"])
    assert selector.pop("ray.io/group") == worker(service)["groupName"], "the operator sets this label"
    assert selector.items() <= worker(service)["template"]["metadata"]["labels"].items()
    assert type(budget["spec"]["minAvailable"]) is int
    assert 0 < budget["spec"]["minAvailable"] < worker(service)["replicas"]


def test_all_pods_run_one_image_of_the_pinned_versions(service: Document) -> None:
    images = {group["template"]["spec"]["containers"][0]["image"] for _, group in groups(service)}
    assert len(images) == 1
    version = service["spec"]["rayClusterConfig"]["rayVersion"]
    assert f"ray=={version}" in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert f"-ray{version}-py311" in images.pop()
    assert "FROM python:3.11-slim-bookworm" in (ROOT / "k8s" / "Dockerfile").read_text(encoding="utf-8")


# ---- the Serve config ---------------------------------------------------------------------------------------------


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The pydantic models inside an annotation such as `list[X] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in models_in(part)]


def unknown_keys(model: type[BaseModel], data: Any, path: str = "") -> list[str]:
    """Keys Ray's parser would pass over in silence."""
    if isinstance(data, list):
        return [key for i, item in enumerate(data) for key in unknown_keys(model, item, f"{path}[{i}]")]
    if not isinstance(data, dict):
        return []
    found = []
    for key, value in data.items():
        field = model.model_fields.get(key)
        if field is None:
            found.append(f"{path}.{key}".lstrip("."))
            continue
        for inner in models_in(field.annotation)[:1]:
            found += unknown_keys(inner, value, f"{path}.{key}")
    return found


def test_ray_accepts_the_serve_config(config: Document) -> None:
    from ray.serve.schema import ServeDeploySchema

    parsed = ServeDeploySchema.model_validate(config)
    assert [app.name for app in parsed.applications] == ["shoal"]
    assert unknown_keys(ServeDeploySchema, config) == []


@pytest.mark.parametrize("where", ["top", "http_options", "application"])
def test_unknown_serve_keys_are_found(config: Document, where: str) -> None:
    """Ray itself says nothing about them."""
    from ray.serve.schema import ServeDeploySchema

    target = {"top": config, "http_options": config["http_options"], "application": config["applications"][0]}[where]
    target["max_ongoing_request"] = 5
    ServeDeploySchema.model_validate(config)
    assert [key.rpartition(".")[2] for key in unknown_keys(ServeDeploySchema, config)] == ["max_ongoing_request"]


def test_import_path_names_a_function(config: Document) -> None:
    module, _, name = config["applications"][0]["import_path"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_our_config_accepts_the_args(config: Document) -> None:
    args = config["applications"][0]["args"]
    parsed = load(args)
    assert parsed.model == args["model"]
    assert parsed.kv_cache.kv_cache_gib == args["kv_cache"]["kv_cache_gib"]
    with pytest.raises(ConfigError, match="drain_s"):
        load({**args, "drain_sec": 5})


def test_both_deployments_have_the_same_live_knobs_and_those_are_valid(config: Document) -> None:
    application = config["applications"][0]
    told = {one["name"]: one["user_config"] for one in application["deployments"]}
    assert told.keys() == {"Replica", "Router"}
    assert told["Replica"] == told["Router"]
    start = load(application["args"])
    assert lay_over(start.model_dump(), told["Router"]).model == start.model
    with pytest.raises(ConfigError, match="needs a restart"):
        lay_over(start.model_dump(), {"kv_cache": {"block_size": 32}})


def test_each_worker_pod_holds_one_replica(service: Document, config: Document) -> None:
    """Two replicas in one pod would leave the other without a proxy, and never ready."""
    args = load(config["applications"][0]["args"])
    group = worker(service)
    cpus = float(group["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"])
    routers = args.router.replicas * 0.2  # 0.1 each today
    assert args.num_cpus_per_replica + routers <= cpus < 2 * args.num_cpus_per_replica
    assert group["replicas"] == group["minReplicas"] == args.replicas.both


def test_pods_have_the_settings_of_shoal_serve(service: Document) -> None:
    for name, group in groups(service):
        env = {entry["name"]: entry.get("value") for entry in group["template"]["spec"]["containers"][0]["env"]}
        assert env.items() >= SERVE_ENV.items(), name
