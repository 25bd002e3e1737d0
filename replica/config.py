"""PURE. Configuration of one replica: frozen, composed, unknown keys refused.

`auto` values are `None` here and are filled by `resolve(config, hardware)`, a pure function.
"""

from __future__ import annotations

from types import NoneType
from typing import Literal, get_args

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

DType = Literal["auto", "bfloat16", "float32"]
RunnerPlacement = Literal["thread", "process", "workers"]
#: of any knob: sizes of arrays and numbers in messages follow from them
MAX_INTEGER = (1 << 31) - 1


class FrozenModel(BaseModel):
    """Base of every configuration class."""

    # no NaN and no infinity anywhere: 0 * inf is NaN, and a queue sorted by NaN loses who stands in it
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _as_written(cls, value: object, info: ValidationInfo) -> object:
        """`auto` is None where None is meant by it. pydantic would take true for 1, and integers that no array and no
        message holds.
        """
        annotation = cls.model_fields[info.field_name or ""].annotation
        if value == "auto" and NoneType in get_args(annotation):
            return None
        if isinstance(value, bool) and annotation is not bool:
            raise ValueError("true and false are no values of it")
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise ValueError(f"Input should be at most {MAX_INTEGER}")
        return value


class ModelConfig(FrozenModel):
    """Which model, in which numbers."""

    model: str = Field(
        "smollm2-135m-instruct", description="A built-in name, a folder, a .gguf file, or a Hugging Face id."
    )
    dtype: DType = Field("auto", description="auto: bfloat16 where the device computes in it, else float32.")
    max_model_len: int | None = Field(
        None, ge=16, description="Longest prompt + output in tokens. auto: the model's context."
    )
    runner: Literal["torch", "fake"] = Field(
        "torch", description="fake: deterministic tokens from a cost model, no weights."
    )


#: `model`: as in the pool
OffloadDType = Literal["model", "int8", "int4"]


class CacheConfig(FrozenModel):
    """The replica's own KV pool."""

    block_size: int = Field(16, ge=1, le=256, description="Tokens per KV block.")
    num_blocks: int | None = Field(None, ge=2, description="Blocks in the pool. auto: from kv_cache_gib.")
    kv_cache_gib: float | None = Field(
        None, gt=0, description="Memory for the pool in GiB. auto: a share of free memory."
    )
    enable_prefix_caching: bool = Field(True, description="Share computed blocks of equal prefixes.")
    load_wait_ms: float = Field(
        100,
        ge=0,
        le=10_000,
        description="How long a sequence waits for KV from the node's tiers before it is computed.",
    )
    min_load_blocks: int = Field(4, ge=1, description="Fewer blocks than that are computed instead of being loaded.")
    exact_kv: bool = Field(
        True,
        description="Share KV only where its bits are equal: same kernels, same tensor_parallel_size. Off: also where "
        "it differs by rounding, as prefill and decode replicas of different degree do.",
    )
    offload_dtype: OffloadDType = Field(
        "model",
        description="Numbers of KV outside of the pool: as in the pool, or in 8 or 4 bits: smaller, and not exact.",
    )


class SchedulerConfig(FrozenModel):
    """Who runs in a step."""

    policy: Literal["fcfs", "priority", "sjf"] = Field(
        "fcfs", description="Who is served first: by arrival, by priority then arrival, or least work left first."
    )
    priority_ageing_s: float = Field(
        60,
        ge=0.001,
        le=1e6,
        description="Under priority: so many seconds of waiting make a request one level more urgent.",
    )
    sjf_ageing_tokens_per_s: float = Field(
        100, ge=0.001, le=1e9, description="Under sjf: a second of waiting counts like so many tokens less of work."
    )
    max_num_seqs: int = Field(128, ge=1, description="Most sequences running at once.")
    max_num_batched_tokens: int | None = Field(
        None, ge=1, description="Token budget of a step. auto: 256 on CPU, 2048 on GPU."
    )
    tpot_target_ms: float = Field(
        0,
        ge=0,
        description="Time per output token to keep: prompts get fewer tokens of a step beside running streams; 0: off.",
    )
    enable_chunked_prefill: bool = Field(True, description="Off: a prompt is computed in one step, however long.")
    long_prefill_token_threshold: int = Field(
        0,
        ge=0,
        description="A longer prompt is long, and a step computes at most so many tokens of it; 0: none is long.",
    )
    max_long_partial_prefills: int = Field(
        0, ge=0, description="Most long prompts under way at once, on half of the tokens if need be; 0: any number."
    )
    max_partial_prefills: int = Field(0, ge=0, description="Most prompts that a step leaves unfinished; 0: any number.")
    admission_look_past: int = Field(
        8, ge=0, description="Most queued sequences that a smaller one may pass while they do not fit; 0: none."
    )
    max_head_passes: int = Field(
        8, ge=0, description="Admitted past a sequence that does not fit, before nobody passes it any more."
    )
    shed_above_queued_tokens: int = Field(
        0, ge=0, description="Queued tokens above which the last in order is refused or shed (503); 0: no limit."
    )
    num_speculative_tokens: int = Field(
        0, ge=0, le=64, description="Most tokens guessed ahead of a sequence by looking up its own text; 0: none."
    )
    speculative_ngram: int = Field(
        3, ge=1, le=16, description="Tokens that must have stood in this order before, for what followed to be a guess."
    )
    speculative_max_step_tokens: int | None = Field(
        None,
        ge=1,
        description="Guesses are added to a step only up to so many tokens in all. auto: 12 on CPU, 256 on GPU.",
    )
    preemption_victim: Literal["policy", "cost"] = Field(
        "policy", description="Who is put back for blocks: the last in order, or who has least to compute again."
    )
    preemption_mode: Literal["recompute", "offload", "auto"] = Field(
        "recompute",
        description="What becomes of its KV: computed again, kept by the KV connector, or what takes less time.",
    )
    max_preemptions: int = Field(
        8, ge=0, description="Times that one sequence is put back before it is protected, as long as another is not."
    )
    watermark: float = Field(
        0.01, ge=0, lt=1, description="Share of blocks kept free when a sequence is admitted beside others."
    )

    @property
    def class_ageing_s(self) -> float | None:
        """`priority_ageing_s` where priorities count, else None: what a router sorts the requests it holds by."""
        return self.priority_ageing_s if self.policy == "priority" else None

    @model_validator(mode="after")
    def _can_work(self) -> SchedulerConfig:
        if self.max_long_partial_prefills and not self.long_prefill_token_threshold:
            raise ValueError(
                f"max_long_partial_prefills is {self.max_long_partial_prefills}, but no prompt is long while "
                "long_prefill_token_threshold is 0; set both or none"
            )
        return self


class AdmissionConfig(FrozenModel):
    """What a replica accepts."""

    max_queued_requests: int = Field(64, ge=1, description="The queue cap: most queued sequences at this replica.")


class ParallelConfig(FrozenModel):
    """How a replica spans devices."""

    tensor_parallel_size: int = Field(1, ge=1, le=64, description="Ranks per replica, each with a part of the model.")
    ranks_may_be_remote: bool = Field(
        False, description="Ranks may be placed on other nodes than the replica: it listens for them by TCP."
    )
    num_threads: int | None = Field(
        None, ge=1, description="CPU threads of the runner. auto: cores shared among local replicas."
    )
    runner_placement: RunnerPlacement = Field(
        "thread",
        description="Where the model runs: on a thread of the replica, in a process of its own, or on worker actors, "
        "which several ranks always do.",
    )

    @property
    def has_workers(self) -> bool:
        """The model runs on worker actors, one a rank."""
        return self.tensor_parallel_size > 1 or self.runner_placement == "workers"


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

    Cores are shared by all ranks of all replicas on the node; KV memory is a replica's, whatever its ranks make of it.
    """
    on_cpu = hardware.device == "cpu"
    dtype: DType = config.model.dtype
    if dtype == "auto":
        dtype = "bfloat16" if hardware.has_bfloat16 else "float32"
    budget = config.scheduler.max_num_batched_tokens or (256 if on_cpu else 2048)
    with_guesses = config.scheduler.speculative_max_step_tokens or (12 if on_cpu else 256)
    num_ranks = replicas_on_node * config.parallel.tensor_parallel_size
    threads = config.parallel.num_threads or max(1, hardware.num_cores // num_ranks)
    gib = config.cache.kv_cache_gib
    if gib is None:
        gib = round(max(0.125, min(2.0, 0.2 * hardware.memory_bytes / GIB) / replicas_on_node), 3)
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"dtype": dtype}),
            "cache": config.cache.model_copy(update={"kv_cache_gib": gib}),
            "scheduler": config.scheduler.model_copy(
                update={"max_num_batched_tokens": budget, "speculative_max_step_tokens": with_guesses}
            ),
            "parallel": config.parallel.model_copy(update={"num_threads": threads}),
        }
    )
