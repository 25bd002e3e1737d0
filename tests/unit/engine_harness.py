"""An engine core and a fake runner, driven step by step; shared by tests of the engine's rules."""

from __future__ import annotations

from replica.config import AdmissionConfig, CacheConfig, EngineConfig, SchedulerConfig
from replica.engine_core import EngineCore
from replica.fake_runner import FakeModelRunner, expected_output
from replica.messages import (
    FinishReason,
    GenerateRequest,
    RefusalReason,
    ReplicaId,
    RequestId,
    RouterId,
    SamplingParams,
    SequenceInput,
    SequenceOutput,
)
from replica.router_output import RouterOutputs
from replica.sequence import Sequence
from replica.step import StepPlan
from router.sequence_names import SequenceNames

ROUTER = RouterId("r")
VOCAB = 1000


class Harness:
    """A core and a runner; `step()` is schedule, execute, update."""

    def __init__(
        self, *, num_blocks: int = 64, block_size: int = 4, caching: bool = True, cap: int = 64, **scheduler: object
    ) -> None:
        self.runner = FakeModelRunner(
            num_blocks=num_blocks, block_size=block_size, vocab_size=VOCAB, eos_token_ids=(7,)
        )
        self.settings = {"max_num_batched_tokens": 32, "watermark": 0.0, **scheduler}
        self.cap = cap
        self.config = EngineConfig(
            scheduler=SchedulerConfig.model_validate(self.settings),
            admission=AdmissionConfig(max_queued_requests=cap),
            cache=CacheConfig(enable_prefix_caching=caching),
        )
        self.core = EngineCore(self.config, self.runner.info)
        self.names_of_router = SequenceNames()
        self.submitted: set[RequestId] = set()
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason] = {}
        #: what the last submission was answered
        self.message = ""
        self.now = 0.0

    def over(self, runner: FakeModelRunner) -> Harness:
        """The same over another runner, before anything was submitted."""
        self.runner, self.core = runner, EngineCore(self.config, runner.info)
        return self

    def configure(self, *, cap: int | None = None, **scheduler: object) -> None:
        """These settings change, the others stay."""
        self.settings |= scheduler
        self.cap = self.cap if cap is None else cap
        self.core.configure(
            SchedulerConfig.model_validate(self.settings), AdmissionConfig(max_queued_requests=self.cap)
        )
        self.core.validate()

    def submit(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int = 8,
        *,
        arrival: float | None = None,
        priority: int = 0,
        deadline: float | None = None,
        n: int = 1,
        tenant: str = "",
        **sampling: object,
    ) -> RefusalReason | None:
        params = {"temperature": 0.0, "ignore_eos": True, **sampling}
        request = GenerateRequest(
            RequestId(name),
            [SequenceInput(i, prompt, SamplingParams(max_tokens, **params)) for i in range(n)],  # type: ignore[arg-type]
            order_key=(0.0, priority, self.now if arrival is None else arrival),
            deadline_s=deadline,
            tenant=tenant,
        )
        self.submitted.add(request.request_id)
        reply = self.core.submit(ROUTER, request, 0, self.now)
        self.message = reply.message
        self.hear(self.core.take_ended())
        return reply.refusal

    def hear(self, outputs: RouterOutputs) -> None:
        for output in self.told(outputs):
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.ends[output.request_id] = output.finish_reason

    def told(self, outputs: RouterOutputs) -> list[SequenceOutput]:
        """As the router reads them."""
        load = self.core.load(self.now)
        messages = [output.to_message("", load) for output in outputs.values()]
        return [o for m in messages for o in self.names_of_router.expand(ReplicaId("r"), m, self.submitted)]

    def plan(self) -> StepPlan | None:
        plan = self.core.schedule(self.now)
        self.hear(self.core.take_ended())
        self.core.validate()
        return plan

    def finish(self, plan: StepPlan) -> None:
        result = self.runner.execute(plan)
        self.now += 1.0
        self.hear(self.core.update(plan, result, self.now))
        self.core.validate()

    def finish_quietly(self) -> RouterOutputs:
        """One whole step; returns what the core says."""
        plan = self.plan()
        assert plan is not None
        return self.core.update(plan, self.runner.execute(plan), self.now)

    def step(self) -> dict[str, int]:
        """One whole step; returns tokens scheduled by request."""
        plan = self.plan()
        assert plan is not None
        names = {s.seq_id: str(s.request_id) for s in self.core.scheduler.running}
        self.finish(plan)
        return {names[seq_id]: count for seq_id, count in zip(plan.seq_ids, plan.num_scheduled, strict=True)}

    def run(self, limit: int = 1000) -> int:
        for number in range(limit):
            plan = self.plan()
            if plan is None:
                return number
            self.finish(plan)
        raise AssertionError(f"not done after {limit} steps")

    def sequence(self, name: str) -> Sequence:
        (found,) = [s for s in self.core.scheduler.living() if s.request_id == name]
        return found

    def running(self) -> list[str]:
        return self.names(self.core.scheduler.running)

    def names(self, queue: object) -> list[str]:
        return [str(s.request_id) for s in queue]  # type: ignore[attr-defined]


def reference(prompt: list[int], num_tokens: int) -> list[int]:
    return expected_output(prompt, num_tokens, vocab_size=VOCAB, eos=frozenset({7}))
