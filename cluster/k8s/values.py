"""PURE. The values of the Helm chart: what may be given, and how a `ClusterConfig` reads as values.

The chart's `values.schema.json` is generated from these classes (`schema`). Names are those of `values.yaml`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError

from cluster.config import ClusterConfig, sentence
from cluster.k8s.hatches import HatchValues, template_schema
from replica.config import FrozenModel
from replica.errors import ConfigError

#: key of `ClusterConfig` -> the value it is derived from. Giving such a key in `config` is refused: it would be the
#: second place for one thing, and what the chart derives for pods would not follow it.
DERIVED = {
    "model": "model.id",
    "served_model_name": "model.servedName",
    "max_model_len": "model.maxLen",
    "replicas.both": "replicas",
    "replicas.prefill": "disaggregation.prefill.replicas",
    "replicas.decode": "disaggregation.decode.replicas",
    "autoscaling.max_replicas": "autoscaler.maxReplicas",
    "tensor_parallel_size": "tensorParallel",
    "num_gpus_per_replica": "device, tensorParallel",
    "rank_placement": "pods.hostsPerReplica",
    "node_label": "nothing: the chart labels its own nodes",
    "drain_s": "drain.seconds",
    "longest_stream_s": "drain.longestStreamSeconds",
    "router.replicas": "router.replicas",
    "tenants.file": "tenants.secretName",
    "http.api_keys": "tenants.secretName: a key in a manifest can be read by whoever reads the manifest",
}
#: those that a `ClusterConfig` tells and its values take over as they are
_TAKEN_OVER = {
    "model": "model.id",
    "served_model_name": "model.servedName",
    "max_model_len": "model.maxLen",
    "replicas.both": "replicas",
    "drain_s": "drain.seconds",
    "longest_stream_s": "drain.longestStreamSeconds",
    "router.replicas": "router.replicas",
}
_Name = Field("", max_length=253)


class ModelValues(FrozenModel):
    """What is served."""

    id: str = Field(description="A built-in name, a Hugging Face id, or a folder in the image.")
    servedName: str | None = Field(None, description="Name clients use; null: the model's own.")
    maxLen: int | None = Field(None, ge=16, description="Longest prompt + output in tokens; null: the model's context.")


class ImageValues(FrozenModel):
    """One image for all pods: Ray refuses nodes whose Ray or Python differ."""

    repository: str = Field("registry.example/shoal", min_length=1, description="Without the tag.")
    tag: str = Field(description="Names Shoal, Ray and Python: 0.1.0-ray2.60.0-py311.")
    pullPolicy: Literal["IfNotPresent", "Always", "Never"] = Field("IfNotPresent", description="As in Kubernetes.")
    pullSecrets: tuple[str, ...] = Field((), description="Names of existing Secrets.")


class RoleValues(FrozenModel):
    """One role of a disaggregated cluster."""

    replicas: int = Field(1, ge=1, le=1024, description="Replicas of this role.")


class DisaggregationValues(FrozenModel):
    """Prefill and decode on different replicas."""

    enabled: bool = Field(False, description="Then `replicas` above does not count.")
    prefill: RoleValues = RoleValues()
    decode: RoleValues = RoleValues()


class PodValues(HatchValues):
    """The pods of replicas. A Ray node is a pod: what shares a pod shares its memory."""

    replicasPerPod: int = Field(1, ge=1, le=16, description="Replicas in a pod.")
    hostsPerReplica: int = Field(1, ge=1, le=16, description="Pods of a replica whose ranks do not fit one node.")
    gpusPerNode: int = Field(8, ge=1, le=16, description="Most GPUs a pod can get.")
    cpu: int | None = Field(None, ge=1, le=512, description="Of a pod; null: 8 for each GPU, 4 for each CPU replica.")
    memoryGiB: int | None = Field(None, ge=1, le=8192, description="Of a pod; null: 64 for each GPU, 12 else.")
    shmGiB: int | None = Field(None, ge=2, le=4096, description="/dev/shm, of that memory; null: a quarter of it.")
    runtimeClassName: str = _Name


class PlainPodValues(HatchValues):
    """A pod without a device."""

    cpu: int = Field(2, ge=1, le=128, description="Request and limit.")
    memoryGiB: int = Field(4, ge=2, le=1024, description="Request and limit.")


class HeadValues(PlainPodValues):
    """The head: Ray's own state, nothing of the application."""

    cpu: int = Field(4, ge=1, le=128, description="Request and limit.")
    memoryGiB: int = Field(16, ge=4, le=1024, description="Request and limit; heads of 2 GiB run out of memory.")


class RouterValues(PlainPodValues):
    """Routers, each in a pod of its own."""

    replicas: int = Field(2, ge=1, le=1024, description="Routers, and pods for them.")


class SecretValues(FrozenModel):
    """A key of an existing Secret; no name: there is none."""

    secretName: str = _Name


class HfTokenValues(SecretValues):
    """Token for gated models."""

    key: str = Field("HF_TOKEN", min_length=1, description="Key in the Secret.")


class TenantsValues(SecretValues):
    """The file of tenants and their keys (docs/tenants.md)."""

    key: str = Field("tenants.yaml", min_length=1, description="Key in the Secret; changes are taken while it runs.")


class CacheValues(FrozenModel):
    """Where models are kept. Neither size nor claim: each pod fetches its own."""

    size: str = Field("", pattern=r"^([0-9]+(\.[0-9]+)?(Mi|Gi|Ti))?$", description="Of a claim to make, as 200Gi.")
    storageClass: str = _Name
    accessMode: Literal["ReadWriteMany", "ReadWriteOnce"] = Field("ReadWriteMany", description="All pods mount it.")
    existingClaim: str = _Name


class DrainValues(FrozenModel):
    """Time to end what runs. What waits for these is derived from them."""

    seconds: int = Field(120, ge=0, le=3600, description="A replica ends or hands over its sequences.")
    longestStreamSeconds: int = Field(300, ge=1, le=604_800, description="A router lets its streams end.")
    preStopSeconds: int = Field(15, ge=0, le=300, description="Endpoints forget the pod before it is told to stop.")


class UpgradeValues(FrozenModel):
    """What a change of pods does. (A change of the Serve part is always in place.)"""

    strategy: Literal["NewCluster", "NewClusterWithIncrementalUpgrade", "None"] = Field(
        "NewCluster", description="NewCluster: twice the devices for a while; None: such a change does nothing."
    )
    gatewayClassName: str = _Name
    maxSurgePercent: int = Field(100, ge=1, le=100, description="Of the new cluster at once.")
    stepSizePercent: int = Field(10, ge=1, le=100, description="Of the traffic at a time.")
    intervalSeconds: int = Field(30, ge=1, le=3600, description="Between two steps.")


class AutoscalerValues(FrozenModel):
    """Ray's autoscaler (v2) adds and removes pods; without it the numbers of pods are fixed."""

    enabled: bool = Field(False, description="Needed for an incremental upgrade.")
    maxReplicas: int | None = Field(
        None, ge=1, le=1024, description="Given: replicas come and go with the load; null: their number is fixed."
    )
    idleTimeoutSeconds: int = Field(300, ge=30, le=86_400, description="A pod without work goes after it.")


class HeadStateValues(FrozenModel):
    """Redis, so that a head that dies comes back with its state, and workers go on meanwhile."""

    enabled: bool = Field(True, description="Without it the loss of the head restarts everything.")
    passwordSecret: str = _Name
    passwordKey: str = Field("password", min_length=1, description="Key in that Secret.")
    address: str = Field("", pattern=r"^([a-z0-9.-]+:[0-9]+)?$", description="A Redis that is there; empty: make one.")
    image: str = Field("redis:7.2", min_length=1, description="Of the one that is made.")
    size: str = Field("1Gi", pattern=r"^[0-9]+(Mi|Gi)$", description="Of its claim.")
    storageClass: str = _Name


class RayAuthValues(FrozenModel):
    """Ray's token for dashboard, jobs and GCS. Serving does not pass there."""

    enabled: bool = Field(True, description="The operator makes a token for each cluster.")
    secretName: str = _Name


class ClusterTokenValues(SecretValues):
    """What routers prove to replicas that they know."""

    key: str = Field("token", min_length=1, description="Key in the Secret; no Secret: derived from Ray's token.")


class NetworkPolicyValues(FrozenModel):
    """Who may speak to the pods: they to each other, clients to 8000, the operator to the head, scrapers to 8080."""

    enabled: bool = Field(True, description="Needs a network plugin that enforces it.")
    clients: tuple[dict[str, Any], ...] = Field((), description="NetworkPolicy peers; none: this namespace.")
    operator: dict[str, Any] = Field(
        {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}},
        description="A NetworkPolicy peer.",
    )
    scrapers: tuple[dict[str, Any], ...] = Field(
        ({"namespaceSelector": {}, "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}}},),
        description="NetworkPolicy peers.",
    )


class MonitoringValues(FrozenModel):
    """For Prometheus Operator, where the cluster has it, and for Grafana."""

    enabled: bool = Field(True, description="PodMonitors and alerts.")
    labels: dict[str, str] = Field({"release": "prometheus"}, description="That Prometheus selects by.")
    dashboards: bool = Field(False, description="A ConfigMap of dashboards.")
    dashboardLabels: dict[str, str] = Field(
        {"grafana_dashboard": "1"}, description="That Grafana's sidecar selects by."
    )


class ServiceValues(FrozenModel):
    """The Service that clients use."""

    type: Literal["ClusterIP", "LoadBalancer", "NodePort"] = Field("ClusterIP", description="As in Kubernetes.")
    annotations: dict[str, str] = Field({}, description="As in Kubernetes.")


class ParentRef(FrozenModel):
    """A Gateway that is there."""

    name: str = Field(min_length=1, max_length=253, description="Its name.")
    namespace: str | None = Field(None, max_length=63, description="None: that of the release.")
    sectionName: str | None = Field(None, max_length=253, description="One of its listeners; none: all.")


class HttpRouteValues(FrozenModel):
    """Gateway API: a route from an existing Gateway to the Service."""

    enabled: bool = Field(False, description="Needs networkPolicy.clients to let the gateway's pods in.")
    parentRefs: tuple[ParentRef, ...] = Field((), description="Gateways.")
    hostnames: tuple[str, ...] = Field((), description="None: all of the listener.")
    annotations: dict[str, str] = Field({}, description="As in Kubernetes.")


class IngressValues(FrozenModel):
    """An Ingress for the Service. Buffering and time limits are the controller's: annotations."""

    enabled: bool = Field(False, description="Needs networkPolicy.clients to let the controller's pods in.")
    className: str = _Name
    host: str = _Name
    tlsSecret: str = _Name
    annotations: dict[str, str] = Field({}, description="As in Kubernetes.")


class ChartValues(FrozenModel):
    """All of `values.yaml`."""

    model: ModelValues
    image: ImageValues
    replicas: int = Field(1, ge=1, le=1024, description="Data-parallel replicas.")
    tensorParallel: int = Field(1, ge=1, le=64, description="Ranks of a replica, each with a device.")
    device: Literal["gpu", "cpu"] = Field("gpu", description="gpu: a rank has one.")
    disaggregation: DisaggregationValues = DisaggregationValues()
    pods: PodValues = PodValues()
    head: HeadValues = HeadValues()
    router: RouterValues = RouterValues()
    hfToken: HfTokenValues = HfTokenValues()
    tenants: TenantsValues = TenantsValues()
    cache: CacheValues = CacheValues()
    config: dict[str, Any] = Field({}, description="More keys of ClusterConfig; a change is applied in place.")
    userConfig: dict[str, Any] = Field({}, description="Live knobs: a change replaces no process.")
    drain: DrainValues = DrainValues()
    upgrade: UpgradeValues = UpgradeValues()
    autoscaler: AutoscalerValues = AutoscalerValues()
    headState: HeadStateValues = HeadStateValues()
    rayAuth: RayAuthValues = RayAuthValues()
    clusterToken: ClusterTokenValues = ClusterTokenValues()
    networkPolicy: NetworkPolicyValues = NetworkPolicyValues()
    monitoring: MonitoringValues = MonitoringValues()
    service: ServiceValues = ServiceValues()
    httpRoute: HttpRouteValues = HttpRouteValues()
    ingress: IngressValues = IngressValues()


def load_values(data: Mapping[str, Any]) -> ChartValues:
    """Raises ConfigError with a sentence for each mistake."""
    try:
        values = ChartValues.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(sentence(item, ChartValues) for item in error.errors())) from None
    refused = [f"config.{key}: set {DERIVED[key]}" for key, _ in flat(values.config) if key in DERIVED]
    if refused:
        raise ConfigError("\n".join(refused))
    return values


def values_of(config: ClusterConfig) -> dict[str, Any]:
    """The values that make the chart serve `config`. Only what differs from the defaults, besides what must be given.

    Raises ConfigError for what the chart does not offer.
    """
    if config.http.api_keys:
        raise ConfigError("http.api_keys: keys do not belong into a manifest; use tenants, from an existing Secret")
    if config.tenants.file:
        raise ConfigError(f"tenants.file: {config.tenants.file!r} is a file of this machine; set tenants.secretName")
    device = "gpu" if config.num_gpus_per_replica else "cpu"
    values: dict[str, Any] = {"tensorParallel": config.num_ranks, "device": device}
    given = dict(flat(config.model_dump(mode="json")))
    for key, place in _TAKEN_OVER.items():
        value = given[key]
        if key in ("drain_s", "longest_stream_s"):
            value = -int(-value // 1)  # whole seconds, never less
        if value is not None:
            put(values, place, value)
    if (most := config.autoscaling.max_replicas) is not None:
        values["autoscaler"] = {"enabled": True, "maxReplicas": most}
    if config.replicas.prefill or config.replicas.decode:
        if config.replicas.both or not config.replicas.prefill:
            raise ConfigError(
                f"replicas.both is {config.replicas.both}, replicas.prefill {config.replicas.prefill} and "
                f"replicas.decode {config.replicas.decode}; the chart offers replicas of both, or of prefill and decode"
            )
        del values["replicas"]
        values["disaggregation"] = {
            "enabled": True,
            "prefill": {"replicas": config.replicas.prefill},
            "decode": {"replicas": config.replicas.decode},
        }
    default = dict(flat(ClusterConfig().model_dump(mode="json")))
    rest = {key: value for key, value in given.items() if key not in DERIVED and value != default.get(key)}
    for key, value in rest.items():
        put(values, f"config.{key}", value)
    return values


def flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of a tree of mappings; an empty mapping is a leaf."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{above}{key}.")
        else:
            yield above + key, value


def put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """`value` at the dotted place, with the mappings above it."""
    *parents, last = dotted.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[last] = value


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """As Helm lays one values file over another: mappings key by key, everything else whole."""
    result = dict(under)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result


def schema() -> dict[str, Any]:
    """`values.schema.json`. `config` has the keys of `ClusterConfig`, those that are derived included: the chart
    refuses these itself, with a better sentence than a schema can give.
    """
    made = ChartValues.model_json_schema()
    of_config = ClusterConfig.model_json_schema()
    definitions = made.pop("$defs") | of_config.pop("$defs") | {"ClusterConfig": of_config}
    definitions["PodTemplate"] = template_schema()
    for name in ("PodValues", "HeadValues", "RouterValues"):
        definitions[name]["properties"]["podTemplate"] = {"$ref": "#/$defs/PodTemplate"}
    for name in ("config", "userConfig"):
        made["properties"][name] = {"$ref": "#/$defs/ClusterConfig"}
    # what Helm itself puts in, for a chart that is part of another
    made["properties"]["global"] = {"type": "object"}
    return {"$schema": "http://json-schema.org/draft-07/schema#", **_lean(made), "$defs": _lean(definitions)}


def _lean(node: Any) -> Any:
    """Without titles and defaults: defaults are those of values.yaml and of `ClusterConfig`."""
    if isinstance(node, list):
        return [_lean(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: {name: _lean(inner) for name, inner in value.items()} if key in ("properties", "$defs") else _lean(value)
        for key, value in node.items()
        if key != "default" and not (key == "title" and isinstance(value, str))
    }
