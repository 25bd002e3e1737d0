"""ASYNC. A model runner on a thread of its own, awaited from the event loop.

Thread or process was measured on two cores (`docs/architecture.md`, "Runner thread"). Torch and our kernels release the
GIL, so the loop sends results and takes requests while a step computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import queue
import threading
import time
from collections.abc import Callable, Mapping

from replica.fake_runner import FakeModelRunner
from replica.step import ModelRunner, RunnerInfo, StepPlan, StepResult

_Order = tuple[Callable[[], object], "asyncio.Future[object]"]


class RunnerThread:
    """Builds the runner on its thread and calls it only there: OpenMP pools belong to the thread that first used
    them.
    """

    is_lost = False
    counters: Mapping[str, float] = {}

    def __init__(self, factory: Callable[[], ModelRunner]) -> None:
        self.on_loss: Callable[[], object] = lambda: None
        self._factory = factory
        self._runner: ModelRunner | None = None
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="shoal-runner", daemon=True)

    async def start(self) -> RunnerInfo:
        """Load the model. Raises what the factory raises."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        await self._call(self._build)
        assert self._runner is not None
        return self._runner.info

    async def recover(self) -> None:
        """A thread cannot be lost."""

    def execute(self, plan: StepPlan) -> asyncio.Future[StepResult]:
        """Begin a step at once; the future gives its result or raises what the runner raised."""
        assert self._runner is not None, "start() first"
        runner = self._runner
        return self._call(lambda: runner.execute(plan))  # type: ignore[return-value]

    async def prepare_grammar(self, grammar: str) -> None:
        """On another thread, while steps go on. Raises InvalidRequestError."""
        assert self._runner is not None, "start() first"
        await self._loop.run_in_executor(None, self._runner.prepare_grammar, grammar)

    async def close(self) -> None:
        """Free the device and end the thread. Idempotent."""
        if self._thread.is_alive():
            if self._runner is not None:
                await self._call(self._runner.close)
            self._orders.put(None)
            await self._loop.run_in_executor(None, self._thread.join)

    def _build(self) -> None:
        self._runner = self._factory()

    def _call(self, function: Callable[[], object]) -> asyncio.Future[object]:
        future: asyncio.Future[object] = self._loop.create_future()
        self._orders.put((function, future))
        return future

    def _work(self) -> None:
        name_thread(b"shoal-runner")
        while (order := self._orders.get()) is not None:
            function, future = order
            try:
                outcome, failure = function(), None
            except BaseException as error:  # the waiter gets it, whatever it is
                outcome, failure = None, error
            try:
                self._loop.call_soon_threadsafe(_resolve, future, outcome, failure)
            except RuntimeError:
                return  # the loop is closed: nobody waits any more


def name_thread(name: bytes) -> None:
    """Name the calling thread for `ps -L` and `top -H`; OpenMP's threads inherit it, so the model's CPU time can be
    told from the rest.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(15, name, 0, 0, 0)  # PR_SET_NAME


def _resolve(future: asyncio.Future[object], outcome: object, failure: BaseException | None) -> None:
    if future.done():
        return
    if failure is not None:
        future.set_exception(failure)
    else:
        future.set_result(outcome)


class PacedRunner:
    """Makes a fake runner take the time that its cost model says. For live clusters without a model."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    @property
    def info(self) -> RunnerInfo:
        return self._runner.info

    def prepare_grammar(self, grammar: str) -> None:
        self._runner.prepare_grammar(grammar)

    def execute(self, plan: StepPlan) -> StepResult:
        started = time.monotonic()
        result = self._runner.execute(plan)
        rest = result.duration_s - (time.monotonic() - started)
        if rest > 0:
            time.sleep(rest)
        return result

    def close(self) -> None:
        self._runner.close()


class PacedRank(PacedRunner):
    """The same for one of several ranks."""

    def __init__(self, runner: FakeModelRunner) -> None:
        super().__init__(runner)
        self.adopt = runner.adopt
        self.begin_anew = runner.begin_anew
        self.tell_copies = runner.tell_copies
        self.held_bytes = runner.held_bytes
