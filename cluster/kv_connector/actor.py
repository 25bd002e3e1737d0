"""RAY. The KVConnector of a Ray node as an actor: named, on its node, started by the replica that needs it first.

Detached, since the process that started it may end at any time; so it ends by itself when nobody has come for
`ALONE_S`, and `shoal serve` ends those of its application. A killed one is started again by Ray, empty but for its
disk; replicas find it by its name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError, RayTaskError

from cluster.cluster_token import token_for
from cluster.kv_connector.config import KVCacheConfig
from cluster.kv_connector.connector import Connector
from cluster.kv_connector.transport import PeerAddress
from replica.cache_folder import cache_folder
from replica.errors import ConfigError
from replica.kv_messages import KVPeer, KVSpace

NAMESPACE = "shoal"
#: between two looks for connectors of other nodes
PEERS_S = 2.0
#: without a replica for so long it ends; a replica that is replaced is back after seconds
ALONE_S = 600.0
#: for the word of another connector
_ANSWER_S = 2.0
logger = logging.getLogger(__name__)


class Door(msgspec.Struct, frozen=True):
    """Where replicas of the node connect, or why they cannot."""

    socket_name: str = ""
    problem: str = ""
    #: what works, but not as it was asked for
    warning: str = ""


class KVConnector:
    """Plain class behind the actor. Opens with the first replica that says what its KV is."""

    def __init__(self, app_name: str, set_up_logs: Callable[[], None] = lambda: None) -> None:
        set_up_logs()
        self._app_name = app_name
        self._node_id = str(ray.get_runtime_context().get_node_id())
        self._open: Connector | None = None
        #: what it was opened with
        self._of: tuple[KVSpace, KVCacheConfig] | None = None
        self._opening = asyncio.Lock()
        self._needed_at = time.monotonic()
        self._watching: asyncio.Task[None] | None = None

    async def door(self, space: KVSpace, config: Mapping[str, Any]) -> Door:
        """Opens what is not open. Another space or other sizes take the place of the old ones when their replicas are
        gone.
        """
        wanted = space, KVCacheConfig.model_validate(config)
        self._needed_at = time.monotonic()
        async with self._opening:
            if self._watching is None:
                self._watching = asyncio.create_task(self._watch())
            if self._open is not None and self._open.failure is not None:
                problem = str(self._open.failure)
                await self._close()  # the next one who asks tries again
                return Door(problem=problem)
            if self._open is not None and self._of != wanted:
                if self._open.num_members:
                    return Door(problem="replicas of another model or other kv_cache settings still use the tiers")
                await self._close()
            if self._open is None:
                identity = KVPeer(self._node_id, uuid.uuid4().hex)
                try:
                    self._open = await Connector.open(wanted[1], space, identity, _folder(wanted[1]))
                except ConfigError as error:
                    logger.error("%s", error)
                    return Door(problem=str(error))
                self._of = wanted
            return Door(self._open.socket_name, warning=self._open.disk_shortage)

    async def address(self) -> PeerAddress | None:
        """Where connectors of other nodes come."""
        return None if self._open is None else self._open.address

    async def figures(self) -> dict[str, float]:
        """For people and tests."""
        return {} if self._open is None else self._open.figures()

    async def _close(self) -> None:
        closing = self._open
        self._open = None
        if closing is not None:
            await closing.close()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(PEERS_S)
            try:
                await self._look_around()
            except Exception:  # Ray is busy or going: the next look is in two seconds
                logger.exception("connectors of other nodes were not found")

    async def _look_around(self) -> None:
        now = time.monotonic()
        if self._open is None or self._open.num_members:
            self._needed_at = now if self._open is not None else self._needed_at
        if now - self._needed_at > ALONE_S:
            logger.info("no replica for %.0f s: the KV connector of this node ends", ALONE_S)
            await self._close()
            await asyncio.to_thread(_end_myself)
        if self._open is None:
            return
        others = await asyncio.to_thread(_other_nodes, self._app_name, self._node_id)
        if others and self._open.address is None:
            host = str(ray.util.get_node_ip_address())
            self._open.peers.listen(host, token_for(host))
        told = await asyncio.gather(*map(_address_of, others))
        if self._open is not None:
            self._open.peers.set_peers(one for one in told if one is not None)


def find_connector(
    config: Mapping[str, Any],
    set_up_logs: Callable[[], None],
    env_vars: dict[str, str],
    tell: Callable[[str], object],
) -> Callable[[KVSpace], Awaitable[str]]:
    """How a replica finds the connector of its node (`replica.node_link.FindDoor`). `config`: section `kv_cache`."""
    from ray import serve

    app_name = serve.get_replica_context().app_name
    start = partial(_start, app_name, set_up_logs, env_vars)
    problems: set[str] = set()

    async def find(space: KVSpace) -> str:
        try:
            actor = await asyncio.to_thread(start)
            door: Door = await actor.door.remote(space, dict(config))
        except RayTaskError as error:  # it raised: a mistake of ours, or a machine that does what nobody foresaw
            door = Door(problem=f"the KV connector failed: {error.cause!r}")
        except RayError as error:  # it has ended, and starts again
            raise ConnectionError(f"the KV connector does not answer: {type(error).__name__}") from None
        for said, what in ((door.problem, "serves without KV tiers"), (door.warning, "KV tiers")):
            if said and said not in problems:  # once: it is asked every two seconds
                problems.add(said)
                logger.error("%s: %s", what, said)
                tell(f"{what}: {said}")
        if door.problem:
            raise ConnectionError(door.problem)
        return door.socket_name

    return find


def end_connectors(app_name: str) -> None:
    """Of all nodes, at once; what is on disk stays."""
    for name in _names(app_name):
        with contextlib.suppress(ValueError, RayError):
            ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)


def _start(app_name: str, set_up_logs: Callable[[], None], env_vars: dict[str, str]) -> Any:
    """The actor of this node: the one that is there, or a new one."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node_id = str(ray.get_runtime_context().get_node_id())
    actor: Any = ray.remote(KVConnector)
    return actor.options(
        name=f"{_prefix(app_name)}{node_id}",
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        num_cpus=0,
        max_restarts=-1,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        runtime_env={"env_vars": env_vars},
    ).remote(app_name, set_up_logs)


def _prefix(app_name: str) -> str:
    return f"kv-connector:{app_name}:"


def _names(app_name: str) -> list[str]:
    found = ray.util.list_named_actors(all_namespaces=True)
    names = [str(one["name"]) for one in found if one["namespace"] == NAMESPACE]
    return [name for name in names if name.startswith(_prefix(app_name))]


def _other_nodes(app_name: str, node_id: str) -> list[Any]:
    """Their connectors."""
    found = []
    for name in _names(app_name):
        if name != f"{_prefix(app_name)}{node_id}":
            with contextlib.suppress(ValueError):  # it has ended in between
                found.append(ray.get_actor(name, namespace=NAMESPACE))
    return found


async def _address_of(actor: Any) -> PeerAddress | None:
    try:
        async with asyncio.timeout(_ANSWER_S):
            address: PeerAddress | None = await actor.address.remote()
            return address
    except (RayError, TimeoutError):
        return None


def _folder(config: KVCacheConfig) -> Path:
    return Path(config.disk_folder).expanduser() if config.disk_folder else cache_folder() / "kv"


def _end_myself() -> None:
    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
