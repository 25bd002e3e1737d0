"""TORCH. Tensors of an HF-style folder, mapped from disk, gathered into what a Llama-type decoder wants."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from replica.checkpoint import Checkpoint
from replica.errors import ModelLoadError
from replica.models.decoder import DecoderConfig
from replica.shard import Shard


@dataclass(frozen=True)
class LayerWeights:
    """This rank's part of one layer, in the run's dtype; norms in float32. Linear weights are [out, in]."""

    qkv: torch.Tensor
    o: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    input_norm: torch.Tensor
    post_norm: torch.Tensor


class WeightReader:
    """Named tensors of a folder, checked against its configuration; each is read when asked for, and of what the ranks
    share no more than this one's part.
    """

    def __init__(
        self,
        folder: Path,
        config: DecoderConfig,
        dtype: torch.dtype,
        headers_only: bool = False,
        shard: Shard = Shard(),
    ) -> None:
        """`headers_only`: check names and shapes, and give tensors without data (device meta)."""
        self.config = config
        self.shard = shard
        #: given out so far
        self.num_bytes = 0
        self._dtype = dtype
        self._checkpoint = Checkpoint(folder)
        self._headers_only = headers_only

    def _read(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        part: slice = slice(None),
        dim: int = 0,
    ) -> torch.Tensor:
        found = self._checkpoint.shape(name)
        if found != shape:
            raise ModelLoadError(f"tensor {name} has shape {found}, config.json asks for {shape}")
        if self._headers_only:
            return torch.empty(shape, dtype=dtype or self._dtype, device="meta")
        tensor = self._checkpoint.read(name, part, dim).to(dtype or self._dtype)
        self.num_bytes += tensor.nbytes
        return tensor

    def embedding(self) -> torch.Tensor:
        """[vocab, hidden]"""
        return self._read("model.embed_tokens.weight", (self.config.vocab_size, self.config.hidden_size))

    def head(self) -> torch.Tensor:
        """[this rank's part of the vocabulary, hidden]; of the embedding where tied. All ranks' parts are equally long:
        the last ones end in rows of zeros where the vocabulary does not divide.
        """
        vocab = self.config.vocab_size
        name = "model.embed_tokens.weight" if self.config.tie_word_embeddings else "lm_head.weight"
        head = self._read(name, (vocab, self.config.hidden_size), part=self.shard.part(vocab))
        missing = -(-vocab // self.shard.size) - len(head)
        return head if missing <= 0 else torch.cat([head, head.new_zeros(missing, head.shape[1])])

    def final_norm(self) -> torch.Tensor:
        return self._read("model.norm.weight", (self.config.hidden_size,), torch.float32)

    def layers(self) -> Iterator[LayerWeights]:
        """One layer at a time, so that packing never holds two copies of the whole model."""
        c = self.config
        hidden, inter = c.hidden_size, c.intermediate_size
        heads, kv_heads = self.shard.part(c.num_heads), self.shard.kv_heads(c.num_kv_heads)
        q_part = slice(heads.start * c.head_dim, heads.stop * c.head_dim)
        kv_part = slice(kv_heads.start * c.head_dim, kv_heads.stop * c.head_dim)
        inner = self.shard.part(inter)
        for i in range(c.num_layers):
            prefix = f"model.layers.{i}."
            attention = prefix + "self_attn."
            q = self._read(attention + "q_proj.weight", (c.q_dim, hidden), part=q_part)
            k = self._read(attention + "k_proj.weight", (c.kv_dim, hidden), part=kv_part)
            v = self._read(attention + "v_proj.weight", (c.kv_dim, hidden), part=kv_part)
            yield LayerWeights(
                qkv=torch.cat([q, k, v]),
                o=self._read(attention + "o_proj.weight", (hidden, c.q_dim), part=q_part, dim=1),
                gate=self._read(prefix + "mlp.gate_proj.weight", (inter, hidden), part=inner),
                up=self._read(prefix + "mlp.up_proj.weight", (inter, hidden), part=inner),
                down=self._read(prefix + "mlp.down_proj.weight", (hidden, inter), part=inner, dim=1),
                input_norm=self._read(prefix + "input_layernorm.weight", (hidden,), torch.float32),
                post_norm=self._read(prefix + "post_attention_layernorm.weight", (hidden,), torch.float32),
            )

    def digest(self) -> str:
        """See `Checkpoint.digest`."""
        return self._checkpoint.digest()
