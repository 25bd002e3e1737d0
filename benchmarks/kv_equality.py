"""KV that went through the joined KVConnector (sockets, arena, disk, another node) gives the bits that computing gives.

Engines over real runners, their links and connectors in one process. The same requests each way; a case is a request
that came to its end, and compared are its tokens and a digest of the logits behind each (`equality.py`). The ways are
tests with a tiny model (`tests/equivalence/test_kv_joined.py`) and a claim with the default one.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.equality import Item, Trace, Way, differences, make_items
from benchmarks.kv_engines import Door, counters, engine, forget, node, num_known, submit, until
from cluster import model_store
from cluster.kv_connector.connector import Connector
from replica.arena_client import open_arena
from replica.config import CacheConfig, DType, EngineConfig, ModelConfig, ParallelConfig
from replica.engine import Engine
from replica.kv_events import slot_layout
from replica.kv_messages import KVSpace, KVTier
from replica.messages import PreemptionCause
from replica.model_runner import TorchModelRunner
from replica.step import RunnerInfo, StepPlan, StepResult

TOKEN = b"t" * 32


class TracingRunner:
    """Keeps a digest of the logits behind every token, by sequence. `num_blocks`: what the engine may use."""

    def __init__(self, config: EngineConfig, folder: Path, num_blocks: int | None = None) -> None:
        self._runner = TorchModelRunner(config, folder, self_test=False, open_arena=open_arena)
        self._runner.capture_logits = True
        info = self._runner.info
        self.info: RunnerInfo = info if num_blocks is None else msgspec.structs.replace(info, num_blocks=num_blocks)
        self.logits: dict[int, list[bytes]] = {}

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


class Replica(msgspec.Struct, frozen=True):
    """An engine and what it traces."""

    engine: Engine
    runner: TracingRunner

    def loaded(self) -> int:
        return int(counters(self.engine)["kv_blocks_loaded"])


class Bench:
    """One model, its requests, what they give without any tier, and what was found of the ways."""

    def __init__(self, config: EngineConfig, folder: Path, items: list[Item]) -> None:
        self._config, self._folder, self.items = config, folder, items
        info = TracingRunner(config, folder).info
        self.space = KVSpace(info.model_fingerprint, 16, info.block_bytes, 1, slot_layout(config.cache))
        self.plain: list[Trace] = []
        self.num_cases, self.num_loaded = 0, 0
        self.different: list[str] = []

    @asynccontextmanager
    async def replica(
        self, find: Connector | Door, name: str, num_blocks: int | None = None, **scheduler: Any
    ) -> AsyncIterator[Replica]:
        runner = TracingRunner(self._config, self._folder, num_blocks)
        coded = self._config.cache.offload_dtype
        async with engine(find, name, runner=runner, offload_dtype=coded, **scheduler) as one:
            assert one.core.kv is not None
            # it is about bits: load also where a busy machine copies slower than it computes
            one.core.kv._transfer.pace.token_s = lambda: 0.0
            yield Replica(one, runner)
            self.num_loaded += int(counters(one)["kv_blocks_loaded"])

    def compare(self, name: str, traces: list[Trace]) -> None:
        """Empty ones were aborted."""
        kept = [(a, b) for a, b in zip(self.plain, traces, strict=True) if b.tokens]
        self.num_cases += len(kept)
        self.different += differences([a for a, _ in kept], [b for _, b in kept], Way(name))

    async def learn(self) -> None:
        """Without a tier."""
        async with self.replica(Door(), "alone") as alone:
            self.plain = await self.run(alone)
            assert counters(alone.engine)["kv_blocks_stored"] == 0

    @property
    def enough(self) -> int:
        """Blocks that have to be loaded where it is about loads."""
        return self.num_blocks // 2

    @property
    def num_blocks(self) -> int:
        """That are filled by all requests: what a tier with room has in the end. The last token is never computed."""
        found = set()
        for item, trace in zip(self.items, self.plain, strict=True):
            ids = [*item.prompt, *trace.tokens[:-1]]
            found |= {tuple(ids[: 16 * number]) for number in range(1, len(ids) // 16 + 1)}
        return len(found)

    async def run(
        self, replica: Replica, items: list[Item] | None = None, rng: random.Random | None = None
    ) -> list[Trace]:
        """All at once, to their ends; with `rng` some are aborted, and have an empty trace."""
        items = items or self.items
        told = [submit(replica.engine, item.prompt, sampling=item.sampling) for item in items]
        aborted = set()
        if rng is not None:
            for sequence, abort in told:
                for _ in range(rng.randrange(40)):
                    await asyncio.sleep(0)
                if rng.random() < 0.3 and sequence.finish_reason is None:
                    aborted.add(sequence.seq_id)
                    abort()
        for sequence, _ in told:
            await until(lambda sequence=sequence: sequence.finish_reason is not None, 120)  # type: ignore[misc]
        traces = []
        for (sequence, _), item in zip(told, items, strict=True):
            tokens = sequence.token_ids[len(item.prompt) :]
            is_aborted = sequence.seq_id in aborted
            traces.append(Trace() if is_aborted else Trace(tokens, replica.runner.logits[sequence.seq_id]))
        return traces


async def _at_rest(connector: Connector) -> None:
    def is_at_rest() -> bool:
        stats = connector.core.stats(connector.now)
        return stats.num_leased == stats.num_reserved == stats.num_quarantined == stats.num_stranded == 0

    await until(is_at_rest)


async def memory_disk_restart(bench: Bench, folder: Path) -> None:
    """Stored, loaded by the same and by another replica of the node, and from disk by who comes after a restart."""
    space = bench.space
    async with (
        node(600, space=space, folder=folder, num_disk_slots=600) as one,
        bench.replica(one, "a") as first,
        bench.replica(one, "b") as second,
    ):
        bench.compare("stores", await bench.run(first))
        await until(lambda: num_known(first.engine) == num_known(second.engine) == bench.num_blocks)
        forget(first.engine)
        bench.compare("memory", await bench.run(first))
        bench.compare("memory, of the other replica", await bench.run(second))
        assert first.loaded() > bench.enough < second.loaded()
        await until(lambda: one.core.stats(one.now).num_on_disk == one.core.stats(one.now).num_found)
        assert one.core.stats(one.now).loads.given.keys() == {KVTier.HOST}
    async with node(600, space=space, folder=folder, num_disk_slots=600) as again, bench.replica(again, "c") as third:
        await until(lambda: num_known(third.engine) == bench.num_blocks)
        bench.compare("disk after a restart", await bench.run(third))
        assert again.core.stats(again.now).loads.given[KVTier.DISK] > bench.enough < third.loaded()


async def disk_behind_small_memory(bench: Bench, folder: Path) -> None:
    """Memory for what is on its way only: it comes from disk, in the same run."""
    async with (
        node(bench.num_blocks // 2, space=bench.space, folder=folder, num_disk_slots=600) as one,
        bench.replica(one, "a") as first,
    ):

        def is_written() -> bool:
            stats = one.core.stats(one.now)
            return stats.num_disk_writes == stats.num_waiting_for_disk == 0

        for _ in range(3):
            traces = []
            for item in bench.items:  # in turn, so that what is least recently used is what comes next
                traces += await bench.run(first, [item])
                await until(is_written)
            bench.compare("disk", traces)
            forget(first.engine)
        given = one.core.stats(one.now).loads.given
        assert given.get(KVTier.DISK, 0) > bench.enough // 2, given
        await _at_rest(one)


async def another_node(bench: Bench, folder: Path) -> None:
    """Fetched over TCP."""
    async with node(600, space=bench.space, name="n1") as one, node(600, space=bench.space, name="n2") as two:
        two.peers.set_peers([connector.peers.listen("127.0.0.1", TOKEN) for connector in (one, two)])
        async with bench.replica(one, "a") as first, bench.replica(two, "b") as second:
            bench.compare("stores, another node listens", await bench.run(first))
            await until(lambda: num_known(second.engine) == bench.num_blocks)
            bench.compare("another node", await bench.run(second))
            assert two.core.stats(two.now).loads.given[KVTier.REMOTE] > bench.enough < second.loaded()


def _put_back_always(core: Any) -> None:
    """Whoever has a token more is put back before the next step, and the pool forgets it: it is loaded or computed."""
    update = core.update

    def update_and_put_back(plan: StepPlan, result: StepResult, now: float) -> Any:
        outputs = update(plan, result, now)
        for sequence in [s for s in core.scheduler.running if s.seq_id in result.seq_ids]:
            core.scheduler.preempt(sequence, PreemptionCause.BLOCKS, now, by=sequence)
            core.blocks.clear_cache()
        return outputs

    core.update = update_and_put_back


async def offload_at_every_position(bench: Bench, folder: Path) -> None:
    """Preemption by offload after every token of everybody."""
    knobs: dict[str, Any] = {"preemption_mode": "offload", "watermark": 0.0, "max_preemptions": 1000}
    async with node(600, space=bench.space) as one, bench.replica(one, "a", **knobs) as first:
        core = first.engine.core
        _put_back_always(core)
        bench.compare("offload at every position", await bench.run(first))
        num_tokens = sum(len(trace.tokens) - 1 for trace in bench.plain)
        assert core.scheduler.counters.preemptions >= num_tokens, "the last token of each ends it"
        assert first.loaded() > 3 * bench.enough
        await _at_rest(one)


async def tiny_tiers_aborts_two_nodes(bench: Bench, folder: Path) -> None:
    """Two replicas of a node and one of another, tiers and a pool that are far too small, aborts, forgotten pools."""
    rng = random.Random(len(bench.items))
    small: dict[str, Any] = {"preemption_mode": "offload", "watermark": 0.0}
    async with (
        node(30, space=bench.space, name="n1", folder=folder, num_disk_slots=50, eviction="cost") as one,
        node(40, space=bench.space, name="n2") as two,
    ):
        addresses = [connector.peers.listen("127.0.0.1", TOKEN) for connector in (one, two)]
        for connector in (one, two):
            connector.peers.set_peers(addresses)
        async with (
            bench.replica(one, "a", num_blocks=30, **small) as first,
            bench.replica(one, "b") as second,
            bench.replica(two, "c", num_blocks=60, **small) as third,
        ):
            everybody = (first, second, third)
            for _ in range(3):
                for traces in await asyncio.gather(*(bench.run(each, rng=rng) for each in everybody)):
                    bench.compare("tiny tiers, aborts, two nodes", traces)
                forget(rng.choice(everybody).engine)
            assert sum(each.loaded() for each in everybody) > 0
            for each in everybody:
                core = each.engine.core
                await until(lambda core=core: core.blocks.num_free == core.blocks.num_blocks)  # type: ignore[misc]
                core.validate()
            await _at_rest(one)
            await _at_rest(two)


WAYS: tuple[Callable[[Bench, Path], Awaitable[None]], ...] = (
    memory_disk_restart,
    disk_behind_small_memory,
    another_node,
    offload_at_every_position,
    tiny_tiers_aborts_two_nodes,
)


def of_model(model: str, dtype: DType, num_prompts: int, num_tokens: int) -> Bench:
    """With a built-in model. Three engines compute at once in some ways, so each has one thread."""
    config = EngineConfig(
        model=ModelConfig(dtype=dtype),
        cache=CacheConfig(num_blocks=800),
        parallel=ParallelConfig(num_threads=1),
    )
    return Bench(config, model_store.resolve(model), make_items(num_prompts, num_tokens))


async def measure(bench: Bench) -> None:
    """All of them; the bench knows what was found."""
    await bench.learn()
    for way in WAYS:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            await way(bench, Path(folder))
        print(f"{way.__name__}: {bench.num_cases} cases so far, {time.monotonic() - began:.0f} s", file=sys.stderr)
