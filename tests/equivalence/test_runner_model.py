"""The default model against Hugging Face and against itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from benchmarks.hf_reference import PROMPTS, TOLERANCE, Reference
from replica.messages import SamplingParams
from replica.model_runner import TorchModelRunner
from tests.equivalence.runner_driver import Driver, make_config

pytestmark = [pytest.mark.model, pytest.mark.slow]

NUM_TOKENS = 32


def encoded(folder: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in PROMPTS]


def test_each_token_is_hugging_faces_choice(model_folder: Path) -> None:
    prompts = encoded(model_folder)
    driver = Driver(TorchModelRunner(make_config("float32", 16, 128), model_folder))
    outputs = driver.run(prompts, [SamplingParams(NUM_TOKENS, temperature=0)] * len(prompts), budget=256)
    reference = Reference(model_folder)
    verdicts = [reference.judge(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]
    assert max(verdict.worst_gap for verdict in verdicts) <= TOLERANCE
    identical = sum(verdict.num_equal == verdict.num_tokens for verdict in verdicts)
    print(f"{identical} of {len(verdicts)} sequences identical, worst gap {max(v.worst_gap for v in verdicts):.1e}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batched_and_chunked_give_the_bits_of_alone(model_folder: Path, dtype: str) -> None:
    prompts = encoded(model_folder)
    params = [SamplingParams(12, temperature=0.7 * (i % 2), top_p=0.95, seed=i) for i in range(len(prompts))]
    runner = TorchModelRunner(make_config(dtype, 16, 128), model_folder)  # type: ignore[arg-type]
    assert runner.is_invariant is True
    driver = Driver(runner)
    alone = [driver.run([prompt], [param])[0] for prompt, param in zip(prompts, params, strict=True)]
    reference = driver.last(len(prompts))
    for budget, chunk in ((256, 256), (32, 32), (13, 5)):
        assert driver.run(prompts, params, budget, chunk) == alone
        for ours, theirs in zip(driver.last(len(prompts)), reference, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
