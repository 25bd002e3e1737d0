"""RAY. Start a Ray on this machine or join one, and what is known of it: address, room, logs, life."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import threading
from collections.abc import Collection, Mapping

from cluster.config import ClusterConfig
from cluster.process_sweep import serve_replicas
from cluster.resources import NodeRoom, shortage
from cluster.role_config import DEPLOYMENTS
from cluster.supervisor import Driver
from cluster.terminal import say
from replica.errors import ConfigError, ShoalError
from replica.hardware import available_cores
from replica.messages import Role

#: How many of Ray's CPUs a core of this machine is. Processes may share cores (3 ranks on 2 cores are useful); but each
#: takes about 2 s of a core to start, and Serve gives up on one that does not answer for 30 s.
CPUS_PER_CORE = 16


#: Serve itself gives its proxy 60 s, which a busy machine needs
PROXY_WAIT_S = 300


def refuse_oversubscription(config: ClusterConfig) -> None:
    """Raises ConfigError if a Ray of our own would not have the CPUs; says so if processes only share cores."""
    cores = available_cores()
    cpus = float(cores * CPUS_PER_CORE)
    machine = NodeRoom("this machine", {"CPU": cpus}, {"CPU": cpus})
    most = {role: config.most_of(role) for role in config.replicas.counts}
    if short := _shortage(config, most, [machine], ("CPU",)):
        raise ConfigError(
            f"resources: {short} ({cores} cores, each shared by at most {CPUS_PER_CORE} processes); lower "
            "replicas.both or tensor_parallel_size, or what each reserves (num_cpus_per_replica, num_cpus_per_rank)"
        )
    runners = sum(config.most_of(role) * config.of_role(role).num_ranks for role in config.replicas.counts)
    if runners > cores and config.runner == "torch":
        what = "ranks" if runners > config.most_replicas else "replicas"
        say(f"{runners} {what} share {cores} cores: they will wait for each other")


def start_ray(config: ClusterConfig, driver: Driver) -> None:
    """A Ray of our own. If it ends before we do, the driver ends at once."""
    import ray

    say("starting Ray")
    counts = config.replicas.counts
    cpus = {role: sum(bundle.get("CPU", 0) for bundle in replica_bundles(config.of_role(role))) for role in counts}
    needed = sum(config.most_of(role) * cpus[role] for role in counts) + config.router.replicas + 1
    ray.init(
        address="local",
        # to Ray a counter; what is too much was refused before
        num_cpus=max(available_cores(), int(needed) + 1),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
        object_store_memory=100 << 20,  # nothing of ours goes through it
    )
    driver.hear_others()
    threading.Thread(target=_watch, args=(driver,), name="shoal-watch-ray", daemon=True).start()


def _watch(driver: Driver) -> None:
    """Without its GCS a driver waits for a minute in every call, and without its raylet it is ended without a word.

    Told to end as everybody else, both take 10 s to do so; by then nobody answers the driver, and replicas are gone.
    """
    from ray._private import worker

    node = worker._global_node
    if node is None:  # shut down already
        return
    core = [(name, node.all_processes[name][0].process) for name in ("gcs_server", "raylet")]
    pause = threading.Event()
    while True:
        for name, process in core:
            if process.poll() is not None:
                say(f"Ray's {name} ended (exit code {process.returncode}), and all else with it; see {driver.log}")
                driver.end(1)
        if driver.was_told_itself.is_set() and not any(serve_replicas(os.getpid(), n) for n in DEPLOYMENTS.values()):
            say("the signal ended Ray's processes too; streams that had not ended are cut")
            driver.end(1)
        pause.wait(0.1)


def join_ray(driver: Driver) -> None:
    """The Ray at RAY_ADDRESS. Raises ShoalError."""
    import ray

    address = os.environ["RAY_ADDRESS"]
    say(f"joining Ray at {address}")
    check_ray_address(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ShoalError(f"cannot join Ray at RAY_ADDRESS={address}: {error}") from None
    driver.hear_others()


def replica_bundles(config: ClusterConfig) -> list[dict[str, float]]:
    """What Ray reserves for one replica."""
    return config.bundles or [{"CPU": config.num_cpus_per_replica}]


def check_resources(config: ClusterConfig) -> None:
    """Raises ConfigError if the nodes that are there have no room, which Ray would wait for without a word."""
    import ray
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    nodes = [
        NodeRoom(node["NodeManagerAddress"], dict(node["Resources"]), dict(free.get(node["NodeID"], {})))
        for node in ray.nodes()
        if node["Alive"]
    ]
    if short := _shortage(config, config.replicas.counts, nodes):
        raise ConfigError(f"resources: {short}")


def _shortage(
    config: ClusterConfig, counts: Mapping[Role, int], nodes: list[NodeRoom], only: Collection[str] = ()
) -> str:
    """Of all roles together where their replicas take the same, which is the rule; else of each by itself. `only`:
    resources that are looked at.
    """
    kinds: list[tuple[list[dict[str, float]], int]] = []
    for role, count in counts.items():
        of_replica = replica_bundles(config.of_role(role))
        if only:
            of_replica = [{name: bundle.get(name, 0.0) for name in only} for bundle in of_replica]
        if kinds and kinds[-1][0] == of_replica:
            count += kinds.pop()[1]
        kinds.append((of_replica, count))
    found = (shortage(bundles, count, config.rank_placement, nodes) for bundles, count in kinds)
    return next(filter(None, found), "")


def ray_address() -> str:
    """Where another process can join the Ray that this one is in."""
    import ray

    return str(ray.get_runtime_context().gcs_address)


def serve_is_running() -> bool:
    import ray

    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return False
    return True


def listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError:
        return False
    return True


def check_ray_address(address: str) -> None:
    """Ray waits for minutes and in silence for an address where nothing is; two seconds tell as well."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return  # "auto", "local", "ray://...": Ray knows what to make of them
    if not address.startswith("ray://") and not listens(host.strip("[]"), int(port)):
        raise ShoalError(f"RAY_ADDRESS={address}: nothing listens there")


def log_folder() -> str:
    """Where routers and replicas log (`cluster/serve_logs.py`), and Serve as well."""
    return os.path.join(_ray_logs(), "serve")


def crash_files() -> str:
    """What a process writes past its loggers, a crash of native code above all."""
    return os.path.join(_ray_logs(), "worker-*.err")


def _ray_logs() -> str:
    return os.path.join(os.environ.get("RAY_TMPDIR", tempfile.gettempdir()), "ray", "session_latest", "logs")


def set_environment() -> None:
    """Before `ray` is imported: Serve reads these when its modules load, in this process and in every one it starts."""
    from cluster.serve_env import SERVE_ENV

    for name, value in SERVE_ENV.items():
        os.environ.setdefault(name, value)
    if not os.environ.get("RAY_ADDRESS"):
        # one machine: Ray's own ports and our data plane listen on loopback (the switch is named after the systems it
        # was made for)
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    # a proxy that is not ready after 5 s is replaced by one that has to begin again, on a machine that is busy already
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", str(PROXY_WAIT_S))
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
