"""Group B: clients that leave. Each one leaves by closing its socket; what that frees is read inside the server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from replica.messages import FinishReason
from router.dispatcher import DispatcherConfig
from tests.api.calls import COMPLETIONS, answer, complete, error_of, timed
from tests.api.harness import ApiUnderTest, fake_api, num_known
from tests.api.wire import Wire

REFUSE_AT_ONCE = DispatcherConfig(admission_wait_s=0.0)
ABORTED = {"finished_reason": "abort"}


def body(num_tokens: int, prompt: str = "Count: one two three", **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, **more}


@contextmanager
def open_stream(api: ApiUnderTest, request: dict[str, Any], num_events: int) -> Iterator[Wire]:
    """A stream of which `num_events` were read."""
    with Wire(api.port) as wire:
        wire.post(COMPLETIONS, {**request, "stream": True})
        status, _ = wire.head()
        assert status == 200
        wire.events(num_events)
        yield wire


def is_running(api: ApiUnderTest) -> bool:
    scheduler = api.replicas[0].engine.core.scheduler
    return bool(scheduler.running or scheduler.queued or scheduler.returning)


@pytest.mark.slow
@pytest.mark.parametrize("leave", ["close", "reset"])
def test_b01_a_client_leaves_a_running_stream(leave: str) -> None:
    with fake_api(step_s=0.002, num_blocks=300) as api:
        blocks = api.peek(lambda: api.replicas[0].engine.core.blocks.num_free)
        for number in range(20):
            with open_stream(api, body(4000), 3) as wire:
                assert api.peek(api.backend.load) == 1
                getattr(wire, leave)()
            _, took = timed(lambda: api.until(lambda: not is_running(api)))
            assert took < 2
            generated = api.counter("generation_tokens")
            assert generated < 4000 * (number + 1) / 2, "it went on without a reader"
            steps = api.peek(lambda: len(api.replicas[0].runner.plans))
            answer(complete(api, max_tokens=1))  # one plan, and one to forget it: nothing else steps any more
            assert api.peek(lambda: len(api.replicas[0].runner.plans)) - steps <= 3
            assert api.counter("generation_tokens") - generated == 1
        api.check_idle()
        assert api.peek(lambda: api.replicas[0].engine.core.blocks.num_free) == blocks
        assert api.metric("vllm:request_success_total", **ABORTED) == 20
        assert api.metric("vllm:request_success_total") == 40
        assert api.counter("finished_abort") == 20


@pytest.mark.slow
def test_b01_a_client_leaves_before_the_first_token_and_before_a_whole_answer() -> None:
    with fake_api(is_open=False) as api:
        core, runner = api.replicas[0].engine.core, api.replicas[0].runner
        for stream in (True, False):
            with Wire(api.port) as wire:
                wire.post(COMPLETIONS, body(4000, stream=stream))
                api.until(lambda: api.backend.load() == 1 and is_running(api))
                if not stream:
                    runner.gate.release(3)  # some tokens are there, the answer is not
                    api.until(lambda: core.scheduler.counters.generation_tokens >= 2)
            api.until(lambda: api.backend.load() == 0)
            # the router knows; the replica hears of it in the middle of a step, and ends the sequence with that step
            api.until(lambda: all(sequence.abort_reason for sequence in core.scheduler.living()))
            runner.gate.release(1)
            api.until(lambda: not is_running(api))
        runner.open()
        api.check_idle()
        assert api.metric("vllm:request_success_total", **ABORTED) == 2


@pytest.mark.slow
def test_b03_a_client_leaves_four_samples() -> None:
    with fake_api(step_s=0.001) as api:
        core = api.replicas[0].engine.core
        for _ in range(50):
            with open_stream(api, body(1000, n=4), 1):
                assert api.peek(lambda: sum(len(core._requests.of(key)) for key in core._requests)) == 4
            api.until(lambda: not is_running(api))
            assert api.peek(lambda: (len(core._requests), len(api.backend._streams))) == (0, 0)
        api.check_idle()
        assert api.counter("finished_abort") == 200
        assert api.metric("vllm:request_success_total", **ABORTED) == 50


def test_b04_cancelled_while_queued_never_runs() -> None:
    # a router hears of places that became free by the next load message, within 50 ms: until then it holds newcomers
    patient = DispatcherConfig(admission_wait_s=30.0)
    with fake_api(is_open=False, max_num_seqs=1, cap=10, dispatcher=patient) as api, ExitStack() as wires:
        core, runner = api.replicas[0].engine.core, api.replicas[0].runner

        def post(request: dict[str, Any]) -> Wire:
            wire = wires.enter_context(Wire(api.port))
            wire.post(COMPLETIONS, request)
            return wire

        def num_queued() -> int:
            return len(core.scheduler.queued)

        first = post(body(300, [5]))  # type: ignore[arg-type]
        api.until(lambda: runner.plans)
        queued: list[Wire] = []
        for number in range(2, 12):
            queued.append(post(body(5, [number] * 9)))  # type: ignore[arg-type]
            api.until(lambda number=number: num_queued() == number - 1)  # type: ignore[misc]
        for wire in queued[:-1]:
            wire.close()
        # at once: the step of the first is still in the runner's hands
        api.until(lambda: num_queued() == 1)
        assert api.peek(lambda: len(runner.plans)) == 1
        newcomers = [post(body(5, [20 + number] * 9)) for number in range(9)]  # type: ignore[arg-type]
        api.until(lambda: num_queued() == 10)
        for wire in newcomers:
            wire.close()
        api.until(lambda: num_queued() == 1)

        runner.open()
        assert first.reply().json()["usage"]["completion_tokens"] == 300
        reply = queued[-1].reply()
        assert reply.status == 200
        assert reply.json()["usage"]["completion_tokens"] == 5
        prefilled = [new.token_ids for plan in runner.plans for new in plan.new]
        assert prefilled == [[5], [11] * 9], "only the first and the last were ever given to the runner"
        assert api.counter("prompt_tokens") == 1 + 9
        last_of_first = max(n for n, plan in enumerate(runner.plans) if plan.num_tokens and 0 in plan.seq_ids)
        assert runner.plans[last_of_first + 1].new, "the last did not start right after the first"
        api.check_idle()


@pytest.mark.slow
def test_b06_counters_come_back_after_cancels_and_refusals() -> None:
    """Queue cap 4, running cap 2: 6 fill it, 3 more are refused, the queued ones leave, 2 finish. 300 times."""
    rng = random.Random(6)
    with fake_api(is_open=False, max_num_seqs=2, cap=4, dispatcher=REFUSE_AT_ONCE) as api:
        for round_ in range(300):
            _one_round(api, rng, round_)
        api.check_idle()
        with ExitStack() as wires:  # a fresh burst of 6 is accepted in full
            burst = _fill(api, wires, 0)
            api.replicas[0].runner.open()
            assert [wire.reply().status for wire in burst] == [200] * 6
        api.check_idle()


def _fill(api: ApiUnderTest, wires: ExitStack, tag: int) -> list[Wire]:
    """Two running and four queued requests; the runner is held in its step."""
    core = api.replicas[0].engine.core
    filling = []
    for number in range(6):
        wire = wires.enter_context(Wire(api.port))
        wire.post(COMPLETIONS, body(2, [5 + tag % 90, 10 + number]))  # type: ignore[arg-type]
        filling.append(wire)
        if number == 1:  # both are in the scheduler: one step later they run
            api.until(lambda: core.num_unfinished == 2)
            api.replicas[0].runner.gate.release(1)
            api.until(lambda: len(core.scheduler.running) == 2)
        else:
            api.until(lambda number=number: core.num_unfinished == number + 1)  # type: ignore[misc]
    assert api.peek(lambda: (len(core.scheduler.running), len(core.scheduler.queued))) == (2, 4)
    return filling


def _one_round(api: ApiUnderTest, rng: random.Random, round_: int) -> None:
    core, runner = api.replicas[0].engine.core, api.replicas[0].runner
    with ExitStack() as wires:
        filling = _fill(api, wires, round_)
        for number in range(3):
            error_of(complete(api, **body(2, [50 + number])), 503, code="queue_full")  # type: ignore[arg-type]
            assert api.peek(api.backend.load) == 6, "a refused request counted as a running one"
        leaving = filling[2:]
        rng.shuffle(leaving)
        num_before_the_step = rng.randrange(5)
        for wire in leaving[:num_before_the_step]:
            wire.close()
        runner.gate.release(1 + rng.randrange(3))
        for wire in leaving[num_before_the_step:]:
            wire.reset()
        runner.gate.release(100)  # the two that stay end, those that left do not come back
        assert [wire.reply().status for wire in filling[:2]] == [200, 200]
        api.until(lambda: not (api.backend.load() or core.num_unfinished or num_known(api.replicas[0])))
        while runner.gate.acquire(blocking=False):  # steps that were allowed and not needed
            pass


@pytest.mark.slow
@pytest.mark.anyio
async def test_b07_cancels_that_race_with_the_start() -> None:
    rng = random.Random(7)
    with fake_api(step_s=0.001, max_num_seqs=1, cap=512) as api:
        core = api.replicas[0].engine.core

        async def one(delay_s: float) -> None:
            """A client that leaves after `delay_s`, whatever has come until then."""
            reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
            data = b'{"prompt":"x","max_tokens":1000,"ignore_eos":true,"stream":true}'
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
            try:
                async with asyncio.timeout(delay_s):
                    await reader.read()
            except TimeoutError:
                pass
            finally:
                writer.close()
                await writer.wait_closed()

        for _ in range(50):  # ten at a time: some run, some are queued, some have not arrived
            await asyncio.gather(*(one(rng.uniform(0.0, 0.008)) for _ in range(10)))
        async with api.async_client() as client:
            async with asyncio.timeout(5):
                response = await client.post(COMPLETIONS, json=body(3))
        assert answer(response)["usage"]["completion_tokens"] == 3
        await asyncio.to_thread(api.check_idle)  # no request without a client, no complaint about a task
        finished = {reason for reason, count in core.scheduler.counters.finished.items() if count}
        assert finished <= {FinishReason.LENGTH, FinishReason.ABORT}
        assert core.scheduler.counters.finished[FinishReason.LENGTH] == 1
