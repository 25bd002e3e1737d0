"""A slow reader holds a bounded number of bytes, under both kinds of server."""

from __future__ import annotations

import asyncio
import pickle
import random
from collections import deque
from typing import Any

import pytest
from starlette.types import Message

from router.stream_sender import MARK_BYTES, PIECE_BYTES, StreamSender

PIECE = b"x" * 1000


class PicklingServer:
    """As Ray Serve: `send` never waits; messages lie in a queue until the test takes them all, by pickling."""

    def __init__(self) -> None:
        self.queue: deque[Message] = deque()
        self.received: list[Message] = []
        #: Serve's generator holds on to the batch it gave away last
        self.batch: list[Message] = []

    async def send(self, message: Message) -> None:
        self.queue.append(message)

    @property
    def num_waiting_bytes(self) -> int:
        return sum(len(message["body"]) for message in self.queue)

    def take(self) -> None:
        if not self.queue:
            return
        self.batch = list(self.queue)
        self.queue.clear()
        self.received += pickle.loads(pickle.dumps(self.batch))


class WaitingServer:
    """As uvicorn: `send` waits while the connection takes nothing, and keeps no message."""

    def __init__(self) -> None:
        self.is_writable = asyncio.Event()
        self.sizes: list[int] = []

    async def send(self, message: Message) -> None:
        await self.is_writable.wait()
        self.sizes.append(len(message["body"]))


async def until_idle(task: asyncio.Task[Any]) -> None:
    for _ in range(50):
        if task.done():
            return
        await asyncio.sleep(0)


def test_writer_waits_for_a_server_that_queues_without_bound() -> None:
    async def run() -> None:
        server = PicklingServer()
        sender = StreamSender(server.send)

        async def write_all() -> None:
            for number in range(500):
                await sender.write(PIECE + b"%d" % number)

        task = asyncio.create_task(write_all())
        most = 0
        while not task.done():
            await until_idle(task)
            most = max(most, server.num_waiting_bytes)
            server.take()
            await asyncio.sleep(0)
        server.take()
        assert MARK_BYTES < most <= 2 * MARK_BYTES + len(PIECE) + 3
        assert [message["body"] for message in server.received] == [PIECE + b"%d" % number for number in range(500)]
        assert {type(message) for message in server.received} == {dict}
        assert all(message["more_body"] for message in server.received)

    asyncio.run(run())


def test_server_that_waits_itself_is_not_waited_for_twice() -> None:
    async def run() -> None:
        server = WaitingServer()
        sender = StreamSender(server.send)

        async def write_all() -> None:
            for _ in range(300):
                await sender.write(PIECE)

        task = asyncio.create_task(write_all())
        await until_idle(task)
        assert (task.done(), server.sizes) == (False, [])
        server.is_writable.set()
        await asyncio.wait_for(task, 5)
        assert server.sizes == [len(PIECE)] * 300

    asyncio.run(run())


@pytest.mark.parametrize("num_bytes", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 40 * PIECE_BYTES + 7])
def test_long_answer_goes_in_pieces(num_bytes: int) -> None:
    """Serve's gRPC takes messages of at most 4 MiB, and sends all that waits as one."""

    async def run() -> None:
        server = PicklingServer()
        data = random.Random(7).randbytes(num_bytes)
        task = asyncio.ensure_future(StreamSender(server.send).end(data))
        most = 0
        while not task.done():
            await until_idle(task)
            most = max(most, server.num_waiting_bytes)
            server.take()
            await asyncio.sleep(0)
        server.take()
        *bodies, last = server.received
        assert b"".join(message["body"] for message in server.received) == data
        assert all(message["more_body"] and len(message["body"]) <= PIECE_BYTES for message in bodies)
        assert not last.get("more_body")
        assert (num_bytes > PIECE_BYTES) == bool(bodies)
        assert most <= 2 * MARK_BYTES + PIECE_BYTES

    asyncio.run(run())


def test_long_chunk_goes_in_pieces() -> None:
    async def run() -> None:
        server = WaitingServer()
        server.is_writable.set()
        await StreamSender(server.send).write(b"x" * (3 * PIECE_BYTES + 1))
        assert server.sizes == [PIECE_BYTES] * 3 + [1]

    asyncio.run(run())


def test_short_stream_is_plain_messages() -> None:
    async def run() -> None:
        server = PicklingServer()
        sender = StreamSender(server.send)
        for _ in range(MARK_BYTES // len(PIECE)):
            await sender.write(PIECE)
        assert {type(message) for message in server.queue} == {dict}

    asyncio.run(run())


def test_client_that_leaves_ends_the_wait() -> None:
    async def run() -> None:
        server = PicklingServer()
        sender = StreamSender(server.send)

        async def write_forever() -> None:
            while True:
                await sender.write(PIECE)

        task = asyncio.create_task(write_forever())
        await until_idle(task)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        server.queue.clear()  # dropped unread, as Serve does when the client is gone

    asyncio.run(run())


def test_message_that_outlives_the_loop_does_no_harm() -> None:
    server = PicklingServer()

    async def run() -> None:
        sender = StreamSender(server.send)
        for _ in range(2 * MARK_BYTES // len(PIECE)):
            await sender.write(PIECE)

    asyncio.run(run())
    server.queue.clear()
