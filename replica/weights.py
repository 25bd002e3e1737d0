"""TORCH. Tensors of an HF-style folder, mapped from disk, gathered into what a Llama-type decoder wants."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from replica.checkpoint import Checkpoint
from replica.errors import ModelLoadError
from replica.models.decoder import DecoderConfig


@dataclass(frozen=True)
class LayerWeights:
    """One layer, in the run's dtype; norms in float32. Linear weights are [out, in]."""

    qkv: torch.Tensor
    o: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    input_norm: torch.Tensor
    post_norm: torch.Tensor


class WeightReader:
    """Named tensors of a folder, checked against its configuration; each is read when asked for."""

    def __init__(self, folder: Path, config: DecoderConfig, dtype: torch.dtype, headers_only: bool = False) -> None:
        """`headers_only`: check names and shapes, and give tensors without data (device meta)."""
        self.config = config
        self._dtype = dtype
        self._checkpoint = Checkpoint(folder)
        self._headers_only = headers_only

    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        found = self._checkpoint.shape(name)
        if found != shape:
            raise ModelLoadError(f"tensor {name} has shape {found}, config.json asks for {shape}")
        if self._headers_only:
            return torch.empty(shape, dtype=dtype or self._dtype, device="meta")
        return self._checkpoint.read(name).to(dtype or self._dtype)

    def embedding(self) -> torch.Tensor:
        """[vocab, hidden]"""
        return self._read("model.embed_tokens.weight", (self.config.vocab_size, self.config.hidden_size))

    def head(self) -> torch.Tensor:
        """[vocab, hidden]; the embedding where tied."""
        if self.config.tie_word_embeddings:
            return self.embedding()
        return self._read("lm_head.weight", (self.config.vocab_size, self.config.hidden_size))

    def final_norm(self) -> torch.Tensor:
        return self._read("model.norm.weight", (self.config.hidden_size,), torch.float32)

    def layers(self) -> Iterator[LayerWeights]:
        """One layer at a time, so that packing never holds two copies of the whole model."""
        c = self.config
        hidden, inter = c.hidden_size, c.intermediate_size
        for i in range(c.num_layers):
            prefix = f"model.layers.{i}."
            attention = prefix + "self_attn."
            q = self._read(attention + "q_proj.weight", (c.q_dim, hidden))
            k = self._read(attention + "k_proj.weight", (c.kv_dim, hidden))
            v = self._read(attention + "v_proj.weight", (c.kv_dim, hidden))
            yield LayerWeights(
                qkv=torch.cat([q, k, v]),
                o=self._read(attention + "o_proj.weight", (hidden, c.q_dim)),
                gate=self._read(prefix + "mlp.gate_proj.weight", (inter, hidden)),
                up=self._read(prefix + "mlp.up_proj.weight", (inter, hidden)),
                down=self._read(prefix + "mlp.down_proj.weight", (hidden, inter)),
                input_norm=self._read(prefix + "input_layernorm.weight", (hidden,), torch.float32),
                post_norm=self._read(prefix + "post_attention_layernorm.weight", (hidden,), torch.float32),
            )

    def digest(self) -> str:
        """See `Checkpoint.digest`."""
        return self._checkpoint.digest()
