"""Time of single runner steps, without scheduler or network: decode at several batch sizes, prefill at several lengths.

    python -m benchmarks.runner_step --model MODEL [--context 192] [--dtype bfloat16] [--block-size 16] [--layer-major]

Prints medians, best values and the floor: the same matrix products through torch's prepacked oneDNN linears,
measured in turns with the steps, so that a noisy machine slows both alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from cluster import model_store
from replica.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from replica.messages import SamplingParams
from replica.model_runner import TorchModelRunner
from replica.models.decoder import read_decoder_config
from replica.models.decoder_config import DecoderConfig
from replica.step import NewSequence, StepPlan

BATCHES = (1, 8, 32)
PREFILLS = (128, 256, 1024)


class Bench:
    """One runner and the plans to time on it. Sequences have random tokens; greedy."""

    def __init__(self, runner: TorchModelRunner, chunk: int) -> None:
        self.runner = runner
        self._chunk = chunk
        self._rng = np.random.default_rng(0)
        self._size = runner.info.block_size

    def new(self, seq_id: int, length: int, room: int, first_block: int, temperature: float = 0.0) -> NewSequence:
        tokens = self._rng.integers(100, self.runner.info.vocab_size, length).tolist()
        blocks = list(range(first_block, first_block - (-room // self._size)))
        sampling = SamplingParams(max_tokens=room, temperature=temperature, seed=seq_id)
        return NewSequence(seq_id, tokens, length, blocks, sampling)

    def decode(self, batch: int, context: int, steps: int, temperature: float = 0.0) -> Callable[[], float]:
        """Prefills `batch` sequences; each call then runs one decode step and returns its seconds."""
        room = context + steps + 8
        per_sequence = -(-room // self._size)
        for i in range(batch):
            self._prefill(self.new(i, context, room, i * per_sequence, temperature))
        computed = context

        def step() -> float:
            nonlocal computed
            plan = StepPlan(0, list(range(batch)), [computed] * batch, [1] * batch)
            started = time.perf_counter()
            self.runner.execute(plan)
            elapsed = time.perf_counter() - started
            computed += 1
            return elapsed

        return step

    def _prefill(self, new: NewSequence) -> float:
        length, done, elapsed = len(new.token_ids), 0, 0.0
        while done < length:
            count = min(self._chunk, length - done)
            plan = StepPlan(0, [new.seq_id], [done], [count], new=[new] if done == 0 else [])
            started = time.perf_counter()
            self.runner.execute(plan)
            elapsed += time.perf_counter() - started
            done += count
        return elapsed

    def prefill(self, length: int) -> float:
        """Seconds to compute a fresh prompt in chunks."""
        elapsed = self._prefill(self.new(0, length, length + 1, 0))
        self.drop(1)
        return elapsed

    def drop(self, batch: int) -> None:
        self.runner.execute(StepPlan(0, [], [], [], dropped=list(range(batch))))


class Floor:
    """The matrix products of one step in model order, and nothing else, through torch's prepacked linears."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        hidden, inter = config.hidden_size, config.intermediate_size
        shapes = [
            (hidden, config.q_dim + 2 * config.kv_dim),
            (config.q_dim, hidden),
            (hidden, 2 * inter),
            (inter, hidden),
        ]
        self._shapes = shapes * config.num_layers
        self._head = (hidden, config.vocab_size)
        self._dtype = dtype
        self._weights = [self._pack(k, n) for k, n in [*self._shapes, self._head]]

    def _pack(self, k: int, n: int) -> torch.Tensor:
        weight = torch.randn(n, k).to(self._dtype)
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 32)
        return packed

    def __call__(self, rows: int, head_rows: int) -> float:
        """Seconds for `rows` token rows and `head_rows` rows of the vocabulary projection."""
        inputs = {k: torch.randn(rows, k).to(self._dtype) for k, _ in self._shapes}
        last = torch.randn(head_rows, self._head[0]).to(self._dtype)
        started = time.perf_counter()
        for (k, _), weight in zip(self._shapes, self._weights[:-1], strict=True):
            torch.ops.mkldnn._linear_pointwise(inputs[k], weight, None, "none", [], "")
        torch.ops.mkldnn._linear_pointwise(last, self._weights[-1], None, "none", [], "")
        return time.perf_counter() - started


def row(name: str, seconds: list[float], floor: list[float], tokens: int) -> str:
    """One line of the table."""
    median, least = statistics.median(seconds), statistics.median(floor)
    return (
        f"{name:24s} {median * 1e3:8.2f} {min(seconds) * 1e3:8.2f} {tokens / median:9.0f}"
        f" {least * 1e3:10.2f} {min(floor) * 1e3:8.2f} {median / least:8.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--layer-major", action="store_true", help="the other memory order of the KV pool")
    options = parser.parse_args()

    folder = model_store.resolve(options.model)
    need = max(max(BATCHES) * (options.context + options.steps + 16), max(PREFILLS) + 16)
    config = EngineConfig(
        model=ModelConfig(model=options.model, dtype=options.dtype),
        cache=CacheConfig(block_size=options.block_size, num_blocks=2 * need // options.block_size),
        parallel=ParallelConfig(num_threads=options.threads),
    )
    runner = TorchModelRunner(config, folder, kv_layer_major=options.layer_major)
    print(runner.info.description)
    bench = Bench(runner, options.chunk)
    dtype = torch.float32 if "float32" in runner.info.description else torch.bfloat16
    with torch.inference_mode():
        floor = Floor(read_decoder_config(folder), dtype)
        print(
            f"{'step':24s} {'median ms':>8s} {'best':>7s} {'tokens/s':>9s}"
            f" {'GEMM floor':>10s} {'best':>8s} {'ratio':>8s}"
        )
        for batch in BATCHES:
            step = bench.decode(batch, options.context, options.steps + 2, options.temperature)
            pairs = [(step(), floor(batch, batch)) for _ in range(options.steps)][2:]
            bench.drop(batch)
            print(row(f"decode {batch} x {options.context}", [p[0] for p in pairs], [p[1] for p in pairs], batch))
        for length in PREFILLS:
            chunks = [min(options.chunk, length - i) for i in range(0, length, options.chunk)]
            repeats = max(4, options.steps // 3)
            pairs = [(bench.prefill(length), sum(floor(n, 1) for n in chunks)) for _ in range(repeats)][1:]
            print(row(f"prefill {length}", [p[0] for p in pairs], [p[1] for p in pairs], length))


if __name__ == "__main__":
    main()
