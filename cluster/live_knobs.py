"""PURE. Knobs that change while the cluster runs.

A cluster is started with a whole configuration, which stays what it is; what is changed later lies over it: nested
sections of `ClusterConfig` with live keys only. That overlay is Serve's `user_config`, the same for routers and
replicas, so that one that starts later gets it too. Everyone makes the configuration in force from both by
`lay_over`, and a number that equal live values share tells at a glance whether all are of one mind.
"""

from __future__ import annotations

import difflib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from cluster import role_config
from cluster.config import ClusterConfig, load
from cluster.tenant_config import TenantConfig
from replica.config import EngineConfig, SchedulerConfig
from replica.errors import ConfigError
from replica.messages import Role
from router.live_settings import DispatcherConfig, LiveSettings
from router.tenants import DEFAULT_TENANT

#: all of the scheduler, and of the router what its dispatcher decides by
LIVE = frozenset(
    {f"scheduler.{name}" for name in SchedulerConfig.model_fields}
    | role_config.LIVE
    | {
        "router.policy",
        "router.max_queued_requests_per_replica",
        "router.admission_wait_ms",
        "router.max_held_requests",
        "router.max_num_queued_reqs",
        "router.move_after_s",
    }
)

#: key of the configuration -> flag of `shoal scale`
SCALE_FLAGS = {"replicas.both": "--replicas", "replicas.prefill": "--prefill", "replicas.decode": "--decode"}
#: in front of a tenant's name and the name of a field
TENANT = "tenants.named."
#: of each tenant; its keys are changed in the tenants' file
LIVE_OF_TENANT = tuple(name for name in TenantConfig.model_fields if name != "keys")

Overlay = Mapping[str, Any]


def is_live(key: str) -> bool:
    """Whether a dotted key may change while it runs."""
    return key in LIVE or (key.startswith(TENANT) and key.rpartition(".")[2] in LIVE_OF_TENANT)


def lay_over(start: Mapping[str, Any], overlay: Overlay) -> ClusterConfig:
    """The configuration in force. `start`: as `ClusterConfig.model_dump` gives it. Raises ConfigError for an unknown
    key, one that is not live, and for a whole that cannot work.
    """
    values = dict(_flat(overlay))
    check_keys(values)
    return load(start, values)


def check_keys(keys: Mapping[str, Any]) -> None:
    """Raises ConfigError, one sentence each, for dotted keys that are unknown or not live."""
    known = all_keys()
    sentences = []
    for key in keys:
        if under := [name for name in known if name.startswith(f"{key}.")]:
            sentences.append(f"{key}: is a section; its keys: {', '.join(under)}")
        elif key.startswith(TENANT) and (fault := _fault_of_tenant_key(key)) is not None:
            sentences.append(f"{key}: {fault}")
        elif key not in known and not key.startswith(TENANT):
            sentences.append(f"{key}: unknown key; {_nearest(key, known)}")
        elif (flag := SCALE_FLAGS.get(key)) is not None:
            sentences.append(f"{key}: is changed by `shoal scale {flag} N`")
        elif not is_live(key):
            told = " (keys that change while it runs: in tenants.file)" if key.startswith(TENANT) else ""
            sentences.append(
                f"{key}: needs a restart{told}: give it to the next `shoal serve`, with --set or in its file"
            )
    if sentences:
        raise ConfigError("\n".join(sentences))


def _fault_of_tenant_key(key: str) -> str | None:
    """Of TENANT + name + "." + field."""
    name, _, field = key.removeprefix(TENANT).partition(".")
    fields = [*TenantConfig.model_fields]
    if not name or not field:
        return "is a section; its keys: " + ", ".join(f"{TENANT}{name or 'NAME'}.{each}" for each in fields)
    if field in fields:
        return None
    close = difflib.get_close_matches(field, fields, n=1)
    return f"unknown key; did you mean {TENANT}{name}.{close[0]}?" if close else f"unknown; known: {', '.join(fields)}"


def changed(config: ClusterConfig, values: Mapping[str, Any]) -> ClusterConfig:
    """`config` with other values of dotted live keys. Raises ConfigError, also for a tenant that nobody is: one that
    is not named in the configuration may stand in the tenants' file, if there is one.
    """
    check_keys(values)
    known = [*config.tenants.named, DEFAULT_TENANT]
    for key in values:
        name = key.removeprefix(TENANT).partition(".")[0]
        if key.startswith(TENANT) and name not in known and config.tenants.file is None:
            raise ConfigError(f"{key}: there is no tenant {name!r}; allowed: {', '.join(sorted(set(known)))}")
    return load(config.model_dump(), values)


def overlay_of(start: ClusterConfig, wanted: ClusterConfig) -> dict[str, Any]:
    """What has to lie over `start` so that it becomes `wanted`; the two differ in live keys only. JSON."""
    before, after = dict(flat_values(start)), dict(flat_values(wanted))
    overlay: dict[str, Any] = {}
    for key in sorted(filter(is_live, after)):
        if before.get(key) != after[key]:  # a tenant of the file is named here only when something lies over it
            *sections, name = key.split(".")
            inner = overlay
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[name] = after[key]
    return overlay


def differences(before: ClusterConfig, after: ClusterConfig) -> list[tuple[str, Any, Any]]:
    """Live keys whose values differ, with both values."""
    old, new = dict(flat_values(before)), dict(flat_values(after))
    keys = filter(is_live, dict.fromkeys([*old, *new]))
    return [(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]


def shown(value: object) -> str:
    """A value as `shoal get` prints it and `shoal set` takes it."""
    return "auto" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def told_changes(before: ClusterConfig, after: ClusterConfig, keys: Iterable[str]) -> list[str]:
    """A line for each of `keys`."""
    old, new = dict(flat_values(before)), dict(flat_values(after))
    return [
        f"{key}: already {shown(new[key])}"
        if old.get(key) == new[key]
        else f"{key}: {shown(old.get(key))} -> {shown(new[key])}"
        for key in keys
    ]


def warnings(before: ClusterConfig, after: ClusterConfig) -> list[str]:
    """Requests that were served until now and will be 400 from now on, however often they come again."""
    found = []
    policy = after.scheduler.policy
    if before.scheduler.policy == "priority" != policy:
        found.append(
            f"the policy {policy} looks at no priority: requests with a `priority` other than 0 get 400 "
            "(unsupported_value) from now on"
        )
    cap = after.router.max_queued_requests_per_replica
    if cap < before.router.max_queued_requests_per_replica:
        found.append(
            f"requests of more than {cap} sequences (prompts x n) get 400 (too_many_sequences) from now on, since the "
            "queue of a replica never holds so many"
        )
    part, before_part = after.router.most_waiting_per_router, before.router.most_waiting_per_router
    if part is not None and part < min(before_part or cap, cap):
        found.append(
            f"requests of more than {part} sequences (prompts x n) get 400 (too_many_sequences) from now on, also when "
            f"nothing waits: that is each router's part of router.max_num_queued_reqs ({after.router.replicas} routers)"
        )
    found += [
        f"the tenant {name!r} is not in the configuration: it counts only if {after.tenants.file} has one of that name"
        for name in after.tenants.named
        if name not in before.tenants.named and name != DEFAULT_TENANT
    ]
    return found


def number_of(config: ClusterConfig) -> int:
    """Equal for equal live values: 32 bits, so that a metric can carry it."""
    # what a tenant of the file has inline counts when it says something: it is there or not, depending on who asks
    named = {key: value for key, value in flat_values(config) if is_live(key)}
    values = {key: value for key, value in named.items() if value is not None or not key.startswith(TENANT)}
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


def engine_settings(start: Mapping[str, Any], overlay: Overlay, role: Role = Role.BOTH) -> tuple[EngineConfig, int]:
    """What a replica needs of the configuration in force, `auto` values open; and its number. Raises ConfigError."""
    config = lay_over(start, overlay)
    return config.of_role(role).engine_config(), number_of(config)


def router_settings(start: Mapping[str, Any], overlay: Overlay) -> LiveSettings:
    """What a router needs of it. Raises ConfigError."""
    config = lay_over(start, overlay)
    scheduler = config.scheduler
    return LiveSettings(
        dispatcher=DispatcherConfig(
            admission_wait_s=config.router.admission_wait_ms / 1000,
            max_held_requests=config.router.max_held_requests,
            max_waiting=config.router.most_waiting_per_router,
            move_after_s=config.router.move_after_s,
            priority_ageing_s=scheduler.class_ageing_s,
        ),
        placement=config.router.policy,
        order_policy=scheduler.policy,
        number=number_of(config),
        hand_over=config.disaggregation.hand_over(),
    )


def flat_values(config: BaseModel) -> Iterator[tuple[str, Any]]:
    """Dotted key and value, as JSON has them, in the order of the configuration."""
    yield from _flat(config.model_dump(mode="json"))


def all_keys() -> list[str]:
    """Dotted keys of `ClusterConfig`."""
    return [
        *(key for key, _ in flat_values(ClusterConfig())),
        *(f"{TENANT}NAME.{n}" for n in TenantConfig.model_fields),
    ]


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _nearest(key: str, known: list[str]) -> str:
    """Sections are easily forgotten, so last parts are compared as well; and so are ends of long names."""
    by_last = {name.rpartition(".")[2]: name for name in known}
    close = [name for name in known if name.startswith(f"{key}_")]
    close += difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    close += [by_last[name] for name in difflib.get_close_matches(key.rpartition(".")[2], by_last, n=1)]
    return f"did you mean {close[0]!r}?" if close else "`shoal get` shows all of them"
