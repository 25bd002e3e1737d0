"""PURE. `ClusterConfig`: one YAML for laptop and Kubernetes. Frozen, unknown keys refused with the nearest valid
name.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from cluster.allowed import allowed
from cluster.autoscaling import AutoscalingConfig
from cluster.kv_connector.config import KVCacheConfig
from cluster.role_config import DisaggregationConfig, ReplicasConfig, with_tier
from cluster.tenant_config import TenantsConfig, tenants_of
from replica.config import (
    AdmissionConfig,
    DType,
    EngineConfig,
    FrozenModel,
    ModelConfig,
    ParallelConfig,
    RunnerPlacement,
    SchedulerConfig,
)
from replica.errors import ConfigError
from replica.messages import Role
from router.tenants import TenantBook, default_tenant

#: shown instead of API keys
MASK = "***"


class RouterConfig(FrozenModel):
    """The routers and what they may hold."""

    replicas: int = Field(1, ge=1, le=1024, description="Router processes behind the proxy.")
    policy: Literal["least-tokens", "round-robin"] = Field("least-tokens", description="How a replica is chosen.")
    max_queued_requests_per_replica: int = Field(64, ge=1, description="The queue cap of each replica, in sequences.")
    admission_wait_ms: float = Field(100, ge=0, le=60_000, description="How long a router holds what no replica takes.")
    max_held_requests: int = Field(1024, ge=0, description="Most requests a router holds at once.")
    max_num_queued_reqs: int | None = Field(
        None, ge=1, description="Most sequences that wait in the whole application, held ones included. auto: no bound."
    )
    move_after_s: float = Field(
        2, ge=0, le=3600, description="How long streams may end at a replica that drains before they move to another."
    )

    @model_validator(mode="after")
    def _routers_have_a_part(self) -> RouterConfig:
        bound = self.max_num_queued_reqs
        if bound is not None and bound < self.replicas:
            raise ValueError(
                f"max_num_queued_reqs is {bound}, and the {self.replicas} routers share it; allowed: at least "
                f"{self.replicas}, or auto"
            )
        return self

    @property
    def most_waiting_per_router(self) -> int | None:
        """Each router's part of `max_num_queued_reqs`: all together are never above it."""
        return None if self.max_num_queued_reqs is None else self.max_num_queued_reqs // self.replicas


class HttpConfig(FrozenModel):
    """The HTTP edge."""

    api_keys: tuple[str, ...] = Field((), description="Bearer keys; empty: no key is asked for.")
    cors_allow_origins: tuple[str, ...] = Field(("*",), description="Origins whose pages may call.")
    max_body_mib: float = Field(8, gt=0, description="Longest request body in MiB.")
    max_pending_body_mib: float = Field(
        256, gt=0, description="Most MiB of long bodies a router works on at once; more are refused with 503."
    )
    body_timeout_s: float = Field(60, gt=0, le=3600, description="How long a body may take to arrive; then 408.")
    admin_endpoints: bool = Field(
        False, description="Whether POST /reset_prefix_cache and GET /debug/requests are there."
    )

    @field_validator("api_keys")
    @classmethod
    def _keys_are_real(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(value):
            raise ValueError("holds an empty key, which would let everybody in")
        if MASK in value:
            raise ValueError(f"{MASK} is the mask that --print-config shows instead of a key; put the real one in")
        return value


class ClusterConfig(FrozenModel):
    """Everything `shoal serve`, `serve run cluster.app:build` and the Kubernetes manifest need."""

    model: str = Field(
        "smollm2-135m-instruct", description="A built-in name, a model folder, a .gguf file, or a Hugging Face id."
    )
    served_model_name: str | None = Field(None, description="Name clients use. auto: the model's own.")
    dtype: DType = Field("auto", description="auto: bfloat16 where the device computes in it, else float32.")
    max_model_len: int | None = Field(None, ge=16, description="Longest prompt + output. auto: the model's context.")
    runner: Literal["torch", "fake"] = Field("torch", description="fake: no weights, tokens from a cost model.")
    chat_template: str | None = Field(None, description="A Jinja template or the path of one, instead of the model's.")
    replicas: ReplicasConfig = ReplicasConfig()
    disaggregation: DisaggregationConfig = DisaggregationConfig()
    autoscaling: AutoscalingConfig = AutoscalingConfig()
    tensor_parallel_size: int | None = Field(
        None, ge=1, le=64, description="Ranks per replica, each with a part of the model. auto: its GPUs, else 1."
    )
    num_gpus_per_replica: int = Field(
        0, ge=0, le=64, description="GPUs Ray reserves for a replica, one for each rank; 0: ranks on CPUs."
    )
    rank_placement: Literal["STRICT_PACK", "PACK"] = Field(
        "STRICT_PACK", description="A replica's ranks on one node, or on others too if one has not enough."
    )
    num_cpus_per_rank: float = Field(1, ge=0, description="CPUs Ray reserves for a rank, where ranks are workers.")
    threads_per_replica: int | None = Field(
        None, ge=1, description="CPU threads of a runner, or of each rank. auto: cores / (replicas x ranks)."
    )
    runner_placement: RunnerPlacement = Field(
        "thread",
        description="Where the model runs: on a thread of the replica, in a process of its own, or on worker actors, "
        "which several ranks always do.",
    )
    num_cpus_per_replica: float = Field(1, ge=0, description="CPUs Ray reserves for a replica.")
    node_label: str | None = Field(
        None,
        pattern=r"^([a-z0-9][a-z0-9.-]{0,252}/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$",
        description="Ray label whose value says which role a node is for: `router`, or the role of a replica. With it "
        "each router has a node of its own. auto: any node will do.",
    )
    drain_s: float = Field(
        30, ge=0, le=3600, description="How long a stopping replica lets requests end before it moves them."
    )
    longest_stream_s: float = Field(600, gt=0, le=604_800, description="How long a stopping router lets streams end.")
    router: RouterConfig = RouterConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    kv_cache: KVCacheConfig = KVCacheConfig()
    http: HttpConfig = HttpConfig()
    tenants: TenantsConfig = TenantsConfig()

    @field_validator("model")
    @classmethod
    def _model_is_named(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("is empty; give a built-in name, a model folder or a .gguf file")
        return value

    @model_validator(mode="before")
    @classmethod
    def _hand_overs_have_a_tier(cls, value: Any) -> Any:
        return with_tier(value) if isinstance(value, Mapping) else value

    @model_validator(mode="after")
    def _fleet_can_serve(self) -> ClusterConfig:
        replicas = self.replicas
        if not replicas.num_decoding:
            raise ValueError(
                f"replicas.both and replicas.decode are 0 (and replicas.prefill is {replicas.prefill}): nobody would "
                "decode; allowed: at least one replica of both or decode"
            )
        if replicas.prefill and not self.kv_cache.enable_prefix_caching:
            raise ValueError(
                f"replicas.prefill is {replicas.prefill} and kv_cache.enable_prefix_caching is false, but what one "
                "replica hands to another is found by the hashes of its prefixes; allowed: true, or no prefill replica"
            )
        return self

    @model_validator(mode="after")
    def _ranks_fit(self) -> ClusterConfig:
        gpus, size = self.num_gpus_per_replica, self.tensor_parallel_size
        if gpus and size is not None and gpus != size:
            raise ValueError(
                f"num_gpus_per_replica is {gpus} and tensor_parallel_size is {size}, but each rank has one GPU; "
                "give the same number, or only one of them"
            )
        most_ranks = max(self.of_role(role).num_ranks for role in self.replicas.counts)
        if most_ranks > 1 and self.runner_placement == "process":
            raise ValueError(
                f"runner_placement is 'process', which holds one rank, and there are {most_ranks}; "
                "allowed then: 'thread' (which means: not asked for) or 'workers'"
            )
        return self

    @model_validator(mode="after")
    def _kept_kv_has_a_place(self) -> ClusterConfig:
        mode = self.scheduler.preemption_mode
        if mode != "recompute" and not self.kv_cache.has_connector:
            raise ValueError(
                f"scheduler.preemption_mode is {mode!r}, which keeps KV in the node's tiers, and "
                "kv_cache.host_tier_gib is 0; give a host tier, or allowed then: 'recompute'"
            )
        return self

    @model_validator(mode="after")
    def _most_is_not_below_fewest(self) -> ClusterConfig:
        most = self.autoscaling.max_replicas
        if most is not None and not self.replicas.both:
            raise ValueError(
                f"autoscaling.max_replicas is {most} and replicas.both is 0, but scaling changes the number of those "
                "that prefill and decode; allowed: auto, or at least 1 of replicas.both"
            )
        if most is not None and most < self.replicas.both:
            raise ValueError(
                f"autoscaling.max_replicas is {most} and replicas.both, the fewest, is {self.replicas.both}; allowed: "
                f"at least {self.replicas.both}, or auto"
            )
        return self

    @model_validator(mode="after")
    def _keys_open_one_door(self) -> ClusterConfig:
        if not self.http.api_keys:
            return self
        if self.tenants.allow_anonymous:
            raise ValueError(
                "tenants.allow_anonymous is true, and http.api_keys says that a key is needed; give only one of them"
            )
        TenantBook(tenants_of(self.tenants.named, {}, default_tenant(self.http.api_keys).digests), needs_keys=True)
        return self

    @property
    def most_replicas(self) -> int:
        """That there may be at a time, of all roles."""
        return sum(self.most_of(role) for role in self.replicas.counts)

    def most_of(self, role: Role) -> int:
        """That there may be of a role at a time: their number, or what scaling may make of it."""
        most = self.autoscaling.max_replicas if role is Role.BOTH else None
        return most or self.replicas.counts[role]

    def of_role(self, role: Role) -> ClusterConfig:
        """The whole as it is for the replicas of one role."""
        own = self.disaggregation.of(role)
        update: dict[str, Any] = {"scheduler": own.scheduler(self.scheduler)}
        if own.tensor_parallel_size is not None:
            update["tensor_parallel_size"] = own.tensor_parallel_size
            if self.num_gpus_per_replica:
                update["num_gpus_per_replica"] = own.tensor_parallel_size
        return self.model_copy(update=update)

    @property
    def num_ranks(self) -> int:
        """Of each replica."""
        return self.tensor_parallel_size or self.num_gpus_per_replica or 1

    @property
    def bundles(self) -> list[dict[str, float]] | None:
        """What Ray reserves for a replica whose model runs on workers: its own place, then one for each rank."""
        if not self.engine_config().parallel.has_workers:
            return None
        of_rank = {"CPU": self.num_cpus_per_rank} | ({"GPU": 1.0} if self.num_gpus_per_replica else {})
        return [{"CPU": self.num_cpus_per_replica}] + [dict(of_rank) for _ in range(self.num_ranks)]

    @property
    def served_name(self) -> str:
        """What clients ask for."""
        return self.served_model_name or Path(self.model).name.removesuffix(".gguf")

    def engine_config(self) -> EngineConfig:
        """The part a replica needs; `auto` values stay open until the replica knows its hardware."""
        return EngineConfig(
            model=ModelConfig(model=self.model, dtype=self.dtype, max_model_len=self.max_model_len, runner=self.runner),
            cache=self.kv_cache.pool(),
            scheduler=self.scheduler,
            admission=AdmissionConfig(max_queued_requests=self.router.max_queued_requests_per_replica),
            parallel=ParallelConfig(
                tensor_parallel_size=self.num_ranks,
                ranks_may_be_remote=self.rank_placement == "PACK",
                num_threads=self.threads_per_replica,
                runner_placement="workers" if self.num_gpus_per_replica else self.runner_placement,
            ),
        )

    def to_yaml(self) -> str:
        """YAML that `load` reads back to an equal object. Keys are never shown in full."""
        data = self.model_dump(mode="json")
        data["http"]["api_keys"] = [MASK] * len(self.http.api_keys)
        return yaml.safe_dump(data, sort_keys=False)


def load(source: Mapping[str, Any] | str | Path | None, overrides: Mapping[str, Any] | None = None) -> ClusterConfig:
    """Configuration from a mapping or a YAML file; `overrides` maps dotted keys to values and wins.

    Raises ConfigError with one sentence per mistake: field, value, what is allowed.
    """
    data = _read(source)
    # `serve run cluster.app:build router.replicas=2` can only give flat keys
    dotted = {key: data.pop(key) for key in list(data) if isinstance(key, str) and "." in key}
    overrides = {**dotted, **(overrides or {})}
    for key, value in overrides.items():
        _put(data, key, value)
    try:
        return ClusterConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(sentence(item) for item in error.errors())) from None


class PlainYaml(yaml.SafeLoader):
    """YAML forbids a key twice in a mapping; the library would silently take the last. And to it 010 is 8 and 1:30 is
    90, as in YAML 1.1; here numbers are decimal, and anything else is text.
    """

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in found if not tag.endswith((":int", ":float"))]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"{key.value!r} is given twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_WHOLE = r"[-+]?(?:0|[1-9][0-9]*)"
PlainYaml.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(rf"^{_WHOLE}$"), list("-+0123456789"))
PlainYaml.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(rf"^(?:{_WHOLE}(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?|[-+]?\.[0-9]+(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan)$"),
    list("-+.0123456789"),
)


def _read(source: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    if source is None:
        return {}
    if isinstance(source, Mapping):
        return {key: _copied(value) for key, value in source.items()}
    path = Path(source)
    try:
        data = yaml.load(path.read_text(), PlainYaml)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: not YAML: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"--config {path}: expected a mapping at the top, found {type(data).__name__}")
    return data


def _copied(value: Any) -> Any:
    """Sections to any depth: overrides are put into them."""
    return {key: _copied(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value


def _put(data: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for parent in parents:
        data = data.setdefault(parent, {})
        if not isinstance(data, dict):
            raise ConfigError(f"{dotted}: {parent} is not a section")
    data[last] = value


def sentence(item: Mapping[str, Any], root: type[BaseModel] = ClusterConfig) -> str:
    """What one of pydantic's errors says, with the place below `root`, the value unless it may be a key, and what is
    allowed.
    """
    place = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        names = _fields_at(root, item["loc"][:-1])
        close = difflib.get_close_matches(str(item["loc"][-1]), names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; known here: {', '.join(names)}"
        return f"{place}: unknown key{hint}"
    got = "" if _may_be_a_key(item) else f" (got {item['input']!r})"
    if item["type"] == "model_type":
        return f"{place}: must be a section with the keys {', '.join(_fields_at(root, item['loc']))}{got}"
    text = str(item["msg"]).removeprefix("Value error, ")
    if place:  # a rule between keys of the top level has none
        text = f"{place}: {text}"
    # a rule between keys names what it found; the section as a whole would only bury it
    if isinstance(item["input"], Mapping) or (item["type"] == "value_error" and "; allowed: " in text):
        return text
    if not item["type"].startswith(("greater_than", "less_than", "literal_error")):
        text += f"; allowed: {_allowed_at(root, item['loc'])}"
    return text + got


def _may_be_a_key(item: Mapping[str, Any]) -> bool:
    """Keys do not belong into sentences, which end up in logs."""
    names = ["", *(part for part in item["loc"] if isinstance(part, str))]
    is_text = not isinstance(item["input"], int | float | None)
    return is_text and (names[-1] in ("keys", "api_keys") or "named" in names[-2:])


def _allowed_at(root: type[BaseModel], location: tuple[Any, ...]) -> str:
    names = [part for part in location if isinstance(part, str)]  # without the place in a list
    above = _annotation_at(root, tuple(names[:-1]))
    return "text" if above == dict[str, str] else allowed(above, names[-1])


def _fields_at(root: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    return list(_model_at(root, location).model_fields)


def _model_at(root: type[BaseModel], location: tuple[Any, ...]) -> type[BaseModel]:
    found = _annotation_at(root, location)
    assert isinstance(found, type)
    return found


def _annotation_at(root: type[BaseModel], location: tuple[Any, ...]) -> Any:
    found: Any = root
    for part in location:
        if isinstance(part, int):  # a place in a list
            continue
        # below a mapping of sections any name leads to one
        found = get_args(found)[1] if get_origin(found) is dict else found.model_fields[part].annotation
        while get_origin(found) not in (None, dict, Literal):  # a list of sections, or one that may be absent
            found = get_args(found)[0]
    return found
