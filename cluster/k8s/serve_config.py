"""PURE. `serveConfigV2`: what the operator hands to Serve, from the chart's values. The chart's own template of it
(`templates/_serveconfig.tpl`) is the only other place, and a test holds the two together.
"""

from __future__ import annotations

from typing import Any

from cluster.k8s.values import ChartValues, merged

#: Ray label that the chart puts on its nodes; its value is a role
ROLE_LABEL = "shoal/role"
TENANTS_FOLDER = "/etc/shoal/tenants"


def serve_config(values: ChartValues) -> dict[str, Any]:
    """The mapping that `serveConfigV2` holds as text."""
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": 8000, "keep_alive_timeout_s": 90},
        "applications": [
            {
                "name": "shoal",
                "import_path": "cluster.app:build",
                "route_prefix": "/",
                "args": args_of(values),
                "deployments": [
                    {"name": name, "user_config": dict(values.userConfig)} for name in _deployments(values)
                ],
            }
        ],
    }


def args_of(values: ChartValues) -> dict[str, Any]:
    """Keys of `ClusterConfig`: what the values say, and `config` over it."""
    args: dict[str, Any] = {
        "model": values.model.id,
        "replicas": _replicas(values),
        "tensor_parallel_size": values.tensorParallel,
        "node_label": ROLE_LABEL,
        "drain_s": values.drain.seconds,
        "longest_stream_s": values.drain.longestStreamSeconds,
        "router": {"replicas": values.router.replicas},
        **_processors(values),
    }
    if values.autoscaler.maxReplicas is not None and not values.disaggregation.enabled:
        args["autoscaling"] = {"max_replicas": values.autoscaler.maxReplicas}
    if values.model.servedName is not None:
        args["served_model_name"] = values.model.servedName
    if values.model.maxLen is not None:
        args["max_model_len"] = values.model.maxLen
    if values.pods.hostsPerReplica > 1:
        args["rank_placement"] = "PACK"
    if values.tenants.secretName:
        args["tenants"] = {"file": f"{TENANTS_FOLDER}/{values.tenants.key}"}
    return merged(args, values.config)


def _deployments(values: ChartValues) -> list[str]:
    return ["Prefill", "Decode", "Router"] if values.disaggregation.enabled else ["Replica", "Router"]


def _replicas(values: ChartValues) -> dict[str, int]:
    parts = values.disaggregation
    if parts.enabled:
        return {"prefill": parts.prefill.replicas, "decode": parts.decode.replicas}
    return {"both": values.replicas}


def _processors(values: ChartValues) -> dict[str, Any]:
    """On CPUs, a replica takes its part of the pod, so that a pod holds as many as it should; devices do that else."""
    if values.device == "gpu":
        return {"num_gpus_per_replica": values.tensorParallel}
    cpu = values.pods.cpu or 4 * values.pods.replicasPerPod
    each = cpu // values.pods.replicasPerPod
    if values.tensorParallel == 1:
        return {"num_cpus_per_replica": each, "threads_per_replica": each}
    threads = (each - 1) // (values.tensorParallel // values.pods.hostsPerReplica)
    return {"num_cpus_per_replica": 1, "num_cpus_per_rank": threads, "threads_per_replica": threads}
