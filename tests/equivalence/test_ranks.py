"""Several ranks of one model give the tokens of one rank, and equal bits whatever way they are scheduled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from benchmarks.equality import WAYS, differences, run_way
from benchmarks.family_check import TINY_ITEMS as ITEMS
from benchmarks.family_check import make_runner
from benchmarks.hf_reference import TOLERANCE, Reference
from benchmarks.tiny_models import make
from replica.collective import NoPeers
from replica.errors import ConfigError, EngineError
from replica.messages import SamplingParams
from replica.model_runner import TorchModelRunner
from replica.shard import Shard
from replica.step import NewSequence, StepPlan, StepResult
from tests.equivalence.ranks import run_on_ranks
from tests.equivalence.runner_driver import Driver, make_config, write_tiny_model

#: number of ranks, KV heads of the models (cut in 2, cut in 3, each of 2 held by two ranks), and models: biases, soft
#: caps, a norm over all queries, fused tensors, experts, layers without rotation
SIZES = (
    (2, 2, ("llama-biased", "gemma2", "olmo2", "phi3", "mixtral", "qwen3-moe", "smollm3")),
    (3, 3, ("gemma2", "olmo2", "qwen3-moe")),
    (4, 2, ("llama-biased", "olmo2")),
)
SHAPE = {"hidden_size": 192, "num_attention_heads": 12}
#: one asks for what only rank 0 knows of: its logprobs, and those of its prompt
RULED = [
    *ITEMS[:5],
    msgspec.structs.replace(
        ITEMS[0],
        sampling=SamplingParams(8, temperature=0, presence_penalty=0.5, num_logprobs=2, num_prompt_logprobs=1),
    ),
]
GUESSED = next(way for way in WAYS if way.name == "guessed ahead, preempted, in chunks")


def drive(runner: Any) -> dict[str, Any]:
    """What the test wants of rank 0."""
    reference, _ = run_way(WAYS[1], RULED, [runner])  # one by one takes 80 steps, and gloo a while for each
    outputs = [trace.tokens for trace in reference]
    guessed, tally = run_way(GUESSED, RULED, [runner], outputs)
    driver = Driver(runner)
    prompt = list(range(3, 60))
    tokens = driver.run([prompt], [SamplingParams(6, temperature=0)])[0]
    return {
        "outputs": outputs,
        "differences": differences(reference, guessed, GUESSED),
        "accepted": tally.accepted_tokens,
        "tokens": tokens,
        "logits": np.stack([row.numpy() for row in driver.last(1)[0]]),
        "invariant": runner.is_invariant,
    }


@pytest.mark.parametrize(("size", "kv_heads", "names"), SIZES, ids=["2", "3", "4"])
def test_ranks_give_the_tokens_of_one(size: int, kv_heads: int, names: tuple[str, ...], tmp_path: Path) -> None:
    folders = [
        make(
            tmp_path / name, name, **SHAPE, num_key_value_heads=kv_heads, **({} if name == "phi3" else {"head_dim": 16})
        )
        for name in names
    ]
    accepted = 0
    together = run_on_ranks(size, make_config("float32", 16, 160, threads=1), folders, drive)
    for name, folder, (ours, *ranks) in zip(names, folders, together, strict=True):
        runner = make_runner(folder, self_test=True)
        alone = drive(runner)
        assert ours["invariant"] is True, name
        assert ours["differences"] == [], name
        assert ours["outputs"] == alone["outputs"], name
        assert ours["tokens"] == alone["tokens"], name
        np.testing.assert_allclose(ours["logits"], alone["logits"], atol=TOLERANCE, err_msg=name)
        judge = Reference(folder)
        greedy = [
            (i.prompt, o) for i, o in zip(ITEMS[:5], ours["outputs"][:5], strict=True) if not i.sampling.temperature
        ]
        assert max(judge.judge(prompt, output).worst_gap for prompt, output in greedy) <= TOLERANCE, name
        accepted += ours["accepted"]
        weights, pool = runner.held_bytes
        assert {held[1] for held in ranks} == {pool // min(size, kv_heads)}, name
        assert max(held[0] for held in ranks) < weights * (0.03 + 1 / size), name
    assert accepted >= 3, "too few drafts came true to mean anything"


def test_a_rank_that_was_not_told_says_so(tmp_path: Path) -> None:
    """Between two steps it has to hear what rank 0 chose; a step without sequences takes no notice."""
    folder = write_tiny_model(tmp_path / "tiny")
    runner = TorchModelRunner(
        make_config("float32", 16, 8, threads=1), folder, self_test=False, shard=Shard(1, 2), collective=NoPeers()
    )
    new = NewSequence(1, [5, 6], 2, [0], SamplingParams(4))
    assert runner.execute(StepPlan(0, [1], [0], [2], [new])).token_ids == []
    runner.execute(StepPlan(1, [], [], []))
    with pytest.raises(EngineError, match="rank 1 was not told the tokens of the step before step 2"):
        runner.execute(StepPlan(2, [1], [2], [1]))
    runner.adopt(StepResult(0, [1], [7]))
    runner.adopt(StepResult(0, [1], [7]))  # nothing is left to be told
    runner.execute(StepPlan(2, [1], [2], [1]))


def test_sizes_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    config = make_config("float32", 16, 8)
    with pytest.raises(ConfigError, match=r"6 query heads, 2 KV heads.*sizes that do: 1, 2"):
        TorchModelRunner(config, folder, shard=Shard(0, 5), collective=NoPeers())
    fallback = make(tmp_path / "neox", "gpt-neox")
    with pytest.raises(ConfigError, match="runs through transformers, which is not cut into ranks; allowed: 1"):
        TorchModelRunner(config, fallback, shard=Shard(0, 2), collective=NoPeers())


def test_a_sum_is_the_same_bits_on_each_rank() -> None:
    """`NoPeers` leaves what it is given alone."""
    x = torch.ones(2, 3)
    NoPeers().sum_(x)
    assert torch.equal(x, torch.ones(2, 3))
    assert NoPeers().gather_columns(x) is x
