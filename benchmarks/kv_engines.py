"""Engines, their links and connectors with real sockets, arenas and files, on one loop and without Ray."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from cluster.kv_connector.config import KVCacheConfig
from cluster.kv_connector.connector import Connector
from replica.arena_client import open_arena
from replica.arena_map import round_slot
from replica.config import GIB, CacheConfig, EngineConfig, OffloadDType, ParallelConfig, SchedulerConfig
from replica.engine import Engine
from replica.fake_runner import CostModel, FakeModelRunner, expected_output
from replica.kv_events import KV_LAYOUT
from replica.kv_messages import KVPeer, KVSpace
from replica.kv_transfer import TransferLimits
from replica.messages import Abort, GenerateRequest, RequestId, RouterId, SamplingParams, SequenceInput, Submit
from replica.node_link import NodeLink
from replica.runner_thread import RunnerThread
from replica.sequence import Sequence
from replica.step import ModelRunner
from replica.step_runner import StepRunner

BLOCK = 4
#: of the fake runner: 8 bytes a token
SPACE = KVSpace("fake", BLOCK, 8 * BLOCK, 1, KV_LAYOUT)
_numbers = itertools.count()


class Door:
    """Where replicas of a node find its connector."""

    def __init__(self) -> None:
        self.connector: Connector | None = None

    async def find(self, space: KVSpace) -> str:
        if self.connector is None:
            raise ConnectionError("there is none now")
        return self.connector.socket_name


@asynccontextmanager
async def node(
    num_slots: int = 128,
    *,
    space: KVSpace = SPACE,
    folder: Path | None = None,
    num_disk_slots: int = 0,
    name: str = "node",
    **knobs: Any,
) -> AsyncIterator[Connector]:
    """A connector, validated at its end."""
    gib = round_slot(space.block_bytes) / GIB
    config = KVCacheConfig.model_validate(
        {"host_tier_gib": num_slots * gib, "disk_tier_gib": num_disk_slots * gib, **knobs}
    )
    one = await Connector.open(config, space, KVPeer(name, f"i{next(_numbers)}"), folder)
    try:
        yield one
        one.core.validate()
        assert one.core.stats(one.now).num_stranded == 0
    finally:
        await one.close()


@asynccontextmanager
async def engine(
    find: Connector | Door,
    name: str,
    *,
    runner: ModelRunner | None = None,
    steps: StepRunner | None = None,
    num_ranks: int = 1,
    num_blocks: int = 64,
    offload_dtype: OffloadDType = "model",
    **scheduler: Any,
) -> AsyncIterator[Engine]:
    """An engine over a fake runner, or over `steps` with blocks of 16, beside a connector. Connected when it is given
    out.
    """
    if isinstance(find, Connector):
        door = Door()
        door.connector = find
    else:
        door = find
    made = runner or fake(num_blocks)
    link = NodeLink(KVPeer(name, f"i{next(_numbers)}"), door.find)
    config = EngineConfig(
        cache=CacheConfig(block_size=made.info.block_size if steps is None else 16, offload_dtype=offload_dtype),
        parallel=ParallelConfig(tensor_parallel_size=num_ranks),
        scheduler=SchedulerConfig.model_validate({"max_num_batched_tokens": 64, **scheduler}),
    )
    one = Engine(
        config,
        steps or RunnerThread(lambda: made),
        incarnation=name,
        kv_link=link,
        transfer_limits=TransferLimits(1, 5.0),
    )
    await one.start()
    try:
        if door.connector is not None:
            await until(lambda: link.is_connected)
        yield one
    finally:
        await one.close()


def fake(num_blocks: int = 64, block_size: int = BLOCK) -> FakeModelRunner:
    """Its copies stop with `copies.most = 0`."""
    cost = CostModel(0, 0, 0, 0)
    return FakeModelRunner(num_blocks=num_blocks, block_size=block_size, cost=cost, open_arena=open_arena)


def submit(
    one: Engine, prompt: list[int], num_tokens: int = 6, sampling: SamplingParams | None = None
) -> tuple[Sequence, Callable[[], None]]:
    """A sequence under way, and how to abort it."""
    name = f"r{next(_numbers)}"
    router = one.connect(RouterId(name))
    sampling = sampling or SamplingParams(num_tokens, temperature=0.0, ignore_eos=True)
    request = GenerateRequest(RequestId(name), [SequenceInput(0, prompt, sampling)], order_key=(0.0, 0, 0.0))
    one.handle(router, Submit(request, 0))
    told = {s.request_id: s for s in one.core.scheduler.living()}[RequestId(name)]
    return told, lambda: one.handle(router, Abort(RequestId(name)))


async def ask(one: Engine, prompt: list[int], num_tokens: int = 6) -> Sequence:
    """To its end; it is what an undisturbed run gives."""
    told, _ = submit(one, prompt, num_tokens)
    await until(lambda: told.finish_reason is not None)
    check(told, prompt, num_tokens)
    return told


def check(told: Sequence, prompt: list[int], num_tokens: int = 6) -> None:
    tokens = told.token_ids[len(prompt) :]
    assert tokens == expected_output(prompt, num_tokens, vocab_size=49152, eos=frozenset({2}))


def counters(one: Engine) -> dict[str, float]:
    assert one.core.kv is not None
    return one.core.kv.counters()


def num_known(one: Engine) -> int:
    """Blocks that the connector is said to have; it says so every 50 ms."""
    assert one.core.kv is not None
    return len(one.core.kv._transfer._known or ())


def forget(one: Engine) -> None:
    """The pool of this replica has nothing any more, the tiers do."""
    one.core.blocks.clear_cache()


async def until(condition: Callable[[], object], within_s: float = 20) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 (nobody would set an event)
            await asyncio.sleep(0)
