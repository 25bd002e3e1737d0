"""A KV cache larger than the machine is refused with what was asked for and what there is."""

from __future__ import annotations

import pytest

from replica.config import GIB, CacheConfig
from replica.errors import ConfigError
from replica.memory_check import check_pool
from replica.models.decoder_config import ModelShape

#: 2 heads * 3 layers * K and V * 16 wide * 4 bytes = 768 bytes a token
SHAPE = ModelShape("Llama", 64, 3, 4, 2, 16, 96, 100, 512)


def test_gibibytes() -> None:
    check_pool(CacheConfig(kv_cache_gib=7.9), 8 * GIB)
    sentence = r"kv_cache_gib=100 asks for 100\.0 GiB, and this machine has 8\.0 GiB .*; allowed: less than 8\.00"
    with pytest.raises(ConfigError, match=sentence):
        check_pool(CacheConfig(kv_cache_gib=100), 8 * GIB)
    with pytest.raises(ConfigError, match=r"asks for 3\.0 GiB for each of 3 replicas, .* 8\.0 GiB .* less than 2\.67"):
        check_pool(CacheConfig(kv_cache_gib=3), 8 * GIB, num_pools=3)


def test_blocks_have_a_size_where_the_model_is_known() -> None:
    blocks = CacheConfig(num_blocks=1 << 20, block_size=16)  # 12 GiB
    check_pool(blocks, 8 * GIB)
    check_pool(blocks, 13 * GIB, 1, SHAPE, 4)
    with pytest.raises(ConfigError, match=r"num_blocks=1048576 .* 12\.0 GiB.* 8\.0 GiB.* at most 699050 blocks"):
        check_pool(blocks, 8 * GIB, 1, SHAPE, 4)


def test_what_is_left_open_fits() -> None:
    check_pool(CacheConfig(), 1, 64, SHAPE, 4)
