"""Bodies on their way in: how they are read, how much of them is held, and the threads that work on them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.types import Message

from replica.errors import RouterBusyError
from router.app import create_app
from router.edge import Edge as SharedEdge
from router.http_errors import HttpError
from router.request_body import MAX_DISCARDED_BYTES, Body, BodyLimits, ClientGoneError, read_body
from router.tokenizer import Tokenizer
from tests.unit.asgi import post_scope, receiving
from tests.unit.http_fakes import FakeBackend, byte_level_bpe, settings, small_tokenizer

CHAT = b'{"messages": [{"role": "user", "content": "Say"}], "max_tokens": 2}'


def read(limits: BodyLimits, receive: Callable[[], Awaitable[Message]], *headers: tuple[bytes, bytes]) -> Body:
    return asyncio.run(read_body(post_scope("/", *headers), receive, limits))


def limits(max_body: int = 100, pending: int = 1000, free: int = 10, timeout_s: float = 60.0) -> BodyLimits:
    return BodyLimits(max_body, pending, free, timeout_s)


# ---- how a body arrives ----


def test_a_wrong_body_is_read_to_its_end_before_it_is_refused() -> None:
    """A client in the middle of an upload would see a reset instead of the reason."""
    for wrong in [(b"content-type", b"text/plain")], []:
        pieces = [b"x" * 90] * 3
        with pytest.raises(HttpError) as caught:
            read(limits(), receive := receiving(*pieces), *wrong)
        assert caught.value.rule.status == (415 if wrong else 413)
        with pytest.raises(TimeoutError):  # nothing of it is left to read
            asyncio.run(asyncio.wait_for(receive(), 0.001))


def test_a_body_without_end_is_413_before_its_end() -> None:
    piece = b"x" * (MAX_DISCARDED_BYTES // 4)
    with pytest.raises(HttpError) as caught:
        read(limits(), receiving(*[piece] * 6))
    assert caught.value.headers == {"connection": "close"}
    with pytest.raises(HttpError):  # and one that announces it, at once
        read(limits(), receiving(then="wait"), (b"content-length", str(MAX_DISCARDED_BYTES + 1).encode()))


@pytest.mark.parametrize("announced", [b"-1", b"abc", b"", b"\xff"])
def test_a_content_length_that_is_no_number_is_left_to_the_server(announced: bytes) -> None:
    assert read(limits(), receiving(b"{}"), (b"content-length", announced)).take() == b"{}"


def test_a_slow_body_is_408() -> None:
    pending = limits(timeout_s=0.001)
    with pytest.raises(HttpError) as caught:
        read(pending, receiving(b"x" * 50, then="wait"))
    assert (caught.value.rule.status, caught.value.rule.code) == (408, "request_timeout")
    assert caught.value.headers == {"connection": "close"}
    assert pending.num_pending_bytes == 0


def test_a_client_that_leaves_while_it_sends_leaves_nothing_behind() -> None:
    pending = limits()
    with pytest.raises(ClientGoneError):
        read(pending, receiving(b"x" * 50, then="http.disconnect"))
    assert pending.num_pending_bytes == 0


# ---- memory for bodies ----


def test_long_bodies_in_work_are_bounded_in_bytes_and_short_ones_pass() -> None:
    pending = limits(pending=100, free=10)
    first = read(pending, receiving(b"x" * 60, b"x" * 35))
    assert pending.num_pending_bytes == 85
    with pytest.raises(RouterBusyError, match="95 bytes") as caught:
        read(pending, receiving(b"x" * 20, b"x" * 20))
    assert caught.value.retry_after_s >= 1
    assert read(pending, receiving(b"x" * 10)).is_long is False
    second = read(pending, receiving(b"x" * 25))
    assert pending.num_pending_bytes == 100
    for body in (first, first, second):  # twice is once
        body.release()
    assert pending.num_pending_bytes == 0


# ---- threads ----


class SlowTokenizer(Tokenizer):
    """Encodes when the test lets it."""

    def __init__(self) -> None:
        super().__init__(byte_level_bpe(), small_tokenizer().chat_template)  # type: ignore[arg-type]
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)
        self.num_begun = 0

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        self.num_begun += 1
        self.begun.release()
        self.go_on.acquire()
        return super().encode(text, add_special_tokens)


async def until(condition: Callable[[], bool]) -> None:
    """Turns of the loop until it holds; fails instead of hanging."""
    async with asyncio.timeout(10):
        while True:
            if condition():
                return
            await asyncio.sleep(0)


async def post(app: Any, receive: Callable[[], Awaitable[Message]]) -> list[Message]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await app(post_scope(), receive, send)
    return sent


def test_who_leaves_while_waiting_for_a_thread_costs_nothing_more() -> None:
    async def run() -> None:
        slow, backend = SlowTokenizer(), FakeBackend()
        app = create_app(settings(on_loop_max_bytes=0, num_tokenizer_threads=1), slow, backend)
        stays = asyncio.create_task(post(app, receiving(CHAT)))
        await until(lambda: slow.num_begun == 1)
        leaves = asyncio.create_task(post(app, receiving(CHAT, then=None)))
        gone = asyncio.create_task(post(app, receiving_then_leaving(CHAT)))
        assert await gone == []
        assert slow.num_begun == 1
        slow.go_on.release(2)
        assert (await stays)[0]["status"] == (await leaves)[0]["status"] == 200
        assert len(backend.requests) == 2

    asyncio.run(run())


def receiving_then_leaving(body: bytes) -> Callable[[], Awaitable[Message]]:
    messages: list[Message] = [{"type": "http.request", "body": body}, {"type": "http.disconnect"}]

    async def receive() -> Message:
        return messages.pop(0) if len(messages) > 1 else messages[0]

    return receive


def test_threads_are_taken_in_turn_and_a_turn_ends_when_its_thread_does() -> None:
    async def run() -> None:
        edge = SharedEdge(
            settings(num_tokenizer_threads=1), small_tokenizer(), FakeBackend(), lambda: 0.0, lambda grammar: ""
        )
        running, may_end = threading.Event(), threading.Event()
        calls: list[int] = []

        def block() -> None:
            running.set()
            may_end.wait(10)

        first = asyncio.create_task(edge.compute(True, block))
        await until(running.is_set)
        second = asyncio.create_task(edge.compute(True, calls.append, 2))
        third = asyncio.create_task(edge.compute(True, calls.append, 3))
        await asyncio.sleep(0)
        first.cancel()  # its client left, but its thread works on
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        assert calls == []
        may_end.set()
        await third
        assert calls == [3]
        assert await edge.compute(False, lambda: threading.current_thread()) is threading.current_thread()
        assert await edge.compute(True, lambda: threading.current_thread()) is not threading.current_thread()
        with pytest.raises(ZeroDivisionError):
            await edge.compute(True, lambda: 1 // 0)
        edge.threads.shutdown()

    asyncio.run(run())


class LongBody:
    """Stands for one; can be watched."""


def test_a_body_that_is_refused_is_freed_without_the_garbage_collector() -> None:
    """The collector comes late where little garbage is made, and a flood is refused by the hundred MiB."""

    async def refused(edge: SharedEdge, body: LongBody) -> None:
        with contextlib.suppress(ZeroDivisionError):
            await edge.compute(True, lambda _: 1 // 0, body)

    async def run() -> None:
        edge = SharedEdge(settings(), small_tokenizer(), FakeBackend(), lambda: 0.0, lambda grammar: "")
        body = LongBody()
        is_alive = weakref.ref(body)
        await refused(edge, body)
        edge.threads.shutdown()
        await asyncio.sleep(0)  # callbacks of the futures
        del body
        assert is_alive() is None

    gc.collect()
    gc.disable()
    try:
        asyncio.run(run())
    finally:
        gc.enable()
