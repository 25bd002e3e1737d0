"""PURE. A replica in virtual time: the production `EngineCore` with a fake runner whose steps take what the cost model
says.
"""

from __future__ import annotations

from collections.abc import Callable

from cluster.simulation.event_queue import EventQueue, Rank
from cluster.simulation.sim_transfer import SimTransfers
from replica.config import EngineConfig
from replica.engine_core import EngineCore
from replica.fake_runner import FakeModelRunner
from replica.messages import (
    Abort,
    Ask,
    Continue,
    DownMessage,
    Draining,
    Explain,
    ReplicaId,
    Role,
    RouterId,
    Submit,
    UpMessage,
)
from replica.report_schedule import ReportSchedule
from replica.router_output import RouterOutput, RouterOutputs
from replica.step import StepPlan, StepResult

SendUp = Callable[[ReplicaId, RouterId, UpMessage], None]


class SimReplica:
    """Stands where `replica/engine.py` stands live. `send` delivers a message to a router after the network delay."""

    def __init__(
        self,
        replica_id: ReplicaId,
        config: EngineConfig,
        runner: FakeModelRunner,
        events: EventQueue,
        send: SendUp,
        role: Role = Role.BOTH,
        transfers: SimTransfers | None = None,
    ) -> None:
        self.role = role
        self._transfers = transfers
        self.replica_id = replica_id
        self.core = EngineCore(config, runner.info)
        self.core.scheduler.remote.has_loader = transfers is not None
        self.runner = runner
        self.is_alive = True
        self._events = events
        self._send = send
        self._reports = ReportSchedule()
        self._routers: list[RouterId] = []
        self._is_busy = False
        self._outputs: RouterOutputs = {}
        self._deadline_at: float | None = None

    def connect(self, router_id: RouterId) -> None:
        """A router opened its stream."""
        self._routers.append(router_id)
        self._report(router_id, RouterOutput())

    def receive(self, router_id: RouterId, message: DownMessage) -> None:
        """One message of a router."""
        if not self.is_alive:
            return
        now = self._events.now
        match message:
            case Submit(request=request, epoch=epoch, permit=permit):
                reply = self.core.submit(router_id, request, epoch, now, permit)
                if reply.refusal is not None:
                    self._reports.refused(router_id)
                self._send(self.replica_id, router_id, reply)
                if reply.refusal is None and request.kv_sink is not None and self._transfers is not None:
                    self._transfers.leg(self.replica_id, self.core, request.request_id, request.kv_sink.hand_over)
            case Continue():
                self.core.go_on(router_id, message, now)
            case Ask():
                self.core.ask(router_id, message)
            case Abort(request_id=request_id, indices=indices):
                self.core.abort(router_id, request_id, now, indices)
            case Explain():
                self._send(self.replica_id, router_id, self.core.explain(message, now))
        self._publish_ended()
        self._start_soon()

    def disconnect(self, router_id: RouterId) -> None:
        """The router's stream broke."""
        self._routers.remove(router_id)
        self._reports.forget(router_id)
        self.core.abort_router(router_id, self._events.now)
        self._outputs.pop(router_id, None)
        self._publish_ended()
        self._start_soon()

    def heartbeat(self) -> None:
        """What a living replica tells every router once a second."""
        self._publish_ended()
        for router_id in self._routers:
            self._report(router_id, RouterOutput())

    def drain(self, drain_s: float) -> None:
        """Take nothing more; what is left after `drain_s` is given back."""
        self.core.stop_admission()
        for router_id in self._routers:
            self._send(self.replica_id, router_id, Draining(self._events.now + drain_s))
        self._events.after(drain_s, Rank.FAULT, self._hand_over)

    def _hand_over(self) -> None:
        """Until nothing is left: what is in the step ends with it."""
        if not self.is_alive:
            return
        for router_id, output in self.core.hand_over(self._events.now).items():
            self._report(router_id, output)
        self._start_soon()

    def die(self) -> None:
        """As by `kill -9`: nothing is sent any more."""
        self.is_alive = False

    def _start_soon(self) -> None:
        if not self._is_busy:
            self._is_busy = True
            self._events.after(0.0, Rank.STEP_START, self._start_step)

    def _start_step(self) -> None:
        if not self.is_alive:
            return
        plan = self.core.schedule(self._events.now)
        self._tell_seated()
        self._publish_ended()
        self._publish()
        if plan is None:
            self._is_busy = False
            return
        result = self.runner.execute(plan)
        self._events.after(result.duration_s, Rank.STEP_END, lambda: self._end_step(plan, result))

    def _end_step(self, plan: StepPlan, result: StepResult) -> None:
        if not self.is_alive:
            return
        self._outputs = self.core.update(plan, result, self._events.now)
        if self._transfers is not None:
            self._transfers.step_ended(self.replica_id, self.core, self.runner)
        self.core.step_times.add(result.duration_s, 0.0, result.duration_s)
        self._events.after(0.0, Rank.STEP_START, self._start_step)

    def _tell_seated(self) -> None:
        for router_id, seated in self.core.take_seated():
            if self._transfers is not None:
                self._transfers.seated(self.core, self.runner, seated, self._start_soon)
            self._send(self.replica_id, router_id, seated)

    def _publish_ended(self) -> None:
        """Also in the middle of a step: come back when the next deadline passes. And who may have a free place now."""
        for router_id, grant in self.core.deal(self._events.now):
            self._send(self.replica_id, router_id, grant)
        for router_id, output in self.core.take_ended().items():
            self._report(router_id, output)
        deadline = self.core.next_deadline
        if deadline is not None and (self._deadline_at is None or deadline < self._deadline_at):
            self._deadline_at = max(deadline, self._events.now)
            self._events.at(self._deadline_at, Rank.TIMER, self._end_overdue)

    def _end_overdue(self) -> None:
        self._deadline_at = None
        if self.is_alive:
            self.core.end_overdue(self._events.now)
            self._publish_ended()
            self._start_soon()  # who waited for blocks of another replica goes on without them

    def _publish(self) -> None:
        outputs, self._outputs = self._outputs, {}
        for router_id in self._reports.due(self._events.now, outputs):
            self._report(router_id, outputs.get(router_id, RouterOutput()))

    def _report(self, router_id: RouterId, output: RouterOutput) -> None:
        now = self._events.now
        self._send(self.replica_id, router_id, output.to_message(self.replica_id, self.core.load(now)))
        self._reports.sent(router_id, now)
