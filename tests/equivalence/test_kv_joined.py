"""KV that went through the joined KVConnector (sockets, arena, disk, another node) gives the bits that computing it
gives: every way of `benchmarks/kv_equality.py` with a tiny model. `test_tier.py` shows the same of a replica's half
alone, at every position.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from benchmarks.equality import make_items
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
