"""Every family against Hugging Face and against itself, on tiny random checkpoints."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F

from benchmarks import family_check
from benchmarks.equality import WAYS, differences, run_way
from benchmarks.family_check import FEW_WAYS, make_runner
from benchmarks.family_check import TINY_ITEMS as ITEMS
from benchmarks.hf_reference import TOLERANCE, Reference, Verdict
from benchmarks.tiny_models import TINY_MODELS, make
from replica.attention.row_exp import by_rows
from replica.messages import SamplingParams
from replica.models import decoder, families
from replica.models.decoder_config import DecoderConfig, LayerConfig
from replica.models.family_defaults import filled
from replica.native import library
from replica.native.builder import NativeUnavailableError
from tests.equivalence.runner_driver import Driver

FolderOf = Callable[[str], Path]
NAMES = tuple(TINY_MODELS)


def judge(folder: Path) -> list[Verdict]:
    """Our greedy outputs, teacher-forced by transformers."""
    verdicts, tally = family_check.judge(folder, ITEMS)
    assert tally.preemptions >= 2, "too few to mean anything"
    return verdicts


def worst_gap(verdicts: list[Verdict]) -> float:
    return max(verdict.worst_gap for verdict in verdicts)


@pytest.mark.parametrize("name", NAMES)
def test_each_token_is_hugging_faces_choice(name: str, tiny_folder: FolderOf) -> None:
    verdicts = judge(tiny_folder(name))
    assert worst_gap(verdicts) <= TOLERANCE
    assert len({verdict.num_tokens for verdict in verdicts}) == 1


def test_a_head_of_its_own_is_used_though_the_configuration_ties_it(tiny_folder: FolderOf, tmp_path: Path) -> None:
    """So does transformers, if the values differ."""
    for path in tiny_folder("llama").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["tie_word_embeddings"] is False
    (tmp_path / "config.json").write_text(json.dumps({**raw, "tie_word_embeddings": True}))
    assert worst_gap(judge(tmp_path)) <= TOLERANCE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_our_ways_give_equal_bits(name: str, dtype: Any, tiny_folder: FolderOf) -> None:
    runner = make_runner(tiny_folder(name), dtype, self_test=True)
    assert runner.is_invariant is True
    reference, _ = run_way(WAYS[0], ITEMS, [runner])
    outputs = [trace.tokens for trace in reference]
    assert len({token for output in outputs for token in output}) > 20, "outputs too poor to mean anything"
    for way in FEW_WAYS:
        traces, tally = run_way(way, ITEMS, [runner], outputs)
        assert differences(reference, traces, way) == []
        if way.num_blocks == 0:
            assert tally.preemptions >= 2, "too few to mean anything"
    runner.close()


@pytest.mark.parametrize("name", ["gemma2", "qwen3-moe", "phi"])
def test_a_wide_model_on_two_threads(name: str, tmp_path: Path) -> None:
    """Wide enough that torch splits its operators between threads, at places that depend on the number of rows."""
    more = {"moe_intermediate_size": 384} if name == "qwen3-moe" else {}
    folder = make(tmp_path / "wide", name, hidden_size=320, intermediate_size=832, num_hidden_layers=2, **more)
    runner = make_runner(folder, self_test=True, threads=2)
    assert runner.is_invariant is True
    reference, _ = run_way(WAYS[0], ITEMS[:4], [runner])
    for way in FEW_WAYS[:2]:
        traces, _ = run_way(way, ITEMS[:4], [runner])
        assert differences(reference, traces, way) == []


@pytest.mark.parametrize("name", NAMES)
def test_the_decoder_that_serves_is_the_one_meant(name: str, tiny_folder: FolderOf) -> None:
    wanted = TINY_MODELS[name].decoder
    if wanted == "native":
        try:
            library.load()
        except NativeUnavailableError as error:
            pytest.skip(f"no native kernels: {error}")
    runner = make_runner(tiny_folder(name))
    assert runner.info.description.split(", ")[3].startswith(wanted), runner.info.description


def _everywhere(config: DecoderConfig, **changes: Any) -> DecoderConfig:
    layers = tuple(msgspec.structs.replace(layer, **changes) for layer in config.layers)
    return msgspec.structs.replace(config, layers=layers)


def _with(**changes: Any) -> Callable[[DecoderConfig], DecoderConfig]:
    return lambda config: msgspec.structs.replace(config, **changes)


def _rope(**changes: Any) -> Callable[[DecoderConfig], DecoderConfig]:
    def change(config: DecoderConfig) -> DecoderConfig:
        ropes = tuple(msgspec.structs.replace(rope, **changes) for rope in config.ropes)
        return msgspec.structs.replace(config, ropes=ropes)

    return change


def _normalises_not(config: DecoderConfig) -> DecoderConfig:
    assert config.experts is not None
    return msgspec.structs.replace(config, experts=msgspec.structs.replace(config.experts, normalises=False))


BROKEN: list[tuple[str, str, Callable[[DecoderConfig], DecoderConfig]]] = [
    ("llama-llama3", "llama3 rope", _rope(kind="default")),
    ("llama-yarn", "yarn", _rope(kind="default")),
    ("llama-linear", "linear rope", _rope(kind="default")),
    ("llama-biased", "biases of q, k, v", _with(qkv_bias=False)),
    ("llama-biased", "bias of o", _with(o_bias=False)),
    ("llama-biased", "biases of the MLP", _with(mlp_bias=False)),
    ("mistral", "window", lambda config: _everywhere(config, window=None)),
    ("mistral", "window one too long", lambda config: _everywhere(config, window=25)),
    ("qwen2", "which layers are windowed", lambda config: _everywhere(config, window=24)),
    ("qwen3", "norm of queries and keys", _with(qk_norm="none")),
    ("gemma2", "attention soft cap", _with(attention_softcap=None)),
    ("gemma2", "attention scale", _with(attention_scale=0.25)),
    ("gemma2", "norm weight + 1", _with(norm_offset=0.0)),
    ("gemma2", "gelu", _with(activation="silu")),
    ("gemma2", "factor of the embedding", _with(embedding_multiplier=1.0)),
    ("gemma3", "rotation of windowed layers", lambda config: _everywhere(config, rope=0)),
    ("phi3", "partial rotation", _rope(kind="default", rotary_dim=16)),
    ("phi3", "long factors", _rope(kind="default")),
    ("olmo2", "norm of queries and keys", _with(qk_norm="none")),
    ("smollm3", "layers without rotation", lambda config: _everywhere(config, rope=0)),
    ("granite", "residual factor", _with(residual_multiplier=1.0)),
    ("granite", "attention factor", _with(attention_scale=0.25)),
    ("mixtral", "experts per token", _normalises_not),
    ("qwen3-moe", "weights of experts", _normalises_not),
]


@pytest.mark.parametrize(("name", "feature", "change"), BROKEN, ids=[f"{name}: {what}" for name, what, _ in BROKEN])
def test_a_broken_feature_would_show(
    name: str,
    feature: str,
    change: Callable[[DecoderConfig], DecoderConfig],
    tiny_folder: FolderOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same comparison, with one feature left out, has to fail."""

    def parse(raw: dict[str, Any]) -> DecoderConfig:
        config = families.parse(raw)
        assert config is not None
        return change(config)

    monkeypatch.setattr(decoder, "parse", parse)
    assert worst_gap(judge(tiny_folder(name))) > TOLERANCE, f"{feature} makes no difference"


def test_soft_capped_logits(tiny_folder: FolderOf) -> None:
    """A cap changes no order, so the tokens do not show it: the logits do."""
    folder = tiny_folder("gemma2")
    runner = make_runner(folder)
    driver = Driver(runner)
    prompt = list(range(3, 60))
    output = driver.run([prompt], [SamplingParams(4, temperature=0)])[0]
    theirs = Reference(folder).logits(prompt + output)[len(prompt) - 1 : -1]
    torch.testing.assert_close(torch.stack(driver.last(1)[0]), theirs, rtol=1e-4, atol=1e-4)


def test_longrope_takes_its_long_factors_for_a_long_run(tiny_folder: FolderOf) -> None:
    """Where the run may be longer than the original context; by itself it is not."""
    folder = tiny_folder("phi3")
    assert make_runner(folder).info.max_model_len == 256
    runner = make_runner(folder, max_model_len=512)
    driver = Driver(runner)
    prompt = [(7 * i) % 256 for i in range(300)]
    output = driver.run([prompt], [SamplingParams(4, temperature=0)], budget=64)[0]
    theirs = Reference(folder).logits(prompt + output)[len(prompt) - 1 : -1]
    torch.testing.assert_close(torch.stack(driver.last(1)[0]), theirs, rtol=1e-4, atol=1e-4)
    assert runner.info.model_fingerprint != make_runner(folder).info.model_fingerprint


def test_tiny_models_are_the_same_every_time(tiny_folder: FolderOf, tmp_path: Path) -> None:
    again = make(tmp_path / "again", "qwen3-moe")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (again / name).read_bytes() == (tiny_folder("qwen3-moe") / name).read_bytes()


#: fields of transformers' configuration classes that change no logits of a served model
_WITHOUT_EFFECT = {
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "embd_pdrop",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "label2id",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "resid_pdrop",
    "return_dict",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "_name_or_path",
}


@pytest.mark.parametrize("name", [name for name in NAMES if TINY_MODELS[name].decoder != "transformers"])
def test_no_field_of_transformers_is_overlooked(
    name: str, tiny_folder: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each field of config.json is read by our parser or known to change nothing: a new one in a new transformers
    fails here.
    """
    raw = json.loads((tiny_folder(name) / "config.json").read_text())

    class Watched(dict[str, Any]):
        read: set[str]

        def __getitem__(self, key: str) -> Any:
            self.read.add(key)
            return super().__getitem__(key)

        def get(self, key: str, default: Any = None) -> Any:
            self.read.add(key)
            return super().get(key, default)

    watched = Watched(filled(raw["architectures"][0], raw))
    watched.read = {"architectures"}
    monkeypatch.setattr(families, "filled", lambda architecture, raw: watched)
    assert families.parse(raw) is not None
    of_windows: set[str] = set() if raw.get("use_sliding_window", True) else {"sliding_window", "max_window_layers"}
    assert set(raw) - watched.read - _WITHOUT_EFFECT - of_windows == set()


def test_a_layer_is_plain_by_default() -> None:
    assert LayerConfig() == LayerConfig(rope=0, window=None, has_experts=False)


@pytest.mark.parametrize(
    "function",
    [torch.tanh, F.gelu, functools.partial(F.gelu, approximate="tanh"), torch.sigmoid, F.silu],
    ids=["tanh", "gelu", "gelu_tanh", "sigmoid", "silu"],
)
@pytest.mark.parametrize("width", [8, 24, 48, 64, 208, 1536, 40_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pointwise_functions_of_a_row(function: Any, width: int, dtype: torch.dtype) -> None:
    """The same bits alone and at every place among others."""
    x = torch.randn(37, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    together = by_rows(function, x)
    assert all(torch.equal(by_rows(function, x[i : i + 1])[0], together[i]) for i in range(len(x)))
    torch.testing.assert_close(together, function(x))
