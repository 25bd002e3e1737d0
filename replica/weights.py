"""TORCH. Tensors of an HF-style folder, gathered into what a decoder wants of a layer, in one rank's part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from replica.checkpoint import Checkpoint
from replica.errors import ModelLoadError
from replica.models.decoder_config import DecoderConfig
from replica.shard import Shard
from replica.tensor_names import FLOATS, refuse_quantized

_MATRICES = ("gate_proj", "up_proj", "down_proj")
#: `DecoderConfig.norms` -> names of the norms before attention, behind it, before the MLP, behind it
_NORMS: dict[str, tuple[str | None, str | None, str | None, str | None]] = {
    "before": ("input_layernorm", None, "post_attention_layernorm", None),
    "behind": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "both": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}


@dataclass(frozen=True)
class ExpertWeights:
    """The router [experts, hidden], and of each expert gate over up [2 * inner, hidden] and down [hidden, inner]."""

    router: torch.Tensor
    gate_up: list[torch.Tensor]
    down: list[torch.Tensor]


@dataclass(frozen=True)
class LayerVectors:
    """This rank's part of a layer's norms and biases, in float32; None where there is none. `o_bias` and `down_bias`
    are whole, to be added once to the sum of the ranks.
    """

    qkv_bias: torch.Tensor | None
    o_bias: torch.Tensor | None
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    input_norm: torch.Tensor | None
    attention_out_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    mlp_out_norm: torch.Tensor | None


@dataclass(frozen=True)
class LayerWeights:
    """This rank's part of one layer. Linear weights are [out, in], in the run's dtype: q over k over v, gate over up. A
    layer has an MLP or experts.
    """

    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor | None
    down: torch.Tensor | None
    experts: ExpertWeights | None
    vectors: LayerVectors


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
        refuse_quantized(self._checkpoint.dtypes())
        self._asked: set[str] = set()
        self._headers_only = headers_only
        heads, kv_heads = shard.part(config.num_heads), shard.kv_heads(config.num_kv_heads)
        self._q = slice(heads.start * config.head_dim, heads.stop * config.head_dim)
        self._kv = slice(kv_heads.start * config.head_dim, kv_heads.stop * config.head_dim)

    def _read(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        part: slice | None = None,
        dim: int = 0,
    ) -> torch.Tensor:
        self._asked.add(name)
        if (kind := self._checkpoint.dtype(name)) not in FLOATS:
            raise ModelLoadError(f"tensor {name} has dtype {kind}; allowed are {', '.join(FLOATS)}")
        found = self._checkpoint.shape(name)
        if found != shape:
            raise ModelLoadError(f"tensor {name} has shape {found}, config.json asks for {shape}")
        part = slice(0, shape[dim]) if part is None else part
        if self._headers_only:
            size = (*shape[:dim], part.stop - part.start, *shape[dim + 1 :])
            return torch.empty(size, dtype=dtype or self._dtype, device="meta")
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
        # a head of its own is used even where the configuration ties it: so does transformers, if their values differ
        is_tied = self.config.tie_word_embeddings and "lm_head.weight" not in self._checkpoint
        name = "model.embed_tokens.weight" if is_tied else "lm_head.weight"
        head = self._read(name, (vocab, self.config.hidden_size), part=self.shard.part(vocab))
        missing = -(-vocab // self.shard.size) - len(head)
        return head if missing <= 0 else torch.cat([head, head.new_zeros(missing, head.shape[1])])

    def final_norm(self) -> torch.Tensor:
        return self._norm("model.norm", self.config.hidden_size)

    def layers(self) -> Iterator[LayerWeights]:
        """One layer at a time, so that packing never holds two copies of the whole model."""
        c = self.config
        for index in range(c.num_layers):
            prefix = f"model.layers.{index}."
            has_experts = c.layers[index].has_experts
            yield LayerWeights(
                qkv=self._qkv(prefix + "self_attn."),
                o=self._read(prefix + "self_attn.o_proj.weight", (c.hidden_size, c.q_dim), part=self._q, dim=1),
                gate_up=None if has_experts else self._gate_up(prefix + "mlp.", _MATRICES, c.intermediate_size),
                down=None if has_experts else self._down(prefix + "mlp.down_proj", c.intermediate_size),
                experts=self._experts(prefix) if has_experts else None,
                vectors=self._vectors(prefix, has_experts),
            )

    def _vectors(self, prefix: str, has_experts: bool) -> LayerVectors:
        c, attention, mlp = self.config, prefix + "self_attn.", prefix + "mlp."
        before_a, behind_a, before_m, behind_m = (
            None if name is None else self._norm(prefix + name, c.hidden_size) for name in _NORMS[c.norms]
        )
        q_norm, k_norm = self._qk_norms(attention)
        mlp_bias = c.mlp_bias and not has_experts
        return LayerVectors(
            qkv_bias=self._qkv_bias(attention) if c.qkv_bias else None,
            o_bias=self._vector(attention + "o_proj.bias", c.hidden_size) if c.o_bias else None,
            gate_up_bias=self._gate_up_bias(mlp) if mlp_bias else None,
            down_bias=self._vector(mlp + "down_proj.bias", c.hidden_size) if mlp_bias else None,
            q_norm=q_norm,
            k_norm=k_norm,
            input_norm=before_a,
            attention_out_norm=behind_a,
            mlp_norm=before_m,
            mlp_out_norm=behind_m,
        )

    def _norm(self, name: str, length: int, part: slice | None = None) -> torch.Tensor:
        return self._read(name + ".weight", (length,), torch.float32, part) + self.config.norm_offset

    def _vector(self, name: str, length: int, part: slice | None = None) -> torch.Tensor:
        return self._read(name, (length,), torch.float32, part)

    def _qk_norms(self, attention: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        c = self.config
        if c.qk_norm == "none":
            return None, None
        if c.qk_norm == "head":
            return self._norm(attention + "q_norm", c.head_dim), self._norm(attention + "k_norm", c.head_dim)
        return self._norm(attention + "q_norm", c.q_dim, self._q), self._norm(attention + "k_norm", c.kv_dim, self._kv)

    def _qkv(self, attention: str) -> torch.Tensor:
        c = self.config
        if not c.has_fused_tensors:
            parts = self._qkv_parts()
            return torch.cat(
                [self._read(f"{attention}{n}.weight", (size, c.hidden_size), part=part) for n, size, part in parts]
            )
        shape = (c.q_dim + 2 * c.kv_dim, c.hidden_size)
        fused = (self._q, _moved(self._kv, c.q_dim), _moved(self._kv, c.q_dim + c.kv_dim))
        return torch.cat([self._read(attention + "qkv_proj.weight", shape, part=part) for part in fused])

    def _qkv_parts(self) -> tuple[tuple[str, int, slice], ...]:
        q_dim, kv_dim = self.config.q_dim, self.config.kv_dim
        return ("q_proj", q_dim, self._q), ("k_proj", kv_dim, self._kv), ("v_proj", kv_dim, self._kv)

    def _qkv_bias(self, attention: str) -> torch.Tensor:
        return torch.cat([self._vector(f"{attention}{n}.bias", size, part) for n, size, part in self._qkv_parts()])

    def _gate_up(self, mlp: str, names: tuple[str, str, str], inner: int) -> torch.Tensor:
        c, part = self.config, self.shard.part(inner)
        if c.has_fused_tensors:
            shape = (2 * inner, c.hidden_size)
            parts = (part, _moved(part, inner))
            return torch.cat([self._read(mlp + "gate_up_proj.weight", shape, part=part) for part in parts])
        shape = (inner, c.hidden_size)
        return torch.cat([self._read(f"{mlp}{name}.weight", shape, part=part) for name in names[:2]])

    def _gate_up_bias(self, mlp: str) -> torch.Tensor:
        inner = self.config.intermediate_size
        part = self.shard.part(inner)
        return torch.cat([self._vector(f"{mlp}{name}.bias", inner, part) for name in _MATRICES[:2]])

    def _down(self, name: str, inner: int) -> torch.Tensor:
        shape = (self.config.hidden_size, inner)
        return self._read(name + ".weight", shape, part=self.shard.part(inner), dim=1)

    def _experts(self, prefix: str) -> ExpertWeights:
        """Expert by expert; checkpoints of Mixtral and Qwen3-MoE keep them apart."""
        experts = self.config.experts
        assert experts is not None, "a layer with experts, in a model without"
        inner = experts.intermediate_size
        names = [f"{prefix}{experts.expert_name}.{i}." for i in range(experts.count)]
        return ExpertWeights(
            router=self._read(f"{prefix}{experts.router_name}.weight", (experts.count, self.config.hidden_size)),
            gate_up=[self._gate_up(name, experts.matrix_names, inner) for name in names],
            down=[self._down(name + experts.matrix_names[2], inner) for name in names],
        )

    def unread(self) -> list[str]:
        """Tensors of the files that nobody has asked for, but for tables that old checkpoints keep and all compute."""
        return sorted(n for n in self._checkpoint if n not in self._asked and not n.endswith("rotary_emb.inv_freq"))

    def digest(self) -> str:
        """See `Checkpoint.digest`."""
        return self._checkpoint.digest()


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)
