"""Bit-equality between all our ways of computing, on a random model small enough to try many of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.hf_reference import Reference
from replica.errors import ConfigError, EngineError, ModelLoadError
from replica.messages import SamplingParams
from replica.model_runner import TorchModelRunner
from replica.native import library
from replica.native.builder import NativeUnavailableError
from replica.step import NewSequence, StepPlan
from tests.equivalence.runner_driver import Driver, make_config, write_tiny_model

MakeRunner = Callable[..., TorchModelRunner]
LENGTHS = (1, 3, 8, 31, 32, 33, 70, 150)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(params=["native", "torch"])
def make_runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tiny: Path) -> MakeRunner:
    """A maker of runners of one kind; native is skipped, with the reason, where it cannot be built."""
    if request.param == "torch":
        monkeypatch.setenv("SHOAL_NATIVE", "0")
    else:
        try:
            library.load()
        except NativeUnavailableError as error:
            pytest.skip(f"no native kernels: {error}")

    def make(dtype: str = "float32", block_size: int = 16, num_blocks: int = 160, **more: object) -> TorchModelRunner:
        folder = more.pop("folder", tiny)
        runner = TorchModelRunner(make_config(dtype, block_size, num_blocks, **more), folder, self_test=False)  # type: ignore[arg-type]
        assert request.param in runner.info.description
        return runner

    return make


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(3, 301, n).tolist() for n in LENGTHS]


def samplings(count: int, max_tokens: int = 6) -> list[SamplingParams]:
    """Greedy and seeded in turns."""
    return [SamplingParams(max_tokens, temperature=0.9 * (i % 2), top_k=50, seed=i) for i in range(count)]


def equal(a: list[list[torch.Tensor]], b: list[list[torch.Tensor]]) -> bool:
    return all(torch.equal(x, y) for r, s in zip(a, b, strict=True) for x, y in zip(r, s, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_embedding_that_is_the_head(make_runner: MakeRunner, dtype: str, tmp_path: Path) -> None:
    """The native kernels then hold it once, packed, and take rows out of that."""
    tied = write_tiny_model(tmp_path / "tied", tie_word_embeddings=True)
    apart = write_tiny_model(tmp_path / "apart", tie_word_embeddings=True)
    tensors = load_file(apart / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, apart / "model.safetensors")
    texts = prompts()
    outputs, logits = [], []
    for folder in (tied, apart):
        driver = Driver(make_runner(dtype, folder=folder))
        outputs.append(driver.run(texts, samplings(len(texts))))
        logits.append(driver.last(len(texts)))
    assert outputs[0] == outputs[1]
    assert equal(*logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_a_row_does_not_depend_on_its_company(make_runner: MakeRunner, dtype: str, block_size: int) -> None:
    texts, params = prompts(), samplings(len(LENGTHS))
    driver = Driver(make_runner(dtype, block_size))
    alone = [driver.run([text], [param])[0] for text, param in zip(texts, params, strict=True)]
    reference = driver.last(len(texts))
    for budget, chunk in ((10_000, 10_000), (64, 7), (33, 33), (300, 32), (9, 1)):
        tokens = driver.run(texts, params, budget, chunk)
        assert tokens == alone, (budget, chunk)
        assert equal(driver.last(len(texts)), reference), (budget, chunk)


def test_block_size_and_threads_do_not_change_bits(make_runner: MakeRunner) -> None:
    """More than promised, and what makes a hand-over between unlike replicas possible."""
    texts, params = prompts(), samplings(len(LENGTHS))
    results = []
    for block_size, threads in ((16, 2), (8, 1), (5, 3)):
        driver = Driver(make_runner("float32", block_size, num_blocks=400, threads=threads))
        driver.run(texts, params)
        results.append(driver.last(len(texts)))
    assert equal(results[0], results[1])
    assert equal(results[0], results[2])


def test_recompute_gives_the_same_bits(make_runner: MakeRunner) -> None:
    """A preempted sequence comes back with its output as tokens to compute; its next logits are the same."""
    prompt = prompts()[6]
    driver = Driver(make_runner("bfloat16"))
    output = driver.run([prompt], [SamplingParams(8, temperature=0.8, seed=5)])[0]
    before = driver.last(1)[0]
    runner = driver.runner
    known = prompt + output[:4]
    back = NewSequence(99, known, len(prompt), list(range(12)), SamplingParams(8, temperature=0.8, seed=5))
    result = runner.execute(StepPlan(0, [99], [0], [len(known)], [back]))
    assert result.token_ids == [output[4]]
    assert torch.equal(runner.last_logits[99][0], before[4])


def test_close_to_hugging_face(make_runner: MakeRunner, tiny: Path) -> None:
    reference = Reference(tiny)
    driver = Driver(make_runner("float32"))
    for text in prompts():
        output = driver.run([text], [SamplingParams(5, temperature=0)])[0]
        theirs = reference.logits(text + output)[len(text) - 1 : -1]
        torch.testing.assert_close(torch.stack(driver.last(1)[0]), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
)
def test_rope_scaling_as_hugging_face(make_runner: MakeRunner, tmp_path: Path, rope: dict[str, object]) -> None:
    folder = write_tiny_model(tmp_path / "scaled", rope_scaling=rope, tie_word_embeddings=True)
    driver = Driver(make_runner("float32", folder=folder))
    text = prompts()[7]
    output = driver.run([text], [SamplingParams(2, temperature=0)])[0]
    theirs = Reference(folder).logits(text + output)[len(text) - 1 : -1]
    torch.testing.assert_close(torch.stack(driver.last(1)[0]), theirs, rtol=1e-4, atol=1e-4)


def test_min_tokens_holds_stop_tokens_back(make_runner: MakeRunner) -> None:
    driver = Driver(make_runner("float32"))
    free = driver.run([prompts()[3]], [SamplingParams(4, temperature=0)])[0]
    held = SamplingParams(4, temperature=0, min_tokens=2, stop_token_ids=tuple(set(free)))
    output = driver.run([prompts()[3]], [held])[0]
    assert not set(output[:2]) & set(free)
    assert all(row[list(set(free))].isinf().all() for row in driver.last(1)[0][:2])
    assert not any(row[list(set(free))].isinf().any() for row in driver.last(1)[0][2:])


def test_self_test_reports(tiny: Path) -> None:
    runner = TorchModelRunner(make_config("bfloat16", 16, 64), tiny)
    assert runner.is_invariant is True
    assert "invariance self-test passed" in runner.info.description


def test_self_test_can_fail(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder whose logits move with the number of rows must be caught."""
    monkeypatch.setenv("SHOAL_NATIVE", "0")
    from replica.models.torch_decoder import TorchDecoder

    original = TorchDecoder._logits

    def moody(self: TorchDecoder, rows: torch.Tensor) -> torch.Tensor:
        return original(self, rows) * (1 + 1e-6 * len(rows))

    monkeypatch.setattr(TorchDecoder, "_logits", moody)
    runner = TorchModelRunner(make_config("float32", 16, 64), tiny)
    assert runner.is_invariant is False
    assert "FAILED" in runner.info.description


def test_fingerprint(tiny: Path, make_runner: MakeRunner) -> None:
    first, second = make_runner("float32").info, make_runner("float32", num_blocks=20).info
    assert first.model_fingerprint == second.model_fingerprint
    assert make_runner("bfloat16").info.model_fingerprint != first.model_fingerprint


def test_broken_plans_are_refused(make_runner: MakeRunner) -> None:
    runner = make_runner("float32")
    good = SamplingParams(4)
    with pytest.raises(EngineError, match="sequence 7"):
        runner.execute(StepPlan(0, [7], [0], [1]))
    with pytest.raises(EngineError, match="token ids"):
        runner.execute(StepPlan(0, [1], [0], [1], [NewSequence(1, [301], 1, [0], good)]))
    with pytest.raises(EngineError, match="block id"):
        runner.execute(StepPlan(0, [2], [0], [1], [NewSequence(2, [5], 1, [160], good)]))
    with pytest.raises(EngineError, match="block room for 16"):
        runner.execute(StepPlan(0, [3], [0], [17], [NewSequence(3, [5] * 17, 17, [0], good)]))
    runner.close()
    runner.close()
    with pytest.raises(EngineError, match="closed"):
        runner.execute(StepPlan(0, [], [], []))


def test_wrong_folders_and_settings(tmp_path: Path, tiny: Path) -> None:
    for name, changes, sentence in (
        ("t5", {"architectures": ["T5ForConditionalGeneration"]}, "T5ForConditionalGeneration is not supported"),
        ("bias", {"attention_bias": True}, "q_proj.bias is missing"),
        ("spiral", {"rope_scaling": {"rope_type": "spiral"}}, "rope type 'spiral' is not supported"),
    ):
        with pytest.raises(ModelLoadError, match=sentence):
            TorchModelRunner(make_config("float32", 16, 8), write_tiny_model(tmp_path / name, **changes))
    with pytest.raises(ModelLoadError, match=r"config\.json cannot be read"):
        TorchModelRunner(make_config("float32", 16, 8), tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="max_model_len=600"):
        TorchModelRunner(make_config("float32", 16, 8, max_model_len=600), tiny)
