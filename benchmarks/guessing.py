"""`python -m benchmarks.guessing`: what guessing ahead (`replica/speculation.py`) gains and costs with the real model.

Two kinds of text, greedy, without HTTP: a copying task, whose output stands in the prompt, and a free one. The same
requests in turns with and without guesses; both have to say the same.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator

import msgspec

from cluster import model_store
from replica.config import (
    AdmissionConfig,
    CacheConfig,
    DType,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from replica.engine_core import EngineCore
from replica.messages import GenerateRequest, RequestId, RouterId, SamplingParams, SequenceInput
from replica.model_runner import TorchModelRunner
from router.tokenizer import Tokenizer

MODEL = "smollm2-135m-instruct"
NUM_GUESSED = 8
#: what `auto` gives on a CPU
MAX_STEP_TOKENS = 12
LINES = (
    "The harbour master counts {n} boats at dawn",
    "Every boat carries {n} crates of salt and rope",
    "At noon the wind turns and {n} sails go up",
    "By evening {n} lamps burn along the pier",
)
COPY = "Repeat this list exactly, line by line, and nothing else:\n{text}"
FREE = "Write a short story about a lighthouse keeper who finds {n} letters in a bottle."


class Outcome(msgspec.Struct, frozen=True):
    """Of one kind of text at one concurrency."""

    task: str
    num_streams: int
    #: tokens per second with guesses over without; medians, with the lowest and highest round
    gain: float
    lowest: float
    highest: float
    #: guessed tokens that came true, and tokens per stream and step
    acceptance: float
    tokens_per_step: float
    is_equal: bool


def prompts(task: str, tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Different ones, so that no two streams share text."""
    found = []
    for number in range(count):
        text = "\n".join(line.format(n=10 * number + i + 2) for i, line in enumerate(LINES * 2))
        content = (COPY if task == "copy" else FREE).format(text=text, n=number + 3)
        chat = f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
        found.append(tokenizer.encode(chat))
    return found


def run(runner: TorchModelRunner, texts: list[list[int]], num_tokens: int, guessed: int) -> tuple[float, EngineCore]:
    """Seconds from the first token of the last stream to the end of all, and the core, whose counters tell the rest."""
    config = EngineConfig(
        cache=CacheConfig(enable_prefix_caching=False),
        scheduler=SchedulerConfig(
            max_num_batched_tokens=256, num_speculative_tokens=guessed, speculative_max_step_tokens=MAX_STEP_TOKENS
        ),
        admission=AdmissionConfig(max_queued_requests=len(texts)),
    )
    core = EngineCore(config, runner.info)
    for number, text in enumerate(texts):
        sampling = SamplingParams(num_tokens, temperature=0.0, ignore_eos=True)
        request = GenerateRequest(RequestId(str(number)), [SequenceInput(0, text, sampling)])
        reply = core.submit(RouterId("bench"), request, 0, 0.0)
        assert reply.refusal is None, reply.message
    started: float | None = None
    while (plan := core.schedule(0.0)) is not None:
        if started is None and not plan.new and max(plan.num_scheduled, default=1) <= 1 + guessed:
            started = time.perf_counter()
        result = runner.execute(plan)
        core.update(plan, result, 0.0)
    assert started is not None
    return time.perf_counter() - started, core


def measure(
    tasks: tuple[str, ...], streams: tuple[int, ...], rounds: int, num_tokens: int = 96, dtype: DType = "bfloat16"
) -> Iterator[Outcome]:
    """Alternating rounds on one runner."""
    folder = model_store.resolve(MODEL)
    threads = len(os.sched_getaffinity(0))
    runner = TorchModelRunner(
        EngineConfig(
            model=ModelConfig(dtype=dtype),
            cache=CacheConfig(num_blocks=1500),
            parallel=ParallelConfig(num_threads=threads),
        ),
        folder,
    )
    tokenizer = Tokenizer.from_folder(folder)
    for task in tasks:
        for count in streams:
            texts = prompts(task, tokenizer, count)
            ratios, core = [], None
            for _ in range(rounds):
                without, _ = run(runner, texts, num_tokens, 0)
                with_guesses, core = run(runner, texts, num_tokens, NUM_GUESSED)
                ratios.append(without / with_guesses)
            assert core is not None
            counters = core.scheduler.counters
            yield Outcome(
                task,
                count,
                statistics.median(ratios),
                min(ratios),
                max(ratios),
                counters.accepted_tokens / max(1, counters.drafted_tokens),
                counters.generation_tokens / max(1, counters.generation_tokens - counters.accepted_tokens),
                _outputs(runner, texts, num_tokens, 0) == _outputs(runner, texts, num_tokens, NUM_GUESSED),
            )
    runner.close()


def _outputs(runner: TorchModelRunner, texts: list[list[int]], num_tokens: int, guessed: int) -> list[list[int]]:
    """What the streams say, in a short run."""
    said: dict[int, list[int]] = {}

    class Listening:
        info = runner.info

        def execute(self, plan: object) -> object:
            result = runner.execute(plan)  # type: ignore[arg-type]
            for seq_id, token_id in zip(result.seq_ids, result.token_ids, strict=True):
                said.setdefault(seq_id, []).extend([token_id, *result.more.get(seq_id, [])])
            return result

    run(Listening(), texts, num_tokens, guessed)  # type: ignore[arg-type]
    return [said[seq_id] for seq_id in sorted(said)]


def main() -> None:
    for outcome in measure(("copy", "free"), (1, 4, 16), rounds=3):
        print(outcome, flush=True)


if __name__ == "__main__":
    main()
