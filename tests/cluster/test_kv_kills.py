"""A slice of `benchmarks/kv_kills.py`: a live cluster with tiers, whose connector and replica are killed with loads and
stores on their way, whose disk is full and damaged. The claim `kv.kills` and `make soak` do all of it, again and again.
"""

from __future__ import annotations

import pytest

from benchmarks.kv_faults import SHORT
from benchmarks.kv_kills import run
from benchmarks.kv_live import SHAPES

pytestmark = [pytest.mark.anyio, pytest.mark.cluster, pytest.mark.slow, pytest.mark.long]


async def test_every_request_ends_right_and_nothing_is_left() -> None:
    found = await run(list(SHORT), 1, SHAPES["fake"])
    assert (found.wrong, found.errors, found.most_stranded, found.left, found.missed) == ([], [], 0, [], [])
    assert found.faults.total() + len(found.skipped) == len(SHORT)
