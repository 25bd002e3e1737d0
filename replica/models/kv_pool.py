"""TORCH. The replica's KV memory: one tensor, one contiguous slab per block."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from replica.config import OffloadDType
from replica.errors import ConfigError
from replica.kv_codec import KVShape
from replica.models.decoder_config import ModelShape
from replica.shard import Shard
from replica.slab_code import SlabCoder

GIB = 1 << 30


def heads_held(config: ModelShape, shard: Shard) -> int:
    """KV heads of one rank."""
    held = shard.kv_heads(config.num_kv_heads)
    return int(held.stop) - int(held.start)


def block_bytes(config: ModelShape, block_size: int, dtype: torch.dtype, shard: Shard = Shard()) -> int:
    """Bytes of one block on one rank: K and V of `block_size` tokens over all layers."""
    return config.block_bytes(block_size, dtype.itemsize, heads_held(config, shard))


def count_blocks(config: ModelShape, block_size: int, dtype: torch.dtype, gib: float, shard: Shard = Shard()) -> int:
    """How many blocks fit `gib`, which the ranks share. Raises ConfigError when fewer than 2 do."""
    size = block_bytes(config, block_size, dtype, shard) * shard.size
    count = int(gib * GIB // size)
    if count < 2:
        raise ConfigError(f"cache.kv_cache_gib={gib} holds {count} blocks of {size} bytes; at least 2 are needed")
    return count


def slabs(pool: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The same memory as rows of bytes: [num_blocks, bytes of a block]. `pool` is block-major."""
    assert pool.is_contiguous(), "a block is not one piece of memory"
    rows: npt.NDArray[np.uint8] = pool.view(pool.shape[0], -1).view(torch.uint8).numpy()
    return rows


def coder_of(pool: torch.Tensor, offload_dtype: OffloadDType) -> SlabCoder | None:
    """How blocks of `pool` are held elsewhere; None: as they are. Raises ConfigError for a shape that cannot be so."""
    if offload_dtype == "model":
        return None
    _, heads, layers, _, block_size, dim = pool.shape
    try:
        shape = KVShape(heads, layers, block_size, dim, pool.dtype == torch.bfloat16)
        return SlabCoder(shape, 8 if offload_dtype == "int8" else 4)
    except ValueError as error:
        raise ConfigError(f"kv_cache.offload_dtype: {offload_dtype!r}, but {error}; allowed here: 'model'") from None


def allocate(
    config: ModelShape,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    advise: Callable[[int, int], None] | None = None,
    layer_major: bool = False,
    shard: Shard = Shard(),
) -> torch.Tensor:
    """Zeroed pool, seen as [num_blocks, kv_heads, num_layers, 2, block_size, head_dim] in either memory order, with the
    KV heads of one rank.

    Zeroing touches every page, so no step pays for a page fault; `advise(address, bytes)` runs before that.
    `layer_major` stores [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]; for comparison only.
    """
    heads, layers, dim = heads_held(config, shard), config.num_layers, config.head_dim
    if layer_major:
        memory = torch.empty((layers, 2, num_blocks, heads, block_size, dim), dtype=dtype)
        pool = memory.permute(2, 3, 0, 1, 4, 5)
    else:
        memory = pool = torch.empty((num_blocks, heads, layers, 2, block_size, dim), dtype=dtype)
    if advise is not None:
        advise(memory.data_ptr(), memory.nbytes)
    memory.zero_()
    return pool
