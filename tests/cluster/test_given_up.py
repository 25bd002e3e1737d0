"""What a replica tells routers of requests that end before they begin, while the device is busy and while it is not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from replica.config import AdmissionConfig, EngineConfig, SchedulerConfig
from replica.engine import Engine
from replica.messages import FinishReason, GenerateRequest, RouterId, StepOutput, Submit, decode_up
from tests.cluster.harness import ReplicaUnderTest, request, until

pytestmark = pytest.mark.anyio


class Listener:
    """Stands where a router's stream stands; keeps who ended, and why."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine = engine
        self.link = engine.connect(RouterId(name))
        self.ends: dict[str, FinishReason] = {}
        self.task = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        async for data in self.link.messages():
            message = decode_up(data)
            if isinstance(message, StepOutput):
                self.ends |= {str(o.request_id): o.finish_reason for o in message.outputs if o.finish_reason}

    def submit(self, item: GenerateRequest, **fields: object) -> None:
        self.engine.handle(self.link, Submit(msgspec.structs.replace(item, **fields)))


@asynccontextmanager
async def busy_replica() -> AsyncIterator[tuple[ReplicaUnderTest, Listener, Listener]]:
    """One place in the queue, one in the batch; the first step is under way and does not end. Two routers."""
    config = EngineConfig(
        scheduler=SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=1, policy="priority"),
        admission=AdmissionConfig(max_queued_requests=1),
    )
    replica = ReplicaUnderTest("replica", config, 64, is_open=False)
    await replica.engine.start()
    first, second = Listener(replica.engine, "first"), Listener(replica.engine, "second")
    try:
        first.submit(request("runs", [1], 3))
        await until(lambda: replica.runner.plans)
        yield replica, first, second
    finally:
        replica.runner.open()
        await replica.engine.close()
        await asyncio.gather(first.task, second.task)


async def test_a_deadline_is_answered_in_the_middle_of_a_long_step() -> None:
    async with busy_replica() as (replica, first, _):
        first.submit(request("hasty", [2], 3), deadline_s=time.time() + 0.02)
        await until(lambda: first.ends)
        assert first.ends == {"hasty": FinishReason.DEADLINE}
        assert len(replica.runner.plans) == 1, "the step is still under way"
        assert replica.engine.core.next_deadline is None


async def test_a_deadline_is_answered_while_nothing_runs() -> None:
    async with busy_replica() as (replica, first, second):
        replica.runner.open()
        await until(lambda: first.ends == {"runs": FinishReason.LENGTH})
        # its grammar is never there: the fake runner's compiler is not asked
        replica.engine._compile = lambda grammar: None  # type: ignore[method-assign]
        item = request("compiling", [2], 3)
        (sequence,) = item.sequences
        sampling = msgspec.structs.replace(sequence.sampling, grammar="g")
        sequences = [msgspec.structs.replace(sequence, sampling=sampling)]
        second.submit(item, sequences=sequences, deadline_s=time.time() + 0.02)
        await until(lambda: second.ends)
        assert second.ends == {"compiling": FinishReason.DEADLINE}


async def test_the_router_of_a_request_that_was_shed_hears_of_it_at_once() -> None:
    async with busy_replica() as (replica, first, second):
        first.submit(request("patient", [2], 3), order_key=(0.0, 5, 1.0))
        second.submit(request("urgent", [3], 3), order_key=(0.0, 1, 2.0))
        await until(lambda: first.ends)
        assert first.ends == {"patient": FinishReason.SHED}
        replica.runner.open()
        await until(lambda: second.ends)
        assert second.ends == {"urgent": FinishReason.LENGTH}
        assert first.ends == {"patient": FinishReason.SHED, "runs": FinishReason.LENGTH}
