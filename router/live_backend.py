"""ASYNC. The router's shell: carries out what `Dispatcher` decides, over one gRPC stream per replica."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping

from replica.errors import DeadlineExceededError, NoReplicaError, QueueFullError, ReplicaLostError, ShoalError
from replica.messages import (
    HEARTBEAT_S,
    Abort,
    Continue,
    Draining,
    Explained,
    FinishReason,
    GenerateRequest,
    Grant,
    ReplicaId,
    RequestId,
    ResetDone,
    Role,
    RouterId,
    Seated,
    SequenceOutput,
    StepOutput,
    Submit,
    SubmitReply,
    UpMessage,
)
from router.audit import audit
from router.backend import Health
from router.breakdown import breakdown
from router.cache_reset import CacheResets
from router.engine_metrics import RouterFigures, render_metrics
from router.instructions import Dispatch, DispatchPrefill, Fail, Instruction, Refuse, SendAbort, SendContinue
from router.journal import FAILED, REFUSED
from router.kv_tiers import KVTiers
from router.live_answers import LiveAnswers
from router.live_stream import LiveStream
from router.outcomes import failure_error, final_error, refusal_error
from router.pairing import PairingDispatcher
from router.prefill_legs import first_tokens, leg_of
from router.replica_client import ReplicaClient
from router.replica_view import MAX_SILENCE_S, ReplicaView
from router.sequence_names import SequenceNames

logger = logging.getLogger(__name__)

#: so many seconds lie between two looks at the books
_AUDIT_BEATS = 60


class LiveBackend:
    """Implements `router.backend.Backend`. Everything runs on the event loop that made it."""

    def __init__(
        self,
        dispatcher: PairingDispatcher,
        router_id: RouterId,
        model_name: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        token: bytes = b"",
    ) -> None:
        """`token`: of the cluster; replicas want a proof of it. Empty: none is shown."""
        self.dispatcher = dispatcher
        self.journal = dispatcher.journal
        self.router_id = router_id
        #: names the configuration: equal numbers, equal live values
        self.config_number = 0
        self._model_name = model_name
        self._token = token
        self._clock = clock
        #: seconds since the epoch: what order keys and deadlines are told in
        self._wall_clock = wall_clock
        self._clients: dict[ReplicaId, ReplicaClient] = {}
        self._known: dict[ReplicaId, Mapping[str, str]] = {}
        self._streams: dict[RequestId, LiveStream] = {}
        self._resets = CacheResets(lambda replica_id, message: self._clients[replica_id].send(message))
        self._answers = LiveAnswers(dispatcher, router_id, self._clients, clock, wall_clock)
        self._names = SequenceNames()
        self.kv_tiers = KVTiers()
        self._timer: asyncio.TimerHandle | None = None
        #: when it strikes, by our clock
        self._timer_at: float | None = None
        #: when this process last looked at the clock: long ago, and it was stopped itself
        self._looked_at = clock()
        self._ticker = asyncio.create_task(self._tick(), name="shoal-router-tick")
        self._closing: set[asyncio.Task[None]] = set()
        #: what was found lost, by what: nothing, if we made no mistake
        self.num_leaks: Counter[str] = Counter()
        #: of requests that ended well, seconds by part (`router/breakdown.py`)
        self.part_seconds: dict[str, float] = {}
        #: set once the server stops and nothing is left
        self._all_ended = asyncio.Event()

    # ---- router.backend.Backend ----

    async def generate(self, request: GenerateRequest) -> LiveStream:
        stream = LiveStream(request, self._finish, self._abort)
        self._streams[request.request_id] = stream
        now = self._clock()
        deadline_at = None if request.deadline_s is None else now + request.deadline_s - self._wall_clock()
        self._carry_out(
            self.dispatcher.submit(
                request.request_id,
                len(request.sequences),
                request.num_prompt_tokens,
                now,
                request.order_key,
                deadline_at,
                request.tenant,
                request.tenant_weight,
            )
        )
        try:
            await stream.wait_first()
        except asyncio.CancelledError:
            stream.abort()
            raise
        return stream

    def may_admit(self, num_sequences: int, priority: int = 0, tenant: str = "", tenant_weight: float = 1.0) -> None:
        now = self._clock()
        if self.dispatcher.is_stopping:
            raise NoReplicaError("the server stops")
        key = (0.0, priority, self._wall_clock())
        if self.dispatcher.is_certainly_full(num_sequences, now, key, tenant, tenant_weight):
            raise QueueFullError(
                "every queue is full, and as many requests wait for a place in them as may hope for one",
                self.dispatcher.retry_after_s(now),
            )

    def health(self) -> Health:
        now = self._clock()
        up = [view for view in self.dispatcher.views.values() if view.is_placeable(now)]
        detail: dict[str, object] = {"replicas_up": len(up), "replicas_known": len(self._known)}
        if prefill := self.dispatcher.desk.views:  # without them decode replicas compute prompts
            detail["prefill_replicas_up"] = sum(view.is_placeable(now) for view in prefill.values())
        if not up:
            states = Counter(view.state(now) for view in self.dispatcher.views.values())
            others = ", ".join(f"{number} {state}" for state, number in sorted(states.items()))
            detail["reason"] = f"no replica is ready: {others or 'none is connected'}"
        if self.dispatcher.is_stopping:
            detail["reason"] = "the server stops"
        return Health(bool(up) and not self.dispatcher.is_stopping, detail)

    def load(self) -> int:
        return self.dispatcher.num_requests

    def audit(self) -> Counter[str]:
        """What is lost now, by what."""
        desk = self.dispatcher.desk
        return audit(self.dispatcher, self._streams, self._names, self._clients, desk.requests())

    def metrics_text(self) -> bytes:
        own = RouterFigures(self.router_id, self.config_number, self.num_leaks, self.part_seconds)
        return render_metrics(self.dispatcher, self._known, self._model_name, own)

    async def reset_prefix_cache(self, timeout_s: float) -> int:
        return await self._resets.run([i for i in self._clients if i in self._known], timeout_s)

    async def explain(self, name: str, timeout_s: float) -> dict[str, object] | None:
        return await self._answers.explain(name, timeout_s)

    async def living(self, limit: int, timeout_s: float) -> dict[str, object]:
        return await self._answers.living(limit, timeout_s)

    def status(self) -> dict[str, object]:
        now = self._clock()
        replicas = [
            view.describe(self._known.get(view.replica_id, {}).get("description", ""), now)
            for view in self.dispatcher.all_views.values()
        ]
        return {
            "router_id": self.router_id,
            "requests": self.dispatcher.num_requests,
            "held": self.dispatcher.num_held,
            "config": f"{self.config_number:08x}",
            "leaks": dict(self.num_leaks),
            "replicas": replicas,
            "kv_nodes": self.kv_tiers.describe(),
        }

    # ---- membership: called on the loop with everyone that Serve says is running ----

    def on_view(self, replicas: Mapping[str, Mapping[str, str]]) -> None:
        """`replicas`: id -> metadata (address, incarnation, role). A drop means draining or dead: place nothing there,
        keep the stream.
        """
        for name, metadata in replicas.items():
            replica_id = ReplicaId(name)
            if replica_id in self._known or "address" not in metadata:
                continue
            self._known[replica_id] = metadata
            if replica_id in self._clients:  # it was gone for a moment: the controller restarted, say
                self._clients[replica_id].wants_reconnect = True
                if (view := self.dispatcher.view_of(replica_id)) is not None:
                    view.is_draining = False
                continue
            self._clients[replica_id] = ReplicaClient(
                replica_id,
                metadata["address"],
                metadata.get("incarnation", ""),
                self.router_id,
                self._on_message,
                self._on_broken,
                self._token,
            )
        for replica_id in [r for r in self._known if r not in replicas]:
            del self._known[replica_id]
            self._clients[replica_id].wants_reconnect = False
            self.dispatcher.on_draining(replica_id)
            if self.dispatcher.view_of(replica_id) is None:
                self._drop_client(replica_id)  # it was not connected: nothing to wait for

    async def stop(self, within_s: float) -> None:
        """The server stops: what comes is refused, what is here ends within that time. Returns when nothing is left."""
        now = self._clock()
        self._carry_out(self.dispatcher.on_stopping(now + within_s, now))
        if self._streams:
            await self._all_ended.wait()

    async def close(self) -> None:
        """End all streams to replicas; unfinished requests fail, or are refused if they have no token yet."""
        self._ticker.cancel()
        await asyncio.gather(self._ticker, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
        for request_id, stream in list(self._streams.items()):
            self.dispatcher.abort(request_id)
            self._end(request_id, (ReplicaLostError if stream.has_begun else NoReplicaError)("the router stops"))
        for replica_id in list(self._clients):
            self.dispatcher.on_lost(replica_id, self._clock())  # who comes yet is told that no replica is there
            self._drop_client(replica_id)
        await asyncio.gather(*self._closing, return_exceptions=True)

    # ---- what replicas say ----

    def _on_message(self, replica_id: ReplicaId, message: UpMessage) -> None:
        now = self._clock()
        if self.dispatcher.view_of(replica_id) is None and replica_id in self._known:
            metadata = self._known[replica_id]
            role = Role(metadata.get("role", Role.BOTH))
            view = ReplicaView(replica_id, metadata["address"], metadata.get("incarnation", ""), role)
            view.kv_bytes_per_token = float(metadata.get("kv_bytes_per_token", 0))
            self.dispatcher.add_replica(view)
        match message:
            case StepOutput():
                self._on_step(replica_id, message, now)
            case SubmitReply():
                self._carry_out(self.dispatcher.on_load(replica_id, message.load, now))
                self._carry_out(
                    self.dispatcher.on_reply(message.request_id, message.epoch, message.refusal, message.message, now)
                )
            case Grant():
                self._carry_out(self.dispatcher.on_grant(replica_id, message, now))
            case Seated():
                self.dispatcher.on_seated(replica_id, message, now)
                self._carry_out([])
            case Draining():
                self.dispatcher.on_draining(replica_id)
            case ResetDone(reset_id=reset_id):
                self._resets.answered(replica_id, reset_id)
            case Explained():
                self._answers.questions.answered(replica_id, message)

    def _on_step(self, replica_id: ReplicaId, message: StepOutput, now: float) -> None:
        view = self.dispatcher.view_of(replica_id)
        if view is None:
            return
        if message.kv_events:
            self.kv_tiers.hear(replica_id, message.kv_events)
            view.kv_node = self.kv_tiers.node_of(replica_id)
        by_request: dict[RequestId, list[SequenceOutput]] = {}
        for output in self._names.expand(replica_id, message, self._streams):
            by_request.setdefault(output.request_id, []).append(output)
        for request_id, outputs in by_request.items():
            if request_id not in self._streams:
                outputs = first_tokens(self.dispatcher, replica_id, outputs, self._max_tokens, now)
                if not outputs:  # late output of a request that is over, nearly always
                    continue
                request_id = outputs[0].request_id
            elif not self.dispatcher.is_working_on(request_id, replica_id):
                continue
            try:
                self._deliver(self._streams[request_id], replica_id, outputs, now)
            except Exception as error:
                self._end_broken(request_id, error)
        self._carry_out(self.dispatcher.on_load(replica_id, message.load, now))
        if not view.is_connected:
            self._carry_out(self.dispatcher.on_connected(replica_id, now))

    def _max_tokens(self, request_id: RequestId, index: int) -> int:
        sequences = self._streams[request_id].request.sequences
        return next(sequence.sampling.max_tokens for sequence in sequences if sequence.index == index)

    def _deliver(self, stream: LiveStream, replica_id: ReplicaId, outputs: list[SequenceOutput], now: float) -> None:
        request_id = stream.request.request_id
        # of a sequence that ended here already (a stop string) nothing counts any more, its loss least of all
        outputs = [output for output in outputs if stream.wants(output.index)]
        ends = {output.finish_reason for output in outputs}
        for output in outputs:
            if (error := final_error(output)) is not None:  # it would be the same on any other replica
                outcome = REFUSED if isinstance(error, DeadlineExceededError) else FAILED
                self._carry_out(self.dispatcher.abort(request_id, outcome))
                self._end(request_id, error)
                return
        if FinishReason.SHED in ends:  # always the whole request, before any token
            self._carry_out(self.dispatcher.on_shed(request_id, now))
            return
        for output in outputs:
            if output.stages is not None:
                if replica_id in self.dispatcher.desk.views:
                    self.journal.told_of_leg(request_id, output.index, replica_id, output.stages, now)
                else:
                    self.journal.told(request_id, output.index, replica_id, output.stages)
                self.dispatcher.began(request_id, output.index)
        kept = [o for o in outputs if o.finish_reason not in (FinishReason.MOVED, FinishReason.ERROR)]
        if any(output.new_token_ids for output in kept):
            self.dispatcher.progressed(request_id)
        if kept:
            stream.push(kept)
        if FinishReason.ERROR in ends:
            # the step failed, not the request: the others of its sequences are taken along to the next attempt
            self._carry_out([SendAbort(request_id, replica_id), *self.dispatcher.on_failed(request_id, now)])
        elif stream.is_finished:
            self._finished(request_id)
        elif FinishReason.MOVED in ends:
            self._carry_out([SendAbort(request_id, replica_id), *self.dispatcher.on_moved(request_id, now)])

    def _on_broken(self, replica_id: ReplicaId) -> None:
        self._names.forget_replica(replica_id)
        self._answers.questions.gone(replica_id)
        self.kv_tiers.gone(replica_id)
        self._carry_out(self.dispatcher.on_lost(replica_id, self._clock()))
        if replica_id not in self._known:
            self._drop_client(replica_id)

    def _drop_client(self, replica_id: ReplicaId) -> None:
        client = self._clients.pop(replica_id, None)
        self._resets.gone(replica_id)
        self._answers.questions.gone(replica_id)
        if client is not None:
            task = asyncio.create_task(client.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    # ---- what clients do ----

    def _finish(self, request_id: RequestId, indices: list[int]) -> None:
        replica_id = self.dispatcher.replica_of(request_id)
        if replica_id is not None and replica_id in self._clients:
            self._clients[replica_id].send(Abort(request_id, indices))
        stream = self._streams.get(request_id)
        if stream is not None and stream.is_finished:
            self._finished(request_id)
            self._carry_out([])

    def _finished(self, request_id: RequestId) -> None:
        now = self._clock()
        self.journal.note(request_id, now, "all tokens here")
        if (entry := self.journal.of(request_id)) is not None:
            for part, seconds in breakdown(entry, now).items():
                self.part_seconds[part] = self.part_seconds.get(part, 0.0) + seconds
        self.dispatcher.finish(request_id)
        self._forget(request_id)

    def _abort(self, request_id: RequestId) -> None:
        if self._forget(request_id) is not None:
            self._carry_out(self.dispatcher.abort(request_id))

    def _forget(self, request_id: RequestId) -> LiveStream | None:
        self._names.forget(request_id)
        stream = self._streams.pop(request_id, None)
        if not self._streams and self.dispatcher.is_stopping:
            self._all_ended.set()
        return stream

    # ---- orders ----

    def _carry_out(self, instructions: list[Instruction]) -> None:
        orders = [*instructions, *self.dispatcher.take_orders()]
        while orders:
            for instruction in orders:
                try:
                    self._carry_out_one(instruction)
                except Exception as error:
                    self._end_broken(instruction.request_id, error)
            orders = self.dispatcher.take_orders()
        for replica_id, ask in self.dispatcher.asks(self._clock()):
            if replica_id in self._clients:
                self._clients[replica_id].send(ask)
        self._set_timer()

    def _carry_out_one(self, instruction: Instruction) -> None:
        match instruction:
            case Dispatch(request_id=request_id, replica_id=replica_id, epoch=epoch):
                stream = self._streams[request_id]
                stream.served_by = f"{replica_id}@{self.dispatcher.views[replica_id].address}"
                request = stream.to_submit(instruction.is_returning, instruction.kv_source)
                self._clients[replica_id].send(Submit(request, epoch, instruction.permit))
            case SendAbort(request_id=request_id, replica_id=replica_id):
                if replica_id in self._clients:
                    self._clients[replica_id].send(Abort(request_id, instruction.indices))
            case DispatchPrefill(replica_id=replica_id):
                leg = leg_of(self._streams[instruction.request_id].request, instruction)
                self._clients[replica_id].send(Submit(leg))
            case SendContinue(request_id=request_id, replica_id=replica_id):
                if replica_id in self._clients:
                    word = Continue(request_id, instruction.hand_over, instruction.tokens)
                    self._clients[replica_id].send(word)
            case Refuse(request_id=request_id):
                self._end(request_id, refusal_error(instruction))
            case Fail(request_id=request_id):
                self._end(request_id, failure_error(instruction))

    def _end_broken(self, request_id: RequestId, error: Exception) -> None:
        """A mistake of ours with one request ends this one. Raised any further it would cut the link to a replica, and
        all that run there would count it as a loss.
        """
        logger.error("request %s could not be carried on; it ends", request_id, exc_info=error)
        for instruction in self.dispatcher.abort(request_id, FAILED):
            self._carry_out_one(instruction)
        self._end(request_id, ShoalError("the router could not carry on with this request; its log says why"))

    def _end(self, request_id: RequestId, error: ShoalError) -> None:
        stream = self._forget(request_id)
        if stream is not None:
            stream.fail(error)

    def _set_timer(self) -> None:
        deadline = self.dispatcher.next_deadline()
        if deadline == self._timer_at:
            return
        self._timer_at = deadline
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, deadline - self._clock()), self._on_time)

    def _on_time(self) -> None:
        self._timer_at = None  # it may have been the timer, which strikes once
        now = self._clock()
        # after a stop of our own what replicas said lies unread, and none of them was silent: in a second it is read
        if now - self._looked_at <= MAX_SILENCE_S:
            self._carry_out(self.dispatcher.on_time(now))

    async def _tick(self) -> None:
        """Silence sends no message: look at the clock once a second, and once a minute at the books."""
        while True:
            for _ in range(_AUDIT_BEATS):
                await asyncio.sleep(HEARTBEAT_S)
                self._on_time()
                self._looked_at = self._clock()
            if found := self.audit():
                logger.error("the books of this router do not agree: %s", dict(found))
                self.num_leaks += found
