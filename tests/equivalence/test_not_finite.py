"""NaN in place of logits: a model that has nothing else is refused, and a request that meets it ends alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from replica.errors import ModelLoadError
from replica.messages import SamplingParams
from replica.model_runner import TorchModelRunner
from replica.native import library
from replica.native.builder import NativeUnavailableError
from replica.step import NewSequence, StepPlan, StepResult
from tests.equivalence.ranks import run_on_ranks
from tests.equivalence.runner_driver import Driver, make_config, write_tiny_model

FolderOf = Callable[[str], Path]
BAD = 77
BLOCK = 16


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(params=["native", "torch", "transformers"])
def runner(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tiny: Path, tiny_folder: FolderOf
) -> TorchModelRunner:
    """One of each kind, whose embedding of BAD is NaN."""
    if request.param == "torch":
        monkeypatch.setenv("SHOAL_NATIVE", "0")
    if request.param == "native":
        try:
            library.load()
        except NativeUnavailableError as error:
            pytest.skip(f"no native kernels: {error}")
    folder = tiny_folder("phi") if request.param == "transformers" else tiny
    runner = TorchModelRunner(make_config("float32", BLOCK, 12, threads=1), folder, self_test=False)
    assert request.param in runner.info.description
    decoder: Any = runner._decoder
    if request.param == "native":
        (embedding,) = [t for t in decoder._keep if t.shape == (301, 96)]
    elif request.param == "torch":
        embedding = decoder._embedding
    else:
        embedding = decoder._model.get_input_embeddings().weight.data
    with torch.inference_mode():
        embedding[BAD] = torch.nan
    return runner


def step(runner: TorchModelRunner, prompts: dict[int, list[int]], sampling: SamplingParams) -> StepResult:
    """All of `prompts` in one step, each with two blocks of its own."""
    new = [NewSequence(i, p, len(p), [2 * i, 2 * i + 1], sampling) for i, p in prompts.items()]
    lengths = [len(p) for p in prompts.values()]
    return runner.execute(StepPlan(1, list(prompts), [0] * len(prompts), lengths, new=new))


PROMPTS = {0: [5, 6, 7], 1: [8, BAD, 9], 2: [10, 11, 12, 13]}


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(4),
        SamplingParams(4, temperature=0.8, seed=3),
        SamplingParams(4, temperature=0.8, seed=3, top_k=5, top_p=0.9),
        SamplingParams(4, num_logprobs=2),
        SamplingParams(4, num_prompt_logprobs=1),
        SamplingParams(4, logit_bias={5: 1.0}, bad_words=((6,),)),
    ],
)
def test_a_request_that_meets_nan_ends_alone(runner: TorchModelRunner, sampling: SamplingParams) -> None:
    result = step(runner, PROMPTS, sampling)
    assert (result.not_finite, result.seq_ids, result.failed) == ([1], [0, 2], {})
    assert not {1} & {*result.logprobs, *result.prompt_logprobs}
    assert all(0 <= token < runner.info.vocab_size for token in result.token_ids)
    decodes = StepPlan(2, [0, 2], [3, 4], [1, 1], dropped=[1])
    after = runner.execute(decodes)
    runner.execute(StepPlan(3, [], [], [], dropped=[0, 2]))
    healthy = step(runner, {i: PROMPTS[i] for i in (0, 2)}, sampling)
    assert (healthy.token_ids, healthy.not_finite) == (result.token_ids, [])
    assert runner.execute(StepPlan(2, [0, 2], [3, 4], [1, 1])).token_ids == after.token_ids


def test_a_prompt_of_several_chunks(runner: TorchModelRunner) -> None:
    """NaN lies in the first chunk, which nobody samples behind."""
    new = [NewSequence(0, [BAD, 5, 6, 7], 4, [0], SamplingParams(2))]
    assert runner.execute(StepPlan(1, [0], [0], [2], new=new)).not_finite == []
    assert runner.execute(StepPlan(2, [0], [2], [2])).not_finite == [0]


def test_a_guess_that_came_true_does_not_count_either(runner: TorchModelRunner) -> None:
    sampling = SamplingParams(4, logit_bias={BAD: 100.0})  # it is what comes next
    first = step(runner, {0: [5, 6, 7]}, sampling)
    assert first.token_ids == [BAD]
    assert runner.execute(StepPlan(2, [0], [3], [1])).not_finite == [0]
    runner.execute(StepPlan(3, [], [], [], dropped=[0]))
    step(runner, {0: [5, 6, 7]}, SamplingParams(4, logit_bias={9: 100.0}))
    guessed = runner.execute(StepPlan(2, [0], [3], [3], drafts={0: [9, 9]}))
    assert (guessed.seq_ids, guessed.not_finite, guessed.more) == ([0], [], {0: [9, 9]})


def test_what_it_left_in_its_blocks_harms_nobody(runner: TorchModelRunner) -> None:
    """All blocks have held NaN, and each new owner fills its last one in part."""
    prompts = [list(range(5, 5 + length)) for length in (3, 20, 33)]
    samplings = [SamplingParams(6, logit_bias={BAD: -100.0})] * 3  # which none of them shall choose
    clean = Driver(runner).run(prompts, samplings)
    for first in range(0, 12, 4):
        new = [NewSequence(9, [BAD] * 4 * BLOCK, 4 * BLOCK, list(range(first, first + 4)), SamplingParams(1))]
        assert runner.execute(StepPlan(1, [9], [0], [4 * BLOCK], new=new)).not_finite == [9]
        runner.execute(StepPlan(2, [], [], [], dropped=[9]))
    assert not torch.isfinite(runner.kv_pool.float()).any(dim=-1).any()
    assert Driver(runner).run(prompts, samplings) == clean


def overflowing(source: Path, folder: Path, layer: int) -> Path:
    """A copy whose MLP of `layer` gives infinity, and so NaN behind the next norm. Every weight is finite."""
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    weights = load_file(source / "model.safetensors")
    for part in ("up_proj", "down_proj"):
        weights[f"model.layers.{layer}.mlp.{part}.weight"] *= 1e37
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", ["native", "torch"])
@pytest.mark.parametrize(
    ("layer", "sentence"),
    [
        (0, "layer 1 of 2 is the first whose keys or values are not finite"),
        (1, "all keys and values are finite, so it happens in the last of 2 layers or behind it"),
    ],
)
def test_a_model_of_nan_is_refused(
    kind: str, layer: int, sentence: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "torch":
        monkeypatch.setenv("SHOAL_NATIVE", "0")
    folder = overflowing(tiny, tmp_path, layer)
    with pytest.raises(ModelLoadError, match=f"is not served: in the self-test the model computes NaN .*; {sentence}"):
        TorchModelRunner(make_config("float32", BLOCK, 40, threads=1), folder)


def test_every_rank_refuses_it(tiny: Path, tmp_path: Path) -> None:
    """Rank 0 sees the logits and tells the others, who would wait for it otherwise."""
    folder = overflowing(tiny, tmp_path, 0)
    config = make_config("float32", BLOCK, 40, threads=1)
    with pytest.raises(AssertionError, match=r"ModelLoadError: .* in the self-test the model computes NaN"):
        run_on_ranks(2, config, [folder], repr)
