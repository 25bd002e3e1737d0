"""PURE. A router in virtual time: the production `Dispatcher`; clients are records instead of sockets."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from cluster.simulation.event_queue import EventQueue, Rank
from cluster.simulation.records import SimRecord
from replica.messages import (
    Abort,
    Continue,
    DownMessage,
    Draining,
    FinishReason,
    GenerateRequest,
    Grant,
    KVSink,
    KVSource,
    RefusalReason,
    ReplicaId,
    RequestId,
    Role,
    RouterId,
    SamplingParams,
    Seated,
    SequenceInput,
    SequenceOutput,
    StepOutput,
    Submit,
    SubmitReply,
    UpMessage,
)
from router.instructions import Dispatch, DispatchPrefill, Fail, Instruction, Refuse, SendAbort, SendContinue
from router.pairing import PairingDispatcher
from router.replica_view import ReplicaView
from router.sequence_names import SequenceNames

SendDown = Callable[[RouterId, ReplicaId, DownMessage], None]


class SimRouter:
    """Stands where `router/live_backend.py` stands live."""

    def __init__(self, router_id: RouterId, dispatcher: PairingDispatcher, events: EventQueue, send: SendDown) -> None:
        self.router_id = router_id
        self.dispatcher = dispatcher
        self._events = events
        self._send = send
        self._records: dict[RequestId, SimRecord] = {}
        self._names = SequenceNames()
        self._timer_at: float | None = None
        #: it is there and does nothing, like a stopped process
        self.is_frozen = False

    def add_replica(self, replica_id: ReplicaId, role: Role = Role.BOTH) -> None:
        """Serve told of a replica; it is connected with its first message."""
        self.dispatcher.add_replica(ReplicaView(replica_id, "virtual", replica_id, role))

    def arrive(self, record: SimRecord) -> None:
        """A client's request."""
        request = record.request
        request_id = RequestId(request.request_id)
        self._records[request_id] = record
        order_key = (0.0, request.priority, request.arrival_s)
        num_tokens = len(request.prompt_token_ids)
        now, whose = self._events.now, (request.tenant, request.tenant_weight)
        if self.dispatcher.is_certainly_full(1, now, order_key, *whose):  # as the HTTP edge asks
            retry_s = self.dispatcher.retry_after_s(now)
            self._carry_out([Refuse(request_id, RefusalReason.QUEUE_FULL, retry_s, "it would wait in vain")])
            return
        self._carry_out(
            self.dispatcher.submit(
                request_id,
                1,
                num_tokens,
                self._events.now,
                order_key,
                request.deadline_s,
                request.tenant,
                request.tenant_weight,
            )
        )

    def client_leaves(self, record: SimRecord) -> None:
        """The client closes its connection, if it is still there."""
        if self._end(RequestId(record.request.request_id)) is not None:
            record.aborted = True
            self._carry_out(self.dispatcher.abort(RequestId(record.request.request_id)))

    def receive(self, replica_id: ReplicaId, message: UpMessage) -> None:
        """One message of a replica."""
        if self.is_frozen:
            return
        now = self._events.now
        view = self.dispatcher.view_of(replica_id)
        if view is None:
            return
        match message:
            case SubmitReply():
                self._carry_out(self.dispatcher.on_load(replica_id, message.load, now))
                self._carry_out(
                    self.dispatcher.on_reply(message.request_id, message.epoch, message.refusal, message.message, now)
                )
            case StepOutput():
                for output in self._names.expand(replica_id, message, self._records):
                    if self.dispatcher.is_working_on(output.request_id, replica_id):
                        self._token(replica_id, output)
                    elif output.request_id not in self._records:
                        self._first_token(replica_id, output)
                self._carry_out(self.dispatcher.on_load(replica_id, message.load, now))
                if not view.is_connected:
                    self._carry_out(self.dispatcher.on_connected(replica_id, now))
            case Grant():
                self._carry_out(self.dispatcher.on_grant(replica_id, message, now))
            case Seated():
                self.dispatcher.on_seated(replica_id, message, now)
                self._carry_out([])
            case Draining():
                self.dispatcher.on_draining(replica_id)

    def replica_lost(self, replica_id: ReplicaId) -> None:
        """The stream broke."""
        self._names.forget_replica(replica_id)
        self._carry_out(self.dispatcher.on_lost(replica_id, self._events.now))

    def die(self) -> list[SimRecord]:
        """As by `kill -9`. Returns the requests that its clients will never hear of again."""
        self.is_frozen = True
        return [record for request_id in list(self._records) if (record := self._end(request_id)) is not None]

    def _token(self, replica_id: ReplicaId, output: SequenceOutput) -> None:
        record = self._records[output.request_id]
        record.token_ids += output.new_token_ids
        record.token_times_s += [self._events.now] * len(output.new_token_ids)
        if output.stages is not None:
            record.stages = output.stages
            journal, now = self.dispatcher.journal, self._events.now
            if replica_id in self.dispatcher.desk.views:
                journal.told_of_leg(output.request_id, output.index, replica_id, output.stages, now)
            else:
                journal.told(output.request_id, output.index, replica_id, output.stages)
            self.dispatcher.began(output.request_id, output.index)
        if output.new_token_ids:
            self.dispatcher.progressed(output.request_id)
        if output.finish_reason is FinishReason.MOVED:
            record.num_moves += 1
            self._carry_out(self.dispatcher.on_moved(output.request_id, self._events.now))
        elif output.finish_reason is FinishReason.SHED:
            self._carry_out(self.dispatcher.on_shed(output.request_id, self._events.now))
        elif output.finish_reason is not None:
            record.finish_reason = output.finish_reason
            self.dispatcher.finish(output.request_id)
            self._end(output.request_id)

    def _first_token(self, replica_id: ReplicaId, output: SequenceOutput) -> None:
        """Of a prefill replica, or of nobody any more."""
        now, leg_id = self._events.now, output.request_id
        request_id = self.dispatcher.desk.request_of(leg_id, replica_id, output.index)
        if request_id is None:
            return
        record = self._records[request_id]
        first = self.dispatcher.first_token(replica_id, output, record.request.max_tokens)
        if first is None:
            self.dispatcher.leg_failed(replica_id, output, now)
        else:
            record.num_remote += 1
            ended = set() if first.finish_reason is None else {first.index}
            self.dispatcher.prefilled(leg_id, {first.index: first.new_token_ids}, ended, now)
            self._token(replica_id, first)
        self._carry_out([])

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in [*instructions, *self.dispatcher.take_orders()]:
            match instruction:
                case Dispatch(request_id=request_id, replica_id=replica_id, epoch=epoch):
                    self._send(
                        self.router_id,
                        replica_id,
                        Submit(
                            self._request(request_id, instruction.is_returning, instruction.kv_source),
                            epoch,
                            instruction.permit,
                        ),
                    )
                case DispatchPrefill():
                    self._send(self.router_id, instruction.replica_id, Submit(self._leg(instruction)))
                case SendContinue(request_id=request_id, replica_id=replica_id):
                    word = Continue(request_id, instruction.hand_over, instruction.tokens)
                    self._send(self.router_id, replica_id, word)
                case SendAbort(request_id=request_id, replica_id=replica_id):
                    if (moved := self._records.get(request_id)) is not None:
                        moved.num_moves += 1
                    self._send(self.router_id, replica_id, Abort(request_id, instruction.indices))
                case Refuse(request_id=request_id):
                    if (record := self._end(request_id)) is not None:
                        record.refusal = instruction.reason
                        record.retry_after_s = instruction.retry_after_s
                case Fail(request_id=request_id, message=message):
                    if (record := self._end(request_id)) is not None:
                        record.failure = message
        for replica_id, ask in self.dispatcher.asks(self._events.now):
            self._send(self.router_id, replica_id, ask)
        self._set_timer()

    def _set_timer(self) -> None:
        deadline = self.dispatcher.next_deadline()
        if deadline is not None and (self._timer_at is None or deadline < self._timer_at):
            self._timer_at = max(deadline, self._events.now)
            self._events.at(self._timer_at, Rank.TIMER, self.on_time)

    def on_time(self) -> None:
        """Give the dispatcher the time."""
        self._timer_at = None
        if self.is_frozen:
            return
        self._carry_out(self.dispatcher.on_time(self._events.now))

    def _leg(self, order: DispatchPrefill) -> GenerateRequest:
        """The same prompt, for one token."""
        whole = self._request(order.request_id, False)
        return msgspec.structs.replace(
            whole,
            request_id=order.leg_id,
            sequences=[
                msgspec.structs.replace(s, sampling=msgspec.structs.replace(s.sampling, max_tokens=1))
                for s in whole.sequences
                if s.index in order.indices
            ],
            kv_sink=KVSink(order.hand_over),
        )

    def _request(self, request_id: RequestId, is_returning: bool, kv_source: KVSource | None = None) -> GenerateRequest:
        record = self._records[request_id]
        request = record.request
        sampling = SamplingParams(
            max_tokens=request.max_tokens, temperature=request.temperature, seed=request.seed, ignore_eos=True
        )
        sequence = SequenceInput(0, request.prompt_token_ids, sampling, record.token_ids.copy())
        return GenerateRequest(
            request_id,
            [sequence],
            order_key=(0.0, request.priority, request.arrival_s),
            deadline_s=request.deadline_s,
            is_returning=is_returning,
            tenant=request.tenant,
            tenant_weight=request.tenant_weight,
            kv_source=kv_source,
        )

    def _end(self, request_id: RequestId) -> SimRecord | None:
        self._names.forget(request_id)
        record = self._records.pop(request_id, None)
        if record is not None:
            record.num_ends += 1
            record.ended_s = self._events.now
        return record
