"""RAY. The process of one rank: `replica/rank_loop.py` in an actor, with the model runner that the configuration asks
for.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import ray

from replica.config import EngineConfig
from replica.fake_runner import FakeModelRunner
from replica.rank_link import Endpoint
from replica.rank_loop import Meeting, NoMeeting, Rank, RankRunner
from replica.runner_thread import PacedRank
from replica.shard import Shard
from replica.step import OpenArena

logger = logging.getLogger(__name__)

ModelSource = Callable[[str], Path]


class Worker:
    """Plain class behind the actor. `run` lasts as long as the rank: the replica watches its end."""

    def run(
        self,
        rank: int,
        size: int,
        endpoint: Endpoint,
        config: EngineConfig,
        model_source: ModelSource,
        open_arena: OpenArena | None = None,
    ) -> None:
        """Blocks until the replica says stop. `config` is resolved, equal on all ranks."""
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        node = ray.get_runtime_context().get_node_id()
        make_meeting: Callable[[Callable[[bool], None]], Meeting] = NoMeeting
        make_runner: Callable[[Meeting, bool], RankRunner] = partial(_fake_rank, config, Shard(rank, size), open_arena)
        if config.model.runner != "fake":
            make_meeting = partial(_torch_meeting, rank, size, str(ray.util.get_node_ip_address()))
            make_runner = partial(_torch_rank, config, model_source, Shard(rank, size), open_arena)
        # a rank without its replica has nobody to work for, and may sit in a collective for ever: no orderly end
        Rank(rank, size, endpoint, node, make_meeting, make_runner, lambda: os._exit(1)).run()


def fake_runner(config: EngineConfig, open_arena: OpenArena | None = None, shard: Shard = Shard()) -> FakeModelRunner:
    """The fake runner that `config` asks for."""
    return FakeModelRunner(
        num_blocks=config.cache.num_blocks or 4096,
        block_size=config.cache.block_size,
        max_model_len=config.model.max_model_len or 8192,
        open_arena=open_arena,
        rank=shard.rank,
        num_ranks=shard.size,
    )


def _fake_rank(
    config: EngineConfig, shard: Shard, open_arena: OpenArena | None, meeting: Meeting, is_first: bool
) -> RankRunner:
    return PacedRank(fake_runner(config, open_arena, shard))


def _torch_meeting(rank: int, size: int, host: str, note_wait: Callable[[bool], None]) -> Meeting:
    from replica.rank_torch import TorchMeeting

    return TorchMeeting(rank, size, host, "gloo", note_wait)


def _torch_rank(
    config: EngineConfig,
    model_source: ModelSource,
    shard: Shard,
    open_arena: OpenArena | None,
    meeting: Meeting,
    is_first: bool,
) -> RankRunner:
    from replica.model_runner import TorchModelRunner
    from replica.rank_torch import TorchMeeting

    assert isinstance(meeting, TorchMeeting)
    folder = model_source(config.model.model)
    # the self-test takes all ranks, and those that stay when one is replaced have passed it
    return TorchModelRunner(
        config, folder, self_test=is_first, shard=shard, collective=meeting.collective, open_arena=open_arena
    )
