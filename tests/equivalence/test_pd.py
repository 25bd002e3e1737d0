"""A prompt that one replica computes and another goes on with gives the bits and the tokens of a run on one: whatever
the chunks, with one arena and with two, beside aborts.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from benchmarks import kv_equality
from benchmarks.equality import Item, Trace, Way, differences, make_items, make_ruled_items
from benchmarks.kv_engines import Door, node, until
from replica.kv_messages import ArenaPlace, KVSpace
from replica.messages import (
    Continue,
    FinishReason,
    GenerateRequest,
    KVSink,
    KVSource,
    RequestId,
    RouterId,
    SamplingParams,
    SequenceInput,
    Submit,
)
from replica.model_runner import TorchModelRunner
from replica.step import Arena, OpenArena, StepPlan, StepResult
from tests.equivalence.runner_driver import make_config, write_tiny_model
from tests.unit.pd_world import PDPair, PDReplica

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="an arena is a memfd")
BLOCK = 16
ITEMS = make_items(12, 6, vocab=(3, 300))
#: around whole blocks, and words that come again
EDGES = [
    Item(([5, 9, 14, 9] * 80)[:length], SamplingParams(6, temperature=0.0, ignore_eos=True))
    for length in (1, 5, 15, 16, 17, 31, 32, 33, 300)
]


class Bench:
    """Runs of one model, on a pair and alone."""

    def __init__(self, folder: Path, num_blocks: int = 250, num_slots: int = 600) -> None:
        self.folder, self.num_slots = folder, num_slots
        self.config = make_config("float32", BLOCK, num_blocks, threads=1)
        self.runners: list[TorchModelRunner] = []
        self.spare: list[TorchModelRunner] = []
        self._opens: list[OpenArena] = []

    def runner(self, open_arena: OpenArena | None = None) -> TorchModelRunner:
        """One that has copied nothing: a connector's core counts from 0."""
        if open_arena is not None:
            self._opens.append(open_arena)
        if self.spare:
            return self.spare.pop()
        runner = TorchModelRunner(self.config, self.folder, self_test=False, open_arena=self._open)
        runner.capture_logits = True
        self.runners.append(runner)
        return runner

    def _open(self, place: ArenaPlace, member: str) -> Arena:
        return self._opens[-1](place, member)

    def pair(self, chunk: int, num_nodes: int = 1) -> PDPair:
        if not self.runners:
            self.spare.append(self.runner())
        info = self.runners[0].info
        space = KVSpace(info.model_fingerprint, BLOCK, info.block_bytes, 1, "")
        self._opens.clear()
        pair = PDPair(self.runner, space, num_nodes=num_nodes, num_slots=self.num_slots, chunk=chunk)
        opens = dict(zip((pair.p.node.name, pair.d.node.name), self._opens, strict=True))
        self._opens.append(lambda place, member: opens[place.incarnation.split("/")[0]](place, member))
        self.traces: dict[str, Trace] = {}
        pair.on_step = self.note
        return pair

    def note(self, one: PDReplica, plan: StepPlan, result: StepResult) -> None:
        runner = one.runner
        assert isinstance(runner, TorchModelRunner)
        names = {s.seq_id: str(s.request_id) for s in one.core.scheduler.living()}
        for seq_id, token_id in zip(result.seq_ids, result.token_ids, strict=True):
            trace = self.traces.setdefault(names[seq_id].removesuffix("@p"), Trace())
            trace.tokens.append(token_id)
            trace.logits += [hashlib.sha256(row.tobytes()).digest() for row in runner.last_logits[seq_id].numpy()]
        runner.last_logits.clear()
        for grammar in one.core.take_wanted_grammars():
            runner.prepare_grammar(grammar)
            one.core.grammar_compiled(grammar, None, one.now)

    def run(self, pair: PDPair, items: Sequence[Item], name: str = "q") -> list[Trace]:
        for number, item in enumerate(items):
            pair.submit(f"{name}{number}", item.prompt, item.sampling, load_within_s=1e6)
        pair.run()
        pair.check_baseline()
        return [self.traces[f"{name}{number}"] for number in range(len(items))]

    def close(self) -> None:
        for runner in self.runners:
            runner.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def bench(tiny: Path):  # type: ignore[no-untyped-def]
    one = Bench(tiny)
    yield one
    one.close()


def alone(bench: Bench, items: Sequence[Item]) -> list[Trace]:
    """On P by itself, with its whole prompt in one step."""
    pair = bench.pair(512)
    pair.p.disconnect()
    for number, item in enumerate(items):
        pair.submit_local(pair.p, f"q{number}", item.prompt, item.sampling)
    pair.run()
    bench.spare = list(bench.runners)
    return [bench.traces[f"q{number}"] for number in range(len(items))]


def equal(reference: Sequence[Trace], traces: Sequence[Trace], name: str) -> None:
    assert differences(reference, traces, Way(name)) == []


def num_full(items: Sequence[Item]) -> int:
    return sum(len(item.prompt) // BLOCK for item in items if len(item.prompt) > BLOCK)


def test_chunks_from_one_block_to_the_whole_prompt(bench: Bench) -> None:
    """E-09, E-13: also prompts around whole blocks, and repeated words."""
    items = [*ITEMS, *EDGES]
    reference = alone(bench, items)
    for num_nodes, chunk in ((1, 16), (1, 512), (2, 50), (2, 512)):
        pair = bench.pair(chunk, num_nodes)
        equal(reference, bench.run(pair, items), f"{num_nodes} nodes, chunks of {chunk}")
        counters = pair.d.kv.counters()
        # what two of them share is loaded once, or twice
        assert 0.5 * num_full(items) < counters["kv_blocks_loaded"] <= num_full(items)
        assert counters["kv_failed_loads"] == 0
        assert (pair.nodes[-1].num_fetched > 0) == (num_nodes == 2)


def test_d_has_a_part_of_the_prompt(bench: Bench) -> None:
    reference = alone(bench, ITEMS)
    pair = bench.pair(64, 2)
    for number, item in enumerate(ITEMS):
        share = item.prompt[: max(1, len(item.prompt) // (1 + number % 3))]
        pair.submit_local(pair.d, f"before{number}", share, SamplingParams(1, temperature=0.0))
    pair.run()
    equal(reference, bench.run(pair, ITEMS), "a partial hit")
    assert any(seated.num_cached_tokens > 0 and seated.is_waiting for seated in pair.seats.values())
    assert pair.d.kv.counters()["kv_blocks_loaded"] < num_full(ITEMS)


@pytest.mark.parametrize("seed", range(2))
def test_aborts(bench: Bench, seed: int) -> None:
    reference, rng = alone(bench, ITEMS), random.Random(seed)
    pair = bench.pair(40, 1 + seed)
    for number, item in enumerate(ITEMS):
        pair.submit(f"q{number}", item.prompt, item.sampling, load_within_s=1e6)
        pair.submit(f"x{number}", ITEMS[rng.randrange(len(ITEMS))].prompt, item.sampling, load_within_s=1e6)
    count = 0

    def abort(*_: object) -> None:
        nonlocal count
        if rng.random() < 0.3 and count < len(ITEMS):
            pair.abort(f"x{count}")
            pair.firsts.pop(f"x{count}", None)
            pair.seats.pop(f"x{count}", None)
            count += 1

    note = bench.note

    def step(one: PDReplica, plan: StepPlan, result: StepResult) -> None:
        note(one, plan, result)
        abort()

    pair.on_step = step
    pair.run()
    pair.check_baseline()
    equal(reference, [bench.traces[f"q{number}"] for number in range(len(ITEMS))], "beside aborts")
    assert count > 3


def test_the_real_model_with_rules_and_grammars(model_folder: Path) -> None:
    ruled = [
        msgspec.structs.replace(item, sampling=msgspec.structs.replace(item.sampling, num_prompt_logprobs=None))
        for item in make_ruled_items(40, 4)
        if BLOCK < len(item.prompt) < 120
    ]
    ruled.sort(key=lambda item: not item.sampling.grammar)
    items = ruled[:5]
    assert sum(bool(item.sampling.grammar) for item in items) >= 2
    bench = Bench(model_folder, 60, 120)
    reference = alone(bench, items)
    pair = bench.pair(32, 2)
    equal(reference, bench.run(pair, items), "SmolLM2")
    assert pair.nodes[1].num_fetched > 0
    bench.close()


@pytest.mark.anyio
async def test_two_arenas_over_tcp(tiny: Path) -> None:
    """Engines, sockets, copying threads and connectors as they are; only the router is missing."""
    joined = kv_equality.Bench(make_config("float32", 16, 400, threads=1), tiny, ITEMS)
    async with joined.replica(Door(), "alone") as alone:
        reference = [await _local(alone, item) for item in ITEMS]
    async with node(600, space=joined.space, name="n1") as n1, node(600, space=joined.space, name="n2") as n2:
        addresses = [connector.peers.listen("127.0.0.1", b"t" * 32) for connector in (n1, n2)]
        for connector in (n1, n2):
            connector.peers.set_peers(addresses)
        async with joined.replica(n1, "p") as p, joined.replica(n2, "d") as d:
            traces = await asyncio.gather(*(_handed_over(p, d, f"h{i}", item) for i, item in enumerate(ITEMS)))
            equal(reference, traces, "over TCP")
            assert n2.peers.stats is not None
            assert n2.peers.stats.fetched_bytes > 40 * joined.space.block_bytes, "no bytes crossed TCP"
            for core in (p.engine.core, d.engine.core):
                await until(lambda core=core: core.blocks.num_free == core.blocks.num_blocks)  # type: ignore[misc]
                core.validate()
            for connector in (n1, n2):
                await until(lambda c=connector: c.core.stats(c.now).num_leased == 0)  # type: ignore[misc]


async def _local(one: kv_equality.Replica, item: Item) -> Trace:
    request = GenerateRequest(RequestId("local"), [SequenceInput(0, item.prompt, item.sampling)])
    told = _submit(one.engine, "local", request)
    await until(lambda: told.finish_reason is not None)
    return Trace(told.token_ids[len(item.prompt) :], one.runner.logits[told.seq_id])


async def _handed_over(p: kv_equality.Replica, d: kv_equality.Replica, name: str, item: Item) -> Trace:
    """As a router does it."""
    p_engine, d_engine = p.engine, d.engine
    p_runner, d_runner = p.runner, d.runner
    source = KVSource(name, 60.0, 30.0, ["n1"])
    sequences = [SequenceInput(0, item.prompt, item.sampling)]
    at_d = _submit(d_engine, name, GenerateRequest(RequestId(name), sequences, kv_source=source))
    await until(lambda: at_d.first_scheduled_at is not None)
    if at_d.remote is None:
        await until(lambda: at_d.finish_reason is not None)
        return Trace(at_d.token_ids[len(item.prompt) :], d_runner.logits[at_d.seq_id])
    sampling = msgspec.structs.replace(item.sampling, max_tokens=1)
    leg = GenerateRequest(RequestId(name), [SequenceInput(0, item.prompt, sampling)], kv_sink=KVSink(name))
    at_p = _submit(p_engine, name, leg)
    await until(lambda: at_p.finish_reason is not None)
    assert at_p.finish_reason is FinishReason.LENGTH
    first = at_p.token_ids[len(item.prompt) :]
    d_engine.core.go_on(RouterId(name), Continue(name, name, {0: first}), d_engine._clock())
    d_engine._kick()
    await until(lambda: at_d.finish_reason is not None)
    logits = p_runner.logits[at_p.seq_id] + d_runner.logits.get(at_d.seq_id, [])
    return Trace(at_d.token_ids[len(item.prompt) :], logits)


def _submit(one, name: str, request: GenerateRequest):  # type: ignore[no-untyped-def]
    one.handle(one.connect(RouterId(name)), Submit(request, 0))
    return {s.request_id: s for s in one.core.scheduler.living()}[RequestId(name)]
