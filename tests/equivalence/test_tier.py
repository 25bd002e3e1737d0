"""KV that comes from an arena gives the bits that computing it gives: loaded by another engine, put back and loaded at
every position, beside aborts and a tier that is far too small. The arena is memory that each runner maps for itself;
the copies run on the runners' threads while steps compute.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.equality import Item, Trace, Way, differences, make_items
from replica.config import AdmissionConfig, CacheConfig, EngineConfig, SchedulerConfig
from replica.engine_core import EngineCore
from replica.kv_messages import ArenaPlace
from replica.kv_side import KVSide
from replica.kv_transfer import TransferLimits
from replica.messages import GenerateRequest, PreemptionCause, RequestId, RouterId, SequenceInput
from replica.model_runner import TorchModelRunner
from replica.step import Arena
from tests.equivalence.runner_driver import make_config, write_tiny_model
from tests.unit.tier_harness import FakeArena, FakeConnector

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="an arena is a memfd")
ROUTER = RouterId("r")
ITEMS = make_items(12, 8, vocab=(3, 300))


class MappedConnector(FakeConnector):
    """Its arena is a memfd, mapped once more by each who opens it."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        super().__init__(num_slots, slot_bytes)
        self._descriptor = os.memfd_create("test-arena")
        os.ftruncate(self._descriptor, num_slots * slot_bytes)
        self.slots = self._map(self.slots.shape)
        self.slots[:] = 0xAB

    def _map(self, shape: tuple[int, ...]) -> np.ndarray:  # type: ignore[type-arg]
        return np.frombuffer(mmap.mmap(self._descriptor, shape[0] * shape[1]), np.uint8).reshape(shape)

    def open(self, place: ArenaPlace, member: str) -> Arena:
        return FakeArena(self._map(self.slots.shape))


class Run:
    """An engine core over a runner and a connector, to the end of its requests."""

    def __init__(self, runner: TorchModelRunner, connector: FakeConnector, name: str, num_blocks: int | None = None):
        config = EngineConfig(
            cache=CacheConfig(),
            scheduler=SchedulerConfig(
                max_num_seqs=6,
                max_num_batched_tokens=96,
                watermark=0.0,
                preemption_mode="offload",
                max_preemptions=1000,
            ),
            admission=AdmissionConfig(max_queued_requests=100),
        )
        info = runner.info if num_blocks is None else _with_blocks(runner, num_blocks)
        self.core = EngineCore(config, info, transfer_limits=TransferLimits(1, 60.0))
        self.runner, self.connector, self.name = runner, connector, name
        assert self.core.kv is not None
        self.kv: KVSide = self.core.kv
        self.kv.connected(connector.place(name), 100.0, 0.0)
        self.traces: dict[str, Trace] = {}

    def submit(self, name: str, item: Item) -> None:
        self.traces[name] = Trace()
        sequence = SequenceInput(0, item.prompt, item.sampling)
        request = GenerateRequest(RequestId(name), [sequence], order_key=(0.0, 0, float(len(self.traces))))
        assert self.core.submit(ROUTER, request, 0, 0.0).refusal is None

    def hear(self) -> None:
        for message in self.kv.take_messages():
            for answer in self.connector.handle(self.name, message):
                self.kv.receive(answer, 0.0)
        for event in self.connector.events(self.name):
            self.kv.receive(event, 0.0)

    def step(self, puts_back: bool = False) -> bool:
        self.hear()
        if (plan := self.core.schedule(0.0)) is None:
            self.hear()
            if (plan := self.core.schedule(0.0)) is None:
                return False
        self.hear()
        owner = {s.seq_id: str(s.request_id) for s in self.core.scheduler.running}
        result = self.runner.execute(plan)
        for seq_id, token_id in zip(result.seq_ids, result.token_ids, strict=True):
            trace = self.traces[owner[seq_id]]
            trace.tokens.append(token_id)
            trace.logits += [hashlib.sha256(row.tobytes()).digest() for row in self.runner.last_logits[seq_id].numpy()]
        self.runner.last_logits.clear()
        self.core.update(plan, result, 0.0)
        if puts_back:
            for sequence in [s for s in self.core.scheduler.running if s.seq_id in result.seq_ids]:
                self.core.scheduler.preempt(sequence, PreemptionCause.BLOCKS, 0.0, by=sequence)
                self.core.blocks.clear_cache()  # as if others had taken its blocks: it comes from the arena or not
        return True

    def all(self, items: list[Item], puts_back: bool = False) -> list[Trace]:
        for number, item in enumerate(items):
            self.submit(str(number), item)
        while self.step(puts_back):
            pass
        self.core.validate()
        assert self.core.num_unfinished == 0
        assert self.core.blocks.num_free == self.core.blocks.num_blocks
        return [self.traces[str(number)] for number in range(len(items))]

    def counter(self, name: str) -> float:
        return self.kv.counters()[name]


def _with_blocks(runner: TorchModelRunner, num_blocks: int):  # type: ignore[no-untyped-def]
    import msgspec

    return msgspec.structs.replace(runner.info, num_blocks=num_blocks)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


class Bench:
    """Two runners of one model, and the arena between them."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.connector = FakeConnector(1, 1)
        self.runners = [self._runner(folder, dtype) for _ in range(2)]
        for runner in self.runners:
            runner.capture_logits = True
        self.slot_bytes = self.runners[0].info.block_bytes

    def _runner(self, folder: Path, dtype: str) -> TorchModelRunner:
        config = make_config(dtype, 16, 400)  # type: ignore[arg-type]
        return TorchModelRunner(config, folder, self_test=False, open_arena=lambda p, m: self.connector.open(p, m))

    def arena(self, num_slots: int = 600) -> FakeConnector:
        self.connector = MappedConnector(num_slots, self.slot_bytes)
        self.connector.name = f"c{id(self.connector)}"
        return self.connector


@pytest.fixture(params=["float32", "bfloat16"])
def bench(request: pytest.FixtureRequest, tiny: Path) -> Iterator[Bench]:
    bench = Bench(tiny, request.param)
    yield bench
    for runner in bench.runners:
        runner.close()


@pytest.fixture
def reference(bench: Bench) -> list[Trace]:
    """Without a connector; the numbers of copies begin with 0 afterwards."""
    run = Run(bench.runners[0], bench.arena(), "r")
    run.kv.gone()
    return run.all(ITEMS)


def equal(reference: list[Trace], traces: list[Trace], name: str) -> None:
    assert differences(reference, traces, Way(name)) == []


def test_another_engine_loads_what_the_first_one_computed(bench: Bench, reference: list[Trace]) -> None:
    connector = bench.arena()
    first, second = (Run(runner, connector, name) for runner, name in zip(bench.runners, "ab", strict=True))
    equal(reference, first.all(ITEMS), "stores")
    equal(reference, second.all(ITEMS), "loads")
    assert first.counter("kv_blocks_stored") > 40
    assert second.counter("kv_blocks_loaded") > 40
    assert connector.is_at_baseline


def test_put_back_by_offload_at_every_position(bench: Bench, reference: list[Trace]) -> None:
    run = Run(bench.runners[0], bench.arena(), "a")
    equal(reference, run.all(ITEMS, puts_back=True), "put back after every token, loaded")
    assert run.core.scheduler.counters.preemptions > 60
    assert run.counter("kv_blocks_loaded") > 200
    assert run.counter("kv_failed_loads") == 0


def test_a_pool_that_holds_little_more_than_one(bench: Bench, reference: list[Trace]) -> None:
    run = Run(bench.runners[0], bench.arena(), "a", num_blocks=24)
    equal(reference, run.all(ITEMS), "offload")
    assert run.counter("kv_blocks_stored") > 40


@pytest.mark.parametrize("seed", range(3))
def test_aborts_a_tiny_tier_and_two_engines_at_once(bench: Bench, reference: list[Trace], seed: int) -> None:
    rng = random.Random(seed)
    connector = bench.arena(30)
    runs = [Run(runner, connector, name, 40) for runner, name in zip(bench.runners, "ab", strict=True)]
    waiting = [[(str(n), item) for n, item in enumerate(ITEMS)] for _ in runs]
    count = 0
    is_busy = True
    while is_busy or any(waiting):
        is_busy = False
        for run, mine in zip(runs, waiting, strict=True):
            if mine:
                run.submit(*mine.pop(0))
            if rng.random() < 0.4 and mine:
                run.submit(f"x{count}", ITEMS[rng.randrange(len(ITEMS))])
                count += 1
            lost = [name for name in run.traces if name.startswith("x")]
            if lost and rng.random() < 0.5:
                run.core.abort(ROUTER, RequestId(rng.choice(lost)), 0.0)
            if rng.random() < 0.2:
                run.core.blocks.clear_cache()
            is_busy |= run.step(puts_back=rng.random() < 0.1)
    for run in runs:
        equal(reference, [run.traces[str(n)] for n in range(len(ITEMS))], run.name)
        run.core.validate()
        assert run.core.blocks.num_free == 40
    assert sum(run.counter("kv_blocks_loaded") for run in runs) > 10
    assert connector.is_at_baseline
