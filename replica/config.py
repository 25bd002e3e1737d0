"""PURE. Configuration of one replica: frozen, composed, unknown keys refused.

`auto` values are `None` here and are filled by `resolve(config, hardware)`, a pure function.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

DType = Literal["auto", "bfloat16", "float32"]


class FrozenModel(BaseModel):
    """Base of every configuration class."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class ModelConfig(FrozenModel):
    """Which model, in which numbers."""

    model: str = Field("smollm2-135m-instruct", description="A built-in name, a model folder, or a .gguf file.")
    dtype: DType = Field("auto", description="auto: bfloat16 where the device computes in it, else float32.")
    max_model_len: int | None = Field(
        None, ge=16, description="Longest prompt + output in tokens. auto: the model's context."
    )
    runner: Literal["torch", "fake"] = Field(
        "torch", description="fake: deterministic tokens from a cost model, no weights."
    )


class CacheConfig(FrozenModel):
    """The replica's own KV pool."""

    block_size: int = Field(16, ge=1, le=256, description="Tokens per KV block.")
    num_blocks: int | None = Field(None, ge=2, description="Blocks in the pool. auto: from kv_cache_gib.")
    kv_cache_gib: float | None = Field(
        None, gt=0, description="Memory for the pool in GiB. auto: a share of free memory."
    )
    enable_prefix_caching: bool = Field(True, description="Share computed blocks of equal prefixes.")


class SchedulerConfig(FrozenModel):
    """Who runs in a step."""

    policy: Literal["fcfs"] = Field("fcfs", description="Order of the waiting queue.")
    max_num_seqs: int = Field(128, ge=1, description="Most sequences running at once.")
    max_num_batched_tokens: int | None = Field(
        None, ge=1, description="Token budget of a step. auto: 256 on CPU, 2048 on GPU."
    )
    enable_chunked_prefill: bool = Field(True, description="Off: a prompt is computed in one step, however long.")
    long_prefill_token_threshold: int = Field(
        0, ge=0, description="Most tokens of one prompt in a step; 0: the whole budget."
    )
    watermark: float = Field(
        0.01, ge=0, lt=1, description="Share of blocks kept free when a sequence is admitted beside others."
    )


class AdmissionConfig(FrozenModel):
    """What a replica accepts."""

    max_queued_requests: int = Field(64, ge=1, description="The queue cap: most queued sequences at this replica.")


class ParallelConfig(FrozenModel):
    """How a replica spans devices."""

    tensor_parallel_size: int = Field(
        1, ge=1, le=1, description="Ranks per replica. Only 1 until tensor parallelism lands."
    )
    num_threads: int | None = Field(
        None, ge=1, description="CPU threads of the runner. auto: cores shared among local replicas."
    )
    runner_placement: Literal["thread", "process"] = Field(
        "thread", description="Where the model runs: on a thread of the replica, or in a process of its own."
    )


class EngineConfig(FrozenModel):
    """Everything one replica needs to know."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    admission: AdmissionConfig = AdmissionConfig()
    parallel: ParallelConfig = ParallelConfig()


class Hardware(msgspec.Struct, frozen=True):
    """What `resolve` needs to know of a machine."""

    num_cores: int
    memory_bytes: int
    has_bfloat16: bool
    device: Literal["cpu", "cuda"] = "cpu"


GIB = 1 << 30


def resolve(config: EngineConfig, hardware: Hardware, replicas_on_node: int = 1) -> EngineConfig:
    """Fill every `auto` from `hardware`. Pure: same input, same output.

    The CPU token budget is 256: a CPU computes about 4,000 prompt tokens/s on the default model whatever the chunk (256
    rows already reach the matrix peak), so a bigger chunk only makes running streams wait longer.
    """
    on_cpu = hardware.device == "cpu"
    dtype: DType = config.model.dtype
    if dtype == "auto":
        dtype = "bfloat16" if hardware.has_bfloat16 else "float32"
    budget = config.scheduler.max_num_batched_tokens or (256 if on_cpu else 2048)
    threads = config.parallel.num_threads or max(1, hardware.num_cores // replicas_on_node)
    gib = config.cache.kv_cache_gib
    if gib is None:
        gib = round(max(0.125, min(2.0, 0.2 * hardware.memory_bytes / GIB) / replicas_on_node), 3)
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"dtype": dtype}),
            "cache": config.cache.model_copy(update={"kv_cache_gib": gib}),
            "scheduler": config.scheduler.model_copy(update={"max_num_batched_tokens": budget}),
            "parallel": config.parallel.model_copy(update={"num_threads": threads}),
        }
    )
