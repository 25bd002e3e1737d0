"""Aborts at random moments: queued, running, in the step, long finished."""

from __future__ import annotations

import random

import pytest

from replica.config import AdmissionConfig, EngineConfig, SchedulerConfig
from replica.engine_core import EngineCore
from replica.fake_runner import FakeModelRunner
from replica.messages import GenerateRequest, RequestId, SamplingParams, SequenceInput
from tests.property.engine_client import ROUTERS, VOCAB


@pytest.mark.parametrize("seed", range(3))
def test_a_thousand_random_aborts_leave_every_pool_at_baseline(seed: int) -> None:
    rng = random.Random(seed)
    runner = FakeModelRunner(num_blocks=60, block_size=8, max_model_len=200, vocab_size=VOCAB, eos_token_ids=())
    config = EngineConfig(
        scheduler=SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=16),
        admission=AdmissionConfig(max_queued_requests=40),
    )
    core = EngineCore(config, runner.info)
    alive: list[RequestId] = []
    num_aborted, count, now = 0, 0, 0.0
    plan = None
    while num_aborted < 1000:
        for _ in range(rng.randrange(4)):
            prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 120))]
            request_id = RequestId(str(count))
            count += 1
            sampling = SamplingParams(max_tokens=rng.randrange(1, 60), temperature=0.0)
            request = GenerateRequest(request_id, [SequenceInput(0, prompt, sampling)], order_key=(0.0, 0, now))
            if core.submit(ROUTERS[0], request, 0, now).refusal is None:
                alive.append(request_id)
        plan = core.schedule(now)
        for _ in range(min(len(alive), rng.randrange(3))):  # queued, running, in the step or long finished
            core.abort(ROUTERS[0], alive.pop(rng.randrange(len(alive))), now)
            num_aborted += 1
        if plan is not None:
            result = runner.execute(plan)
            now += result.duration_s
            core.update(plan, result, now)
    core.abort_router(ROUTERS[0], now)
    while (plan := core.schedule(now)) is not None:
        core.update(plan, runner.execute(plan), now)
    core.validate()
    assert core.num_unfinished == 0
    assert core.blocks.num_free == 60
    assert runner.num_known == 0
    load = core.load(now)
    assert (load.num_queued, load.num_running, load.num_uncomputed_tokens, load.num_context_tokens) == (0, 0, 0, 0)
