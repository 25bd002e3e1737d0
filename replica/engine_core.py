"""PURE. One replica without its shell: admission, scheduler, blocks and the outputs for each router.

Events in (`submit`, `abort`, `update`), orders out (`schedule` gives a plan for the runner, `update` gives messages for
routers). `replica/engine.py` drives it with asyncio and a runner thread; the simulator drives it with a virtual clock.
Both run this code.
"""

from __future__ import annotations

from collections import deque

from replica.admission import Admission, Refused
from replica.block_hash import chain_packed, root_hash
from replica.block_manager import BlockManager
from replica.config import EngineConfig
from replica.messages import (
    FinishReason,
    GenerateRequest,
    KVEvent,
    ReplicaLoad,
    RequestId,
    RouterId,
    SubmitReply,
)
from replica.progress import Progress
from replica.router_output import RouterOutputs, add_columns, add_record
from replica.scheduler import Scheduler
from replica.sequence import Sequence, Status
from replica.step import RunnerInfo, StepPlan, StepResult

#: the drain rate is a mean over this many seconds
_RATE_WINDOW_S = 5.0
#: grammars that the runner is known to have compiled; it keeps at least as many (`replica/grammar.py`)
MAX_KNOWN_GRAMMARS = 64


class EngineCore:
    """The replica is the authority on its queue: what `submit` accepts is queued, and never more than the cap."""

    def __init__(self, config: EngineConfig, info: RunnerInfo, *, record_kv_events: bool = False) -> None:
        self.info = info
        self.blocks = BlockManager(
            info.num_blocks,
            info.block_size,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            record_events=record_kv_events,
        )
        self._admission = Admission(info, config.admission.max_queued_requests)
        self.scheduler = Scheduler(config.scheduler, self.blocks, info.eos_token_ids)
        self._requests: dict[tuple[RouterId, RequestId], list[Sequence]] = {}
        self._next_seq_id = 0
        self._departures: deque[tuple[float, int]] = deque()
        #: sum over `_departures`
        self._num_departed = 0
        self._num_refused = 0
        self._max_queued_seen = 0
        self._num_resets = 0
        #: grammar -> sequences that wait for it; compiled ones are in `_compiled`, least recently used first
        self._waiting_for: dict[str, list[Sequence]] = {}
        self._compiled: dict[str, None] = {}
        self._wanted_grammars: list[str] = []

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self.scheduler.has_news_for_runner

    @property
    def num_unfinished(self) -> int:
        scheduler = self.scheduler
        return len(scheduler.running) + len(scheduler.returning) + len(scheduler.queued) + len(scheduler.blocked)

    def submit(self, router_id: RouterId, request: GenerateRequest, epoch: int, now: float) -> SubmitReply:
        """Take or refuse a whole request. A refusal changes nothing and says why."""
        refusal, message = None, ""
        try:
            is_known = (router_id, request.request_id) in self._requests
            packed = self._admission.check(request, is_known, self.scheduler.num_queued)
        except Refused as refused:
            self._num_refused += 1
            refusal, message = refused.reason, refused.message
        else:
            self._accept(router_id, request, packed, now)
        return SubmitReply(request.request_id, epoch, self.load(now), refusal, message)

    def abort(self, router_id: RouterId, request_id: RequestId, now: float, indices: list[int] | None = None) -> None:
        """End sequences of a request. Unknown or finished ones are ignored: an abort may cross the end on the wire."""
        for sequence in list(self._requests.get((router_id, request_id), ())):
            if indices is not None and sequence.index not in indices:
                continue
            self.scheduler.abort(sequence, FinishReason.ABORT, now)
            self._forget(
                sequence
            )  # at once, though the runner may still hold it: the id can come back in a new attempt

    def abort_router(self, router_id: RouterId, now: float) -> None:
        """A router is gone: end all of its requests."""
        for key in [key for key in self._requests if key[0] == router_id]:
            self.abort(*key, now)

    def take_wanted_grammars(self) -> list[str]:
        """Grammars that accepted sequences wait for, each once: have them compiled, then call `grammar_compiled`."""
        wanted, self._wanted_grammars = self._wanted_grammars, []
        return wanted

    def grammar_compiled(self, grammar: str, error: str | None, now: float) -> RouterOutputs:
        """What waited for `grammar` may run, or ends as invalid with the compiler's sentence."""
        waiting = [s for s in self._waiting_for.pop(grammar, []) if s.status is not Status.FINISHED]
        if error is not None:
            return self._outputs([self.scheduler.invalidate(sequence, error, now) for sequence in waiting])
        self._compiled[grammar] = None
        if len(self._compiled) > MAX_KNOWN_GRAMMARS:
            del self._compiled[next(iter(self._compiled))]
        for sequence in waiting:
            self.scheduler.unblock(sequence)
        return {}

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; what runs is not disturbed."""
        self.blocks.clear_cache()
        self._num_resets += 1

    def schedule(self, now: float) -> StepPlan | None:
        """The next step for the runner, or None."""
        num_queued = self.scheduler.num_queued
        plan = self.scheduler.schedule(now)
        left = num_queued - self.scheduler.num_queued
        if left:
            self._departures.append((now, left))
            self._num_departed += left
        return plan

    def update(self, plan: StepPlan, result: StepResult, now: float) -> RouterOutputs:
        """Take in a finished step; what to tell which router."""
        progress = self.scheduler.update(plan, result, now)
        outputs = self._outputs(progress.others)
        add_columns(outputs, progress.plain, progress.token_ids, self.scheduler.running)
        return outputs

    def fail_step(self, now: float) -> RouterOutputs:
        """The runner raised: the step's sequences end with ERROR."""
        return self._outputs(self.scheduler.fail_step(now))

    def stop_admission(self) -> None:
        """Draining: refuse everything from now on."""
        self._admission.is_draining = True

    def hand_over(self, now: float) -> RouterOutputs:
        """End everything that is not in the runner's hands with MOVED, so that routers continue it elsewhere.

        Sequences in the step end with the next `update`; call again until `num_unfinished` is 0.
        """
        moved = [s for s in self.scheduler.living() if self.scheduler.abort(s, FinishReason.MOVED, now)]
        return self._outputs([Progress(sequence, [], FinishReason.MOVED) for sequence in moved])

    def take_kv_events(self) -> list[KVEvent]:
        """What became cached or was forgotten since the last call, if that is recorded."""
        event = self.blocks.take_events()
        return [] if event is None else [event]

    def load(self, now: float) -> ReplicaLoad:
        """A snapshot for routers. No walk over sequences: it goes out with every step."""
        scheduler, blocks = self.scheduler, self.blocks.stats()
        waiting = (scheduler.queued, scheduler.returning, scheduler.blocked)
        counters = scheduler.counters
        num_context = scheduler.running.num_context_tokens
        return ReplicaLoad(
            num_queued=scheduler.num_queued,
            num_returning=sum(map(len, waiting)) - scheduler.num_queued,
            num_running=len(scheduler.running),
            num_queued_prompt_tokens=sum(queue.num_prompt_tokens for queue in waiting),
            num_uncomputed_tokens=sum(queue.num_tokens for queue in waiting)
            + scheduler.running.num_known_tokens
            - num_context,
            num_context_tokens=num_context,
            num_free_blocks=blocks.num_free,
            num_blocks=blocks.num_blocks,
            queue_cap=self._admission.cap,
            step=counters.steps,
            drain_rate=self._drain_rate(now),
            counters={
                "prompt_tokens": counters.prompt_tokens,
                "cached_prompt_tokens": counters.cached_prompt_tokens,
                "scheduled_tokens": counters.scheduled_tokens,
                "generation_tokens": counters.generation_tokens,
                "preemptions": counters.preemptions,
                "recomputed_tokens": counters.recomputed_tokens,
                "prefix_cache_queries": blocks.query_tokens,
                "prefix_cache_hits": blocks.hit_tokens,
                "evictions": blocks.num_evictions,
                "admitted": counters.admitted,
                "refused": self._num_refused,
                "prefix_cache_resets": self._num_resets,
                "waiting_for_grammar": len(scheduler.blocked),
                "max_queued": self._max_queued_seen,
                "queue_time_s": counters.queue_time_s,
                **{f"finished_{reason.value}": count for reason, count in counters.finished.items()},
            },
            step_token_counts=counters.step_token_counts.copy(),
        )

    def validate(self) -> None:
        """Check all invariants. Raises AssertionError."""
        self.scheduler.validate()
        assert self.scheduler.num_queued <= self._admission.cap, (
            f"{self.scheduler.num_queued} queued, cap {self._admission.cap}"
        )
        blocked = {s.seq_id for sequences in self._waiting_for.values() for s in sequences}
        assert blocked >= {s.seq_id for s in self.scheduler.blocked}, "a blocked sequence waits for nothing"
        assert self._num_departed == sum(count for _, count in self._departures), "departures are counted wrongly"
        known = {s.seq_id for sequences in self._requests.values() for s in sequences}
        wanted = {s.seq_id for s in self.scheduler.living() if s.abort_reason is not FinishReason.ABORT}
        assert known == wanted, "request map and scheduler disagree"

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
            )
            sequence.block_hashes = hashes.copy()
            self._next_seq_id += 1
            sequences.append(sequence)
            self.scheduler.add(sequence, is_blocked=self._must_wait_for_grammar(sequence))
        self._requests[(router_id, request.request_id)] = sequences
        self._max_queued_seen = max(self._max_queued_seen, self.scheduler.num_queued)

    def _must_wait_for_grammar(self, sequence: Sequence) -> bool:
        grammar = sequence.sampling.grammar
        if not grammar:
            return False
        if grammar in self._compiled:
            del self._compiled[grammar]
            self._compiled[grammar] = None  # the most recently used now
            return False
        if grammar not in self._waiting_for:
            self._waiting_for[grammar] = []
            self._wanted_grammars.append(grammar)
        self._waiting_for[grammar].append(sequence)
        return True

    def _outputs(self, progress: list[Progress]) -> RouterOutputs:
        outputs: RouterOutputs = {}
        for item in progress:
            if item.finish_reason is FinishReason.ABORT:
                continue  # forgotten already; whoever aborts does not wait for an answer
            if item.finish_reason is not None:
                self._forget(item.sequence)
            add_record(outputs, item)
        return outputs

    def _forget(self, sequence: Sequence) -> None:
        key = (sequence.router_id, sequence.request_id)
        siblings = self._requests[key]
        siblings.remove(sequence)
        if not siblings:
            del self._requests[key]

    def _drain_rate(self, now: float) -> float:
        while self._departures and self._departures[0][0] < now - _RATE_WINDOW_S:
            self._num_departed -= self._departures.popleft()[1]
        return self._num_departed / _RATE_WINDOW_S
