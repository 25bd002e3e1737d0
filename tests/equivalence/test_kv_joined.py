"""KV that went through the joined KVConnector (sockets, arena, disk, another node) gives the bits that computing it
gives: every way of `benchmarks/kv_equality.py` with a tiny model. `test_tier.py` shows the same of a replica's half
alone, at every position.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from benchmarks.equality import Way, differences, make_items
from benchmarks.kv_engines import node, num_known, until
from benchmarks.kv_equality import WAYS, Bench
from tests.equivalence.runner_driver import make_config, write_tiny_model

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="an arena is a memfd"),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_bits_are_those_of_computing(
    dtype: str, way: Callable[[Bench, Path], Awaitable[None]], tiny: Path, tmp_path: Path
) -> None:
    config = make_config(dtype, 16, 400, threads=1)  # type: ignore[arg-type]
    bench = Bench(config, tiny, make_items(12, 8, vocab=(3, 300)))
    await bench.learn()
    await way(bench, tmp_path)
    assert bench.different == []
    assert bench.num_cases >= len(bench.items) / 2


@pytest.mark.parametrize("offload_dtype", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_compressed_blocks_are_the_same_for_everybody_and_not_what_was_computed(
    dtype: str, offload_dtype: str, tiny: Path
) -> None:
    exact = make_config(dtype, 16, 400, threads=1)  # type: ignore[arg-type]
    config = exact.model_copy(update={"cache": exact.cache.model_copy(update={"offload_dtype": offload_dtype})})
    # of different beginnings: who shares blocks with an earlier one in its pool has them as they were computed
    long = [item for item in make_items(12, 8, vocab=(3, 300)) if len(item.prompt) > 64]
    bench = Bench(config, tiny, list({tuple(item.prompt[:16]): item for item in long}.values()))
    share = 0.6 if offload_dtype == "int8" else 0.35
    assert bench.space.block_bytes < share * Bench(exact, tiny, []).space.block_bytes
    await bench.learn()
    loaded = []
    async with node(600, space=bench.space) as one:
        async with bench.replica(one, "a") as first:
            bench.compare("stores, and reads its own pool", await bench.run(first))
            await until(lambda: num_known(first.engine) == bench.num_blocks)
        assert bench.different == []
        for name in "bc":
            async with bench.replica(one, name) as other:
                await until(lambda other=other: num_known(other.engine) >= bench.num_blocks)  # type: ignore[misc]
                loaded.append(await bench.run(other))
                assert other.loaded() > 10
    assert differences(loaded[0], loaded[1], Way("two who load the same")) == []
    assert differences(bench.plain, loaded[0], Way("compressed")) != []
