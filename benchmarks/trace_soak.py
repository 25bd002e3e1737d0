"""`python -m benchmarks.trace_soak --requests 1000000 [--traces DIR] [--seed 0]`: requests from public traces through
the production engine core in virtual time.

In episodes, each with a policy, pool, load and knobs of its own, drawn from the seed and printed, so that a failure can
be repeated by itself (`--seed N --episodes 1`). Clients leave (5 %), set deadlines (10 %), ask for several samples
(2 %). After each episode every request has ended exactly once with no token too many, pools and queues are at baseline,
the published KV events give exactly the cached set; `validate()` runs every `VALIDATE_EVERY` steps.

The runner here makes tokens up: who got which KV is the matter of the property tests and of `benchmarks.soak`.
"""

from __future__ import annotations

import argparse
import heapq
import os
import random
import sys
import time
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.engine_cost import NullRunner
from benchmarks.traces import BLOCK_TOKENS, TraceRequest, load
from replica.config import AdmissionConfig, EngineConfig, SchedulerConfig
from replica.engine_core import EngineCore
from replica.fake_runner import CostModel
from replica.messages import GenerateRequest, RefusalReason, RequestId, RouterId, SamplingParams, SequenceInput
from replica.router_output import RouterOutputs
from replica.step import RunnerInfo

VALIDATE_EVERY = 2000
EPISODE_REQUESTS = 20_000
BLOCK_SIZE = 16
VOCAB = 1 << 31
ROUTERS = (RouterId("a"), RouterId("b"))
#: a step of a GPU, roughly: 10 ms and 50,000 prompt tokens a second
COST = CostModel(base_s=10e-3, per_token_s=2e-5, per_sequence_s=2e-5, per_context_token_s=2e-9)
#: a leak shows as growth between the first fifth of a run and its end
MAX_GROWTH_MIB = 64.0


class Tally(msgspec.Struct):
    """What happened in one episode or in all."""

    requests: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    refused: int = 0
    aborted: int = 0
    shed: int = 0
    overdue: int = 0
    validations: int = 0
    longest_wait_s: float = 0.0
    virtual_s: float = 0.0

    def add(self, other: Tally) -> None:
        for name in self.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            setattr(self, name, max(mine, theirs) if name == "longest_wait_s" else mine + theirs)


def random_config(rng: random.Random) -> tuple[EngineConfig, int]:
    """An engine's configuration and its number of blocks."""
    policy = rng.choice(["fcfs", "priority", "sjf"])
    long_lane = rng.random() < 0.3
    scheduler: dict[str, Any] = {
        "policy": policy,
        "priority_ageing_s": rng.choice([5.0, 60.0]),
        "sjf_ageing_tokens_per_s": rng.choice([50.0, 1000.0]),
        "max_num_seqs": rng.choice([32, 64, 128]),
        "max_num_batched_tokens": rng.choice([512, 1024, 2048]),
        "watermark": rng.choice([0.0, 0.01, 0.05]),
        "long_prefill_token_threshold": 256 if long_lane else 0,
        "max_long_partial_prefills": 2 if long_lane else 0,
        "admission_look_past": rng.choice([0, 8]),
        "preemption_victim": rng.choice(["policy", "cost"]),
        "shed_above_queued_tokens": rng.choice([0, 0, 20_000]),
        "tpot_target_ms": rng.choice([0, 0, 30]),
    }
    config = EngineConfig(
        scheduler=SchedulerConfig.model_validate(scheduler),
        admission=AdmissionConfig(max_queued_requests=rng.choice([16, 64, 512])),
    )
    return config, rng.choice([600, 1500, 6000])


class Episode:
    """One engine core, one stretch of a trace."""

    def __init__(self, seed: int, trace: list[TraceRequest], num_requests: int) -> None:
        self._rng = rng = random.Random(seed)
        self.config, num_blocks = random_config(rng)
        self.load = rng.choice([0.7, 1.0, 1.4])
        self._core = EngineCore(
            self.config, RunnerInfo(num_blocks, BLOCK_SIZE, 8192, VOCAB, (), "soak"), record_kv_events=True
        )
        self._runner = NullRunner()
        start = rng.randrange(len(trace))
        self._requests = list(islice(cycle(trace), start, start + num_requests))
        self._gaps = self._arrival_gaps()
        self._tokens_from = rng.randrange(1 << 20)
        self._now = 0.0
        #: request -> sequences that have not ended, with the tokens each may get at most
        self._open: dict[tuple[RouterId, RequestId], dict[int, int]] = {}
        self._names: dict[int, tuple[tuple[RouterId, RequestId], int]] = {}
        self._leaving: list[tuple[float, RouterId, RequestId]] = []
        self._cached: set[bytes] = set()
        self.tally = Tally()

    def describe(self) -> str:
        changed = self.config.scheduler.model_dump(exclude_defaults=True)
        cap = self.config.admission.max_queued_requests
        return f"load {self.load}, {self._core.blocks.num_blocks} blocks, cap {cap}, {changed}"

    def run(self) -> Tally:
        """Raises AssertionError if anything is lost, doubled, left behind or stands still."""
        arrivals = iter(zip(self._gaps, self._requests, strict=True))
        pending = next(arrivals, None)
        at, number, idle_steps = 0.0, 0, 0
        while pending is not None or self._core.has_work:
            while pending is not None and at + pending[0] <= self._now:
                at += pending[0]
                self._submit(pending[1], number)
                number += 1
                pending = next(arrivals, None)
            self._leave()
            plan = self._core.schedule(self._now)
            self._hear(self._core.take_ended())
            if plan is None:
                assert not self._core.has_work, "work, but no step"
                assert self._core.num_unfinished == 0, "unfinished, but no step"
                if pending is not None:
                    self._now = at + pending[0]
                continue
            idle_steps = 0 if plan.seq_ids else idle_steps + 1
            assert idle_steps < 3, "steps without a token"
            self._now += COST.step_s(plan)
            self._hear(self._core.update(plan, self._runner.execute(plan), self._now))
            self._after_step()
        self._check_baseline()
        return self.tally

    def _arrival_gaps(self) -> list[float]:
        """The trace's own, made so dense that the mean demand is `load` times what the engine does."""
        demand = sum(
            r.num_prompt_tokens * COST.per_token_s + r.num_output_tokens * COST.base_s / 40 for r in self._requests
        )
        gaps = [max(0.0, b.arrival_s - a.arrival_s) for a, b in zip(self._requests, self._requests[1:], strict=False)]
        total = sum(gaps) or 1.0
        return [0.0, *(gap * demand / (self.load * total) for gap in gaps)]

    def _prompt(self, request: TraceRequest, number: int) -> list[int]:
        count = request.num_prompt_tokens
        if not request.blocks:
            first = (self._tokens_from + number * 8192) % (VOCAB - 8192)
            return list(range(first, first + count))
        tokens: list[int] = []
        for block in request.blocks:
            first = (self._tokens_from + block * BLOCK_TOKENS) % (VOCAB - BLOCK_TOKENS)
            tokens += range(first, first + BLOCK_TOKENS)
        return (tokens + [7] * max(0, count - len(tokens)))[:count]

    def _submit(self, traced: TraceRequest, number: int) -> None:
        rng, core, tally = self._rng, self._core, self.tally
        router, request_id = ROUTERS[number % 2], RequestId(str(number))
        n = 2 + rng.randrange(3) if rng.random() < 0.02 else 1
        prompt = self._prompt(traced, number)
        sampling = SamplingParams(traced.num_output_tokens, temperature=0.0, ignore_eos=True)
        request = GenerateRequest(
            request_id,
            [SequenceInput(index, prompt, sampling) for index in range(n)],
            order_key=(0.0, rng.randrange(4) if self.config.scheduler.policy == "priority" else 0, self._now),
            deadline_s=self._now + rng.expovariate(0.5) if rng.random() < 0.1 else None,
        )
        reply = core.submit(router, request, 0, self._now)
        self._hear(core.take_ended())
        tally.requests += 1
        if reply.refusal is not None:
            assert reply.refusal in (RefusalReason.QUEUE_FULL, RefusalReason.SHED, RefusalReason.NEVER_FITS), reply
            tally.refused += 1
            return
        self._open[(router, request_id)] = dict.fromkeys(range(n), traced.num_output_tokens)
        if rng.random() < 0.05:
            heapq.heappush(self._leaving, (self._now + rng.expovariate(1.0), router, request_id))

    def _leave(self) -> None:
        while self._leaving and self._leaving[0][0] <= self._now:
            _, router, request_id = heapq.heappop(self._leaving)
            if self._open.pop((router, request_id), None) is not None:
                self._core.abort(router, request_id, self._now)
                self.tally.aborted += 1

    def _hear(self, outputs: RouterOutputs) -> None:
        """Every token and every end belongs to a request that is open, and to one of its sequences that is."""
        for router, output in outputs.items():
            for record in output.outputs:
                key = (router, record.request_id)
                left = self._open[key]
                left[record.index] -= len(record.new_token_ids)
                assert left[record.index] >= 0, f"{key}: a token too many"
                self.tally.tokens += len(record.new_token_ids)
                if record.seq_id is not None:
                    self._names[record.seq_id] = (key, record.index)
                if record.finish_reason is None:
                    continue
                self.tally.shed += record.finish_reason == "shed"
                self.tally.overdue += record.finish_reason == "deadline"
                if record.finish_reason == "length":
                    assert left[record.index] == 0, f"{key}: ended {left[record.index]} tokens early"
                del left[record.index]
                if not left:
                    del self._open[key]
            for seq_id in output.seq_ids:
                key, index = self._names[seq_id]
                if key in self._open:
                    self._open[key][index] -= 1
            self.tally.tokens += len(output.seq_ids)

    def _after_step(self) -> None:
        tally = self.tally
        tally.steps += 1
        for event in self._core.take_kv_events():
            if event.cleared:
                self._cached.clear()
            self._cached.difference_update(event.removed)
            self._cached.update(event.stored)
        tally.longest_wait_s = max(tally.longest_wait_s, self._core.scheduler.oldest_wait_s(self._now))
        if tally.steps % VALIDATE_EVERY == 0:
            self._core.validate()
            assert self._cached == set(self._core.blocks.cached_hashes()), "events do not give the cached set"
            tally.validations += 1
            living = {s.seq_id for s in self._core.scheduler.living()}
            self._names = {seq_id: name for seq_id, name in self._names.items() if seq_id in living}

    def _check_baseline(self) -> None:
        core, tally = self._core, self.tally
        core.validate()
        assert not self._open, f"{len(self._open)} requests never ended"
        assert core.blocks.num_free == core.blocks.num_blocks, "blocks are lost"
        assert not self._runner.num_known, "the runner remembers somebody"
        assert self._cached == set(core.blocks.cached_hashes()), "events do not give the cached set"
        counters, blocks = core.scheduler.counters, core.blocks.stats()
        tally.validations += 1
        tally.preemptions = counters.preemptions
        tally.prompt_tokens, tally.hit_tokens = counters.prompt_tokens, blocks.hit_tokens
        tally.virtual_s = self._now


def episodes(seed: int, traces: dict[str, list[TraceRequest]], size: int) -> Iterator[tuple[int, str, Episode]]:
    """Without end: the traces in turn, each time with the next seed."""
    names = sorted(traces)
    while True:
        name = names[seed % len(names)]
        yield seed, name, Episode(seed, traces[name], size)
        seed += 1


def resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def run(num_requests: int, seed: int, folder: Path | None, size: int = EPISODE_REQUESTS, quiet: bool = False) -> Tally:
    """At least `num_requests` requests. Raises AssertionError on the first thing that is wrong, with its seed told."""
    total, started, early_mib = Tally(), time.monotonic(), 0.0
    traces = load(folder, seed)
    for number, name, episode in episodes(seed, traces, size):
        try:
            total.add(episode.run())
        except BaseException:
            print(f"soak: episode {number} on {name} failed ({episode.describe()}); repeat it with", file=sys.stderr)
            print(f"  python -m benchmarks.trace_soak --seed {number} --requests 1", file=sys.stderr)
            raise
        taken, mib = time.monotonic() - started, resident_mib()
        if total.requests <= max(num_requests // 5, size):
            early_mib = mib
        if not quiet:
            print(
                f"soak: {total.requests} requests, {taken:.0f} s, {mib:.0f} MiB; episode {number} on {name}: "
                f"{episode.describe()}",
                flush=True,
            )
        if total.requests >= num_requests:
            break
    assert mib - early_mib < MAX_GROWTH_MIB, f"the process grew from {early_mib:.0f} to {mib:.0f} MiB"
    if not quiet:
        print(
            f"soak traces ({', '.join(sorted(traces))}): {total}\n"
            f"{total.requests / taken:.0f} requests/s, {total.steps / taken:.0f} steps/s, "
            f"{(total.tokens + total.prompt_tokens) / taken:.0f} tokens/s, validate() every {VALIDATE_EVERY} steps: "
            "nothing lost"
        )
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first episode")
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"), help="absent: synthetic requests")
    options = parser.parse_args()
    run(options.requests, options.seed, options.traces)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
