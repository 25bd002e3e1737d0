"""PURE. Which part of a model one tensor-parallel rank holds. Sizes that do not divide are refused here, once."""

from __future__ import annotations

from typing import Protocol

import msgspec

from replica.errors import ConfigError


class ShardedShape(Protocol):
    """What of a decoder's shape decides whether it can be cut."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...


class Shard(msgspec.Struct, frozen=True):
    """Rank `rank` of `size`. Query heads, and with them the rows of q and the columns of o, go in equal contiguous
    parts; so do the MLP's inner rows and the vocabulary. KV heads do as well, or each is held by several ranks.
    """

    rank: int = 0
    size: int = 1

    def part(self, length: int) -> slice:
        """This rank's part of `length` things. The last ranks get fewer where it does not divide (the vocabulary)."""
        each = -(-length // self.size)
        start = min(length, self.rank * each)
        return slice(start, min(length, start + each))

    def kv_heads(self, num_kv_heads: int) -> slice:
        """The KV heads that this rank's query heads read. With more ranks than KV heads, one, shared with others."""
        if self.size <= num_kv_heads:
            return self.part(num_kv_heads)
        first = self.rank * num_kv_heads // self.size
        return slice(first, first + 1)


def sizes_that_divide(shape: ShardedShape, most: int = 64) -> list[int]:
    """The tensor-parallel sizes up to `most` that this shape can be cut into."""
    return [
        size
        for size in range(1, most + 1)
        if shape.num_heads % size == 0
        and shape.intermediate_size % size == 0
        and (shape.num_kv_heads % size == 0 or size % shape.num_kv_heads == 0)
    ]


def check_divides(shape: ShardedShape, size: int) -> None:
    """Raises ConfigError, naming the sizes that do, if `size` ranks cannot share `shape`."""
    allowed = sizes_that_divide(shape, max(size, 64))
    if size not in allowed:
        raise ConfigError(
            f"tensor_parallel_size={size} does not divide this model: {shape.num_heads} query heads, "
            f"{shape.num_kv_heads} KV heads, intermediate size {shape.intermediate_size}; "
            f"sizes that do: {', '.join(map(str, allowed))}"
        )
