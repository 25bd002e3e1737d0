"""`python -m benchmarks.block_size_speed`: what block sizes 8, 16 and 32 cost on this machine, prompts over 512 tokens.

Engine: `engine_cost.decode_cost`, 256 running. Model: steps of the default model, 8 sequences of 768 tokens and one
prompt of 1,024, a runner for each block size in one process. Sizes take turns, so that a busy machine disturbs all of
them alike; medians of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from functools import partial

import torch

from benchmarks.engine_cost import decode_cost
from benchmarks.runner_step import Bench
from cluster import model_store
from replica.config import CacheConfig, EngineConfig, ModelConfig
from replica.model_runner import TorchModelRunner

SIZES = (8, 16, 32)
BATCH, CONTEXT, PROMPT = 8, 768, 1024


def engine_us(rounds: int) -> dict[int, float]:
    """Microseconds per running sequence and step, the least disturbed round."""
    found: dict[int, list[float]] = {size: [] for size in SIZES}
    for _ in range(rounds):
        for size in SIZES:
            found[size].append(decode_cost(256, block_size=size).total)
    return {size: min(values) for size, values in found.items()}


def model_ms(rounds: int) -> tuple[dict[int, float], dict[int, float]]:
    """Milliseconds of a decode step and of a prompt, medians."""
    folder = model_store.resolve("smollm2-135m-instruct")
    tokens = BATCH * (CONTEXT + rounds + 64) + PROMPT + 64
    benches = {}
    for size in SIZES:
        cache = CacheConfig(block_size=size, num_blocks=tokens // size + 16)
        benches[size] = Bench(TorchModelRunner(EngineConfig(model=ModelConfig(), cache=cache), folder), 256)
    with torch.inference_mode():
        steps = {size: bench.decode(BATCH, CONTEXT, rounds + 2) for size, bench in benches.items()}
        decode = _in_turns(rounds, steps)
        for bench in benches.values():
            bench.drop(BATCH)
        prompts = {size: partial(bench.prefill, PROMPT) for size, bench in benches.items()}
        prefill = _in_turns(max(3, rounds // 5), prompts)
    return decode, prefill


def _in_turns(rounds: int, measures: Mapping[int, Callable[[], float]]) -> dict[int, float]:
    found: dict[int, list[float]] = {size: [] for size in SIZES}
    for number in range(rounds + 1):
        for size in SIZES[number % 3 :] + SIZES[: number % 3]:
            found[size].append(measures[size]())
    return {size: 1e3 * statistics.median(values[1:]) for size, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    engine = engine_us(3)
    decode, prefill = model_ms(options.rounds)
    print("| block size | engine, us a sequence and step | 8 x 768 decode step, ms | 1,024-token prompt, ms |")
    print("|---|---|---|---|")
    for size in SIZES:
        print(f"| {size} | {engine[size]:.2f} | {decode[size]:.1f} | {prefill[size]:.0f} |")


if __name__ == "__main__":
    main()
