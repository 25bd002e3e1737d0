"""RAY. `shoal scale`: more or fewer replicas while the cluster runs. Those that stay are not touched; those that go
drain, and their streams move to the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from cluster.config import ClusterConfig
from cluster.live_apply import InForce, num_replicas_held, refuse_declared, replica_states, submit_num_replicas
from cluster.memory_room import Needs, available_bytes, memory_shortage, needs
from cluster.ray_start import check_resources
from cluster.role_config import DEPLOYMENTS, ReplicasConfig
from replica.config import resolve
from replica.errors import ConfigError, ShoalError
from replica.hardware import detect_hardware
from replica.messages import Role

#: Serve's controller turns every 0.1 s
_LOOK_S = 0.05


def scale(found: InForce, role: Role, count: int, is_all_here: bool, tell: Callable[[str], object]) -> float:
    """Blocks until `count` replicas of a role are up and all others of it are gone; returns the seconds it took. Raises
    ConfigError if there is no room for more, or no deployment of the role, ShoalError if Serve cannot start them or
    another command wants another number.

    `is_all_here`: the whole cluster is this machine; `tell` takes a line when something has changed.
    """
    refuse_declared(f"change `num_replicas` of the deployment {DEPLOYMENTS[role]} there, see docs/start_and_stop.md")
    if role not in found.now.replicas.counts:
        there = ", ".join(found.now.replicas.counts)
        raise ConfigError(f"no replica has the role {role.value}, which is decided at the start; allowed here: {there}")
    if role is Role.BOTH and (most := found.now.autoscaling.max_replicas) is not None:
        raise ConfigError(
            f"autoscaling decides how many replicas there are, {found.now.replicas.both} to {most}: both are given at "
            "the start (replicas.both, autoscaling.max_replicas)"
        )
    before = found.now.replicas.counts[role]
    if count > before:
        _check_room(found.now, role, count - before, is_all_here)
    started = time.monotonic()
    if count != before:
        submit_num_replicas(role, count)
    pause, last = threading.Event(), ""
    while True:
        states, trouble = replica_states(role)
        if states.get("RUNNING", 0) == count and sum(states.values()) == count and num_replicas_held(role) == count:
            return time.monotonic() - started
        if trouble:
            raise ShoalError(f"{count} replica(s) were asked for, and Serve has trouble with them: {trouble}")
        if time.monotonic() - started > 1.0 and (held := num_replicas_held(role)) != count:
            raise ShoalError(f"superseded by another change; Serve keeps {held} replica(s) up now")
        if (line := _told(states)) != last:
            tell(line)
            last = line
        pause.wait(_LOOK_S)


def _told(states: dict[str, int]) -> str:
    words = {"RUNNING": "up", "STOPPING": "draining", "STARTING": "starting"}
    return ", ".join(f"{n} {words.get(state, state.lower())}" for state, n in sorted(states.items()) if n)


def _check_room(config: ClusterConfig, role: Role, more: int, is_all_here: bool) -> None:
    config = config.of_role(role)
    check_resources(_with(config, more))
    if not is_all_here or config.runner != "torch":
        return
    from cluster import model_store

    engine = resolve(config.engine_config(), detect_hardware(), config.replicas.total)
    folder = model_store.resolve(config.model)
    one, all_of_them = needs(_with(config, 1), engine, folder), needs(_with(config, 1 + more), engine, folder)
    wanted = Needs(all_of_them.processes - one.processes, all_of_them.weights - one.weights, all_of_them.kv - one.kv)
    if short := memory_shortage(_with(config, more), engine, wanted, available_bytes()):
        raise ConfigError(short)


def _with(config: ClusterConfig, count: int) -> ClusterConfig:
    """As if all were of one kind: what is asked is only whether there is room."""
    return config.model_copy(update={"replicas": ReplicasConfig(both=count)})
