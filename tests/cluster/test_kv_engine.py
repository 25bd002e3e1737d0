"""An engine, its step loop and its runner thread beside a KVConnector in process: what is asked is answered on the
loop, and an idle engine sees its stores through without polling.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from replica.config import CacheConfig, EngineConfig, SchedulerConfig
from replica.engine import Engine
from replica.fake_runner import CostModel, FakeModelRunner, expected_output
from replica.kv_events import KVEvents
from replica.kv_messages import KVSpace, ToConnector
from replica.kv_transfer import TransferLimits
from replica.messages import (
    GenerateRequest,
    RequestId,
    ResetPrefixCache,
    RouterId,
    SamplingParams,
    SequenceInput,
    Submit,
)
from replica.runner_thread import RunnerThread
from tests.unit.tier_harness import LEASE_S, FakeConnector

pytestmark = pytest.mark.anyio
PROMPT = list(range(100, 170))


LINKS: list[LoopLink] = []


class LoopLink:
    """A KVLink to a connector on the same loop."""

    def __init__(self, connector: FakeConnector, name: str) -> None:
        self.connector, self.name = connector, name
        self.is_mute = False
        self.is_closed = False

    def start(self, space: KVSpace, events: KVEvents) -> None:
        self.space, self.events = space, events
        LINKS.append(self)
        asyncio.get_running_loop().call_soon(self.connect)

    def connect(self) -> None:
        self.events.on_connected(self.connector.place(self.name), LEASE_S)
        self._tell()

    def send(self, message: ToConnector) -> None:
        asyncio.get_running_loop().call_soon(self._handle, message)

    async def close(self) -> None:
        self.is_closed = True
        self.connector.leave(self.name)

    def _handle(self, message: ToConnector) -> None:
        if self.is_mute or self.is_closed:
            return
        for answer in self.connector.handle(self.name, message):
            self.events.on_message(answer)
        for link in LINKS:  # everybody hears what changed
            if link.connector is self.connector and not link.is_closed:
                link._tell()

    def _tell(self) -> None:
        for event in self.connector.events(self.name):
            self.events.on_message(event)


@asynccontextmanager
async def engine(
    connector: FakeConnector, name: str, load_wait_s: float = 5.0
) -> AsyncIterator[tuple[Engine, LoopLink]]:
    runner = FakeModelRunner(num_blocks=64, block_size=4, cost=CostModel(0, 0, 0, 0), open_arena=connector.open)
    link = LoopLink(connector, name)
    limits = TransferLimits(1, load_wait_s)
    config = EngineConfig(cache=CacheConfig(block_size=4), scheduler=SchedulerConfig(max_num_batched_tokens=64))
    one = Engine(config, RunnerThread(lambda: runner), incarnation=name, kv_link=link, transfer_limits=limits)
    await one.start()
    try:
        yield one, link
    finally:
        await one.close()


async def ask(one: Engine, name: str, prompt: list[int]) -> None:
    router = one.connect(RouterId(name))
    sampling = SamplingParams(6, temperature=0.0, ignore_eos=True)
    request = GenerateRequest(RequestId(name), [SequenceInput(0, prompt, sampling)], order_key=(0.0, 0, 0.0))
    one.handle(router, Submit(request, 0))
    told = {s.request_id: s for s in one.core.scheduler.living()}[RequestId(name)]
    await until(lambda: told.finish_reason is not None)
    tokens = told.token_ids[len(prompt) :]
    assert tokens == expected_output(prompt, 6, vocab_size=49152, eos=frozenset({2}))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 (nobody would set an event)
            await asyncio.sleep(0)


async def test_one_engine_stores_while_idle_and_the_other_one_loads() -> None:
    connector = FakeConnector(128, 32)
    async with engine(connector, "a") as (first, link), engine(connector, "b") as (second, _):
        assert (link.space.block_bytes, link.space.block_size) == (32, 4)
        await ask(first, "x", PROMPT)
        await until(lambda: len(connector.sealed) == 18 and connector.is_at_baseline)
        await ask(second, "y", PROMPT)
        assert second.core.kv is not None
        assert second.core.kv.counters()["kv_blocks_loaded"] == 17
        await until(lambda: connector.is_at_baseline)


async def test_a_mute_connector_costs_the_wait_and_no_more() -> None:
    connector = FakeConnector(128, 32)
    async with engine(connector, "a", load_wait_s=0.02) as (one, link):
        await ask(one, "x", PROMPT)
        await until(lambda: len(connector.sealed) == 18)
        one.core.blocks.clear_cache()
        link.is_mute = True
        await ask(one, "y", PROMPT)
        assert one.core.kv is not None
        assert one.core.kv.counters()["kv_failed_loads"] == 1
        await until(lambda: one.core.blocks.num_free == 64)


async def test_a_connector_that_dies_and_comes_back_with_another_arena() -> None:
    connector = FakeConnector(128, 32)
    async with engine(connector, "a") as (one, link):
        await ask(one, "x", PROMPT)
        link.events.on_gone()
        await ask(one, "y", PROMPT[5:])
        connector.name, connector.sealed, connector.free = "c2", {}, list(range(128))
        connector.reserved.clear()
        connector._numbers.clear()
        link.connect()
        await ask(one, "z", PROMPT[9:])
        await until(lambda: len(connector.sealed) == 16)


async def test_a_reset_empties_the_tier_too() -> None:
    connector = FakeConnector(128, 32)
    async with engine(connector, "a") as (one, _):
        await ask(one, "x", PROMPT)
        await until(lambda: len(connector.sealed) == 18)
        one.handle(one.connect(RouterId("r")), ResetPrefixCache("1"))
        await until(lambda: not connector.sealed)
        assert connector.is_at_baseline
