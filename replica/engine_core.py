"""PURE. One replica without its shell: admission, scheduler, blocks and the outputs for each router.

Events in (`submit`, `abort`, `update`, `configure`), orders out (`schedule` gives a plan for the runner, `update` gives
messages for routers). `replica/engine.py` drives it with asyncio and a runner thread; the simulator drives it with a
virtual clock. Both run this code.
"""

from __future__ import annotations

from collections.abc import Mapping

from replica.admission import Admission, Refused
from replica.block_hash import chain_packed, root_hash
from replica.block_manager import BlockManager
from replica.cap_use import CapUse
from replica.config import AdmissionConfig, EngineConfig, SchedulerConfig
from replica.deadlines import Deadlines
from replica.drain_forecast import DrainForecast
from replica.drain_rate import DrainRate
from replica.grammar_gate import GrammarGate
from replica.kv_side import KVSide
from replica.kv_transfer import KVTransfer, TransferLimits
from replica.messages import (
    Ask,
    Continue,
    Explain,
    Explained,
    FinishReason,
    GenerateRequest,
    Grant,
    KVEvent,
    Permit,
    ReplicaLoad,
    RequestId,
    RouterId,
    Seated,
    SubmitReply,
)
from replica.progress import Progress
from replica.queue_gate import QueueGate
from replica.request_book import RequestBook, key_of
from replica.router_output import RouterOutputs, add_columns, add_record
from replica.scheduler import Scheduler
from replica.sequence import Sequence
from replica.shedding import Shedding, last_queued
from replica.step import RunnerInfo, StepPlan, StepResult
from replica.step_times import StepTimes


class EngineCore:
    """The replica is the authority on its queue: what `submit` accepts is queued, and with the permits that are out it
    is never more than the cap.
    """

    def __init__(
        self,
        config: EngineConfig,
        info: RunnerInfo,
        *,
        record_kv_events: bool = False,
        transfer_limits: TransferLimits | None = None,
    ) -> None:
        """`transfer_limits`: there is, or will be, a KVConnector. Raises ConfigError if its KV cannot be moved."""
        self.info = info
        self.blocks = BlockManager(
            info.num_blocks,
            info.block_size,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            record_events=record_kv_events,
            window=info.window,
        )
        self._admission = Admission(info, config.admission.max_queued_requests)
        #: the way to the KVConnector of the node
        self.kv: KVSide | None = None
        transfer = None
        if transfer_limits is not None:
            transfer = KVTransfer(self.blocks, transfer_limits)
        self.scheduler = Scheduler(config.scheduler, self.blocks, info.eos_token_ids, transfer)
        if transfer is not None:
            self.kv = KVSide(transfer, self.scheduler)
        #: names the configuration: equal numbers, equal live values; the shell sets it
        self.config_number = 0
        #: for the shell to fill
        self.step_times = StepTimes()
        #: the runner's own
        self.runner_counters: Mapping[str, float] = {}
        self._requests = RequestBook()
        self._gate = QueueGate(self._make_shedding(config.scheduler))
        self._deadlines = Deadlines()
        #: of sequences that ended outside of a step, until somebody takes it
        self._ended: RouterOutputs = {}
        self._next_seq_id = 0
        self._forecast = DrainForecast()
        self._drain_rate = DrainRate(self._forecast, self.scheduler, self.blocks)
        self._grammars = GrammarGate()
        self._num_refused = 0
        self._cap_use = CapUse()
        self._num_resets = 0
        #: by what was lost (`replica/audit.py`); the shell looks
        self.num_leaks: dict[str, int] = {}

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self.scheduler.has_news_for_runner

    @property
    def num_unfinished(self) -> int:
        scheduler = self.scheduler
        return len(scheduler.running) + len(scheduler.returning) + len(scheduler.queued) + len(scheduler.blocked)

    @property
    def next_deadline(self) -> float | None:
        """When a queued request has to be given up, if nothing happens before: call `end_overdue` then."""
        of_kv = None if self.kv is None else self.kv.next_deadline
        deadlines = (self._deadlines.next, of_kv, self.scheduler.remote.next_deadline)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def submit(
        self, router_id: RouterId, request: GenerateRequest, epoch: int, now: float, permit: Permit | None = None
    ) -> SubmitReply:
        """Take or refuse a whole request. A refusal changes nothing and says why; what is taken may cost others their
        place (`take_ended`). A permit is worth the places that were reserved for it, if they still are.
        """
        refusal, message = None, ""
        has_places = self._gate.redeem(router_id, request, permit)
        try:
            packed = self._admission.check(request, (router_id, request.request_id) in self._requests, now)
            shed = [] if request.is_returning else self._gate.make_room(request, self._next_seq_id, has_places)
        except Refused as refused:
            self._num_refused += 1
            refusal, message = refused.reason, refused.message
        else:
            self._end_queued(shed, FinishReason.SHED, "the request made way for a more urgent one", now)
            self._accept(router_id, request, packed, now)
        self._note_cap_use(now)
        return SubmitReply(request.request_id, epoch, self.load(now), refusal, message)

    def ask(self, router_id: RouterId, ask: Ask) -> None:
        """A router gives back permits, and says who waits there: `deal` answers."""
        self._gate.ask(router_id, ask)

    def deal(self, now: float) -> list[tuple[RouterId, Grant]]:
        """Reserve what is free for requests that routers hold: call it when anything may have changed, and once a
        second, since leases end by themselves. Between tenants it may cost others their place (`take_ended`).
        """
        is_open = self._admission.is_ready and not self._admission.is_draining
        while is_open and (leaving := self._gate.make_way()):
            self._end_queued(leaving, FinishReason.SHED, "the request made way for one of another tenant", now)
        grants = self._gate.deal(is_open, now)
        self._note_cap_use(now)
        return grants

    def configure(self, scheduler: SchedulerConfig, admission: AdmissionConfig) -> None:
        """Other rules from now on; both are resolved. Safe at any time, also while the runner works on a step.

        Nobody is ended, refused or put back for it: above a lowered cap submissions are refused until enough have left
        the queue. What follows for those who wait, follows in the next `submit` and `schedule`.
        """
        self.scheduler.configure(scheduler)
        self._admission.cap = admission.max_queued_requests
        self._gate.configure(self._make_shedding(scheduler))

    def take_ended(self) -> RouterOutputs:
        """Ends outside of a step, for their routers: take them after `submit`, `schedule` and `end_overdue`."""
        ended, self._ended = self._ended, {}
        return ended

    def end_overdue(self, now: float) -> None:
        """Give up requests whose deadline has passed before anything of them was scheduled, and waits for the
        KVConnector that took too long.
        """
        if self.kv is not None:
            self.kv.tick(now)
        for sequence in self.scheduler.remote.overdue(now):
            self._end_queued([sequence], FinishReason.MOVED, "nobody said that it may go on", now)
        for sequence in self._deadlines.pop_passed(now):
            siblings = self._requests.untouched(sequence)
            self._end_queued(siblings, FinishReason.DEADLINE, "the deadline passed while the request was queued", now)

    def abort(self, router_id: RouterId, request_id: RequestId, now: float, indices: list[int] | None = None) -> None:
        """End sequences of a request. Unknown or finished ones are ignored: an abort may cross the end on the wire."""
        for sequence in self._requests.of((router_id, request_id)):
            if indices is not None and sequence.index not in indices:
                continue
            self._grammars.drop(sequence)
            self.scheduler.abort(sequence, FinishReason.ABORT, now)
            # at once, though the runner may still hold it: the id can come back in a new attempt
            self._requests.forget(sequence)

    def abort_router(self, router_id: RouterId, now: float) -> None:
        """A router is gone: end all of its requests, and take back its permits."""
        self._gate.forget(router_id)
        for key in self._requests:
            if key[0] == router_id:
                self.abort(*key, now)

    def go_on(self, router_id: RouterId, message: Continue, now: float) -> None:
        """Another replica has computed prompts that wait here, or will not."""
        for sequence in self._requests.of((router_id, RequestId(message.request_id))):
            token_ids = message.tokens.get(sequence.index)
            if token_ids is None or not self.scheduler.remote.waits_for(sequence, message.hand_over):
                continue
            if token_ids and sequence.num_tokens + len(token_ids) >= sequence.max_total_tokens:
                self._end_queued([sequence], FinishReason.LENGTH, "", now)
            else:
                self.scheduler.go_on(sequence, token_ids, now)

    def take_seated(self) -> list[tuple[RouterId, Seated]]:
        """Who waits with a seat for another replica, for their routers: take it after `schedule`."""
        return self.scheduler.remote.take_seated()

    def take_wanted_grammars(self) -> list[str]:
        """Grammars that accepted sequences wait for, each once: have them compiled, then call `grammar_compiled`."""
        return self._grammars.take_wanted()

    def grammar_failed(self, grammar: str, now: float) -> RouterOutputs:
        """It could not be compiled, and not for its own sake: what waited for it is tried elsewhere."""
        waiting = self._grammars.compiled(grammar, works=False)
        for sequence in waiting:
            self.scheduler.abort(sequence, FinishReason.ERROR, now)
        return self._outputs([Progress(sequence, [], FinishReason.ERROR) for sequence in waiting])

    def grammar_compiled(self, grammar: str, error: str | None, now: float) -> RouterOutputs:
        """What waited for `grammar` may run, or ends as invalid with the compiler's sentence."""
        waiting = self._grammars.compiled(grammar, works=error is None)
        if error is not None:
            return self._outputs([self.scheduler.invalidate(sequence, error, now) for sequence in waiting])
        for sequence in waiting:
            sequence.record.grammar_s = now - sequence.submitted_at
            self.scheduler.unblock(sequence)
        return {}

    def explain(self, question: Explain, now: float) -> Explained:
        """Of whichever router: what `question` asks for."""
        accounts = self.scheduler.explain(RequestId(question.request_id), question.limit, now)
        num_requests = len({key_of(sequence) for sequence in self.scheduler.living()})
        return Explained(question.question_id, accounts, num_requests)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; what runs is not disturbed."""
        self.blocks.clear_cache()
        if self.kv is not None:
            self.kv.reset()
        self._num_resets += 1

    def schedule(self, now: float) -> StepPlan | None:
        """The next step for the runner, or None."""
        self.end_overdue(now)
        plan = self.scheduler.schedule(now)
        self._note_cap_use(now)
        return plan

    def update(self, plan: StepPlan, result: StepResult, now: float) -> RouterOutputs:
        """Take in a finished step; what to tell which router."""
        if self.kv is not None:
            self.kv.tick(now)  # before what was copied is believed
        progress = self.scheduler.update(plan, result, now)
        for item in progress.others:
            if item.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                self._forecast.learn(item.sequence)
        outputs = self._outputs(progress.others)
        add_columns(outputs, progress.plain, progress.token_ids, self.scheduler.running)
        return outputs

    def fail_step(self, now: float) -> RouterOutputs:
        """The runner raised: the step's sequences end with ERROR."""
        return self._outputs(self.scheduler.fail_step(now))

    def stop_admission(self, takes_returning: bool = False) -> None:
        """Draining: refuse everything from now on, but for what was given back when the runner was lost, if
        `takes_returning`.
        """
        self._admission.is_draining, self._admission.takes_returning = True, takes_returning

    def pause(self) -> None:
        """The runner is lost: refuse everything until `resume`, and say so in every load."""
        self._admission.is_ready = False

    def lose_runner(self, now: float) -> RouterOutputs:
        """Everything ends here, and nothing is known of any KV: what was in the step, which may be what broke it, with
        ERROR, the rest with MOVED. Routers continue both elsewhere.
        """
        progress = self.scheduler.fail_step(now)
        self._grammars = GrammarGate()  # what was compiled may be gone as well
        for sequence in self.scheduler.living():
            self.scheduler.abort(sequence, FinishReason.MOVED, now)
            progress.append(Progress(sequence, [], FinishReason.MOVED))
        self.blocks.clear_cache()
        if self.kv is not None:
            self.kv.runner_lost()
        return self._outputs(progress)

    def resume(self) -> None:
        """The runner is there again, and knows nothing."""
        if self.kv is not None:
            self.kv.runner_back()
        self._admission.is_ready = True

    def hand_over(self, now: float) -> RouterOutputs:
        """End everything that is not in the runner's hands with MOVED, so that routers continue it elsewhere.

        Sequences in the step end with the next `update`; call again until `num_unfinished` is 0.
        """
        moved = [s for s in self.scheduler.living() if self.scheduler.abort(s, FinishReason.MOVED, now)]
        return self._outputs([Progress(sequence, [], FinishReason.MOVED) for sequence in moved])

    def tier_events(self, router_id: RouterId, now: float) -> list[KVEvent]:
        """What the next message to this router says of the tiers of its node."""
        return [] if self.kv is None else self.kv.feed.take(router_id, now)

    def take_kv_events(self) -> list[KVEvent]:
        """What became cached or was forgotten since the last call, if that is recorded."""
        event = self.blocks.take_events()
        return [] if event is None else [event]

    def load(self, now: float) -> ReplicaLoad:
        """A snapshot for routers. It goes out with every step, so no walk over sequences but that of the forecast, ten
        times a second while somebody is queued.
        """
        self._note_cap_use(now)
        scheduler, blocks = self.scheduler, self.blocks.stats()
        waiting = (scheduler.queued, scheduler.returning, scheduler.blocked)
        counters = scheduler.counters
        num_uncomputed, num_context = scheduler.running.count_tokens()
        num_used = blocks.num_blocks - blocks.num_free
        return ReplicaLoad(
            num_queued=scheduler.num_queued,
            num_returning=sum(map(len, waiting)) - scheduler.num_queued,
            num_running=len(scheduler.running),
            num_queued_prompt_tokens=sum(queue.num_prompt_tokens for queue in waiting),
            num_uncomputed_tokens=sum(queue.num_tokens for queue in waiting) + num_uncomputed,
            num_context_tokens=num_context,
            num_free_blocks=blocks.num_free,
            num_blocks=blocks.num_blocks,
            queue_cap=self._admission.cap,
            step=counters.steps,
            drain_rate=self._drain_rate.at(now),
            counters={
                **counters.told(),
                "prefix_cache_queries": blocks.query_tokens,
                "prefix_cache_hits": blocks.hit_tokens,
                "evictions": blocks.num_evictions,
                "refused": self._num_refused,
                "prefix_cache_resets": self._num_resets,
                "waiting_for_grammar": len(scheduler.blocked) - (self.kv.num_wanting if self.kv else 0),
                **self._cap_use.counters,
                "model_s": self.step_times.model_s,
                "scheduler_s": self.step_times.scheduler_s,
                "between_steps_s": self.step_times.between_s,
                "config_number": self.config_number,
                "prompt_token_limit": scheduler.prompt_token_limit,
                **self.runner_counters,
                **{f"leaks_{what}": count for what, count in self.num_leaks.items()},
                **(self.kv.counters() if self.kv else {}),
            },
            step_token_counts=counters.step_token_counts.copy(),
            step_sequence_counts=counters.step_sequence_counts.copy(),
            step_second_counts=self.step_times.counts.copy(),
            last_queued=last_queued(scheduler.policy, (scheduler.queued, scheduler.blocked)),
            is_ready=self._admission.is_ready,
            takes_returning=self._admission.takes_returning,
            oldest_wait_s=scheduler.oldest_wait_s(now),
            kv_fragmentation=scheduler.running.num_unfilled_slots / max(1, num_used * self.blocks.block_size),
            num_permits=self._gate.num_permits,
            num_awaited_tokens=scheduler.remote.num_tokens,
            step_line=scheduler.pace.line,
            num_step_prompt_tokens=scheduler.prompt_token_limit,
        )

    def _note_cap_use(self, now: float) -> None:
        """In `submit` and `deal`, the only ones that take places, and where some become free."""
        self._cap_use.note(self.scheduler.num_queued, self._gate.num_permits, now)

    def validate(self) -> None:
        """Check all invariants. Raises AssertionError."""
        self.scheduler.validate()
        self._gate.validate()
        asked = () if self.kv is None else (s for s in self.scheduler.blocked if s.load is not None)
        self._grammars.validate(set(self.scheduler.blocked).difference(asked))
        self._requests.validate(s for s in self.scheduler.living() if s.abort_reason is not FinishReason.ABORT)

    def _make_shedding(self, config: SchedulerConfig) -> Shedding:
        scheduler = self.scheduler
        waiting = (scheduler.queued, scheduler.blocked)
        max_tokens = config.shed_above_queued_tokens
        return Shedding(scheduler.policy, self._requests, waiting, self._admission.cap, max_tokens)

    def _end_queued(self, sequences: list[Sequence], reason: FinishReason, message: str, now: float) -> None:
        for sequence in sequences:
            self._grammars.drop(sequence)
            self.scheduler.abort(sequence, reason, now)
            self._requests.forget(sequence)
            add_record(self._ended, Progress(sequence, [], reason, message=message))

    def _accept(self, router_id: RouterId, request: GenerateRequest, packed: list[bytes], now: float) -> None:
        root = root_hash(self.info.model_fingerprint, request.cache_salt)
        sequences: list[Sequence] = []
        hashes: list[bytes] = []
        for number, (item, data) in enumerate(zip(request.sequences, packed, strict=True)):
            if self.blocks.is_caching and (number == 0 or data != packed[number - 1]):
                # here, while a step computes, and not when it is looked up: there the device would wait
                hashes = chain_packed(root, data, self.info.block_size)
            sequence = Sequence(
                seq_id=self._next_seq_id,
                request_id=request.request_id,
                index=item.index,
                router_id=router_id,
                prompt_token_ids=item.prompt_token_ids,
                output_token_ids=item.output_token_ids,
                sampling=item.sampling,
                order_key=request.order_key,
                root=root,
                max_total_tokens=min(self._admission.max_tokens, len(item.prompt_token_ids) + item.sampling.max_tokens),
                now=now,
                is_returning=request.is_returning,
                tenant=request.tenant,
                tenant_weight=request.tenant_weight,
            )
            sequence.block_hashes = hashes.copy()
            sequence.sink = request.kv_sink
            self._next_seq_id += 1
            sequences.append(sequence)
            if request.kv_source is not None:
                self.scheduler.remote.accept(sequence, request.kv_source)
            self.scheduler.add(sequence, is_blocked=self._grammars.must_wait(sequence))
        self._requests.add((router_id, request.request_id), sequences)
        if request.deadline_s is not None:
            self._deadlines.add(request.deadline_s, sequences[0])

    def _outputs(self, progress: list[Progress]) -> RouterOutputs:
        outputs: RouterOutputs = {}
        for item in progress:
            if item.finish_reason is FinishReason.ABORT:
                continue  # forgotten already; whoever aborts does not wait for an answer
            if item.finish_reason is not None:
                self._requests.forget(item.sequence)
            add_record(outputs, item)
        return outputs
