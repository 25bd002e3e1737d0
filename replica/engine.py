"""ASYNC. The shell around `EngineCore`: the step loop, the links to routers, abort and drain.

Everything here runs on one event loop, so the core needs no lock; only the runner works elsewhere. While a step
computes, requests are accepted or refused at once, and the results of the step before leave for the routers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

from replica.config import EngineConfig
from replica.engine_core import EngineCore, RouterOutputs
from replica.errors import EngineError
from replica.messages import (
    Abort,
    DownMessage,
    Draining,
    RouterId,
    StepOutput,
    Submit,
    UpMessage,
    encode,
)
from replica.report_policy import LOAD_INTERVAL_S, ReportPolicy
from replica.runner_process import RunnerProcess
from replica.runner_thread import RunnerThread
from replica.step import StepPlan, StepResult

logger = logging.getLogger(__name__)

#: every router hears from the replica at least this often, so that silence means something
HEARTBEAT_S = 1.0
#: a link with more unsent messages than this belongs to a router that does not read; it is cut rather than buffered for
#: ever
MAX_UNSENT_MESSAGES = 20_000
#: a step longer than this is called hung by `check_health`
MAX_STEP_S = 120.0
#: after this many failed steps in a row the device is taken for broken and the replica for unhealthy
MAX_FAILED_STEPS = 3


class RouterLink:
    """The way up to one router: a queue that the engine fills without ever waiting and a gRPC handler drains."""

    def __init__(self, router_id: RouterId) -> None:
        self.router_id = router_id
        self._unsent: deque[bytes] = deque()
        self._ready = asyncio.Event()
        self._flushed = asyncio.Event()
        self._closed = False

    def send(self, message: UpMessage) -> None:
        self._unsent.append(encode(message))
        self._flushed.clear()
        if len(self._unsent) > MAX_UNSENT_MESSAGES:
            logger.warning("router %s does not read; its link is cut", self.router_id)
            self._closed = True
        self._ready.set()

    def close(self) -> None:
        self._closed = True
        self._ready.set()

    async def wait_flushed(self) -> None:
        """Until the transport has taken everything there is."""
        await self._flushed.wait()

    async def messages(self) -> AsyncIterator[bytes]:
        """Encoded messages in order, until the link is closed and empty."""
        while True:
            while self._unsent:
                yield self._unsent.popleft()
            self._flushed.set()
            if self._closed:
                return
            self._ready.clear()
            await self._ready.wait()


class Engine:
    """One replica's engine. `start()` loads the model and begins to step; `drain()` ends it in good order."""

    def __init__(
        self,
        config: EngineConfig,
        runner: RunnerThread | RunnerProcess,
        *,
        incarnation: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._runner = runner
        self._clock = clock
        self.incarnation = incarnation
        self.core: EngineCore
        self._links: dict[RouterId, RouterLink] = {}
        self._reports = ReportPolicy()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._load_timer: asyncio.TimerHandle | None = None
        self._step_started_at: float | None = None
        self._failure: BaseException | None = None
        self._num_failed_steps = 0

    async def start(self) -> None:
        """Load the model, then step whenever there is work. Raises what loading raises."""
        self.core = EngineCore(self._config, await self._runner.start())
        self._idle.set()
        self._tasks = [
            asyncio.create_task(self._run(), name="shoal-step-loop"),
            asyncio.create_task(self._heartbeat(), name="shoal-heartbeat"),
        ]

    def connect(self, router_id: RouterId) -> RouterLink:
        """A router's stream is open. A second one of the same router replaces the first and ends its requests."""
        if router_id in self._links:
            self.disconnect(self._links[router_id])
        link = self._links[router_id] = RouterLink(router_id)
        now = self._clock()
        link.send(StepOutput(self.incarnation, self.core.load(now)))
        self._reports.sent(router_id, now)
        return link

    def disconnect(self, link: RouterLink) -> None:
        """The stream broke: the router's requests have nobody to go to."""
        link.close()
        if self._links.get(link.router_id) is link:
            del self._links[link.router_id]
            self._reports.forget(link.router_id)
            self.core.abort_router(link.router_id, self._clock())
            self._kick()

    def handle(self, link: RouterLink, message: DownMessage) -> None:
        """One message from a router."""
        now = self._clock()
        match message:
            case Submit(request=request, epoch=epoch):
                reply = self.core.submit(link.router_id, request, epoch, now)
                link.send(reply)
                if reply.refusal is not None:
                    self._reports.refused(link.router_id)
            case Abort(request_id=request_id, indices=indices):
                self.core.abort(link.router_id, request_id, now, indices)
                self._schedule_load()
        self._kick()

    def check_health(self) -> None:
        """Progress, not just life. Raises EngineError if the step loop died or a step hangs."""
        if self._failure is not None:
            raise EngineError(f"the step loop ended: {self._failure!r}")
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            raise EngineError(f"the last {self._num_failed_steps} steps failed")
        started = self._step_started_at
        if started is not None and time.monotonic() - started > MAX_STEP_S:
            raise EngineError(f"a step has been running for {time.monotonic() - started:.0f} s")

    async def drain(self, drain_s: float) -> None:
        """Refuse new requests, let short ones end for `drain_s`, hand the rest back as MOVED, flush. Idempotent."""
        self.core.stop_admission()
        deadline = self._clock() + drain_s
        for link in self._links.values():
            link.send(Draining(deadline))
        try:
            async with asyncio.timeout(drain_s):
                await self._wait_idle()
        except TimeoutError:
            self._publish(self.core.hand_over(self._clock()))
            await self._wait_idle()
        try:
            async with asyncio.timeout(2):
                await asyncio.gather(*(link.wait_flushed() for link in self._links.values()))
        except TimeoutError:
            logger.warning("drain: a router did not take its last messages within 2 s")

    async def close(self) -> None:
        """Stop stepping and free the device, whatever is running."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in list(self._links.values()):
            link.close()
        await self._runner.close()

    async def _wait_idle(self) -> None:
        while self.core.num_unfinished:
            self._idle.clear()
            await self._idle.wait()

    def _kick(self) -> None:
        self._wake.set()
        if not self.core.num_unfinished:
            self._idle.set()

    async def _run(self) -> None:
        try:
            outputs: RouterOutputs = {}
            while True:
                plan = self.core.schedule(self._clock())
                if plan is None:
                    self._publish(outputs)
                    outputs = {}
                    if not self.core.num_unfinished:
                        self._idle.set()
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                outputs = await self._step(plan, outputs)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            logger.exception("the step loop ended")
            self._failure = error
            self._publish(self.core.fail_step(self._clock()))

    async def _step(self, plan: StepPlan, previous: RouterOutputs) -> RouterOutputs:
        """Start `plan`, send what the step before gave while it computes, then take in its result."""
        self._step_started_at = time.monotonic()
        future = self._runner.execute(plan)
        self._publish(previous)
        try:
            result: StepResult = await future
        except Exception:
            logger.exception("step %d failed; its %d sequences end with an error", plan.step, len(plan.seq_ids))
            self._num_failed_steps += 1
            return self.core.fail_step(self._clock())
        finally:
            self._step_started_at = None
        self._num_failed_steps = 0
        return self.core.update(plan, result, self._clock())

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._schedule_load()

    def _publish(self, outputs: RouterOutputs) -> None:
        now = self._clock()
        if due := self._reports.due(now, outputs):
            load = self.core.load(now)
            for router_id in due:
                self._links[router_id].send(StepOutput(self.incarnation, load, outputs.get(router_id, [])))
                self._reports.sent(router_id, now)
        if not self.core.num_unfinished:
            self._schedule_load()  # the last word about a load must not be a stale one

    def _schedule_load(self) -> None:
        if self._load_timer is None:
            self._load_timer = asyncio.get_running_loop().call_later(LOAD_INTERVAL_S, self._send_load)

    def _send_load(self) -> None:
        self._load_timer = None
        now = self._clock()
        load = self.core.load(now)
        for router_id, link in self._links.items():
            link.send(StepOutput(self.incarnation, load))
            self._reports.sent(router_id, now)
