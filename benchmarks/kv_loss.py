"""What KV in 8 or 4 bits does to the model's answers, and what it costs: `python -m benchmarks.kv_loss`.

The default model reads a fixed text (`texts/loss.txt`) in windows of 1,024 tokens. The KV of the first half of each is
put into slots and taken back, as a load does; the second half is told to the model, whatever it would have said, and
each of its logits is compared with those of the same run without that. Without a coder the difference is 0 to the bit.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from tokenizers import Tokenizer

from cluster import model_store
from replica.config import CacheConfig, EngineConfig, ModelConfig, OffloadDType, ParallelConfig
from replica.messages import SamplingParams
from replica.model_runner import TorchModelRunner
from replica.models.kv_pool import coder_of, slabs
from replica.slab_code import SlabCoder
from replica.step import NewSequence, StepPlan

TEXT = Path(__file__).parent / "texts" / "loss.txt"
WINDOW, CONTEXT, BLOCK = 1024, 512, 16
DTYPES: tuple[OffloadDType, ...] = ("int8", "int4")


class Loss(msgspec.Struct, frozen=True):
    """Of one way to hold KV, over all told tokens."""

    dtype: OffloadDType
    num_tokens: int
    #: |logit - logit without compression|: over the whole vocabulary, and the largest of all
    mean_distance: float
    max_distance: float
    #: mean of D(without || with), in nats
    divergence: float
    #: tokens for which another one is the likeliest
    changed: float
    perplexity: float
    plain_perplexity: float
    #: of a slab in the pool
    size: float


class Reader:
    """The model, told what to say. Knows every logit of the last step."""

    def __init__(self, threads: int = 1) -> None:
        config = EngineConfig(
            model=ModelConfig(dtype="auto"),
            cache=CacheConfig(num_blocks=WINDOW // BLOCK + 2),
            parallel=ParallelConfig(num_threads=threads),
        )
        folder = model_store.resolve("smollm2-135m-instruct")
        self.runner = TorchModelRunner(config, folder, self_test=False)
        self._decoder: Any = self.runner._decoder
        self.runner._decoder = self
        self.rows = torch.empty(0)
        text = TEXT.read_text(encoding="utf-8")
        tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
        self.windows = [tokens[i : i + WINDOW] for i in range(0, len(tokens) - WINDOW + 1, WINDOW)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def forward(self, batch: Any) -> Any:
        """As the decoder does."""
        tokens, logits = self._decoder.forward(batch)
        self.rows = logits[len(batch.sampled) :].clone()  # those of the prompt
        return tokens, logits

    def read(self, window: list[int], coder: SlabCoder | None) -> torch.Tensor:
        """Logits behind each token of the second half but the last one, float32 [tokens, vocab]."""
        blocks = list(range(1, WINDOW // BLOCK + 2))
        sampling = SamplingParams(max_tokens=1, temperature=0.0, num_prompt_logprobs=0)
        sequence = NewSequence(0, window, len(window), blocks, sampling)
        self.runner.execute(StepPlan(0, [0], [0], [CONTEXT], [sequence]))
        if coder is not None:
            there_and_back(slabs(self.runner.kv_pool), blocks[: CONTEXT // BLOCK], coder)
        self.runner.execute(StepPlan(1, [0], [CONTEXT], [len(window) - CONTEXT]))
        rows = self.rows
        self.runner.execute(StepPlan(2, [], [], [], dropped=[0]))
        return rows


def there_and_back(pool: np.ndarray, blocks: list[int], coder: SlabCoder) -> tuple[float, float]:
    """CPU seconds into slots and out of them."""
    at, to = np.array(blocks, np.int64), np.arange(len(blocks))
    slots = np.ones((len(blocks), coder.coded_bytes), np.uint8)
    times = [time.thread_time()]
    coder.encode(slots, to, pool, at)
    times.append(time.thread_time())
    coder.decode(pool, at, slots, to)
    times.append(time.thread_time())
    return times[1] - times[0], times[2] - times[1]


def measure(reader: Reader, plain: list[torch.Tensor], dtype: OffloadDType) -> Loss:
    """`plain`: the logits without compression, by window."""
    coder = coder_of(reader.runner.kv_pool, dtype)
    distances, most, divergences, changed = [], 0.0, [], []
    nats: dict[str, list[float]] = {"plain": [], "coded": []}
    for window, before in zip(reader.windows, plain, strict=True):
        after = reader.read(window, coder)
        apart = (after - before).abs()
        distances.append(float(apart.mean()))
        most = max(most, float(apart.max()))
        told = torch.tensor(window[CONTEXT + 1 :])[:, None]
        of_before, of_after = before.log_softmax(1), after.log_softmax(1)
        nats["plain"] += (-of_before.gather(1, told)).flatten().tolist()
        nats["coded"] += (-of_after.gather(1, told)).flatten().tolist()
        divergences.append(float((of_before.exp() * (of_before - of_after)).sum(1).mean()))
        changed.append(float((before.argmax(1) != after.argmax(1)).float().mean()))
    perplexity = {name: float(np.exp(statistics.mean(found))) for name, found in nats.items()}
    size = 1.0 if coder is None else coder.coded_bytes / slabs(reader.runner.kv_pool).shape[1]
    return Loss(
        dtype, len(nats["plain"]), statistics.mean(distances), most, statistics.mean(divergences),
        statistics.mean(changed), perplexity["coded"], perplexity["plain"], size,
    )  # fmt: skip


def cost(reader: Reader, dtype: OffloadDType, num_rounds: int = 15) -> tuple[float, float]:
    """CPU seconds for a GiB of the pool into slots, and out of them: medians over rounds of 32 blocks."""
    coder = coder_of(reader.runner.kv_pool, dtype)
    assert coder is not None
    pool = slabs(reader.runner.kv_pool).copy()
    blocks = list(range(1, 1 + CONTEXT // BLOCK))
    gib = len(blocks) * pool.shape[1] / 2**30
    found = [there_and_back(pool, blocks, coder) for _ in range(num_rounds)]
    return statistics.median(t for t, _ in found) / gib, statistics.median(t for _, t in found) / gib


def losses(reader: Reader) -> list[Loss]:
    """Of every way; the first is as it is in the pool."""
    plain = [reader.read(window, None) for window in reader.windows]
    ways: tuple[OffloadDType, ...] = ("model", *DTYPES)
    return [measure(reader, plain, dtype) for dtype in ways]


def main() -> None:
    reader = Reader()
    print(f"{reader.runner.info.description}; {len(reader.windows)} windows")
    print(
        "| numbers outside of the pool | size | logits: mean distance | max | divergence, nats "
        "| other likeliest token, % | perplexity | CPU s a GiB, in / out |\n|---|---|---|---|---|---|---|---|"
    )
    for one in losses(reader):
        spent = "" if one.dtype == "model" else " / ".join(f"{s:.2f}" for s in cost(reader, one.dtype))
        print(
            f"| {one.dtype} | {one.size:.3f} | {one.mean_distance:.4f} | {one.max_distance:.2f} | {one.divergence:.5f} "
            f"| {100 * one.changed:.2f} | {one.perplexity:.3f} | {spent} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
