"""Blocks of one rank are loaded by three, and the other way round: each rank takes its heads out of the slab.
What follows is what the loading side computes itself, within the tolerance between degrees.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.equality import Item
from benchmarks.hf_reference import TOLERANCE
from replica.collective import NoPeers
from replica.errors import EngineError
from replica.kv_messages import ArenaPlace, KVPeer, KVSpace
from replica.messages import SamplingParams
from replica.model_runner import TorchModelRunner
from replica.shard import Shard
from replica.step import Arena, StepPlan, StepResult
from tests.equivalence.ranks import run_on_ranks
from tests.equivalence.runner_driver import make_config, write_tiny_model
from tests.equivalence.test_tier import Run
from tests.unit.tier_harness import FakeArena, FakeConnector

EXACT = make_config("float32", 16, 160, threads=1)
CONFIG = EXACT.model_copy(update={"cache": EXACT.cache.model_copy(update={"exact_kv": False})})
SLOTS = 100
ITEMS = [
    Item([(i * 7 + seed) % 260 + 3 for i in range(length)], SamplingParams(5, temperature=0.0, ignore_eos=True))
    for seed, length in enumerate((40, 64, 100, 33))
]
OTHERS = [Item([(t + 11) % 260 + 3 for t in item.prompt], item.sampling) for item in ITEMS]


class FileConnector(FakeConnector):
    """Its arena is a file, which other processes map as well."""

    def __init__(self, path: Path, slot_bytes: int, sealed: dict[bytes, int]) -> None:
        super().__init__(1, slot_bytes)
        self.path = path
        self.slots = np.memmap(path, np.uint8, "r+", shape=(SLOTS, slot_bytes))
        self.sealed = dict(sealed)
        self.free = [slot for slot in range(SLOTS) if slot not in sealed.values()]

    def place(self, holder: str) -> ArenaPlace:
        space = KVSpace("", 0, self.slots.shape[1], 1, "")
        return ArenaPlace(str(self.path), KVPeer(holder, "1"), space, self.name)


def open_file(place: ArenaPlace, member: str) -> Arena:
    if not place.socket_path:
        raise EngineError("no arena")
    return FakeArena(np.memmap(place.socket_path, np.uint8, "r+", shape=(SLOTS, place.space.block_bytes)))


class Rows:
    """Keeps the logits of every token, by sequence."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        runner.capture_logits = True
        self.rows: dict[int, list[Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def execute(self, plan: StepPlan) -> StepResult:
        result: StepResult = self.runner.execute(plan)
        for seq_id in result.seq_ids:
            self.rows.setdefault(seq_id, []).extend(self.runner.last_logits[seq_id].numpy().copy())
        return result


def drive(path: Path, sealed: dict[bytes, int], items: list[Item], more: list[Item], runner: Any) -> dict[str, Any]:
    """`items` as far as they can be loaded; then `more` is stored."""
    rows = Rows(runner)
    connector = FileConnector(path, runner.info.block_bytes, sealed)
    run = Run(rows, connector, "x")  # type: ignore[arg-type]
    traces = run.all(items)
    loaded = run.counter("kv_blocks_loaded")
    for number, item in enumerate(more):
        run.submit(f"more{number}", item)
    while run.step():
        pass
    run.hear()
    tokens = [trace.tokens for trace in traces], [run.traces[f"more{n}"].tokens for n in range(len(more))]
    logits = [np.stack(rows.rows[n]) for n in range(len(items) + len(more))]
    return {"tokens": tokens, "logits": logits, "loaded": loaded, "sealed": connector.sealed, "info": runner.info}


def test_one_rank_and_three_load_of_each_other(tmp_path: Path) -> None:
    shape = {"hidden_size": 192, "num_attention_heads": 12, "num_key_value_heads": 3, "intermediate_size": 192}
    folder = write_tiny_model(tmp_path / "tiny", **shape)

    def single() -> TorchModelRunner:
        return TorchModelRunner(CONFIG, folder, self_test=False, open_arena=open_file)

    path = tmp_path / "arena"
    path.write_bytes(bytes(SLOTS * single().info.block_bytes))
    stored = drive(path, {}, [], ITEMS, single())
    assert len(stored["sealed"]) >= sum(len(item.prompt) // 16 for item in ITEMS)
    work = functools.partial(drive, path, stored["sealed"], ITEMS, OTHERS)
    ((three, *_),) = run_on_ranks(3, CONFIG, [folder], work, open_file)
    info = single().info
    for name in ("model_fingerprint", "block_bytes", "block_size", "kv_degree"):
        assert getattr(three["info"], name) == getattr(info, name), name
    one = drive(path, three["sealed"], OTHERS, [], single())
    for result, expected in ((three["loaded"], ITEMS), (one["loaded"], OTHERS)):
        assert result == sum((len(item.prompt) - 1) // 16 for item in expected)
    assert three["tokens"][0] == stored["tokens"][1], "computed by one, gone on with by three"
    assert one["tokens"][0] == three["tokens"][1], "computed by three, gone on with by one"
    for ours, theirs in ((three["logits"][:4], stored["logits"]), (one["logits"], three["logits"][4:])):
        for row, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(row, other, atol=TOLERANCE)


def test_by_default_bits_count(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    prints = [
        TorchModelRunner(config, folder, self_test=False, shard=Shard(0, size), collective=NoPeers()).info
        for config in (EXACT, CONFIG)
        for size in (1, 2)
    ]
    one, two, near, other = [info.model_fingerprint for info in prints]
    assert len({one, two, near}) == 3
    assert near == other


@pytest.mark.parametrize(("size", "degree"), [(1, 1), (2, 1), (4, 4)])
def test_heads_that_are_held_twice_are_no_common_layout(tmp_path: Path, size: int, degree: int) -> None:
    shape = {"hidden_size": 192, "num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 192}
    folder = write_tiny_model(tmp_path / "tiny", **shape)
    config = make_config("float32", 16, 8, threads=1)
    runner = TorchModelRunner(config, folder, self_test=False, shard=Shard(0, size), collective=NoPeers())
    assert runner.info.kv_degree == degree
