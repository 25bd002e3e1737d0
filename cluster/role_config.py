"""PURE. Sections `replicas` and `disaggregation`: how many replicas of each role there are, what they do otherwise, and
how a request is decided that may have two of them (`docs/disaggregation.md`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from replica.config import FrozenModel, SchedulerConfig
from replica.messages import Role
from router.disaggregation import HandOverConfig

#: what a node gets of memory for KV outside of the pools, where prompts are handed over and nobody said how much
HOST_TIER_GIB = 0.25
#: role -> name of its Serve deployment
DEPLOYMENTS = {Role.BOTH: "Replica", Role.PREFILL: "Prefill", Role.DECODE: "Decode"}
_PER_ROLE = ("max_num_batched_tokens", "max_num_seqs")


class ReplicasConfig(FrozenModel):
    """How many data-parallel replicas of each role."""

    both: int = Field(
        1, ge=0, le=1024, description="Replicas that prefill and decode. 0 if others are given and this is not."
    )
    prefill: int = Field(0, ge=0, le=1024, description="Replicas that compute prompts for others.")
    decode: int = Field(0, ge=0, le=1024, description="Replicas whose prompts others may compute.")

    @model_validator(mode="before")
    @classmethod
    def _parts_are_all(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and "both" not in value and (value.get("prefill") or value.get("decode")):
            return {**value, "both": 0}
        return value

    @property
    def counts(self) -> dict[Role, int]:
        """Of the roles that there are."""
        counts = {Role.BOTH: self.both, Role.PREFILL: self.prefill, Role.DECODE: self.decode}
        return {role: count for role, count in counts.items() if count}

    @property
    def num_decoding(self) -> int:
        return self.both + self.decode

    @property
    def total(self) -> int:
        return self.both + self.prefill + self.decode


class RoleConfig(FrozenModel):
    """What replicas of one role have otherwise than the rest of the configuration says."""

    max_num_batched_tokens: int | None = Field(
        None, ge=1, description="Token budget of a step. auto: that of the scheduler section."
    )
    max_num_seqs: int | None = Field(
        None, ge=1, description="Most sequences running at once. auto: that of the scheduler section."
    )
    tensor_parallel_size: int | None = Field(
        None, ge=1, le=64, description="Ranks per replica. auto: as other replicas."
    )

    @model_validator(mode="before")
    @classmethod
    def _blocks_are_alike(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and "block_size" in value:
            raise ValueError(
                f"block_size is {value['block_size']!r} here, but blocks are what one replica hands to another, so "
                "they have one size; allowed: kv_cache.block_size, for all roles"
            )
        return value

    def scheduler(self, of_all: SchedulerConfig) -> SchedulerConfig:
        """`of_all` with what this role has otherwise."""
        own = {name: value for name in _PER_ROLE if (value := getattr(self, name)) is not None}
        return of_all.model_copy(update=own)


class DisaggregationConfig(FrozenModel):
    """Whether a prompt is computed where the request decodes, or on a prefill replica."""

    decision: Literal["auto", "always", "never"] = Field(
        "auto", description="Who computes a prompt. auto: whoever would have the first token sooner."
    )
    prefill_timeout_s: float = Field(
        30, gt=0, le=3600, description="How long a prefill replica has; then another one, then the decode replica."
    )
    transfer_timeout_s: float = Field(
        3, ge=0, le=3600, description="Blocks that are not there so long after the first token are computed again."
    )
    tpot_target_ms: float = Field(
        0, ge=0, le=60_000, description="So much of a transfer may follow the first token without counting against it."
    )
    transfer_gbit_s: float = Field(
        8, gt=0, le=1e6, description="What the way between replicas carries, as the decision reckons, in Gbit/s."
    )
    prefill: RoleConfig = RoleConfig()
    decode: RoleConfig = RoleConfig()

    def hand_over(self) -> HandOverConfig:
        """What a router decides by."""
        return HandOverConfig(
            decision=self.decision,
            prefill_timeout_s=self.prefill_timeout_s,
            transfer_timeout_s=self.transfer_timeout_s,
            transfer_bytes_s=self.transfer_gbit_s * 1e9 / 8,
            tpot_target_s=self.tpot_target_ms / 1000,
        )

    def of(self, role: Role) -> RoleConfig:
        return {Role.PREFILL: self.prefill, Role.DECODE: self.decode}.get(role, RoleConfig())


#: keys of the section that may change while it runs
LIVE = frozenset(
    {f"disaggregation.{name}" for name in DisaggregationConfig.model_fields if name not in ("prefill", "decode")}
    | {f"disaggregation.{role}.{name}" for role in ("prefill", "decode") for name in _PER_ROLE}
)


def with_tier(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Raw configuration in which a node has memory for what is handed over, if nobody said how much."""
    replicas, cache = data.get("replicas"), data.get("kv_cache", {})
    if not isinstance(replicas, Mapping) or not replicas.get("prefill") or not isinstance(cache, Mapping):
        return data
    if "host_tier_gib" in cache or cache.get("enable_prefix_caching") is False:
        return data
    return {**data, "kv_cache": {**cache, "host_tier_gib": HOST_TIER_GIB}}
