"""`python -m benchmarks.engine_cost`: what the engine costs without a model, prefix caching on.

Counted is all that production does on the event loop around a step: `schedule`, `update` (blocks, hashes, outputs by
router), KV events, the load snapshot, one encoded message a router. Not counted is the runner, here one that makes up
tokens. The load is that of a scheduler benchmark of vLLM's (`benchmarks/engine_rival.py` runs it): prompts of 512
random tokens, block size 16, everybody decodes.

The clock is the thread's CPU time, which other processes disturb less. Means over whole turns of 16 steps, not medians
of steps: all sequences cross a block border in the same step, and a median would not see it.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import msgspec

from replica.config import AdmissionConfig, EngineConfig, SchedulerConfig
from replica.engine_core import EngineCore
from replica.messages import GenerateRequest, RequestId, RouterId, SamplingParams, SequenceInput, encode
from replica.router_output import RouterOutputs
from replica.step import RunnerInfo, StepPlan, StepResult

BLOCK_SIZE = 16
VOCAB = 49152
PROMPT_TOKENS = 512
ROUTERS = [RouterId("router-0"), RouterId("router-1")]


class StepCost(msgspec.Struct, frozen=True):
    """Microseconds per running sequence and step."""

    #: submissions, where sequences come and go
    submit: float
    schedule: float
    update: float
    #: load snapshot and KV events
    report: float
    encode: float

    @property
    def total(self) -> float:
        return self.submit + self.schedule + self.update + self.report + self.encode


class AdmitCost(msgspec.Struct, frozen=True):
    """Milliseconds for one prompt: as nobody has sent it before, then once more. Submitting hashes it."""

    submit: float
    schedule: float
    #: registers the blocks
    update: float
    lookup: float
    hit_submit: float
    hit_schedule: float

    @property
    def total(self) -> float:
        return self.submit + self.schedule + self.update


Cost = TypeVar("Cost", StepCost, AdmitCost)

#: seconds: schedule, update, report, encode
Parts = tuple[float, float, float, float]


class NullRunner:
    """Knows how long each sequence is, so that it samples for those whose tokens are all computed."""

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        for seq_id in plan.dropped:
            self._lengths.pop(seq_id, None)
        for new in plan.new:
            self._lengths[new.seq_id] = len(new.token_ids)
        seq_ids = []
        for seq_id, start, count in zip(plan.seq_ids, plan.num_computed, plan.num_scheduled, strict=True):
            if start + count == self._lengths[seq_id]:
                self._lengths[seq_id] += 1
                seq_ids.append(seq_id)
        return StepResult(plan.step, seq_ids, [7 + (i & 1023) for i in range(len(seq_ids))])


class Bench:
    """An engine core, a null runner and a stopwatch."""

    def __init__(self, max_num_seqs: int, token_budget: int, num_blocks: int, block_size: int = BLOCK_SIZE) -> None:
        info = RunnerInfo(num_blocks, block_size, 65536, VOCAB, (2,), "null")
        config = EngineConfig(
            scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=token_budget, watermark=0.0),
            admission=AdmissionConfig(max_queued_requests=max(64, max_num_seqs)),
        )
        self.core = EngineCore(config, info, record_kv_events=True)
        self.runner = NullRunner()
        self._outputs: RouterOutputs = {}
        self._count = 0

    def submit(self, prompt: list[int], max_tokens: int) -> float:
        """Seconds it took. Requests go to the routers in turn."""
        number, self._count = self._count, self._count + 1
        sampling = SamplingParams(max_tokens, temperature=0.0, ignore_eos=True)
        request = GenerateRequest(
            RequestId(f"request-{number}"), [SequenceInput(0, prompt, sampling)], order_key=(0.0, 0, float(number))
        )
        started = time.thread_time()
        reply = self.core.submit(ROUTERS[number % len(ROUTERS)], request, 0, float(number))
        taken = time.thread_time() - started
        assert reply.refusal is None, reply.message
        return taken

    def step(self) -> Parts:
        """Seconds for schedule, update, report, encode, in the order of the live step loop: what a step gave is sent
        once the next one has been planned.
        """
        at = [time.thread_time()]
        plan = self.core.schedule(0.0)
        at.append(time.thread_time())
        load, events = self.core.load(0.0), self.core.take_kv_events()
        at.append(time.thread_time())
        for output in self._outputs.values():
            encode(output.to_message("incarnation", load, events))
        at.append(time.thread_time())
        assert plan is not None
        result = self.runner.execute(plan)
        at.append(time.thread_time())
        self._outputs = self.core.update(plan, result, 0.0)
        at.append(time.thread_time())
        return at[1] - at[0], at[5] - at[4], at[2] - at[1], at[3] - at[2]

    @property
    def is_decoding(self) -> bool:
        """Everybody runs and is past the prompt."""
        scheduler = self.core.scheduler
        return not scheduler.num_queued and all(s.num_uncomputed_tokens == 1 for s in scheduler.running)

    def run(self) -> None:
        """Until nobody is left."""
        while (plan := self.core.schedule(0.0)) is not None:
            self.core.update(plan, self.runner.execute(plan), 0.0)


def prompts(seed: int, num_tokens: int) -> Iterator[list[int]]:
    rng = random.Random(seed)
    while True:
        yield [rng.randrange(VOCAB) for _ in range(num_tokens)]


def decode_cost(num_running: int, num_steps: int = 160, block_size: int = BLOCK_SIZE) -> StepCost:
    """Everybody decodes and nobody ends."""
    blocks_each = (PROMPT_TOKENS + num_steps + 80) // block_size + 2
    bench = Bench(max(8, num_running), 8192, num_running * blocks_each + 64, block_size)
    source = prompts(1, PROMPT_TOKENS)
    for _ in range(num_running):
        bench.submit(next(source), 100_000 - PROMPT_TOKENS)
    while not bench.is_decoding:
        bench.step()
    for _ in range(16):
        bench.step()
    gc.collect()
    gc.freeze()
    parts = [bench.step() for _ in range(num_steps)]
    gc.unfreeze()
    bench.core.validate()
    assert len(bench.core.scheduler.running) == num_running
    return _step_cost(parts, num_running, 0.0, block_size)


def churn_cost(num_running: int, num_steps: int = 160, output_tokens: int = 200) -> StepCost:
    """Sequences end and others take their places: per step `num_running / output_tokens` of each."""
    blocks_each = (PROMPT_TOKENS + output_tokens) // BLOCK_SIZE + 2
    bench = Bench(num_running, 8192, 2 * num_running * blocks_each)
    source = prompts(3, PROMPT_TOKENS)
    rng = random.Random(3)
    for _ in range(num_running):
        bench.submit(next(source), rng.randrange(1, output_tokens))
    while not bench.is_decoding:
        bench.step()
    gc.collect()
    gc.freeze()
    parts, submit_s = [], 0.0
    for _ in range(num_steps):
        for _ in range(num_running - bench.core.num_unfinished):
            submit_s += bench.submit(next(source), output_tokens)
        parts.append(bench.step())
    gc.unfreeze()
    bench.core.validate()
    return _step_cost(parts, num_running, submit_s / num_steps)


def admit_cost(num_tokens: int = 32768, num_prompts: int = 7) -> AdmitCost:
    """Each part as it was least disturbed among `num_prompts` prompts. The prompt is one chunk of one step."""
    bench = Bench(64, 65536, (num_tokens // BLOCK_SIZE + 8) * (num_prompts * 2 + 6))
    source = prompts(2, num_tokens)
    found = []
    for _ in range(num_prompts):
        prompt = next(source)
        submit = bench.submit(prompt, 4)
        schedule, update, _, _ = bench.step()
        bench.run()
        hit_submit = bench.submit(list(prompt), 4)
        sequence = bench.core.scheduler.queued.at(0)
        assert sequence is not None
        started = time.thread_time()
        hits = bench.core.blocks.find_prefix(sequence)
        lookup = time.thread_time() - started
        assert len(hits) >= num_tokens // BLOCK_SIZE - 1, "the whole prompt is cached"
        hit_schedule = bench.step()[0]
        bench.run()
        found.append((submit, schedule, update, lookup, hit_submit, hit_schedule))
    bench.core.validate()
    return AdmitCost(*(1e3 * min(column) for column in zip(*found, strict=True)))


def _step_cost(parts: list[Parts], num_running: int, submit_s: float, block_size: int = BLOCK_SIZE) -> StepCost:
    """Of the least disturbed turn of `block_size` steps; each has the same work."""
    turns = [parts[i : i + block_size] for i in range(0, len(parts), block_size)]
    means = [[statistics.fmean(column) for column in zip(*turn, strict=True)] for turn in turns]
    schedule, update, report, encode_s = (1e6 * mean / num_running for mean in min(means, key=sum))
    return StepCost(1e6 * submit_s / num_running, schedule, update, report, encode_s)


def best(measure: Callable[[], Cost], rounds: int) -> Cost:
    """The least disturbed of several rounds."""
    return min((measure() for _ in range(rounds)), key=lambda cost: cost.total)


def describe(cost: Cost) -> str:
    """Total and parts on one line."""
    parts = ", ".join(f"{name} {value:.3f}" for name, value in msgspec.structs.asdict(cost).items())
    return f"{cost.total:.3f}  ({parts})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    print("us per running sequence and step")
    for measure in (decode_cost, churn_cost):
        for num_running in (32, 256, 1024):
            cost = best(partial(measure, num_running), rounds)
            print(f"  {measure.__name__:<11} {num_running:>4}: {describe(cost)}")
    print("ms per prompt of 32,768 tokens")
    print(f"  {describe(best(admit_cost, rounds))}")


if __name__ == "__main__":
    main()
