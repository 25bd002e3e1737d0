"""ASYNC. What all endpoints of one HTTP application share: settings, clock, metrics, threads for long bodies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.types import Receive, Scope

from router.app_settings import AppSettings
from router.backend import Backend
from router.entrance import Entrance
from router.http_metrics import HttpMetrics
from router.prepare import TextCodec
from router.request_body import Body, BodyLimits, read_body
from router.structured import ReasonAgainst
from router.tenant_desk import TenantDesk

Result = TypeVar("Result")


#: how much less the tokenizer's threads matter than everything that streams, in steps of `nice`
_NICE = 10


def _yield_to_the_loop() -> None:
    """On Linux a priority belongs to a thread: long prompts get the CPU that streams leave."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


class Edge:
    """What all endpoints share."""

    def __init__(
        self,
        settings: AppSettings,
        codec: TextCodec,
        backend: Backend,
        clock: Callable[[], float],
        reason_against: ReasonAgainst,
        tenants: TenantDesk | None = None,
    ) -> None:
        self.settings = settings
        self.reason_against = reason_against
        self.codec = codec
        self.backend = backend
        #: monotonic seconds, for latencies
        self.clock = clock
        self.metrics = HttpMetrics(settings.metrics_prefix, settings.router_name)
        self.tenants = TenantDesk() if tenants is None else tenants
        self.metrics.watch_tenants(self.tenants)
        self.started_s = int(time.time())
        self._bodies = BodyLimits(
            settings.max_body_bytes,
            settings.max_pending_body_bytes,
            settings.on_loop_max_bytes,
            settings.body_timeout_s,
        )
        self.metrics.watch_body_bytes(lambda: self._bodies.num_pending_bytes)
        self.threads = ThreadPoolExecutor(
            settings.num_tokenizer_threads, thread_name_prefix="tokenizer", initializer=_yield_to_the_loop
        )
        self.entrance = Entrance()
        self._turns = asyncio.Semaphore(settings.num_tokenizer_threads)

    def look_at_priorities(self, policy: str) -> None:
        """`policy` is what replicas sort by from now on."""
        self.settings = self.settings.model_copy(update={"policy": policy})

    async def read(self, scope: Scope, receive: Receive) -> Body:
        """See `read_body`."""
        return await read_body(scope, receive, self._bodies)

    async def compute(self, is_long: bool, function: Callable[..., Result], *args: Any) -> Result:
        """Call `function` here when it is quick, else in a thread, in turn. A caller that is cancelled while it waits
        leaves nothing behind; a thread that has begun goes on, and its turn ends when it does.
        """
        if not is_long:
            return function(*args)
        # no deadline: what a thread does is bounded by the body's length (`max_body_bytes`), a grammar by its worker's
        # 2 s, and how many wait here by `max_pending_body_bytes`
        await self._turns.acquire()
        try:
            future = asyncio.get_running_loop().run_in_executor(self.threads, function, *args)
        except BaseException:
            self._turns.release()
            raise
        future.add_done_callback(self._end_turn)
        try:
            return await asyncio.shield(future)
        finally:
            # a cycle through the exception and its traceback would keep `args`, a long body, until the collector comes
            del future, args

    def _end_turn(self, future: asyncio.Future[Any]) -> None:
        self._turns.release()
        if not future.cancelled():
            future.exception()  # whoever asked may be gone: it is no news then
