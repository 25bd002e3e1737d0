"""PURE. Section `kv_cache`: a replica's own pool, and the tiers of its node's KVConnector."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from replica.config import GIB, CacheConfig

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
        "lru", description="What a full tier gives up: what was used longest ago, or what is cheapest to compute again."
    )
    tier_admission: Admission = Field("always", description="Which blocks get a slot: all, or those asked for before.")
    disk_admission: Admission = Field(
        "always", description="Which of them are written to disk: all, or those used again."
    )

    @model_validator(mode="after")
    def _disk_is_behind_memory(self) -> KVCacheConfig:
        if self.disk_tier_gib and not self.host_tier_gib:
            raise ValueError(
                f"disk_tier_gib is {self.disk_tier_gib:g} and host_tier_gib is 0, but KV goes to disk and comes from "
                "there through memory; give host_tier_gib as well (1 is enough to begin with)"
            )
        if self.host_tier_gib and not self.enable_prefix_caching:
            raise ValueError(
                f"host_tier_gib is {self.host_tier_gib:g} and enable_prefix_caching is false, but blocks are found by "
                "the hashes of their prefixes; allowed then: host_tier_gib 0"
            )
        return self

    @property
    def has_connector(self) -> bool:
        return self.host_tier_gib > 0

    def pool(self) -> CacheConfig:
        """What a replica has to know."""
        return CacheConfig(**{name: getattr(self, name) for name in CacheConfig.model_fields})


def num_slots(gib: float, slot_bytes: int) -> int:
    """Slots that a tier of this size has."""
    return int(gib * GIB) // slot_bytes
