"""A model of any family against Hugging Face and against itself, with everything on that could go wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.equality import WAYS, Item, Tally, Way, differences, make_items, run_way
from benchmarks.hf_reference import Reference, Verdict
from replica.config import CacheConfig, DType, EngineConfig, ModelConfig, ParallelConfig
from replica.model_runner import TorchModelRunner

#: for a vocabulary of bytes: half greedy, some share prefixes; longer than the windows of the tiny checkpoints
TINY_ITEMS = make_items(8, 10, seed=5, vocab=(0, 256))
#: prompts in chunks, prefixes found, blocks for little more than the longest request
EVERYTHING = Way("chunks, prefix cache, preemption", num_blocks=0, token_budget=48, prefix_caching=True, warm=True)
#: the others are measured for the default model alone (`line.equal`)
FEW_WAYS = [
    way
    for way in WAYS
    if way.name in ("batched", "32-token chunks", "preempted again and again", "guessed ahead, preempted, in chunks")
]


def make_runner(
    folder: Path, dtype: DType = "float32", self_test: bool = False, threads: int = 1, **model: Any
) -> TorchModelRunner:
    """With room for all items at once. One thread: two that wait for each other on a busy machine take eight times as
    long, and with tensors as small as those of the tiny models no work is split anyway.
    """
    config = EngineConfig(
        model=ModelConfig(dtype=dtype, **model),
        cache=CacheConfig(block_size=16, num_blocks=160),
        parallel=ParallelConfig(num_threads=threads),
    )
    return TorchModelRunner(config, folder, self_test=self_test)


def judge(folder: Path, items: Sequence[Item], **runner: Any) -> tuple[list[Verdict], Tally]:
    """Our outputs of the greedy ones, teacher-forced by transformers, and what it took to get them."""
    ours = make_runner(folder, **runner)
    traces, tally = run_way(EVERYTHING, items, [ours])
    ours.close()
    reference = Reference(folder)
    verdicts = [
        reference.judge(item.prompt, trace.tokens)
        for item, trace in zip(items, traces, strict=True)
        if item.sampling.temperature == 0
    ]
    return verdicts, tally


def unequal(folder: Path, dtype: DType, items: Sequence[Item]) -> list[str]:
    """A line for each request that differs in a bit between our ways of computing."""
    runner = make_runner(folder, dtype)
    reference, _ = run_way(WAYS[0], items, [runner])
    outputs = [trace.tokens for trace in reference]
    found = []
    for way in FEW_WAYS:
        traces, _ = run_way(way, items, [runner], outputs)
        found += differences(reference, traces, way)
    runner.close()
    return found
