"""What becomes of preempted sequences, in virtual time: `auto` beside both fixed strategies, over context lengths and
speeds of copies on either side of the crossover.
"""

from __future__ import annotations

import pytest

from replica.config import AdmissionConfig, EngineConfig, SchedulerConfig
from replica.engine_core import EngineCore
from replica.fake_runner import CostModel, FakeModelRunner, expected_output
from replica.kv_transfer import TransferLimits
from replica.messages import GenerateRequest, RequestId, RouterId, SamplingParams, SequenceInput
from replica.progress import SchedulerCounters
from replica.sequence import Sequence
from tests.unit.tier_harness import FakeConnector

ROUTER = RouterId("r")
BLOCK = 16
NUM_TOKENS = 48
#: from the step in which a message is sent to the one in which the answer is there
WAY_S = 2e-4


def run(mode: str, length: int, per_copy_s: float) -> tuple[float, SchedulerCounters]:
    """Virtual seconds until one long request is through that makes way for three urgent ones, each of which takes all
    of its blocks. `recompute` has no connector, else it would find what was stored in the background.
    """
    num_blocks = length // BLOCK + 8
    connector = FakeConnector(8 * num_blocks, 8 * BLOCK)
    runner = FakeModelRunner(
        num_blocks=num_blocks,
        cost=CostModel(per_copy_s=per_copy_s),
        open_arena=connector.open,
        eos_token_ids=(),
        vocab_size=1000,
    )
    config = EngineConfig(
        scheduler=SchedulerConfig(
            max_num_batched_tokens=256,
            watermark=0.0,
            preemption_mode=mode,
            max_preemptions=100,
            policy="priority",
            priority_ageing_s=1e6,
        ),
        admission=AdmissionConfig(max_queued_requests=10),
    )
    core = EngineCore(config, runner.info, transfer_limits=TransferLimits(2, 5.0))
    assert core.kv is not None
    if mode != "recompute":
        core.kv.connected(connector.place("a"), 1e9, 0.0)
    now, urgent = 0.0, 0
    long = submit(core, "long", length, 0, now)
    while core.num_unfinished:
        if long.num_output_tokens >= 10 * (urgent + 1) and urgent < 3 and len(core.scheduler.running) == 1:
            urgent += 1
            submit(core, f"urgent {urgent}", length, urgent, now)
        for message in core.kv.take_messages():
            for answer in connector.handle("a", message):
                core.kv.receive(answer, now)
        for event in connector.events("a") if mode != "recompute" else []:
            core.kv.receive(event, now)
        plan = core.schedule(now)
        if plan is None:
            now += WAY_S
            continue
        result = runner.execute(plan)
        now += result.duration_s
        core.update(plan, result, now)
    core.validate()
    assert long.token_ids[length:] == expected_output(long.token_ids[:length], NUM_TOKENS, vocab_size=1000)
    return now, core.scheduler.counters


def submit(core: EngineCore, name: str, length: int, number: int, now: float) -> Sequence:
    prompt = [(number * 131 + i) % 1000 for i in range(length)]
    sampling = SamplingParams(8 if number else NUM_TOKENS, temperature=0.0, ignore_eos=True)
    key = (0.0, 0 if number else 5, now)
    request = GenerateRequest(RequestId(name), [SequenceInput(0, prompt, sampling)], order_key=key)
    assert core.submit(ROUTER, request, 0, now).refusal is None
    (sequence,) = [s for s in core.scheduler.living() if s.request_id == name]
    return sequence


def table(lengths: tuple[int, ...], speeds: tuple[float, ...]) -> list[tuple[float, int, dict[str, float], int]]:
    rows = []
    for per_copy_s in speeds:
        for length in lengths:
            took = {mode: run(mode, length, per_copy_s) for mode in ("recompute", "offload", "auto")}
            preemptions = took["recompute"][1].preemptions
            rows.append((per_copy_s, length, {mode: seconds for mode, (seconds, _) in took.items()}, preemptions))
    return rows


#: a block takes 3.5 ms to compute; copies from one that is hardly seen to one that is dearer than that
SPEEDS = (2e-4, 1e-3, 2.5e-3, 5e-3)


@pytest.mark.parametrize("per_copy_s", SPEEDS)
def test_auto_is_never_much_worse_than_the_better_strategy(per_copy_s: float) -> None:
    for _, length, took, preemptions in table((128, 700, 1500), (per_copy_s,)):
        assert preemptions >= 1, "too few to mean anything"
        best = min(took["recompute"], took["offload"])
        assert took["auto"] <= 1.1 * best, (length, took)


if __name__ == "__main__":
    for per_copy_s, length, took, preemptions in table((128, 256, 512, 1000, 2000, 4000, 6000), SPEEDS):
        ratio = took["auto"] / min(took["recompute"], took["offload"])
        print(
            f"{1e3 * per_copy_s:5.1f} ms a block, {length:5d} tokens, {preemptions:2d} preemptions: "
            + ", ".join(f"{mode} {seconds:7.2f} s" for mode, seconds in took.items())
            + f", auto / better {ratio:.3f}"
        )
