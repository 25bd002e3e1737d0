"""`python -m benchmarks.trace_soak`: a million requests of public traces through the production engine core in virtual
time.

A phase is both traces once (31,397 requests) with arrivals turned round, other token ids and a random engine: policy,
pool (down to one that thrashes), watermark, budget, lanes, victims, guesses. 5 % of the clients go away, some requests
have deadlines or several answers, a step in 20,000 fails, the cache is emptied now and then. Checked: each request ends
exactly once with the right number of tokens (`trace_book.py`); every plan keeps the runner's contract
(`length_runner.py`); a step with work has tokens, or the next one has; `validate()` every `VALIDATE_EVERY` steps; the
pool is at baseline at the end; the process does not grow; on a slice of 250 requests a phase, with the fake KV cache
of `FakeModelRunner`, every token is that of an undisturbed run. Lengths are multiplied by `--scale`, prefix blocks too.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from pathlib import Path

import msgspec

from benchmarks.length_runner import EOS, LengthRunner
from benchmarks.trace_book import Book, TokenCheck
from benchmarks.trace_shapes import COST, VOCAB, Client, Shape, clients, random_shape
from cluster.simulation.traces import TraceRequest, read_azure, read_mooncake, synthetic
from replica.engine_core import EngineCore
from replica.fake_runner import FakeModelRunner, expected_output
from replica.messages import RequestId, RouterId
from replica.step import ModelRunner, RunnerInfo, StepPlan

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
AZURE, MOONCAKE = "AzureLLMInferenceTrace_conv_2023.csv", "mooncake_conversation_trace.jsonl"
VALIDATE_EVERY = 500
SCALE = 0.25
#: growth of the resident set after the third phase that is still taken for the allocator's; measured: see docs/soak.md
MAX_GROWTH = 0.15


class PhaseResult(msgspec.Struct, frozen=True):
    """Counts of one phase. `virtual_s` is the time that the device would have taken."""

    num_requests: int
    num_steps: int
    num_scheduled_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_validations: int
    most_overtaken: int
    oldest_wait_s: float
    virtual_s: float
    ends: dict[str, int]


class Phase:
    """Clients, a book, an engine core and a runner under a virtual clock."""

    def __init__(
        self,
        shape: Shape,
        arrivals: Iterator[Client],
        runner: ModelRunner,
        check_tokens: TokenCheck | None = None,
    ) -> None:
        self._shape = shape
        self._arrivals = arrivals
        self._next: Client | None = next(arrivals, None)
        self._aborts: list[tuple[float, RouterId, RequestId]] = []
        self._runner = runner
        self.core = EngineCore(shape.engine, runner.info)
        self.book = Book(shape, check_tokens)
        self._rng = random.Random(f"faults {shape.seed}")
        self._changes = list(shape.changes)
        self.now = 0.0
        self.num_requests = self.num_steps = self.num_validations = 0
        self._was_idle_step = False
        self.oldest_wait_s = 0.0

    def run(self, tell: Callable[[int], None] = lambda num_requests: None) -> PhaseResult:
        """Until the last request has ended."""
        while True:
            self._deliver(self.now)
            plan = self.core.schedule(self.now)
            self.book.take(self.core.take_ended())
            if plan is not None:
                self._step(plan)
                if self.num_steps % VALIDATE_EVERY == 0:
                    self._validate()
                    tell(self.num_requests)
                continue
            assert not self.core.scheduler.has_work, f"stalled at step {self.num_steps}: nothing planned, work waits"
            if (upcoming := self._next_event()) is None:
                return self._finish()
            self.now = max(self.now, upcoming)

    def _step(self, plan: StepPlan) -> None:
        is_idle = not plan.seq_ids
        # a step that put somebody back for blocks admits nobody, so it may be empty; two in a row are a stall
        assert not (is_idle and self._was_idle_step and self.core.scheduler.has_work), "stalled: two empty steps"
        self._was_idle_step = is_idle
        self.num_steps += 1
        self.book.begun([new.seq_id for new in plan.new])
        chance = self._rng.random()
        if chance < 5e-5:
            if chance < 2.5e-5:
                self._runner.execute(plan)
            self.now += COST.base_s
            self.book.take(self.core.fail_step(self.now))
            return
        result = self._runner.execute(plan)
        self.now += result.duration_s
        self._deliver(self.now)
        self.book.take(self.core.update(plan, result, self.now))
        if chance > 1 - 5e-5:
            self.core.reset_prefix_cache()

    def _deliver(self, until_s: float) -> None:
        """Arrivals and departures up to a time, in order."""
        while (upcoming := self._next_event()) is not None and upcoming <= until_s:
            if self._next is not None and self._next.arrival_s == upcoming:
                self._submit(self._next, upcoming)
                self._next = next(self._arrivals, None)
            else:
                _, router_id, request_id = heappop(self._aborts)
                if self.book.is_open(request_id):
                    self.book.aborted(request_id)
                    self.core.abort(router_id, request_id, upcoming)

    def _submit(self, client: Client, now: float) -> None:
        self.num_requests += 1
        reply = self.core.submit(client.router_id, client.request, 0, now)
        if reply.refusal is not None:
            self.book.refused(client, reply.refusal.value)
            return
        self.book.accepted(client)
        self.book.take(self.core.take_ended())
        if client.abort_at_s is not None:
            heappush(self._aborts, (client.abort_at_s, client.router_id, client.request.request_id))
        if self._changes and self.num_requests % 3000 == 0:
            self._change()

    def _change(self) -> None:
        """Other rules while it runs, where the engine core can do that."""
        self.core.configure(self._changes.pop(), self._shape.engine.admission)

    def _next_event(self) -> float | None:
        arrival = self._next.arrival_s if self._next is not None else None
        abort = self._aborts[0][0] if self._aborts else None
        return arrival if abort is None or (arrival is not None and arrival <= abort) else abort

    def _validate(self) -> None:
        self.core.validate()
        self.num_validations += 1
        self.oldest_wait_s = max(self.oldest_wait_s, self.core.load(self.now).oldest_wait_s)

    def _finish(self) -> PhaseResult:
        self._validate()
        self.book.check_over()
        core, book = self.core, self.book
        assert book.num_ended == self.num_requests, f"{self.num_requests} requests, {book.num_ended} ends"
        assert core.num_unfinished == 0, f"{core.num_unfinished} sequences are left"
        assert core.blocks.num_free == core.blocks.num_blocks, f"{core.blocks.num_free} blocks free at the end"
        assert core.next_deadline is None, "the deadline of nobody"
        counters = core.scheduler.counters
        return PhaseResult(
            self.num_requests,
            self.num_steps,
            counters.scheduled_tokens,
            counters.prompt_tokens,
            counters.cached_prompt_tokens,
            book.num_output_tokens,
            counters.preemptions,
            self.num_validations,
            book.most_overtaken,
            self.oldest_wait_s,
            self.now,
            dict(book.ends),
        )


def length_runner(shape: Shape, max_model_len: int) -> LengthRunner:
    """For the pool of `shape`."""
    info = RunnerInfo(shape.num_blocks, shape.engine.cache.block_size, max_model_len, VOCAB, (EOS,), "lengths")
    return LengthRunner(info, COST)


def run_phase(
    seed: int, rows: list[TraceRequest], scale: float, tell: Callable[[int], None] = lambda num_requests: None
) -> tuple[Shape, PhaseResult]:
    """All of `rows` once, by a random engine. Raises AssertionError if anything was lost, doubled or left behind."""
    shape, longest = _shape_for(seed, rows, scale)
    runner = length_runner(shape, longest)
    result = Phase(shape, clients(shape, rows, scale), runner).run(tell)
    assert runner.num_known == 0, f"the runner still knows {runner.num_known} sequences"
    return shape, result


def run_token_phase(seed: int, rows: list[TraceRequest], scale: float) -> PhaseResult:
    """The same with a fake KV cache: besides, every token has to be that of an undisturbed run."""
    shape, longest = _shape_for(seed, rows, scale)
    runner = FakeModelRunner(
        num_blocks=shape.num_blocks, block_size=shape.engine.cache.block_size, max_model_len=longest, cost=COST
    )

    def check(client: Client, index: int, token_ids: list[int]) -> None:
        prompt = client.request.sequences[index].prompt_token_ids
        reference = expected_output(prompt, len(token_ids), vocab_size=VOCAB, eos=frozenset({EOS}))
        assert token_ids == reference, f"{client.request.request_id}/{index} got other tokens than alone"

    result = Phase(shape, clients(shape, rows, scale, with_end_token=False), runner, check).run()
    assert runner.num_known == 0, f"the runner still knows {runner.num_known} sequences"
    return result


def _shape_for(seed: int, rows: list[TraceRequest], scale: float) -> tuple[Shape, int]:
    """And the longest context it has to hold."""
    longest = max(int(scale * (row.num_prompt_tokens + row.num_output_tokens)) for row in rows) + 128
    mean = scale * sum(row.num_prompt_tokens + row.num_output_tokens for row in rows) / len(rows)
    return random_shape(seed, longest, mean), longest


def load_traces(folder: Path) -> tuple[str, list[TraceRequest]]:
    """Both traces of `folder`, or what stands in for them; and which of the two."""
    if not (folder / AZURE).is_file() or not (folder / MOONCAKE).is_file():
        return "synthetic requests (no traces here)", synthetic(seed=0)
    with (folder / AZURE).open() as azure, (folder / MOONCAKE).open() as mooncake:
        return "Azure conversations 2023 and Mooncake conversations", read_azure(azure) + read_mooncake(mooncake)


def resident_mib() -> float:
    """Memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / (1 << 20)


def run(num_requests: int, first_seed: int, scale: float, folder: Path = TRACES) -> None:
    """Phases until there were so many requests; prints a line for each, and the sum. Raises what a phase raises."""
    source, rows = load_traces(folder)
    print(f"soak traces: {source}, lengths x {scale:g}, validate() every {VALIDATE_EVERY} steps", flush=True)
    total, sizes, ends = Totals(), [], Counter[str]()
    seed, num_right = first_seed, 0
    started = time.perf_counter()
    while total.num_requests < num_requests:
        part = rows if num_requests >= len(rows) else random.Random(seed).sample(rows, num_requests)
        began = time.perf_counter()
        try:
            shape, result = run_phase(seed, part, scale)
            num_right += run_token_phase(seed, random.Random(seed).sample(rows, 250), scale / 4).num_output_tokens
        except BaseException:
            again = f"python -m benchmarks.trace_soak --seed {seed} --requests {len(part)} --scale {scale:g}"
            print(f"soak traces: seed {seed} failed; again with: {again}", file=sys.stderr, flush=True)
            raise
        took = time.perf_counter() - began
        total.add(result)
        ends.update(result.ends)
        gc.collect()
        sizes.append(resident_mib())
        print(f"seed {seed}: {result.num_requests / took:.0f} requests/s, {_line(result)}; {shape.title}; ", end="")
        print(f"{sizes[-1]:.0f} MiB", flush=True)
        seed += 1
    took = time.perf_counter() - started
    print(
        f"soak traces: {total.num_requests} requests in {took:.0f} s = {total.num_requests / took:.0f} requests/s, "
        f"{total.num_steps / took:.0f} steps/s, {total.num_scheduled_tokens / took:.3g} scheduled tokens/s "
        f"({total.num_prompt_tokens:.3g} prompt tokens, {total.num_cached_tokens / total.num_prompt_tokens:.0%} of "
        f"them from the cache; {total.num_output_tokens:.3g} output tokens), {total.num_preemptions} preemptions, "
        f"{total.num_validations} validations"
    )
    print(f"soak traces: ends {dict(ends.most_common())}: nothing lost; {num_right} tokens compared, none wrong")
    check_memory(sizes)


def check_memory(sizes_mib: list[float]) -> None:
    """Raises AssertionError if the process went on growing after its third phase."""
    if len(sizes_mib) < 6:
        return
    early, late = max(sizes_mib[:3]), sizes_mib[-1]
    print(f"soak traces: {early:.0f} MiB after three phases at most, {late:.0f} after the last")
    assert late < early * (1 + MAX_GROWTH), f"the process grew from {early:.0f} to {late:.0f} MiB"


class Totals:
    """Sums over phases."""

    def __init__(self) -> None:
        self.num_requests = self.num_steps = self.num_scheduled_tokens = self.num_prompt_tokens = 0
        self.num_cached_tokens = self.num_output_tokens = self.num_preemptions = self.num_validations = 0

    def add(self, result: PhaseResult) -> None:
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(result, name))


def _line(result: PhaseResult) -> str:
    hits = result.num_cached_tokens / max(1, result.num_prompt_tokens)
    return (
        f"{result.num_steps} steps, {result.num_preemptions} preemptions, {hits:.0%} of the prompts cached, "
        f"most overtaken {result.most_overtaken}, oldest wait {result.oldest_wait_s:.0f} of {result.virtual_s:.0f} s, "
        f"ends {result.ends}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first phase")
    parser.add_argument("--scale", type=float, default=SCALE, help="of all lengths")
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder with both traces")
    options = parser.parse_args()
    run(options.requests, options.seed, options.scale, options.traces)


if __name__ == "__main__":
    main()
