"""Who begins in which turn of the event loop."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Message

from replica.errors import QueueFullError
from router.app import create_app
from router.app_settings import AppSettings
from router.entrance import Entrance
from tests.unit.asgi import post_scope, receiving
from tests.unit.http_fakes import FakeBackend, small_tokenizer

SETTINGS = AppSettings(served_model_names=("model",), max_model_len=100, vocab_size=400)


class Crowd:
    """Requests that enter as soon as they may, and a stream that has something to do in every turn."""

    def __init__(self, per_turn: int = 1) -> None:
        self.entrance = Entrance(per_turn)
        self.begun: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []

    def come(self, *tenants: str) -> list[asyncio.Task[None]]:
        tasks = [asyncio.create_task(self._request(tenant)) for tenant in tenants]
        self._tasks += tasks
        return tasks

    async def _request(self, tenant: str) -> None:
        await self.entrance.enter(tenant)
        self.begun.append(tenant)

    async def turns(self, count: int) -> list[int]:
        """How many began in each of so many turns."""
        had = []
        for _ in range(count):
            before = len(self.begun)
            await asyncio.sleep(0)
            had.append(len(self.begun) - before)
        return had

    async def all_in(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)


def test_one_begins_in_a_turn_however_many_come_together() -> None:
    async def run() -> None:
        crowd = Crowd()
        crowd.come(*["a"] * 64)
        had = await crowd.turns(80)
        assert max(had) == 1
        assert sum(had) == 64
        assert crowd.entrance.num_waiting == 0

    asyncio.run(run())


def test_two_in_a_turn_if_so_many_may() -> None:
    async def run() -> None:
        crowd = Crowd(per_turn=2)
        crowd.come(*["a"] * 10)
        had = await crowd.turns(20)
        assert max(had) == 2
        assert sum(had) == 10

    asyncio.run(run())


def test_who_comes_alone_begins_at_once() -> None:
    async def run() -> None:
        entrance = Entrance()
        for _ in range(3):
            begins = entrance.enter("a")
            try:
                begins.send(None)
            except StopIteration:
                pass
            else:
                raise AssertionError("it had to wait, though nobody else came in this turn")
            await asyncio.sleep(0)

    asyncio.run(run())


def test_tenants_begin_in_rotation() -> None:
    async def run() -> None:
        crowd = Crowd()
        crowd.come(*["crowd"] * 6, "b", "c", "b")
        await crowd.all_in()
        assert crowd.begun == ["crowd", "crowd", "b", "c", "crowd", "b", "crowd", "crowd", "crowd"]

    asyncio.run(run())


def test_who_leaves_costs_nobody_a_turn() -> None:
    async def run() -> None:
        crowd = Crowd()
        tasks = crowd.come(*["a"] * 5)
        await asyncio.sleep(0)
        for task in tasks[1:4]:
            task.cancel()
        await crowd.turns(3)
        assert len(crowd.begun) == 2
        await crowd.all_in()
        assert crowd.entrance.num_waiting == 0

    asyncio.run(run())


def test_when_nobody_waits_the_loop_is_left_alone() -> None:
    async def run() -> None:
        crowd = Crowd()
        crowd.come("a", "a")
        await crowd.turns(6)
        loop, num_calls = asyncio.get_running_loop(), 0
        call_soon = loop.call_soon

        def counted(callback: Any, *args: Any, **kwargs: Any) -> asyncio.Handle:
            nonlocal num_calls
            num_calls += callback == crowd.entrance._turn
            return call_soon(callback, *args, **kwargs)

        loop.call_soon = counted  # type: ignore[method-assign,assignment]
        await crowd.turns(3)
        assert num_calls == 0
        crowd.come("a")
        await crowd.turns(3)
        assert num_calls > 0

    asyncio.run(run())


def test_of_a_crowd_that_is_refused_one_is_answered_in_a_turn() -> None:
    """The whole application; the server has handed over all of them in one turn."""

    async def run() -> None:
        backend = FakeBackend()
        backend.full = QueueFullError("full", 2.0)
        app = create_app(SETTINGS, small_tokenizer(), backend)
        statuses: list[int] = []

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        tasks = [
            asyncio.create_task(app(post_scope("/v1/completions"), receiving(b'{"prompt": "x"}'), send))  # type: ignore[arg-type]
            for _ in range(32)
        ]
        most = 0
        while len(statuses) < 32:
            before = len(statuses)
            await asyncio.sleep(0)
            most = max(most, len(statuses) - before)
        await asyncio.gather(*tasks)
        assert statuses == [503] * 32
        assert most == 1

    asyncio.run(run())
