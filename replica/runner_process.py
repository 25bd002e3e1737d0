"""ASYNC. A model runner in a process of its own: same interface as `RunnerThread`.

The model then shares no interpreter with the event loop; each plan and result crosses a pipe.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
from collections import deque
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection

import msgspec

from replica.errors import EngineError, InvalidRequestError
from replica.runner_thread import name_thread
from replica.step import ModelRunner, RunnerInfo, StepPlan, StepResult

_plan_decoder = msgspec.msgpack.Decoder(StepPlan)
_PLAN, _GRAMMAR = b"p", b"g"
_result_decoder = msgspec.msgpack.Decoder(StepResult)


class RunnerProcess:
    """Spawns the runner; awaits it from the event loop through the pipe's descriptor, without a thread."""

    is_lost = False
    counters: Mapping[str, float] = {}

    def __init__(self, factory: Callable[[], ModelRunner]) -> None:
        self.on_loss: Callable[[], object] = lambda: None
        context = multiprocessing.get_context("spawn")
        self._pipe, far_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(factory, far_end), daemon=True)
        self._far_end = far_end
        self._waiting: deque[asyncio.Future[bytes]] = deque()
        self._grammars: deque[tuple[str, asyncio.Future[bytes]]] = deque()

    async def start(self) -> RunnerInfo:
        """Load the model. Raises EngineError with the far side's sentence."""
        self._loop = asyncio.get_running_loop()
        self._process.start()
        self._far_end.close()
        self._loop.add_reader(self._pipe.fileno(), self._on_readable)
        return msgspec.msgpack.decode(await self._expect(), type=RunnerInfo)

    async def recover(self) -> None:
        """It is not mended: its steps fail, and Serve replaces the replica."""

    def execute(self, plan: StepPlan) -> asyncio.Future[StepResult]:
        """Begin a step at once; the future gives its result or raises EngineError."""
        # the future is in place before the answer can be: uvloop may call the reader before it starts a new task
        answer = self._expect()
        try:
            self._pipe.send_bytes(_PLAN + msgspec.msgpack.encode(plan))
        except OSError:
            self._lose()
        return asyncio.ensure_future(_decoded(answer))

    async def prepare_grammar(self, grammar: str) -> None:
        """In turn with the steps: the far side does one thing at a time. Raises InvalidRequestError."""
        done: asyncio.Future[bytes] = self._loop.create_future()
        self._grammars.append((grammar, done))
        self._send_next_grammar()
        await done

    def _send_next_grammar(self) -> None:
        """Only when the far side waits for orders: it then reads at once, however long the grammar is. In the middle of
        a step both sides could wait for each other to read.
        """
        if self._waiting or not self._grammars:
            return
        grammar, done = self._grammars.popleft()
        self._waiting.append(done)
        try:
            self._pipe.send_bytes(_GRAMMAR + grammar.encode())
        except OSError:
            self._lose()

    async def close(self) -> None:
        """End the process. Idempotent."""
        if self._pipe.closed:
            return
        if self._process.is_alive():
            with contextlib.suppress(OSError):
                self._pipe.send_bytes(b"")
            await self._loop.run_in_executor(None, self._process.join, 10)
            self._process.kill()
        self._loop.remove_reader(self._pipe.fileno())
        self._pipe.close()

    def _expect(self) -> asyncio.Future[bytes]:
        future: asyncio.Future[bytes] = self._loop.create_future()
        self._waiting.append(future)
        return future

    def _lose(self) -> None:
        while self._waiting or self._grammars:
            future = self._waiting.popleft() if self._waiting else self._grammars.popleft()[1]
            if not future.done():
                future.set_exception(EngineError("the runner process is gone"))

    def _on_readable(self) -> None:
        try:
            data = self._pipe.recv_bytes()
        except (EOFError, OSError):
            self._loop.remove_reader(self._pipe.fileno())
            self._lose()
            return
        future = self._waiting.popleft()
        self._send_next_grammar()
        if future.done():
            return
        if data[:1] == b"!":
            future.set_exception(EngineError(data[1:].decode()))
        elif data[:1] == b"?":
            future.set_exception(InvalidRequestError(data[1:].decode()))
        else:
            future.set_result(data[1:])


async def _decoded(answer: asyncio.Future[bytes]) -> StepResult:
    return _result_decoder.decode(await answer)


def _serve(factory: Callable[[], ModelRunner], pipe: Connection) -> None:
    """The far side: build, then one order after the other. `=` leads a result, `!` the text of an error, `?` that of a
    client's mistake.
    """
    name_thread(b"shoal-runner")
    try:
        runner = factory()
        pipe.send_bytes(b"=" + msgspec.msgpack.encode(runner.info))
    except Exception as error:
        pipe.send_bytes(b"!" + str(error).encode())
        return
    while True:
        try:
            data = pipe.recv_bytes()
        except EOFError:
            break
        if not data:
            break
        try:
            if data[:1] == _GRAMMAR:
                runner.prepare_grammar(data[1:].decode())
                pipe.send_bytes(b"=")
            else:
                pipe.send_bytes(b"=" + msgspec.msgpack.encode(runner.execute(_plan_decoder.decode(data[1:]))))
        except InvalidRequestError as error:
            pipe.send_bytes(b"?" + str(error).encode())
        except Exception as error:
            pipe.send_bytes(b"!" + repr(error).encode())
    runner.close()
