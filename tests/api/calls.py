"""Ordinary calls of the API, and what to check of every answer."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import httpx

from tests.api.harness import ApiUnderTest
from tests.api.wire import parse_events

T = TypeVar("T")
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT = "Count: one two three"
#: what no client may read: names of our parts, of exceptions, of files
_INSIDES = ("Traceback", ".py", "Error(", "TypeError", "ValueError", "UnicodeEncodeError", "pydantic", "msgspec")


def complete(api: ApiUnderTest, **body: Any) -> httpx.Response:
    """A greedy completion of `PROMPT`, unless `body` says otherwise."""
    return api.http.post(COMPLETIONS, json={"prompt": PROMPT, "temperature": 0, **body})


def chat(api: ApiUnderTest, content: Any = "Say hello", **body: Any) -> httpx.Response:
    """A greedy chat of one user message, unless `body` says otherwise."""
    messages = [{"role": "user", "content": content}]
    return api.http.post(CHAT, json={"messages": messages, "temperature": 0, **body})


def answer(response: httpx.Response) -> dict[str, Any]:
    """The JSON of an answer with status 200."""
    assert response.status_code == 200, response.text[:500]
    assert response.headers["content-type"] == "application/json"
    return dict(response.json())


def text_of(response: httpx.Response) -> str:
    """The text of an answer's first choice."""
    (choice, *_) = answer(response)["choices"]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a streamed answer that ended well; checks framing and the end mark."""
    assert response.status_code == 200, response.text[:500]
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = parse_events(response.text)
    assert done == "[DONE]"
    assert all(isinstance(chunk, dict) and "error" not in chunk for chunk in chunks)
    return chunks


def pieces_of(chunks: list[dict[str, Any]], index: int = 0) -> list[str]:
    """The text of each chunk of one choice."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return [(choice["text"] if "text" in choice else choice["delta"].get("content")) or "" for choice in choices]


class AnyReply(Protocol):
    """`httpx.Response` or `wire.Reply`."""

    def json(self) -> Any: ...


def error_of(response: Any, status: int, param: str | None = None, code: str | None = None) -> str:
    """The response is an error as OpenAI shapes it and tells nothing of our insides. Returns its message."""
    found = response.status_code if isinstance(response, httpx.Response) else response.status
    body = response.json()
    assert found == status, (found, str(body)[:500])
    assert set(body) == {"error"}, body
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert isinstance(error["message"], str)
    assert 0 < len(error["message"]) <= 1000
    assert not any(word in error["message"] for word in _INSIDES), error["message"]
    if param is not None:
        assert error["param"] == param, error
    if code is not None:
        assert error["code"] == code, error
    return str(error["message"])


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """What `call` gives, and the seconds it took."""
    started = time.monotonic()
    result = call()
    return result, time.monotonic() - started


@contextmanager
def watched_health(api: ApiUnderTest) -> Iterator[list[float]]:
    """Ask /health without a pause, from a thread, while the body runs; seconds of each call."""
    seconds: list[float] = []
    first, stop = threading.Event(), threading.Event()

    def watch() -> None:
        with api.client() as client:
            while not stop.is_set():
                response, took = timed(lambda: client.get("/health"))
                assert response.status_code == 200
                seconds.append(took)
                first.set()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        assert first.wait(10)
        yield seconds
    finally:
        stop.set()
        thread.join(30)


def cpu_timed(call: Callable[[], T]) -> tuple[T, float]:
    """What `call` gives, and the seconds of CPU that this process used meanwhile, server and client: as many on a busy
    machine.
    """
    started = time.process_time()
    result = call()
    return result, time.process_time() - started


@contextmanager
def watched_loop(api: ApiUnderTest) -> Iterator[list[float]]:
    """Seconds of CPU of each callback of the server's event loop: how long the longest one keeps all others waiting."""
    seconds: list[float] = []
    handles: Any = asyncio.Handle
    loop, run = api.peek(asyncio.get_running_loop), handles._run

    def timed_run(handle: Any) -> None:
        if handle._loop is not loop:
            run(handle)
            return
        started = time.thread_time()
        run(handle)
        seconds.append(time.thread_time() - started)

    handles._run = timed_run
    try:
        yield seconds
    finally:
        handles._run = run


def resident_mib() -> float:
    """Memory in use of this process, which holds router, replica and client, in MiB.

    What is free goes back to the kernel first: how much of it an allocator keeps depends on the tests before.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / (1 << 20)
