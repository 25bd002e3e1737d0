"""RAY. The replica as a Serve deployment: builds the engine, tells routers where it is, drains when Serve stops it.

Serve places, watches and replaces the replica; it sees no request. Requests and tokens use `replica/service.py`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import serve

from replica.admission import longest_sequence
from replica.arena_client import open_arena
from replica.config import EngineConfig, resolve
from replica.engine import Engine
from replica.errors import ConfigError
from replica.hardware import detect_hardware
from replica.kv_messages import KVPeer
from replica.memory_check import check_pool
from replica.messages import Role
from replica.node_link import FindDoor, NodeLink
from replica.runner_process import RunnerProcess
from replica.runner_thread import PacedRunner, RunnerThread
from replica.scaling_figures import ScalingFigures
from replica.service import ReplicaService
from replica.step import ModelRunner, OpenArena
from replica.step_runner import StepRunner
from replica.worker import fake_runner
from replica.worker_group import worker_group

logger = logging.getLogger(__name__)

ModelSource = Callable[[str], Path]
#: Serve gives a process up after three checks in a row without an answer within so long: 12 s. Routers leave a silent
#: one after 10 s, and an event loop that merely shares two cores with six busy processes was never late by 0.3 s.
HEALTH_TIMEOUT_S = 4.0
#: the configuration at the start, and what was changed since (Serve's `user_config`) -> the configuration in force, and
#: its number. Raises ConfigError.
Settings = Callable[[Mapping[str, Any], Mapping[str, Any]], tuple[EngineConfig, int]]

#: given whom to tell what people should know: how to find the KVConnector of this node, which is started if need be
FindConnector = Callable[[Callable[[str], object]], FindDoor]


def make_runner(config: EngineConfig, model_source: ModelSource, open_arena: OpenArena | None = None) -> ModelRunner:
    """The runner that `config` asks for; called on the runner thread. Raises ModelLoadError."""
    if config.model.runner == "fake":
        return PacedRunner(fake_runner(config, open_arena))
    from replica.model_runner import TorchModelRunner  # torch costs 1.7 s and 200 MiB: only where it is used

    return TorchModelRunner(config, model_source(config.model.model), open_arena=open_arena)


def make_step_runner(
    config: EngineConfig,
    model_source: ModelSource,
    env_vars: dict[str, str],
    tell: Callable[[str], object],
    open_arena: OpenArena | None = None,
) -> StepRunner:
    """What `config` wants the model to run on; `env_vars` are for worker actors, `tell` hears of lost ones. Loads
    nothing yet.
    """
    make = partial(make_runner, config, model_source, open_arena)
    if config.parallel.has_workers:
        return worker_group(config, model_source, env_vars, tell, open_arena)
    return RunnerProcess(make) if config.parallel.runner_placement == "process" else RunnerThread(make)


def _tell_as(name: str, tell: Callable[[str], object], text: str) -> object:
    return tell(f"replica {name}: {text}")


class Replica:
    """Plain class behind the deployment. `settings` makes the engine's configuration of `config`, `model_source` turns
    a model name into a folder on this node, `cluster_token` reads what routers have to know, for the address that they
    connect to.

    `auto` values are resolved here, from the hardware of the node where the replica really runs.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: Mapping[str, Any],
        settings: Settings,
        model_source: ModelSource,
        drain_s: float,
        replicas_on_node: int,
        env_vars: dict[str, str],
        cluster_token: Callable[[str], bytes],
        role: str = Role.BOTH,
        set_up_logs: Callable[[], None] = lambda: None,
        tell: Callable[[str], object] = lambda text: None,
        find_connector: FindConnector | None = None,
    ) -> None:
        set_up_logs()
        host = ray.util.get_node_ip_address()
        token = cluster_token(host)  # before a model is loaded in vain
        at_start, number = settings(config, {})
        hardware = detect_hardware()
        self._resolve = partial(resolve, hardware=hardware, replicas_on_node=replicas_on_node)
        self._settings = partial(settings, config)
        self.config = self._resolve(at_start)
        if not self.config.parallel.ranks_may_be_remote and self.config.model.runner == "torch":
            check_pool(self.config.cache, hardware.memory_bytes, replicas_on_node)
        self._refused = ""
        self._told: Mapping[str, Any] = {}
        self.role = Role(role)
        #: made here, because Ray reuses actor ids
        self.incarnation = uuid.uuid4().hex
        self._drain_s = drain_s
        self._drained = False
        self._scaling = ScalingFigures()
        name = serve.get_replica_context().replica_id.unique_id
        tell_own = partial(_tell_as, name, tell)
        if find_connector is not None and self.config.parallel.ranks_may_be_remote:
            logger.warning("the KV connector is not used: ranks of other nodes cannot map the arena of this one")
            find_connector = None
        opens = None if find_connector is None else open_arena
        runner = make_step_runner(self.config, model_source, env_vars, tell_own, opens)
        link = None
        if find_connector is not None:
            link = NodeLink(KVPeer(name, self.incarnation), find_connector(tell_own))
        self.engine = Engine(self.config, runner, incarnation=self.incarnation, kv_link=link)
        await self.engine.start()
        self.engine.configure(self.config, number)
        info = self.engine.core.info
        logger.info("%s", info.description)
        if (room := longest_sequence(info)[0]) < info.max_model_len:
            logger.warning("the KV cache holds %d tokens, less than max_model_len %d", room, info.max_model_len)
        self._service = ReplicaService(self.engine, token)
        self.address = await self._service.start(host)
        # what start-up left is never garbage: keep the collector from walking it on every step
        gc.collect()
        gc.freeze()

    def record_replica_metadata(self) -> dict[str, str]:
        """Told once to every router by Serve."""
        return {
            "address": self.address,
            "role": self.role.value,
            "incarnation": self.incarnation,
            "description": self.engine.core.info.description,
            "kv_bytes_per_token": str(self._kv_bytes_per_token),
            "block_size": str(self.engine.core.info.block_size),
            "enable_prefix_caching": str(self.config.cache.enable_prefix_caching),
        }

    @property
    def _kv_bytes_per_token(self) -> float:
        info = self.engine.core.info
        return info.block_bytes / info.block_size

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Serve calls it after the constructor and at each change of `user_config`. What cannot work is refused whole,
        and what was in force stays: raising would make Serve replace one replica after the other, for a misprint.
        """
        self._told = user_config
        try:
            config, number = self._settings(user_config)
        except ConfigError as error:
            self._refused = str(error)
            logger.error("user_config is refused, the configuration stays as it was: %s", error)
            return
        self._refused = ""
        self.config = self._resolve(config)
        self.engine.configure(self.config, number)
        logger.info("configuration %08x is in force", number)

    async def configuration(self) -> dict[str, Any]:
        """For `shoal get` and `shoal set`: what is in force, what Serve told last, and why that is not."""
        return {
            "number": self.engine.core.config_number,
            "refused": self._refused,
            "told": dict(self._told),
            "scheduler": self.config.scheduler.model_dump(mode="json"),
        }

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve calls it while a scaling policy is on, and carries what it returns to the controller. (What is not
        async it calls on a thread, and the engine core is for the event loop alone.)
        """
        core = self.engine.core
        now = asyncio.get_running_loop().time()
        return self._scaling.take(core.load(now), core.scheduler.pace.line, now)

    def check_health(self) -> None:
        """Raises if the engine makes no progress; Serve then replaces the replica."""
        self.engine.check_health()

    async def describe(self) -> dict[str, str]:
        """What a router calls so that Serve makes it a view of the replicas; says what that view says."""
        return self.record_replica_metadata()

    async def __del__(self) -> None:  # Serve awaits it: the only stop hook there is
        if self._drained or not hasattr(self, "_service"):
            return  # the constructor failed, or Serve called before
        self._drained = True
        await self.engine.drain(self._drain_s)
        await self._service.stop(1.0)
        await self.engine.close()


def replica_deployment(
    config: Mapping[str, Any],
    settings: Settings,
    model_source: ModelSource,
    *,
    name: str,
    how_many: Mapping[str, Any],
    replicas_on_node: int,
    num_cpus: float,
    drain_s: float,
    env_vars: dict[str, str],
    request_router_class: str,
    set_up_logs: Callable[[], None],
    tell: Callable[[str], object],
    cluster_token: Callable[[str], bytes],
    find_connector: FindConnector | None = None,
    bundles: list[dict[str, float]] | None = None,
    bundle_strategy: str = "STRICT_PACK",
    role: Role = Role.BOTH,
    node_label: str | None = None,
) -> serve.Application:
    """The Serve application node for replicas of one role; `name`: of the deployment; `how_many`: `num_replicas` or
    `autoscaling_config`.

    `bundles`: what Ray reserves for a replica with worker actors, its own place first, then one for each rank.
    `node_label`: only nodes whose Ray label of that name is the role.
    `request_router_class` is the import path of the observer that tells routers who is there; `set_up_logs` is called
    in each process, first of all; `tell` takes what people should know at once. Why these options:
    `docs/architecture.md`, "Ray Serve settings".
    """
    from ray.serve.config import RequestRouterConfig

    placement: dict[str, Any] = {}
    actor_options: dict[str, Any] = {"num_cpus": num_cpus, "runtime_env": {"env_vars": env_vars}}
    on_nodes = {node_label: role.value} if node_label else {}
    if bundles is not None:
        placement = {"placement_group_bundles": bundles, "placement_group_strategy": bundle_strategy}
        if on_nodes:
            placement["placement_group_bundle_label_selector"] = [on_nodes] * len(bundles)
    elif on_nodes:
        actor_options["label_selector"] = on_nodes
    # Serve checks and converts its options itself; its stubs do not know the plain-class form
    decorate: Any = serve.deployment
    deployment = decorate(
        Replica,
        name=name,
        **how_many,
        ray_actor_options=actor_options,
        **placement,
        # one line per health probe and status call would bury everything else
        logging_config={"enable_access_log": False},
        health_check_period_s=1,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=drain_s + 10,
        max_ongoing_requests=1000,
        user_config={},  # not None, so that `reconfigure` is called from the start
        request_router_config=RequestRouterConfig.model_validate({"request_router_class": request_router_class}),
    )
    application: serve.Application = deployment.bind(
        config,
        settings,
        model_source,
        drain_s,
        replicas_on_node,
        env_vars,
        cluster_token,
        role.value,
        set_up_logs,
        tell,
        find_connector,
    )
    return application
