"""Engines, their gRPC services and routers in one process: the real data plane without Ray, with runners that a test
controls.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec

from replica.audit import audit
from replica.config import AdmissionConfig, CacheConfig, EngineConfig, SchedulerConfig
from replica.engine import Engine
from replica.fake_runner import CostModel, FakeModelRunner
from replica.messages import GenerateRequest, RequestId, Role, RouterId, SamplingParams, SequenceInput
from replica.runner_thread import RunnerThread
from replica.service import ReplicaService
from replica.step import RunnerInfo, StepPlan, StepResult
from router.disaggregation import HandOverConfig
from router.dispatcher import DispatcherConfig
from router.live_backend import LiveBackend
from router.live_stream import LiveStream
from router.pairing import PairingDispatcher
from router.placement import least_tokens


class GatedRunner:
    """A fake runner that computes a step only when the test lets it: `gate` counts the steps it may still take."""

    def __init__(self, runner: FakeModelRunner) -> None:
        self._runner = runner
        self.gate = threading.Semaphore(0)
        self.is_open = False
        self.num_failures = 0
        #: each step with a sequence in it fails, as if that were its fault
        self.is_poisoned = False
        #: not empty: the first sequence of the next step cannot go on, for this reason
        self.invalid = ""
        #: the first sequence of the next step has no numbers
        self.not_finite = False
        self.plans: list[StepPlan] = []

    @property
    def info(self) -> RunnerInfo:
        return self._runner.info

    def prepare_grammar(self, grammar: str) -> None:
        self._runner.prepare_grammar(grammar)

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        if not self.is_open:
            self.gate.acquire()
        if self.num_failures:
            self.num_failures -= 1
            raise RuntimeError("the device is on fire")
        if self.is_poisoned and plan.seq_ids:
            raise RuntimeError("it cannot be computed")
        result = self._runner.execute(plan)
        if self.invalid and plan.seq_ids:
            result, self.invalid = _without_first(result, plan.seq_ids[0], self.invalid), ""
        if self.not_finite and plan.seq_ids:
            first, self.not_finite = plan.seq_ids[0], False
            result = msgspec.structs.replace(_without_first(result, first, ""), failed={}, not_finite=[first])
        return result

    def open(self) -> None:
        """From now on every step runs at once."""
        self.is_open = True
        self.gate.release(1000)

    def close(self) -> None:
        self._runner.close()


def _without_first(result: StepResult, seq_id: int, why: str) -> StepResult:
    kept = [(s, token) for s, token in zip(result.seq_ids, result.token_ids, strict=True) if s != seq_id]
    return StepResult(result.step, [s for s, _ in kept], [token for _, token in kept], failed={seq_id: why})


class ReplicaUnderTest:
    """One engine with its service."""

    role = Role.BOTH

    def __init__(self, name: str, config: EngineConfig, num_blocks: int, is_open: bool, role: Role = Role.BOTH) -> None:
        self.name = name
        self.role = role
        fake = FakeModelRunner(num_blocks=num_blocks, block_size=config.cache.block_size, cost=CostModel(0, 0, 0, 0))
        self.runner = GatedRunner(fake)
        if is_open:
            self.runner.open()
        self.engine = Engine(config, RunnerThread(lambda: self.runner), incarnation=name)

    async def start(self) -> None:
        await self.engine.start()
        self.service = ReplicaService(self.engine)
        self.address = await self.service.start("127.0.0.1")

    async def die(self) -> None:
        """Cut every stream at once, as a killed process would."""
        await self.service.stop(0)

    async def close(self) -> None:
        self.runner.open()
        await self.service.stop(0)
        await self.engine.close()


class ClusterUnderTest:
    """Replicas and routers, connected."""

    def __init__(self, replicas: list[ReplicaUnderTest], routers: list[LiveBackend]) -> None:
        self.replicas = replicas
        self.routers = routers

    def check_books(self) -> None:
        """Nothing is lost, whatever is still under way."""
        for replica in self.replicas:
            assert audit(replica.engine.core, replica.engine._links) == {}
        for router in self.routers:
            router.dispatcher.validate()
            assert router.audit() == {}

    def publish_view(self, *absent: str) -> None:
        """What Serve's membership would tell every router: all replicas but `absent`."""
        view = {
            replica.name: {"address": replica.address, "incarnation": replica.name, "role": replica.role.value}
            for replica in self.replicas
            if replica.name not in absent
        }
        for router in self.routers:
            router.on_view(view)


@asynccontextmanager
async def cluster(
    num_replicas: int = 1,
    num_routers: int = 1,
    *,
    is_open: bool = True,
    cap: int = 64,
    max_num_seqs: int = 8,
    num_blocks: int = 256,
    dispatcher: DispatcherConfig = DispatcherConfig(),
    roles: Sequence[Role] | None = None,
    hand_over: HandOverConfig = HandOverConfig(),
) -> AsyncIterator[ClusterUnderTest]:
    """Everything up and connected; everything down at the end, whatever the test did. `roles`: of each replica."""
    config = EngineConfig(
        cache=CacheConfig(block_size=8),
        scheduler=SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=max_num_seqs),
        admission=AdmissionConfig(max_queued_requests=cap),
    )
    roles = roles or [Role.BOTH] * num_replicas
    replicas = [ReplicaUnderTest(f"replica-{i}", config, num_blocks, is_open, role) for i, role in enumerate(roles)]
    for replica in replicas:
        await replica.start()
    routers = [
        LiveBackend(
            PairingDispatcher(dispatcher, least_tokens, hand_over, f"router-{i}"), RouterId(f"router-{i}"), "fake"
        )
        for i in range(num_routers)
    ]
    under_test = ClusterUnderTest(replicas, routers)
    try:
        under_test.publish_view()
        for router in routers:
            await until(lambda router=router: num_up(router) == len(roles))
        yield under_test
        under_test.check_books()
    finally:
        for router in routers:
            await router.close()
        for replica in replicas:
            with contextlib.suppress(Exception):
                await replica.close()


def num_up(router: LiveBackend) -> int:
    """Replicas of all roles that this router may use."""
    return sum(view.is_open for view in router.dispatcher.all_views.values())


async def until(condition: object, timeout_s: float = 10.0) -> None:
    """Give the loop turns until `condition()` holds. Fails loudly instead of hanging."""
    assert callable(condition)
    async with asyncio.timeout(timeout_s):
        while not condition():
            await turn()


async def turn() -> None:
    """Let everything else on the loop run once; sockets and threads get a millisecond."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    loop.call_later(0.001, done.set_result, None)
    await done


def request(name: str, prompt: list[int], max_tokens: int, *, n: int = 1, arrival: float = 0.0) -> GenerateRequest:
    """A greedy request that runs to its length."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(
        RequestId(name),
        [SequenceInput(index, prompt, sampling) for index in range(n)],
        order_key=(0.0, 0, arrival),
    )


async def collect(stream: LiveStream) -> dict[int, list[int]]:
    """All tokens by sequence index."""
    tokens: dict[int, list[int]] = {}
    async for events in stream:
        for event in events:
            tokens.setdefault(event.index, []).extend(event.token_ids)
    return tokens
