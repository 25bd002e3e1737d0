"""PURE. Section `kv_cache`: a replica's own pool, and the tiers of its node's KVConnector."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from replica.config import CacheConfig

Admission = Literal["always", "second_use"]


class KVCacheConfig(CacheConfig):
    """With both tiers at 0 there is no connector, and nothing is started for it."""

    host_tier_gib: float = Field(
        0, ge=0, le=65_536, description="Memory of each node for KV outside of the replicas' pools; 0: none."
    )
    disk_tier_gib: float = Field(
        0, ge=0, le=1_048_576, description="Disk of each node for KV, behind the memory of host_tier_gib; 0: none."
    )
    disk_folder: str | None = Field(
        None, description="Where the disk tier's files are. auto: a folder of the cache (SHOAL_CACHE)."
    )
    eviction: Literal["lru", "cost"] = Field(
        "lru", description="What a full tier gives up: what was used last, or what is cheapest to compute again."
    )
    tier_admission: Admission = Field("always", description="Which blocks get a slot: all, or those asked for before.")
    disk_admission: Admission = Field(
        "always", description="Which of them are written to disk: all, or those used again."
    )


def pool_config(config: KVCacheConfig) -> CacheConfig:
    """What a replica has to know."""
    return CacheConfig(**{name: getattr(config, name) for name in CacheConfig.model_fields})
