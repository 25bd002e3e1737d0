"""What KubeRay's operator makes of a RayService, restated: one plan a pod, with its `ray start` line and environment.

After the operator's `common/pod.go` (`DefaultWorkerPodTemplate`, `BuildPod`, `generateRayStartCommand`,
`configureGCSFaultTolerance`). A Secret's value is given by whoever runs the plan.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from cluster.k8s.operator_rules import groups, pre_stop_s, ray_container
from cluster.k8s.quantity import quantity

#: the names that pods find each other by
HEAD, REDIS = "shoal-head-svc", "redis"
_OPERATOR_PORTS = {"dashboard-agent-listen-port": "52365", "metrics-export-port": "8080"}
#: of every RayService: the operator's `setContainerEnvVars`
_OPERATOR_ENV = {
    "RAY_PORT": "6379",
    "RAY_SERVE_KV_TIMEOUT_S": "5",
    "RAY_gcs_server_request_timeout_seconds": "5",
    "RAY_USAGE_STATS_KUBERAY_IN_USE": "1",
}


class PodPlan(msgspec.Struct, frozen=True):
    """`start` is what the container's shell gets; `ready` the command of its readiness probe, empty for none."""

    group: str
    start: str
    env: dict[str, str]
    ready: list[str]
    pre_stop_s: float
    grace_s: float
    shm_gib: float

    @property
    def is_head(self) -> bool:
        return self.group == "head"


class Secrets(msgspec.Struct, frozen=True):
    ray_token: str
    redis_password: str


def plans(service: Mapping[str, Any], secrets: Secrets) -> Iterator[tuple[PodPlan, int]]:
    """The head and each group: the plan, and how many pods of it."""
    cluster = service["spec"]["rayClusterConfig"]
    for _, name, group in groups(service):
        pod, container = group["template"]["spec"], ray_container(group)
        env = _OPERATOR_ENV | _environment(cluster, container, name == "head", secrets)
        plan = PodPlan(
            group=name,
            start=_start_line(group, container, name == "head", "gcsFaultToleranceOptions" in cluster),
            env=env,
            ready=((container.get("readinessProbe") or {}).get("exec") or {}).get("command") or [],
            pre_stop_s=pre_stop_s(container),
            grace_s=float(pod.get("terminationGracePeriodSeconds", 30)),
            shm_gib=_shm_gib(pod),
        )
        yield plan, int(group.get("replicas", 1)) * int(group.get("numOfHosts", 1))


def _environment(
    cluster: Mapping[str, Any], container: Mapping[str, Any], is_head: bool, secrets: Secrets
) -> dict[str, str]:
    env = {entry["name"]: entry["value"] for entry in container.get("env") or [] if "value" in entry}
    if (cluster.get("authOptions") or {}).get("mode") == "token":
        env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.ray_token}
    state = cluster.get("gcsFaultToleranceOptions")
    if is_head:
        env["RAY_ADDRESS"] = "127.0.0.1:6379"
        if state:
            env["RAY_REDIS_ADDRESS"] = state["redisAddress"]
            env["REDIS_PASSWORD"] = secrets.redis_password
            env["RAY_external_storage_namespace"] = "the-uid-of-the-cluster"
    else:
        env["FQ_RAY_IP"] = env["RAY_IP"] = HEAD
        env["RAY_ADDRESS"] = f"{HEAD}:6379"
    return env


def _start_line(group: Mapping[str, Any], container: Mapping[str, Any], is_head: bool, has_state: bool) -> str:
    """As the operator's container has it: given parameters win over those that follow from limits."""
    limits = (container.get("resources") or {}).get("limits") or {}
    params = dict(_OPERATOR_PORTS)
    if "cpu" in limits:
        params["num-cpus"] = str(int(quantity(limits["cpu"])))
    if "memory" in limits:
        params["memory"] = str(int(quantity(limits["memory"])))
    if "nvidia.com/gpu" in limits:
        params["num-gpus"] = str(int(quantity(limits["nvidia.com/gpu"])))
    if group.get("labels"):
        params["labels"] = ",".join(f"{key}={value}" for key, value in group["labels"].items())
    params |= {key: str(value) for key, value in (group.get("rayStartParams") or {}).items()}
    if is_head:
        words = ["--head"]
        words += ["--redis-password=$REDIS_PASSWORD"] if has_state else []
    else:
        words = [f"--address={HEAD}:6379"]
    words += [f"--{key}={shlex.quote(value)}" for key, value in sorted(params.items())]
    return f"ulimit -n 65536; ray start {' '.join(words)} --block"


def _shm_gib(pod: Mapping[str, Any]) -> float:
    size = next(v["emptyDir"]["sizeLimit"] for v in pod["volumes"] if v["name"] == "shm")
    return float(quantity(size)) / (1 << 30)
