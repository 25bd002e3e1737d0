"""PURE. Does the KV cache that was asked for fit the machine? Asked before anything is allocated: the allocator's own
error came after 40 s and named neither field nor size.
"""

from __future__ import annotations

from replica.config import GIB, CacheConfig
from replica.errors import ConfigError
from replica.models.decoder_config import ModelShape


def check_pool(
    cache: CacheConfig,
    memory_bytes: int,
    num_pools: int = 1,
    shape: ModelShape | None = None,
    itemsize: int = 0,
) -> None:
    """Raises ConfigError with what was asked and what there is. `num_pools`: replicas that share the machine's
    `memory_bytes`. `shape` and `itemsize` (bytes of a number in the cache) where known: only they give blocks a size.
    """
    if cache.num_blocks is not None:
        if shape is None:
            return
        of_block = shape.block_bytes(cache.block_size, itemsize, shape.num_kv_heads)
        asked, what = cache.num_blocks * of_block, f"kv_cache.num_blocks={cache.num_blocks}"
        allowed = f"at most {max(0, memory_bytes // num_pools // of_block)} blocks"
    elif cache.kv_cache_gib is not None:
        asked, what = int(cache.kv_cache_gib * GIB), f"kv_cache.kv_cache_gib={cache.kv_cache_gib:g}"
        allowed = f"less than {memory_bytes / num_pools / GIB:.2f}"
    else:
        return
    if asked * num_pools >= memory_bytes:
        each = f" for each of {num_pools} replicas" if num_pools > 1 else ""
        raise ConfigError(
            f"{what} asks for {asked / GIB:.1f} GiB{each}, and this machine has {memory_bytes / GIB:.1f} GiB of memory "
            f"in all; allowed: {allowed}, and the weights need room too"
        )
