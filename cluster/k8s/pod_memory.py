"""PURE. Does the KV that is kept in memory fit the pods of the replicas? A pod over its limit is killed, with all that
is in it.

Counted is what is written when it is made: the arena of the KVConnector (a memfd: memory of the pod, and nothing of
`/dev/shm` or the `sizeLimit` of a volume there), the pools of the replicas that share the pod, their processes.
Weights, steps and what fills `/dev/shm` come on top and are not known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cluster.config import ClusterConfig
from cluster.k8s.capacity import Group, groups_of
from cluster.k8s.finding import Finding
from cluster.k8s.operator_rules import Document, groups, ray_container
from cluster.k8s.quantity import quantity
from replica.config import GIB, Hardware, resolve

#: measured without weights and KV (cluster/memory_room.py): a replica with torch, the connector, Ray's part of a pod
_REPLICA_GIB, _CONNECTOR_GIB, _RAY_GIB = 0.3, 0.09, 0.3


def check(service: Document, config: ClusterConfig, counts: Mapping[str, int]) -> Iterator[Finding]:
    """`counts`: replicas by role. Says nothing without a host tier, or where a pod has no limit."""
    if not config.kv_cache.host_tier_gib:
        return
    limits = {name: _limit_gib(group) for _, name, group in groups(service)}
    for group in groups_of(service):
        here = [role for role in counts if _may_hold(group, role, config)]
        limit = limits[group.name]
        if not here or not limit:
            continue
        num = min(sum(counts[role] for role in here), _places(group, config))
        pools = 0.0 if config.num_gpus_per_replica else num * _pool_gib(config, limit, num)
        rest = _RAY_GIB + _CONNECTOR_GIB + num * _REPLICA_GIB
        needed = config.kv_cache.host_tier_gib + pools + rest
        if needed > limit:
            text = (
                f"memory limit {limit:.1f} GiB, and needed are {needed:.1f} GiB before any weights: "
                f"{config.kv_cache.host_tier_gib:.1f} for kv_cache.host_tier_gib (once a pod, not in /dev/shm), "
                f"{pools:.1f} for the KV pools of {num} replica(s), {rest:.1f} for processes; lower "
                "kv_cache.host_tier_gib or raise the limit"
            )
            yield Finding(f"{group.path}.template.spec.containers[0].resources", text)


def _limit_gib(group: Document) -> float:
    """0: none."""
    limits = (ray_container(group).get("resources") or {}).get("limits") or {}
    return quantity(limits.get("memory", 0)) / GIB


def _may_hold(group: Group, role: str, config: ClusterConfig) -> bool:
    return not config.node_label or group.labels.get(config.node_label) == role


def _places(group: Group, config: ClusterConfig) -> int:
    """Replicas that a pod has room for by CPUs and GPUs; at least one, which may have ranks elsewhere too."""
    asked: dict[str, float] = {}
    for bundle in config.bundles or [{"CPU": config.num_cpus_per_replica}]:
        for name, amount in bundle.items():
            asked[name] = asked.get(name, 0.0) + amount
    return max(1, min((int(group.room.get(name, 0) / some + 1e-6) for name, some in asked.items() if some), default=1))


def _pool_gib(config: ClusterConfig, limit_gib: float, num_replicas: int) -> float:
    """Of one; 0: its size is given in blocks, whose bytes depend on the model."""
    engine = config.engine_config()
    if engine.cache.num_blocks is not None:
        return 0.0
    machine = Hardware(1, int(limit_gib * GIB), has_bfloat16=True)
    return resolve(engine, machine, num_replicas).cache.kv_cache_gib or 0.0
