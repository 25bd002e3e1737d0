"""ASYNC. The shell around `EngineCore`: the step loop, the links to routers, abort and drain.

Everything here runs on one event loop, so the core needs no lock; only the runner works elsewhere. While a step
computes, requests are accepted or refused at once, and the results of the step before leave for the routers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from replica.audit import audit
from replica.config import EngineConfig
from replica.engine_core import EngineCore
from replica.errors import EngineError, InvalidRequestError, RanksLostError
from replica.kv_events import KVEvents, KVLink, no_tier_because, slot_layout
from replica.kv_messages import KVSpace
from replica.kv_transfer import TransferLimits
from replica.messages import (
    HEARTBEAT_S,
    Abort,
    Ask,
    Continue,
    DownMessage,
    Draining,
    Explain,
    ResetDone,
    ResetPrefixCache,
    RouterId,
    StepOutput,
    Submit,
)
from replica.report_schedule import LOAD_INTERVAL_S, ReportSchedule
from replica.router_link import RouterLink
from replica.router_output import RouterOutput, RouterOutputs
from replica.step import RunnerInfo, StepPlan
from replica.step_runner import StepRunner

logger = logging.getLogger(__name__)

#: while a step takes longer than this the replica falls silent, so that routers place nothing more behind it
STALLED_STEP_S = 30.0
#: a step longer than this is called hung by `check_health`, and Serve replaces the replica
MAX_STEP_S = 120.0
#: after this many failed steps in a row the runner counts as broken: the loop ends, what is left moves elsewhere
MAX_FAILED_STEPS = 3
#: after its runner was mended a draining replica waits so long for what it gave back: on busy cores a router hears
#: after up to 0.8 s
COME_BACK_S = 2.0
#: so many seconds lie between two looks at the books
_AUDIT_BEATS = 60
#: the router lets nothing pass that takes it 2 s; with all cores busy it may be ten times as long here
GRAMMAR_S = 30.0
#: what `drain` allows for the end of the last step and for the last messages
_LAST_STEP_S = 5.0
_FLUSH_S = 2.0


class Engine:
    """One replica's engine. `start()` loads the model and begins to step; `drain()` ends it in good order."""

    def __init__(
        self,
        config: EngineConfig,
        runner: StepRunner,
        *,
        incarnation: str,
        clock: Callable[[], float] = time.time,
        kv_link: KVLink | None = None,
        transfer_limits: TransferLimits | None = None,
    ) -> None:
        """`kv_link`: the way to the KVConnector of the node, if there is one."""
        self._kv_link = kv_link
        cache = config.cache
        self._transfer_limits = transfer_limits or TransferLimits(cache.min_load_blocks, cache.load_wait_ms / 1e3)
        self._config = config
        self._runner = runner
        self._clock = clock
        self.incarnation = incarnation
        self.core: EngineCore
        self._links: dict[RouterId, RouterLink] = {}
        self._reports = ReportSchedule()
        self._wake = asyncio.Event()
        runner.on_loss = self._wake.set
        self._idle = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._load_timer: asyncio.TimerHandle | None = None
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._step_started_at: float | None = None
        self._failure: BaseException | None = None
        self._compilations: set[asyncio.Task[None]] = set()
        self._num_failed_steps = 0
        #: what was given back when the runner was lost has nowhere else to go if all replicas drain
        self._is_expecting = False
        self._expecting_timer: asyncio.TimerHandle | None = None
        self._is_draining = False
        #: when the runner was last free; None: it had nothing to do since
        self._last_step_end: float | None = None

    async def start(self) -> None:
        """Load the model, then step whenever there is work. Raises what loading raises."""
        try:
            info = await self._runner.start()
        except BaseException:
            await self._runner.close()  # some of its ranks may be there already
            raise
        self.core = EngineCore(self._config, info, transfer_limits=self._tier_limits(info))
        self.core.runner_counters = self._runner.counters
        if self.core.kv is not None and self._kv_link is not None:
            layout = slot_layout(self._config.cache)
            self._kv_link.start(
                KVSpace(info.model_fingerprint, info.block_size, info.block_bytes, info.kv_degree, layout),
                KVEvents(self.core.kv, self._clock, self._after_kv),
            )
        self._idle.set()
        self._tasks = [
            asyncio.create_task(self._run(), name="shoal-step-loop"),
            asyncio.create_task(self._heartbeat(), name="shoal-heartbeat"),
        ]

    def _tier_limits(self, info: RunnerInfo) -> TransferLimits | None:
        """None: without a KVConnector, for which there may be a reason."""
        if self._kv_link is None:
            mode = self._config.scheduler.preemption_mode
            if mode != "recompute":
                logger.warning("preemption_mode is %s without a KV connector: what is put back is computed again", mode)
            return None
        if (why := no_tier_because(info, self._config.cache)) is not None:
            logger.warning("the KV connector is not used, because %s", why)
            return None
        return self._transfer_limits

    def _after_kv(self) -> None:
        """The connector said something, came or went."""
        if self.core.kv is not None and self.core.kv.feed.is_owed(self._clock()):
            self._schedule_load()
        self._publish_ended()
        self._kick()

    def connect(self, router_id: RouterId, on_cut: Callable[[], object] = lambda: None) -> RouterLink:
        """A router's stream is open. A second one of the same router replaces the first and ends its requests."""
        if router_id in self._links:
            self.disconnect(self._links[router_id])
        link = self._links[router_id] = RouterLink(router_id, on_cut)
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
            if self.core.kv is not None:
                self.core.kv.feed.forget(link.router_id)
            self.core.abort_router(link.router_id, self._clock())
            self._kick()

    def handle(self, link: RouterLink, message: DownMessage) -> None:
        """One message from a router; ignored if a newer stream of the router has taken this one's place."""
        if self._links.get(link.router_id) is not link:
            return
        now = self._clock()
        match message:
            case Submit(request=request, epoch=epoch, permit=permit):
                reply = self.core.submit(link.router_id, request, epoch, now, permit)
                link.send(reply)
                if reply.refusal is not None:
                    self._reports.refused(link.router_id)
                for grammar in self.core.take_wanted_grammars():
                    self._compile(grammar)
            case Continue():
                self.core.go_on(link.router_id, message, now)
            case Abort(request_id=request_id, indices=indices):
                self.core.abort(link.router_id, request_id, now, indices)
                self._schedule_load()
            case Ask():
                self.core.ask(link.router_id, message)
                self._schedule_load()  # what went back is room for others
            case ResetPrefixCache(reset_id=reset_id):
                self.core.reset_prefix_cache()
                link.send(ResetDone(reset_id))
            case Explain():
                link.send(self.core.explain(message, now))
                return  # nothing has changed
        self._publish_ended()
        self._kick()

    def configure(self, config: EngineConfig, number: int) -> None:
        """Other rules from now on, also in the middle of a step. Of `config`, which is resolved, only `scheduler` and
        `admission` can change; `number` names it in what the replica tells.
        """
        self.core.configure(config.scheduler, config.admission)
        self.core.config_number = number
        self._schedule_load()  # routers go by the cap they were told last
        self._kick()

    def check_health(self) -> None:
        """Progress, not just life. Raises EngineError if the step loop ended or a step hangs."""
        if self._failure is not None:
            raise EngineError(f"the step loop ended: {self._failure!r}")
        if self._step_age_s() > MAX_STEP_S:
            raise EngineError(f"a step has been running for {self._step_age_s():.0f} s")

    async def drain(self, drain_s: float) -> None:
        """Refuse new requests, let short ones end for `drain_s`, hand the rest back as MOVED, flush. Idempotent.

        If the runner is being mended, that goes on, and what was given back may return and end here. Returns within
        `drain_s` and a few seconds whatever the runner does.
        """
        self._is_draining = True
        self.core.stop_admission(takes_returning=self._is_expecting)
        self._send_load()  # with the next word they think that nothing comes back here
        self._announce_draining(drain_s)
        is_stuck = self._failure is not None or self._step_age_s() > STALLED_STEP_S
        is_idle = await self._wait_idle(0.0 if is_stuck else drain_s)
        self._is_draining = self._is_expecting = False
        self.core.stop_admission()  # also to those that were to come back
        if not is_idle:
            self._publish(self.core.hand_over(self._clock()))
            await self._wait_idle(0.0 if is_stuck else _LAST_STEP_S)
        flushed = asyncio.gather(*(link.wait_flushed() for link in self._links.values()))
        try:
            await asyncio.wait_for(flushed, _FLUSH_S)
        except TimeoutError:
            logger.warning("drain: a router did not take its last messages within %s s", _FLUSH_S)

    async def close(self) -> None:
        """Stop stepping and free the device, whatever is running. Waits for the step that runs: if that hangs, Serve
        ends the process after `graceful_shutdown_timeout_s`.
        """
        tasks = [*self._tasks, *self._compilations]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for timer in (self._load_timer, self._deadline_timer, self._expecting_timer):
            if timer is not None:
                timer.cancel()
        for link in list(self._links.values()):
            link.close()
        await self._runner.close()
        if self._kv_link is not None:
            await self._kv_link.close()  # after the last copy

    def _compile(self, grammar: str) -> None:
        task = asyncio.create_task(self._compile_and_tell(grammar), name="shoal-grammar")
        self._compilations.add(task)
        task.add_done_callback(self._compilations.discard)

    async def _compile_and_tell(self, grammar: str) -> None:
        """Steps go on meanwhile."""
        error = None
        try:
            async with asyncio.timeout(GRAMMAR_S):
                await self._runner.prepare_grammar(grammar)
        except asyncio.CancelledError:
            raise
        except InvalidRequestError as invalid:
            error = str(invalid)
        except BaseException:  # a panic of the library is no Exception; nobody may wait for ever because of it
            logger.exception("a grammar could not be compiled; what waits for it is tried elsewhere")
            self._publish(self.core.grammar_failed(grammar, self._clock()))
            self._kick()
            return
        self._publish(self.core.grammar_compiled(grammar, error, self._clock()))
        self._kick()

    def _announce_draining(self, drain_s: float) -> None:
        for link in self._links.values():
            link.send(Draining(self._clock() + drain_s))

    def _step_age_s(self) -> float:
        started = self._step_started_at
        return 0.0 if started is None else time.monotonic() - started

    async def _wait_idle(self, timeout_s: float) -> bool:
        """False if there is still work, or more to come, after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.core.num_unfinished or self._is_expecting:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def _kick(self) -> None:
        self._wake.set()
        if not self.core.num_unfinished:
            self._idle.set()

    async def _run(self) -> None:
        outputs: RouterOutputs = {}
        try:
            while True:
                if self._runner.is_lost:
                    outputs = await self._mend_runner(outputs)
                began = time.perf_counter()
                plan = self.core.schedule(self._clock())
                planned_s = time.perf_counter() - began
                self._tell_seated()
                self._publish_ended()
                if plan is None:
                    self._last_step_end = None
                    self._publish(outputs)
                    outputs = {}
                    if not self.core.num_unfinished:
                        self._idle.set()
                    self._wake.clear()
                    await self._wake.wait()  # no deadline: whatever brings work calls `_kick`
                    continue
                outputs = await self._step(plan, outputs, planned_s)
                if self._runner.is_lost:
                    outputs = await self._mend_runner(outputs)
                if self._num_failed_steps >= MAX_FAILED_STEPS:
                    raise EngineError(f"the last {self._num_failed_steps} steps failed")
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            logger.exception("the step loop ended")
            self._failure = error
            self._end_of_loop(outputs)

    async def _step(self, plan: StepPlan, previous: RouterOutputs, planned_s: float) -> RouterOutputs:
        """Start `plan`, send what the step before gave while it computes, then take in its result. Planning took
        `planned_s`.
        """
        self._step_started_at = time.monotonic()
        began = self._last_step_end or time.perf_counter() - planned_s
        future = self._runner.execute(plan)
        self._publish(previous)
        try:
            result = await future  # no deadline: `check_health` sees a step that hangs, and Serve ends the process
        except RanksLostError:
            self._num_failed_steps += 1
            self._last_step_end = None
            return {}
        except Exception:
            logger.exception("step %d failed; its %d sequences end with an error", plan.step, len(plan.seq_ids))
            self._num_failed_steps += 1
            self._last_step_end = None
            return self.core.fail_step(self._clock())
        finally:
            self._step_started_at = None
        self._num_failed_steps = 0
        ended = self._last_step_end = time.perf_counter()
        outputs = self.core.update(plan, result, self._clock())
        scheduler_s = planned_s + time.perf_counter() - ended
        if not plan.waits_for_copies:  # the device did nothing
            self.core.step_times.add(result.duration_s, scheduler_s, ended - began)
        return outputs

    async def _mend_runner(self, unpublished: RouterOutputs) -> RouterOutputs:
        """Ranks are lost, and with them all KV. Whatever is here goes back to its routers, who place nothing here until
        they hear that the runner is whole again. Raises EngineError if it cannot be mended; the loop then ends.
        """
        self.core.pause()
        self._send_load()  # before anything is given back: it must not come here again
        self._publish(unpublished)
        if self._expecting_timer is not None:
            self._expecting_timer.cancel()  # of a loss just before: what it gave back may not have come yet
        self._is_expecting |= self.core.num_unfinished > 0
        self._publish(self.core.lose_runner(self._clock()))
        self._idle.set()
        if self._is_draining:
            self.core.stop_admission(takes_returning=self._is_expecting)
        await self._runner.recover()
        self.core.resume()
        self._tell_connector()
        self._send_load()
        if self._is_expecting:
            self._expecting_timer = asyncio.get_running_loop().call_later(COME_BACK_S, self._expect_nobody)
        return {}

    def _expect_nobody(self) -> None:
        self._is_expecting = False
        self._idle.set()

    def _end_of_loop(self, unpublished: RouterOutputs) -> None:
        """Nothing will be computed here any more: tell every router, and give everything back."""
        self.core.stop_admission()
        self._is_expecting = False
        self._announce_draining(0.0)
        self._publish(unpublished)
        self._publish(self.core.fail_step(self._clock()))
        self._publish(self.core.hand_over(self._clock()))
        self._idle.set()

    async def _heartbeat(self) -> None:
        while True:
            for _ in range(_AUDIT_BEATS):
                await asyncio.sleep(HEARTBEAT_S)
                if self._failure is None and self._step_age_s() < STALLED_STEP_S:
                    self._schedule_load()
                if self.core.kv is not None:
                    self.core.end_overdue(self._clock())
                    self._publish_ended()
            self._look_at_books()

    def _look_at_books(self) -> None:
        if found := audit(self.core, self._links):
            logger.error("the books of this replica do not agree: %s", dict(found))
            for what, count in found.items():
                self.core.num_leaks[what] = self.core.num_leaks.get(what, 0) + count

    def _publish(self, outputs: RouterOutputs) -> None:
        now = self._clock()
        if due := self._reports.due(now, outputs):
            load = self.core.load(now)
            for router_id in due:
                output = outputs.get(router_id, RouterOutput())
                events = self.core.tier_events(router_id, now)
                self._links[router_id].send(output.to_message(self.incarnation, load, events))
                self._reports.sent(router_id, now)
        if not self.core.num_unfinished:
            self._schedule_load()  # the last word about a load must not be a stale one

    def _publish_ended(self) -> None:
        """Tell of requests that were shed or overdue, and come back when the next one is: also in the middle of a long
        step, and while nothing can run. And tell who may have a place that is free now.
        """
        for router_id, grant in self.core.deal(self._clock()):
            self._links[router_id].send(grant)
        self._tell_connector()
        if ended := self.core.take_ended():
            self._publish(ended)
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
            self._deadline_timer = None
        if (deadline := self.core.next_deadline) is not None:
            delay_s = max(0.0, deadline - self._clock())
            self._deadline_timer = asyncio.get_running_loop().call_later(delay_s, self._end_overdue)

    def _tell_seated(self) -> None:
        for router_id, seated in self.core.take_seated():
            if (link := self._links.get(router_id)) is not None:
                link.send(seated)

    def _tell_connector(self) -> None:
        if self.core.kv is not None and self._kv_link is not None:
            for message in self.core.kv.take_messages():
                self._kv_link.send(message)

    def _end_overdue(self) -> None:
        self.core.end_overdue(self._clock())
        self._publish_ended()
        self._kick()

    def _schedule_load(self) -> None:
        if self._load_timer is None:
            self._load_timer = asyncio.get_running_loop().call_later(LOAD_INTERVAL_S, self._send_load)

    def _send_load(self) -> None:
        self._load_timer = None
        self._publish_ended()  # leases of permits end by themselves
        now = self._clock()
        load = self.core.load(now)
        for router_id, link in self._links.items():
            link.send(StepOutput(self.incarnation, load, kv_events=self.core.tier_events(router_id, now)))
            self._reports.sent(router_id, now)
        if self.core.kv is not None and self.core.kv.feed.is_owed(now):
            self._schedule_load()
