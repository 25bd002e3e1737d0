"""Drives a model runner by hand, without a scheduler: blocks handed out in order or shuffled, chunks of any size."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from replica.config import CacheConfig, DType, EngineConfig, ModelConfig, ParallelConfig
from replica.messages import SamplingParams
from replica.model_runner import TorchModelRunner
from replica.step import NewSequence, StepPlan


def make_config(dtype: DType, block_size: int, num_blocks: int, threads: int = 2, **model: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(dtype=dtype, **model),
        cache=CacheConfig(block_size=block_size, num_blocks=num_blocks),
        parallel=ParallelConfig(num_threads=threads),
    )


class Driver:
    """Runs sequences to their end and keeps each one's tokens and logits."""

    def __init__(self, runner: TorchModelRunner, seed: int = 0) -> None:
        self.runner = runner
        runner.capture_logits = True
        self._free = np.random.default_rng(seed).permutation(runner.info.num_blocks).tolist()
        self._next_id = 0
        self.tokens: dict[int, list[int]] = {}
        self.logits: dict[int, list[torch.Tensor]] = {}

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        samplings: Sequence[SamplingParams],
        budget: int = 10_000,
        chunk: int = 10_000,
    ) -> list[list[int]]:
        """Outputs of `prompts`, all running at once, at most `chunk` tokens a sequence and `budget` a step."""
        ids = list(range(self._next_id, self._next_id + len(prompts)))
        self._next_id += len(prompts)
        size = self.runner.info.block_size
        known = {i: len(p) for i, p in zip(ids, prompts, strict=True)}
        left = {i: s.max_tokens for i, s in zip(ids, samplings, strict=True)}
        computed = dict.fromkeys(ids, 0)
        held: dict[int, list[int]] = {}
        new: list[NewSequence] = []
        for i, prompt, sampling in zip(ids, prompts, samplings, strict=True):
            held[i] = [self._free.pop() for _ in range(-(-len(prompt) // size))]
            new.append(NewSequence(i, list(prompt), len(prompt), list(held[i]), sampling))
            self.tokens[i], self.logits[i] = [], []
        while active := [i for i in ids if left[i]]:
            grown: dict[int, list[int]] = {}
            plan_ids, scheduled, room = [], [], budget
            for i in active:
                count = min(chunk, known[i] - computed[i], room)
                if count == 0:
                    continue
                plan_ids.append(i)
                scheduled.append(count)
                room -= count
                if computed[i] + count > len(held[i]) * size:
                    grown[i] = [self._free.pop()]
                    held[i] += grown[i]
            plan = StepPlan(0, plan_ids, [computed[i] for i in plan_ids], scheduled, new, grown)
            new = []
            result = self.runner.execute(plan)
            assert not result.not_finite, "NaN in place of logits"
            for i, count in zip(plan_ids, scheduled, strict=True):
                computed[i] += count
            for i, token in zip(result.seq_ids, result.token_ids, strict=True):
                self.tokens[i].append(token)
                self.logits[i].append(self.runner.last_logits[i][0])
                known[i] += 1
                left[i] -= 1
        self.runner.execute(StepPlan(0, [], [], [], dropped=ids))
        for blocks in held.values():
            self._free += blocks
        return [self.tokens[i] for i in ids]

    def last(self, count: int) -> list[list[torch.Tensor]]:
        """Logits of the `count` sequences run last."""
        return [self.logits[i] for i in range(self._next_id - count, self._next_id)]


def write_tiny_model(folder: Path, **changes: Any) -> Path:
    """A random Llama-type checkpoint: 2 layers, 6 query and 2 KV heads of 32, odd vocabulary."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 96,
        "intermediate_size": 208,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 301,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(_tiny_tensors(config)), folder / "model.safetensors")
    return folder


def _tiny_tensors(config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    hidden, inter, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5 * 2

    yield "model.embed_tokens.weight", matrix(config["vocab_size"], hidden)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", matrix(config["vocab_size"], hidden)
    yield "model.norm.weight", 1 + 0.1 * torch.randn(hidden, generator=generator)
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        for name, shape in (
            ("self_attn.q_proj", (q, hidden)),
            ("self_attn.k_proj", (kv, hidden)),
            ("self_attn.v_proj", (kv, hidden)),
            ("self_attn.o_proj", (hidden, q)),
            ("mlp.gate_proj", (inter, hidden)),
            ("mlp.up_proj", (inter, hidden)),
            ("mlp.down_proj", (hidden, inter)),
        ):
            yield f"{prefix}{name}.weight", matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", 1 + 0.1 * torch.randn(hidden, generator=generator)
