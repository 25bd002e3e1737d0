"""KV that went through the joined KVConnector (sockets, arena, disk, another node) gives the bits that computing it
gives. `test_tier.py` shows the same of a replica's half alone, at every position.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.equality import Item, Trace, Way, differences, make_items
from cluster.kv_connector.connector import Connector
from replica.arena_client import open_arena
from replica.config import OffloadDType
from replica.engine import Engine
from replica.kv_events import slot_layout
from replica.kv_messages import KVSpace, KVTier
from replica.model_runner import TorchModelRunner
from replica.step import RunnerInfo, StepPlan, StepResult
from tests.cluster.kv_cluster import Door, counters, engine, forget, node, num_known, submit, until
from tests.equivalence.runner_driver import make_config, write_tiny_model

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="an arena is a memfd"),
]
ITEMS = make_items(12, 8, vocab=(3, 300))
TOKEN = b"t" * 32


class TracingRunner:
    """Keeps a digest of the logits behind every token, by sequence."""

    def __init__(self, folder: Path, dtype: str, num_blocks: int, offload_dtype: OffloadDType = "model") -> None:
        config = make_config(dtype, 16, num_blocks, threads=1)  # type: ignore[arg-type]
        self.cache = config.cache.model_copy(update={"offload_dtype": offload_dtype})
        config = config.model_copy(update={"cache": self.cache})
        self._runner = TorchModelRunner(config, folder, self_test=False, open_arena=open_arena)
        self._runner.capture_logits = True
        self.logits: dict[int, list[bytes]] = {}

    @property
    def info(self) -> RunnerInfo:
        return self._runner.info

    @property
    def space(self) -> KVSpace:
        return KVSpace(self.info.model_fingerprint, 16, self.info.block_bytes, 1, slot_layout(self.cache))

    def prepare_grammar(self, grammar: str) -> None:
        self._runner.prepare_grammar(grammar)

    def execute(self, plan: StepPlan) -> StepResult:
        result = self._runner.execute(plan)
        for seq_id in result.seq_ids:
            rows = self._runner.last_logits[seq_id].numpy()
            self.logits.setdefault(seq_id, []).extend(hashlib.sha256(row.tobytes()).digest() for row in rows)
        self._runner.last_logits.clear()
        return result

    def close(self) -> None:
        self._runner.close()


class Bench:
    """One tiny model, and what it says without any tier."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.folder, self.dtype = folder, dtype
        self.space = self.runner().space

    def runner(self, num_blocks: int = 400) -> TracingRunner:
        return TracingRunner(self.folder, self.dtype, num_blocks)

    @asynccontextmanager
    async def replica(
        self, find: Connector | Door, name: str, num_blocks: int = 400, **scheduler: Any
    ) -> AsyncIterator[tuple[Engine, TracingRunner]]:
        runner = self.runner(num_blocks)
        async with engine(find, name, runner=runner, **scheduler) as one:
            yield one, runner


async def run(
    replica: tuple[Engine, TracingRunner], items: list[Item], rng: random.Random | None = None
) -> list[Trace]:
    """All at once, to their ends; with `rng` some are aborted, and have an empty trace."""
    one, runner = replica
    told = [submit(one, item.prompt, sampling=item.sampling) for item in items]
    aborted = set()
    if rng is not None:
        for sequence, abort in told:
            for _ in range(rng.randrange(40)):
                await asyncio.sleep(0)
            if rng.random() < 0.3 and sequence.finish_reason is None:
                aborted.add(sequence.seq_id)
                abort()
    for sequence, _ in told:
        await until(lambda sequence=sequence: sequence.finish_reason is not None, 60)  # type: ignore[misc]
    traces = []
    for (sequence, _), item in zip(told, items, strict=True):
        tokens = sequence.token_ids[len(item.prompt) :]
        traces.append(Trace() if sequence.seq_id in aborted else Trace(tokens, runner.logits[sequence.seq_id]))
    return traces


def equal(reference: list[Trace], traces: list[Trace], name: str) -> None:
    kept = [(a, b) for a, b in zip(reference, traces, strict=True) if b.tokens]
    assert differences([a for a, _ in kept], [b for _, b in kept], Way(name)) == []


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(params=["float32", "bfloat16"])
def bench(request: pytest.FixtureRequest, tiny: Path) -> Bench:
    return Bench(tiny, request.param)


async def reference(bench: Bench) -> list[Trace]:
    async with bench.replica(Door(), "alone") as alone:
        traces = await run(alone, ITEMS)
        assert counters(alone[0])["kv_blocks_stored"] == 0
        return traces


async def test_host_disk_a_restart_and_a_second_replica(bench: Bench, tmp_path: Path) -> None:
    plain = await reference(bench)
    async with (
        node(600, space=bench.space, folder=tmp_path, num_disk_slots=600) as one,
        bench.replica(one, "a") as first,
        bench.replica(one, "b") as second,
    ):
        equal(plain, await run(first, ITEMS), "stores")
        await until(lambda: one.core.stats(one.now).num_reserved == 0 and not first[0].core.num_unfinished)
        forget(first[0])
        equal(plain, await run(first, ITEMS), "loads its own")
        equal(plain, await run(second, ITEMS), "loads of the other")
        assert counters(first[0])["kv_blocks_loaded"] > 40
        assert counters(second[0])["kv_blocks_loaded"] > 40
        stats = one.core.stats(one.now)
        await until(lambda: one.core.stats(one.now).num_on_disk == stats.num_found)
        assert stats.loads.given.keys() == {KVTier.HOST}
    async with (
        node(600, space=bench.space, folder=tmp_path, num_disk_slots=600) as again,
        bench.replica(again, "c") as third,
    ):
        await until(lambda: num_known(third[0]) == stats.num_found)
        equal(plain, await run(third, ITEMS), "loads from disk after a restart")
        assert again.core.stats(again.now).loads.given[KVTier.DISK] > 40
        assert counters(third[0])["kv_blocks_loaded"] > 40


async def test_blocks_of_another_node(bench: Bench) -> None:
    plain = await reference(bench)
    async with node(600, space=bench.space, name="n1") as one, node(600, space=bench.space, name="n2") as two:
        addresses = [connector.peers.listen("127.0.0.1", TOKEN) for connector in (one, two)]
        two.peers.set_peers(addresses)
        async with bench.replica(one, "a") as first, bench.replica(two, "b") as second:
            equal(plain, await run(first, ITEMS), "stores")
            await until(lambda: num_known(second[0]) > 40 and num_known(second[0]) == one.core.stats(one.now).num_found)
            equal(plain, await run(second, ITEMS), "loads of another node")
            assert two.core.stats(two.now).loads.given[KVTier.REMOTE] > 40
            assert counters(second[0])["kv_blocks_loaded"] > 40


@pytest.mark.parametrize("seed", range(2))
async def test_aborts_tiny_tiers_offload_and_two_replicas(bench: Bench, tmp_path: Path, seed: int) -> None:
    plain = await reference(bench)
    rng = random.Random(seed)
    async with (
        node(30, space=bench.space, folder=tmp_path, num_disk_slots=50, eviction="cost") as one,
        bench.replica(one, "a", num_blocks=30, preemption_mode="offload", watermark=0.0) as first,
        bench.replica(one, "b", num_blocks=400) as second,
    ):
        for turn in range(3):
            results = await asyncio.gather(run(first, ITEMS, rng), run(second, ITEMS, rng))
            for traces in results:
                equal(plain, traces, f"turn {turn}")
            forget(rng.choice((first, second))[0])
        assert counters(first[0])["kv_blocks_loaded"] + counters(second[0])["kv_blocks_loaded"] > 0
        for each, _ in (first, second):
            await until(lambda each=each: each.core.blocks.num_free == each.core.blocks.num_blocks)  # type: ignore[misc]
            each.core.validate()
        await until(lambda: one.core.stats(one.now).num_leased == one.core.stats(one.now).num_reserved == 0)


@pytest.mark.parametrize("offload_dtype", ["int8", "int4"])
async def test_compressed_blocks_are_the_same_for_everybody_and_not_what_was_computed(
    bench: Bench, offload_dtype: OffloadDType
) -> None:
    def small() -> TracingRunner:
        return TracingRunner(bench.folder, bench.dtype, 400, offload_dtype)

    # of different beginnings: who shares blocks with an earlier one in its pool has them as they were computed
    items = list({tuple(item.prompt[:16]): item for item in ITEMS if len(item.prompt) > 64}.values())
    async with bench.replica(Door(), "alone") as alone:
        plain = await run(alone, items)
    space = small().space
    assert space.block_bytes < (0.6 if offload_dtype == "int8" else 0.35) * bench.space.block_bytes
    loaded = []
    async with node(600, space=space) as one:
        async with engine(one, "a", runner=(runner := small()), offload_dtype=offload_dtype) as first:
            equal(plain, await run((first, runner), items), "stores, and reads its own pool")
            await until(lambda: one.core.stats(one.now).num_reserved == 0 and not first.core.num_unfinished)
        for name in "bc":
            async with engine(one, name, runner=(runner := small()), offload_dtype=offload_dtype) as other:
                await until(lambda other=other: num_known(other) > 10)  # type: ignore[misc]
                loaded.append(await run((other, runner), items))
                assert counters(other)["kv_blocks_loaded"] > 10
    equal(loaded[0], loaded[1], "two who load the same")
    assert differences(plain, loaded[0], Way("compressed")) != []
