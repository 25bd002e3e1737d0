"""PURE. Does what Serve is told to place fit the pods of the groups? Ray would wait for room for ever, and a pod
without a Serve replica has no proxy and is never ready.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cluster.config import ClusterConfig
from cluster.k8s.finding import Finding
from cluster.k8s.operator_rules import Document, groups, ray_container
from cluster.k8s.quantity import quantity
from cluster.resources import Resources, fits
from replica.messages import Role

#: what a router takes (router/deployment.py)
ROUTER = {"CPU": 0.1}


class Group(NamedTuple):
    """`pods` at the start and at most; `room` of one, as Ray counts it."""

    path: str
    name: str
    labels: Mapping[str, str]
    pods: int
    most: int
    room: dict[str, float]


def groups_of(service: Document) -> list[Group]:
    """The worker groups, as Ray nodes."""
    found = []
    scales = bool(service["spec"]["rayClusterConfig"].get("enableInTreeAutoscaling"))
    for path, name, group in groups(service):
        if name == "head" and "headGroupSpec" in path:
            continue
        hosts = group.get("numOfHosts", 1)
        pods = group.get("replicas", group.get("minReplicas", 0)) * hosts
        most = group.get("maxReplicas", 2**31 - 1) * hosts if scales else pods
        found.append(Group(path, name, group.get("labels") or {}, pods, most, _room(group)))
    return found


def _room(group: Document) -> dict[str, float]:
    """As the operator tells Ray: rayStartParams, else limits (CPUs: else requests)."""
    params, resources = group.get("rayStartParams") or {}, ray_container(group).get("resources") or {}
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    cpu = params.get("num-cpus", limits.get("cpu", requests.get("cpu", 0)))
    gpu = params.get("num-gpus", limits.get("nvidia.com/gpu", 0))
    # a part of a CPU counts as a whole one
    return {"CPU": float(-(-quantity(cpu) // 1)), "GPU": quantity(gpu)}


def check(service: Document, config: ClusterConfig, counts: Mapping[str, int]) -> list[Finding]:
    """`counts`: replicas by role."""
    found: list[Finding] = []
    all_groups = groups_of(service)
    wanted: list[tuple[str, int, Sequence[Resources], str]] = []
    for role, count in counts.items():
        ranks = config.of_role(Role(role)).bundles
        strategy = config.rank_placement if ranks else "STRICT_PACK"
        wanted.append((role, count, ranks or [{"CPU": config.num_cpus_per_replica}], strategy))
    # without a label routers share nodes with replicas, and take next to nothing there
    if config.node_label:
        wanted.insert(0, ("router", config.router.replicas, [ROUTER], "STRICT_PACK"))
    for role, count, bundles, packed in wanted:
        selector = {config.node_label: role} if config.node_label else {}
        here = [group for group in all_groups if selector.items() <= group.labels.items()]
        most = max(count, config.autoscaling.max_replicas or 0) if role == "both" else count
        found += _fit(role, count, most, bundles, packed, selector, here)
    return found


def _fit(
    role: str,
    count: int,
    most: int,
    bundles: Sequence[Resources],
    packed: str,
    selector: Mapping[str, str],
    here: list[Group],
) -> list[Finding]:
    """`count` at the start, `most` that scaling may make of them."""
    place = "spec.rayClusterConfig.workerGroupSpecs"
    if not here:
        text = f"no group has the label {_text(selector)}, and {count} {role} replica(s) ask for it: pending for ever"
        return [Finding(place, text)]
    one_each = role == "router"
    # more pods than parts of all replicas change nothing
    enough = most * len(bundles)
    nodes = [group.room for group in here for _ in range(min(group.most, enough))]
    placed, _ = fits(bundles, most, packed, nodes, one_each)
    if placed < most:
        each = " + ".join(_text(bundle) for bundle in bundles)
        has = ", ".join(f"{group.most} pod(s) of {_text(group.room)} in {group.name}" for group in here)
        text = f"{most} {role} replica(s) of {each} ({packed}) ask for room and {has} hold {placed}: pending for ever"
        return [Finding(here[0].path, text)]
    _, used = fits(bundles, count, packed, [group.room for group in here for _ in range(group.pods)], one_each)
    pods = sum(group.pods for group in here)
    if used < pods and selector:
        text = f"{pods} pod(s) and {count} {role} replica(s), which fill {used}: {pods - used} would never be ready"
        return [Finding(here[0].path, text)]
    return []


def _text(resources: Mapping[str, Any]) -> str:
    parts = [
        f"{name} {value:g}" if isinstance(value, float | int) else f"{name}={value}"
        for name, value in resources.items()
    ]
    return ", ".join(parts)
