"""RAY. The ranks of a replica as actors in its placement group: rank r in bundle r + 1, also when it is started again.

No Ray call inside a step: Ray starts the processes, and tells when one ended that never came in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from replica.config import EngineConfig
from replica.rank_group import RankGroup
from replica.rank_link import Endpoint
from replica.rank_seat import Launched
from replica.step import OpenArena
from replica.worker import ModelSource, Worker


class RankActor:
    """One rank's actor, with a task that lasts as long as the rank does: its sentinel."""

    def __init__(self, actor: Any, arguments: tuple[object, ...]) -> None:
        self._actor = actor
        self._sentinel = asyncio.create_task(self._watch(actor.run.remote(*arguments)))
        self._callback: Callable[[str], None] = lambda how: None

    def on_end(self, callback: Callable[[str], None]) -> None:
        """See `Launched`."""
        self._callback = callback

    def kill(self) -> None:
        """See `Launched`."""
        ray.kill(self._actor, no_restart=True)

    async def _watch(self, reference: Any) -> None:
        try:
            await reference
        except RayError as error:
            lines = str(error).strip().splitlines()
            self._callback(f"is gone: {lines[-1].strip() if lines else type(error).__name__}")
        else:
            self._callback("ended")


def worker_group(
    config: EngineConfig,
    model_source: ModelSource,
    env_vars: dict[str, str],
    tell: Callable[[str], object],
    open_arena: OpenArena | None = None,
) -> RankGroup:
    """The ranks of this replica, which runs in bundle 0 of a group with one bundle more for each rank. Starts nothing
    yet. `config` is resolved; `tell` gets a sentence when ranks are lost, and one when all is whole again.
    """
    size = config.parallel.tensor_parallel_size
    group = ray.util.get_current_placement_group()
    assert group is not None, "a replica with ranks is deployed with placement_group_bundles"
    bundles: list[dict[str, float]] = group.bundle_specs
    actor: Any = ray.remote(Worker)

    def launch(rank: int, endpoint: Endpoint) -> Launched:
        bundle = bundles[rank + 1]
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank + 1)
        handle = actor.options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=strategy,
            runtime_env={"env_vars": env_vars},
            max_restarts=0,
        ).remote()
        return RankActor(handle, (rank, size, endpoint, config, model_source, open_arena))

    node = ray.get_runtime_context().get_node_id()
    host = str(ray.util.get_node_ip_address()) if config.parallel.ranks_may_be_remote else None
    return RankGroup(launch, size, node, host, tell=tell)
