"""PURE. What KubeRay 1.7 refuses beyond its schema (its validation of RayService and RayCluster), and what it takes
and users then lose streams by: each a sentence with what is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from cluster.k8s.finding import Finding

Document = Mapping[str, Any]
#: Ray's and Kubernetes' default, in seconds: together they always lose the race
_DEFAULT_S = 30.0
_CLUSTER = "spec.rayClusterConfig"
DRAIN_ENV = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
#: what Ray counts, given by the operator from container limits or by `resources`
_COUNTED = ("num-cpus", "num-gpus", "memory", "resources")


def groups(service: Document) -> Iterator[tuple[str, str, Document]]:
    """Path, name and spec of the head and of each worker group."""
    cluster = service["spec"]["rayClusterConfig"]
    yield f"{_CLUSTER}.headGroupSpec", "head", cluster["headGroupSpec"]
    for index, group in enumerate(cluster.get("workerGroupSpecs") or []):
        yield f"{_CLUSTER}.workerGroupSpecs[{index}]", group["groupName"], group


def ray_container(group: Document) -> Document:
    """The first container is Ray's."""
    container: Document = group["template"]["spec"]["containers"][0]
    return container


def environment(container: Document) -> dict[str, str | None]:
    """Plain values by name; None where the value comes from elsewhere."""
    return {entry["name"]: entry.get("value") for entry in container.get("env") or []}


def check(service: Document) -> list[Finding]:
    """All findings. The document must have passed its schema."""
    found = list(_name(service)) + list(_cluster(service)) + list(_upgrade(service))
    for path, name, group in groups(service):
        found += _group(service, path, group, name == "head")
    return found


def _name(service: Document) -> Iterator[Finding]:
    name = service["metadata"]["name"]
    if len(name) > 47 or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        text = f"{name!r}: needs to begin with a letter, have a-z, 0-9 and - only, and at most 47 characters"
        yield Finding("metadata.name", text)


def _version(cluster: Document) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", str(cluster.get("rayVersion", "")))[:2])


def _cluster(service: Document) -> Iterator[Finding]:
    cluster = service["spec"]["rayClusterConfig"]
    auth, state = cluster.get("authOptions") or {}, cluster.get("gcsFaultToleranceOptions")
    version = _version(cluster)
    if auth.get("mode") == "token" and version < (2, 52):
        text = f"token needs rayVersion 2.52 or newer (got {cluster.get('rayVersion')!r})"
        yield Finding(f"{_CLUSTER}.authOptions.mode", text)
    if auth.get("enableK8sTokenAuth"):
        yield Finding(f"{_CLUSTER}.authOptions.enableK8sTokenAuth", "the operator refuses it in a RayService")
    if "upgradeStrategy" in cluster:
        yield Finding(f"{_CLUSTER}.upgradeStrategy", "belongs to spec.upgradeStrategy in a RayService")
    for key, gate in (("networkPolicy", "RayClusterNetworkPolicy"), ("tlsOptions", "RayClusterMTLS")):
        if cluster.get(key):
            yield Finding(f"{_CLUSTER}.{key}", f"needs the operator's alpha feature gate {gate}")
    head = cluster["headGroupSpec"]
    path = f"{_CLUSTER}.headGroupSpec"
    redis = {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD"} & environment(ray_container(head)).keys()
    if redis or "redis-password" in (head.get("rayStartParams") or {}):
        yield Finding(path, f"{', '.join(sorted(redis)) or 'redis-password'} belongs to gcsFaultToleranceOptions")
    if state is not None and state.get("backend") == "rocksdb":
        text = "rocksdb needs the operator's alpha feature gate GCSFaultToleranceEmbeddedStorage"
        yield Finding(f"{_CLUSTER}.gcsFaultToleranceOptions.backend", text)
    elif state is not None and not state.get("redisAddress"):
        yield Finding(f"{_CLUSTER}.gcsFaultToleranceOptions.redisAddress", "is missing")
    if state and state.get("externalStorageNamespace"):
        text = "leave it out: two clusters of an upgrade would share one state"
        yield Finding(f"{_CLUSTER}.gcsFaultToleranceOptions.externalStorageNamespace", text)
    params = head.get("rayStartParams") or {}
    if params.get("num-cpus") != "0":
        text = f"needs to be '0', or replicas are placed beside the cluster's state (got {params.get('num-cpus')!r})"
        yield Finding(f"{path}.rayStartParams.num-cpus", text)


def _upgrade(service: Document) -> Iterator[Finding]:
    strategy = service["spec"].get("upgradeStrategy") or {}
    kind, path = strategy.get("type"), "spec.upgradeStrategy"
    allowed = (None, "None", "NewCluster", "NewClusterWithIncrementalUpgrade")
    if kind not in allowed:
        yield Finding(f"{path}.type", f"{kind!r} is not known; allowed: {', '.join(map(str, allowed[1:]))}")
    if kind != "NewClusterWithIncrementalUpgrade":
        return
    options = strategy.get("clusterUpgradeOptions") or {}
    surge, step = options.get("maxSurgePercent", 100), options.get("stepSizePercent")
    if not service["spec"]["rayClusterConfig"].get("enableInTreeAutoscaling"):
        yield Finding(f"{_CLUSTER}.enableInTreeAutoscaling", "an incremental upgrade needs true")
    if step is None or not 0 <= step <= surge <= 100:
        text = f"stepSizePercent {step} and maxSurgePercent {surge}: needed is 0 <= step <= surge <= 100"
        yield Finding(f"{path}.clusterUpgradeOptions", text)
    if not options.get("gatewayClassName") or options.get("intervalSeconds", 0) <= 0:
        yield Finding(f"{path}.clusterUpgradeOptions", "needs gatewayClassName, and intervalSeconds above 0")


def _group(service: Document, path: str, group: Document, is_head: bool) -> Iterator[Finding]:
    cluster, params = service["spec"]["rayClusterConfig"], group.get("rayStartParams") or {}
    v2 = (cluster.get("autoscalerOptions") or {}).get("version") == "v2"
    scales = bool(cluster.get("enableInTreeAutoscaling"))
    if scales and not v2:
        yield Finding(
            f"{_CLUSTER}.autoscalerOptions.version", "needs to be v2, explicitly: v1 ended all nodes at a slow API"
        )
    if group.get("resources") and set(_COUNTED) & set(params):
        yield Finding(path, f"{', '.join(sorted(set(_COUNTED) & set(params)))} both in rayStartParams and in resources")
    if "labels" in params:
        yield Finding(f"{path}.rayStartParams.labels", "use the group's own field labels")
    if scales and v2 and group["template"]["spec"].get("restartPolicy") not in (None, "Never"):
        yield Finding(f"{path}.template.spec.restartPolicy", "needs to be Never with autoscaler v2")
    for key in ("idleTimeoutSeconds", "priority"):
        if group.get(key) and not v2:
            yield Finding(f"{path}.{key}", "needs autoscalerOptions.version v2")
    if group.get("priority") and _version(cluster) < (2, 56):
        yield Finding(f"{path}.priority", "needs rayVersion 2.56 or newer")
    least, most = group.get("minReplicas", 0), group.get("maxReplicas", 2**31 - 1)
    if not is_head and not 0 <= least <= group.get("replicas", least) <= most:
        text = f"minReplicas {least}, replicas {group.get('replicas')}, maxReplicas {most} must not fall in that order"
        yield Finding(path, text)
    yield from _container(path, ray_container(group))
    yield from _drain(path, group, is_head)


def _container(path: str, container: Document) -> Iterator[Finding]:
    path = f"{path}.template.spec.containers[0]"
    ports = container.get("ports") or []
    if ports and not any(str(port.get("name", "")).split("-")[0] == "serve" for port in ports):
        yield Finding(f"{path}.ports", "none is named serve, so the operator makes no Service for clients")
    if re.search(r"\bray\W+stop\b", str(container.get("lifecycle"))):  # as one text, or as words of a list
        yield Finding(f"{path}.lifecycle.preStop", "`ray stop` kills replicas before they drain; sleep instead")
    resources = container.get("resources") or {}
    limit, request = ((resources.get(part) or {}).get("memory") for part in ("limits", "requests"))
    if limit is None or limit != request:
        text = f"memory request {request!r} and limit {limit!r}: need to be given and equal; Ray counts the limit"
        yield Finding(f"{path}.resources", text)


def _drain(path: str, group: Document, is_head: bool) -> Iterator[Finding]:
    pod, container = group["template"]["spec"], ray_container(group)
    ray_s, grace_s = drain_s(container), float(pod.get("terminationGracePeriodSeconds", _DEFAULT_S))
    before_s = pre_stop_s(container)
    if not is_head and grace_s <= before_s + ray_s:
        text = (
            f"{grace_s:g} s, then SIGKILL; preStop ({before_s:g} s) and Ray's drain ({DRAIN_ENV}, {ray_s:g} s) "
            f"need more than {before_s + ray_s:g} s"
        )
        yield Finding(f"{path}.template.spec.terminationGracePeriodSeconds", text)


def drain_s(container: Document) -> float:
    """How long Ray waits for a node after SIGTERM."""
    try:
        return float(environment(container).get(DRAIN_ENV) or _DEFAULT_S)
    except ValueError:
        return _DEFAULT_S


def pre_stop_s(container: Document) -> float:
    """Of a preStop that sleeps; 0 for any other."""
    stop = (container.get("lifecycle") or {}).get("preStop") or {}
    if "sleep" in stop:
        return float(stop["sleep"]["seconds"])
    command = (stop.get("exec") or {}).get("command") or []
    return float(command[1]) if len(command) == 2 and command[0] == "sleep" else 0.0
