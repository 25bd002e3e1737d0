"""Thread and process give the same answers, errors and end, on asyncio's own loop and on uvloop (Serve's)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest
import uvloop

from replica.errors import ModelLoadError
from replica.fake_runner import FakeModelRunner, expected_output
from replica.messages import SamplingParams
from replica.runner_process import RunnerProcess
from replica.runner_thread import RunnerThread
from replica.step import ModelRunner, NewSequence, StepPlan

Runner = RunnerThread | RunnerProcess
pytestmark = [
    pytest.mark.parametrize("kind", [RunnerThread, RunnerProcess]),
    pytest.mark.parametrize("run", [asyncio.run, uvloop.run]),
]
Run = Callable[[Coroutine[Any, Any, None]], None]
make_fake = partial(FakeModelRunner, num_blocks=8, block_size=16)


def make_nothing() -> ModelRunner:
    raise ModelLoadError("the weights are not there")


def first_step(prompt: list[int]) -> StepPlan:
    new = NewSequence(0, prompt, len(prompt), [3, 1], SamplingParams(50, temperature=0.0, ignore_eos=True))
    return StepPlan(0, [0], [0], [len(prompt)], [new])


def test_steps_one_after_the_other_give_the_reference(kind: type[Runner], run: Run) -> None:
    async def body() -> None:
        runner = kind(make_fake)
        assert (await runner.start()).num_blocks == 8
        tokens = []
        result = await runner.execute(first_step([1, 2, 3]))
        for position in range(3, 23):
            tokens += result.token_ids
            result = await runner.execute(StepPlan(position, [0], [position], [1]))
        # a plan without work is answered at once: the answer may be there before anybody waits for it
        assert (await runner.execute(StepPlan(99, [], [], [], dropped=[0]))).token_ids == []
        assert tokens == expected_output([1, 2, 3], 20, vocab_size=49152, eos=frozenset({2}))
        await runner.close()
        await runner.close()

    run(body())


def test_a_step_that_raises_is_an_error_and_the_next_one_works(kind: type[Runner], run: Run) -> None:
    async def body() -> None:
        runner = kind(make_fake)
        await runner.start()
        with pytest.raises(Exception, match="77"):
            await runner.execute(StepPlan(0, [77], [0], [1]))
        assert len((await runner.execute(first_step([5]))).token_ids) == 1
        await runner.close()

    run(body())


def test_a_model_that_does_not_load_says_why(kind: type[Runner], run: Run) -> None:
    async def body() -> None:
        runner = kind(make_nothing)
        with pytest.raises(Exception, match="the weights are not there"):
            await runner.start()
        await runner.close()

    run(body())


def test_a_killed_runner_process_fails_its_step_instead_of_hanging(kind: type[Runner], run: Run) -> None:
    if kind is RunnerThread:
        pytest.skip("a thread cannot be killed")

    async def body() -> None:
        runner = RunnerProcess(make_fake)
        await runner.start()
        assert runner._process.pid is not None
        os.kill(runner._process.pid, signal.SIGKILL)
        with pytest.raises(Exception, match=r"gone|Broken pipe|reset"):
            await asyncio.wait_for(runner.execute(first_step([1])), 10)
        await runner.close()

    run(body())
