"""The engine core with a fake runner whose KV is real bookkeeping, under arbitrary submits, aborts, steps, failures and
drains.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import hypothesis.strategies as st
import msgspec
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replica.config import AdmissionConfig, CacheConfig, EngineConfig
from replica.engine_core import EngineCore
from replica.fake_runner import FakeModelRunner, expected_output
from replica.kv_transfer import is_loading
from replica.messages import (
    FinishReason,
    GenerateRequest,
    RefusalReason,
    RequestId,
    RouterId,
    SamplingParams,
    SequenceInput,
    SequenceOutput,
)
from replica.order import QueueKey, outranks
from replica.router_output import RouterOutputs
from replica.sequence import Sequence, Status
from replica.step import StepPlan
from router.sequence_names import SequenceNames
from tests.property.engine_client import BLOCK, CAP, KNOBS, REPLICA, ROUTERS, VOCAB, Client, scheduler_config
from tests.property.lengths import examples


class EngineMachine(RuleBasedStateMachine):
    #: None: every layer sees everything
    windows: ClassVar[list[int | None]] = [None, None, 2, 5, 8, 9, 15]

    @initialize(num_blocks=st.integers(6, 20), caching=st.booleans(), knobs=KNOBS, data=st.data())
    def build(self, num_blocks: int, caching: bool, knobs: dict[str, Any], data: st.DataObject) -> None:
        self.window = data.draw(st.sampled_from(self.windows))
        self.runner = self.make_runner(num_blocks)
        # a prompt need not fit the pool where no token sees more of it than does
        is_sliding = self.window is not None and 1 + math.ceil((self.window - 1) / BLOCK) <= num_blocks
        self.capacity = 64 if is_sliding else min(64, num_blocks * BLOCK)
        self.config = EngineConfig(
            scheduler=scheduler_config(knobs),
            admission=AdmissionConfig(max_queued_requests=CAP),
            cache=CacheConfig(enable_prefix_caching=caching),
        )
        self.core = self.make_core()
        self.clients: dict[tuple[RouterId, RequestId], Client] = {}
        self.names = {router: SequenceNames() for router in ROUTERS}
        self.plan: StepPlan | None = None
        self.now = 0.0
        self.count = 0
        self.aborted: list[RequestId] = []
        self.compiling: list[str] = []
        self.num_turns = 0

    def make_runner(self, num_blocks: int) -> FakeModelRunner:
        return FakeModelRunner(
            num_blocks=num_blocks,
            block_size=BLOCK,
            max_model_len=64,
            vocab_size=VOCAB,
            eos_token_ids=(),
            window=self.window,
        )

    def make_core(self) -> EngineCore:
        return EngineCore(self.config, self.runner.info)

    @rule(
        router=st.sampled_from(ROUTERS),
        shape=st.integers(0, 2),
        length=st.integers(1, 40),
        n=st.integers(1, 3),
        max_tokens=st.integers(1, 20),
        resumed=st.integers(0, 3),
        grammar=st.sampled_from(["", "", "g", "h"]),
        tells_prompt=st.booleans(),
        priority=st.integers(-1, 2),
        patience=st.none() | st.sampled_from([-0.01, 0.02, 0.1]),
    )
    def submit(
        self,
        router: RouterId,
        shape: int,
        length: int,
        n: int,
        max_tokens: int,
        resumed: int,
        grammar: str,
        tells_prompt: bool,
        priority: int = 0,
        patience: float | None = None,
    ) -> None:
        # an id comes back in a new attempt, perhaps while the step of the aborted one still runs
        request_id = self.aborted.pop() if self.aborted else RequestId(str(self.count))
        self.count += 1
        # shapes 0 and 1 share long prefixes, shape 2 is its own
        prompt = [(shape * position if shape < 2 else self.count + position) % VOCAB for position in range(length)]
        output = expected_output(prompt, resumed, vocab_size=VOCAB) if resumed < max_tokens else []
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=True,
            num_logprobs=2 if tells_prompt else None,
            num_prompt_logprobs=1 if tells_prompt and not output else None,
            grammar=grammar,  # the fake runner does not follow it; what is tested is who waits for its compilation
        )
        request = GenerateRequest(
            request_id,
            # of a resumed request only the first sequence need have come as far as a token
            [SequenceInput(index, prompt, sampling, list(output) if index == 0 else []) for index in range(n)],
            order_key=(0.0, priority, float(self.count)),
            deadline_s=None if patience is None else self.now + patience,
            is_returning=bool(output),
        )
        scheduler = self.core.scheduler
        num_queued, queued_tokens = scheduler.num_queued, scheduler.queued.num_tokens + scheduler.blocked.num_tokens
        least = self.key_of(request)
        # what a strictly more urgent newcomer may push out: requests of which nothing was scheduled
        weaker = self.untouched(lambda s: outranks(scheduler.policy, (priority, least), s.standing))
        cap = self.config.admission.max_queued_requests
        room = max(0, cap - num_queued) + sum(map(len, weaker.values()))
        reply = self.core.submit(router, request, 0, self.now)
        capacity = self.capacity
        limit = self.config.scheduler.shed_above_queued_tokens
        if length + len(output) >= capacity:
            assert reply.refusal is RefusalReason.NEVER_FITS
            assert str(capacity) in reply.message
        elif output:
            assert reply.refusal is None, "a cap must never refuse a returning request"
        elif n > cap:
            assert reply.refusal is RefusalReason.TOO_MANY_SEQUENCES
        elif patience is not None and patience < 0:
            assert reply.refusal is RefusalReason.DEADLINE
        elif limit and queued_tokens and queued_tokens + n * length > limit:
            assert reply.refusal in (None, RefusalReason.SHED, RefusalReason.QUEUE_FULL)
        elif n > room:
            assert reply.refusal is RefusalReason.QUEUE_FULL
        else:
            assert reply.refusal is None
        self.deliver(self.core.take_ended(), newcomer=least)
        if reply.refusal is None:
            self.clients[(router, request_id)] = Client(
                [prompt] * n, max_tokens, output, sampling, request.order_key, request.deadline_s
            )
            left = scheduler.queued.num_tokens + scheduler.blocked.num_tokens
            if limit and not output:
                assert left <= max(limit, n * length), "more is queued than the limit allows"
        else:
            assert scheduler.num_queued == num_queued
        self.compiling += self.core.take_wanted_grammars()
        assert len(set(self.compiling)) == len(self.compiling), "compiled twice at once"

    def key_of(self, request: GenerateRequest) -> QueueKey:
        work = max(len(s.prompt_token_ids) + s.sampling.max_tokens for s in request.sequences)
        return self.core.scheduler.policy.key(request.order_key, work, 1 << 60)

    def untouched(self, keep: Callable[[Sequence], bool]) -> dict[tuple[RouterId, RequestId], list[Sequence]]:
        """By a walk over everybody: requests of which each sequence is still queued."""
        found: dict[tuple[RouterId, RequestId], list[Sequence]] = {}
        for sequence in self.core.scheduler.living():
            if sequence.status is Status.QUEUED and keep(sequence):
                found.setdefault((sequence.router_id, sequence.request_id), []).append(sequence)
        return {key: s for key, s in found.items() if len(s) == len(self.clients[key].prompts)}

    @precondition(lambda self: self.compiling)
    @rule(works=st.booleans())
    def compiled(self, works: bool) -> None:
        """At any moment, also while a step runs."""
        grammar = self.compiling.pop(0)
        self.deliver(self.core.grammar_compiled(grammar, None if works else "not a grammar", self.now))

    @rule(knobs=KNOBS, cap=st.integers(1, CAP))
    def turn_knobs(self, knobs: dict[str, Any], cap: int) -> None:
        """At any moment, also while a step runs."""
        self.config = self.config.model_copy(
            update={
                "scheduler": scheduler_config(knobs),
                "admission": AdmissionConfig(max_queued_requests=cap),
            }
        )
        self.core.configure(self.config.scheduler, self.config.admission)
        self.num_turns += 1

    @rule()
    def reset(self) -> None:
        self.core.reset_prefix_cache()
        assert self.core.blocks.stats().num_cached == 0

    @precondition(lambda self: self.plan is None)
    @rule()
    def schedule(self) -> None:
        running = len(self.core.scheduler.running)
        counters = self.core.scheduler.counters
        preemptions, displaced = counters.preemptions, counters.displaced
        plan = self.core.schedule(self.now)
        self.deliver(self.core.take_ended())
        self.plan = plan
        if plan is None:
            self.check_nothing_to_do()
            return
        budget = self.config.scheduler.max_num_batched_tokens
        assert budget is not None
        most = max(self.config.scheduler.max_num_seqs, running if self.num_turns else 0)
        assert len(plan.seq_ids) == len(set(plan.seq_ids)) <= most
        if self.config.scheduler.enable_chunked_prefill:
            assert plan.num_tokens <= budget
            if self.config.scheduler.long_prefill_token_threshold:
                longest = max(self.known(plan).values(), default=0)
                assert longest <= self.config.scheduler.long_prefill_token_threshold
            self.lanes_hold(plan)
        assert all(count > 0 for count in plan.num_scheduled)
        if not self.core.scheduler.policy.has_classes:
            assert counters.displaced == displaced
        if counters.preemptions - preemptions > counters.displaced - displaced:
            assert len(self.core.scheduler.running) < running + 1, "a step that preempts for blocks admits nobody"
            assert not plan.new or self.core.kv is not None

    def check_nothing_to_do(self) -> None:
        assert not self.core.has_work or self.core.num_unfinished == 0, "work, but no step"
        assert self.core.num_unfinished == len(self.core.scheduler.blocked)

    def known(self, plan: StepPlan) -> dict[int, int]:
        """Tokens of each sequence in the plan that are no guesses."""
        counts = zip(plan.seq_ids, plan.num_scheduled, strict=True)
        return {seq_id: count - len(plan.drafts.get(seq_id, [])) for seq_id, count in counts}

    def lanes_hold(self, plan: StepPlan) -> None:
        """Of who was admitted under the lanes that hold now; knobs may have been turned since."""
        config, running = self.config.scheduler, self.core.scheduler.running
        if self.num_turns:
            return
        given = self.known(plan)
        unfinished = [s for s in running if s.num_uncomputed_tokens > max(1, given.get(s.seq_id, 0))]
        if config.max_partial_prefills:
            assert len(unfinished) <= config.max_partial_prefills
        if config.max_long_partial_prefills:
            long = [s for s in running if s.num_uncomputed_tokens > config.long_prefill_token_threshold]
            assert len(long) <= config.max_long_partial_prefills

    @precondition(lambda self: hasattr(self, "core"))
    @rule(seconds=st.sampled_from([0.01, 0.2]))
    def wait(self, seconds: float) -> None:
        """Time passes, in the middle of a step or while nothing runs."""
        self.now += seconds
        self.core.end_overdue(self.now)
        self.deliver(self.core.take_ended())
        overdue = self.untouched(lambda s: True)
        for key in overdue:
            deadline = self.clients[key].deadline
            assert deadline is None or deadline > self.now, "nobody was told that its deadline has passed"

    @precondition(lambda self: self.plan is not None)
    @rule(failing=st.none() | st.integers(0, 4))
    def finish_step(self, failing: int | None = None) -> None:
        """`failing`: this one of those that sampled cannot go on."""
        assert self.plan is not None
        before = {s.seq_id: s.num_computed_tokens for s in self.core.scheduler.running}
        loading = {s.seq_id for s in self.core.scheduler.running if is_loading(s)}
        result = self.runner.execute(self.plan)
        if failing is not None and failing < len(result.seq_ids):
            seq_ids, token_ids = result.seq_ids.copy(), result.token_ids.copy()
            failed = {seq_ids.pop(failing): "cannot go on"}
            result.more.pop(next(iter(failed)), None)
            del token_ids[failing]
            result = msgspec.structs.replace(result, seq_ids=seq_ids, token_ids=token_ids, failed=failed)
        self.now += result.duration_s
        outputs = self.core.update(self.plan, result, self.now)
        scheduled = dict(zip(self.plan.seq_ids, self.plan.num_scheduled, strict=True))
        for sequence in self.core.scheduler.running:
            seq_id = sequence.seq_id
            if seq_id in loading:
                continue
            num_rejected = len(self.plan.drafts.get(seq_id, [])) - len(result.more.get(seq_id, []))
            assert sequence.num_computed_tokens == before[seq_id] + scheduled.get(seq_id, 0) - num_rejected
        self.plan = None
        self.deliver(outputs)

    @precondition(lambda self: self.plan is not None)
    @rule()
    def step_fails(self) -> None:
        """The runner took the plan in, then the device failed."""
        assert self.plan is not None
        self.runner.execute(self.plan)
        self.plan = None
        self.deliver(self.core.fail_step(self.now))

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), whole=st.booleans())
    def abort(self, data: st.DataObject, whole: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.clients)))
        client = self.clients[key]
        indices = None if whole else [0]
        self.core.abort(key[0], key[1], self.now, indices)
        for index in range(len(client.ends)) if whole else [0]:
            if client.ends[index] is None:
                client.ends[index] = FinishReason.ABORT
        if all(end is not None for end in client.ends):
            del self.clients[key]
            self.names[key[0]].forget(key[1])
            self.aborted.append(key[1])

    def deliver(self, outputs: RouterOutputs, newcomer: QueueKey | None = None) -> None:
        load = self.core.load(self.now)
        for router, output in outputs.items():
            unfinished = {request_id for owner, request_id in self.clients if owner == router}
            for item in self.names[router].expand(REPLICA, output.to_message("", load), unfinished):
                client = self.clients.get((router, item.request_id))
                assert client is not None, "output for a request that was aborted as a whole"
                assert client.ends[item.index] is None, "output after the end"
                assert item.new_token_ids or item.finish_reason is not None, "an empty message"
                is_first = len(client.tokens[item.index]) == (len(client.resumed) if item.index == 0 else 0)
                client.tokens[item.index] += item.new_token_ids
                client.ends[item.index] = item.finish_reason
                client.check_told(item, is_first)
                self.check_given_up(client, item, newcomer)
                client.check_tokens(item.index, self.capacity)
                if all(end is not None for end in client.ends):
                    del self.clients[(router, item.request_id)]
                    self.names[router].forget(item.request_id)

    def check_given_up(self, client: Client, item: SequenceOutput, newcomer: QueueKey | None) -> None:
        """Shed or overdue: only what had not begun, and with a reason."""
        if item.finish_reason not in (FinishReason.SHED, FinishReason.DEADLINE):
            return
        assert item.message
        assert client.tokens == [[] for _ in client.prompts]
        assert item.stages is not None
        assert item.stages.queued_s is None
        if item.finish_reason is FinishReason.DEADLINE:
            assert client.deadline is not None
            assert client.deadline <= self.now
        else:
            assert newcomer is not None, "shed, and nobody came"
            if self.config.scheduler.policy != "sjf":  # there the key knows what is cached
                assert self.core.scheduler.policy.key(client.order_key, 0, 0) > newcomer

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "core"):
            self.core.validate()

    @invariant()
    def a_window_bounds_what_is_held(self) -> None:
        if not hasattr(self, "core") or self.window is None or self.num_turns:
            return
        config = self.config.scheduler
        if config.enable_chunked_prefill:
            budget, threshold = config.max_num_batched_tokens or 0, config.long_prefill_token_threshold
            chunk = max(min(budget, threshold or budget), 1 + config.num_speculative_tokens)
            most = math.ceil((self.window + chunk) / BLOCK) + 1
            assert max((len(s.held_blocks) for s in self.core.scheduler.running), default=0) <= most

    @invariant()
    def the_load_is_that_of_a_walk_over_all(self) -> None:
        if not hasattr(self, "core"):
            return
        load, scheduler = self.core.load(self.now), self.core.scheduler
        waiting = [*scheduler.queued, *scheduler.returning, *scheduler.blocked]
        running = list(scheduler.running)
        assert load.num_queued == sum(s.status is Status.QUEUED for s in waiting)
        assert load.num_returning == sum(s.status is Status.RETURNING for s in waiting)
        assert load.num_running == len(running)
        assert load.num_queued_prompt_tokens == sum(s.num_prompt_tokens for s in waiting)
        assert load.num_uncomputed_tokens == sum(s.num_uncomputed_tokens for s in [*waiting, *running])
        seen = 64 if self.window is None else self.window
        assert load.num_context_tokens == sum(min(seen, s.num_computed_tokens) for s in running)

    def teardown(self) -> None:
        """Let everything end: it must end, exactly once, and leave every pool at baseline."""
        if not hasattr(self, "core"):
            return
        while self.compiling:
            self.compiled(True)
        for _ in range(5000):
            if self.plan is None:
                self.schedule()
            if self.plan is None:
                break
            self.finish_step()
        assert self.clients == {}, "requests that never ended"
        assert [len(names) for names in self.names.values()] == [0, 0], "names that nobody forgot"
        assert self.core.num_unfinished == 0
        assert self.core.blocks.num_free == self.core.blocks.num_blocks
        assert self.runner.num_known == 0
        self.core.validate()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=examples(150), stateful_step_count=50, deadline=None)
