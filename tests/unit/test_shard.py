"""How a model is cut among tensor-parallel ranks."""

from __future__ import annotations

import msgspec
import pytest

from replica.errors import ConfigError
from replica.shard import Shard, check_divides, sizes_that_divide


class Shape(msgspec.Struct):
    num_heads: int
    num_kv_heads: int
    intermediate_size: int


SMOLLM2 = Shape(9, 3, 1536)


def test_smollm2_divides_by_one_and_three() -> None:
    assert sizes_that_divide(SMOLLM2) == [1, 3]


def test_a_size_that_does_not_divide_names_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 .*9 query heads, 3 KV heads.*sizes that do: 1, 3$"):
        check_divides(SMOLLM2, 2)


def test_each_query_head_sits_beside_its_kv_head() -> None:
    for heads, kv_heads, size in [(9, 3, 3), (8, 2, 1), (8, 2, 2), (8, 2, 4), (8, 2, 8), (16, 4, 8), (6, 1, 3)]:
        check_divides(Shape(heads, kv_heads, 48), size)
        seen: list[int] = []
        for rank in range(size):
            shard = Shard(rank, size)
            mine, held = shard.part(heads), shard.kv_heads(kv_heads)
            wanted = {head * kv_heads // heads for head in range(mine.start, mine.stop)}
            assert wanted == set(range(held.start, held.stop))
            seen += range(mine.start, mine.stop)
        assert seen == list(range(heads))


def test_a_vocabulary_that_does_not_divide_loses_nothing() -> None:
    parts = [Shard(rank, 4).part(9) for rank in range(4)]
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(9))
