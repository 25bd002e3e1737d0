"""TORCH. Tensors of an HF-style folder, gathered into what a decoder wants of a layer, in one rank's part."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from replica.checkpoint import Checkpoint
from replica.errors import ModelLoadError
from replica.load_progress import LoadProgress
from replica.models.decoder_config import DecoderConfig
from replica.shard import Shard
from replica.tensor_names import FLOATS, refuse_quantized
from replica.weight_matrix import Matrix, Source

logger = logging.getLogger(__name__)
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

    router: Matrix
    gate_up: list[Matrix]
    down: list[Matrix]


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
    """This rank's part of one layer. Linear weights are [out, in], in the run's dtype: q over k over v, gate over up;
    read when asked for. A layer has an MLP or experts.
    """

    qkv: Matrix
    o: Matrix
    gate_up: Matrix | None
    down: Matrix | None
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
        """`headers_only`: check names and shapes, and give vectors without data (device meta)."""
        self.config = config
        self.shard = shard
        self._dtype = dtype
        self._checkpoint = Checkpoint(folder)
        refuse_quantized(self._checkpoint.dtypes())
        self._asked: set[str] = set()
        self._headers_only = headers_only
        self._progress = LoadProgress(shard.rank, shard.size, config.num_layers, time.monotonic())
        heads, kv_heads = shard.part(config.num_heads), shard.kv_heads(config.num_kv_heads)
        self._q = slice(heads.start * config.head_dim, heads.stop * config.head_dim)
        self._kv = slice(kv_heads.start * config.head_dim, kv_heads.stop * config.head_dim)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        self._asked.add(name)
        if (kind := self._checkpoint.kind(name)) not in FLOATS:
            raise ModelLoadError(f"tensor {name} has dtype {kind}; allowed are {', '.join(FLOATS)}")
        found = self._checkpoint.shape(name)
        if found != shape:
            raise ModelLoadError(f"tensor {name} has shape {found}, config.json asks for {shape}")

    @property
    def num_bytes(self) -> int:
        """Given out so far."""
        return self._progress.num_bytes

    def _note(self, num_bytes: int) -> None:
        if sentence := self._progress.add(num_bytes, time.monotonic()):
            logger.info(sentence)

    def finish(self) -> None:
        """Says what was read, and how fast."""
        logger.info(self._progress.end(time.monotonic()))

    def _source(
        self, name: str, shape: tuple[int, int], rows: slice | None = None, columns: slice | None = None
    ) -> Source:
        self._check(name, shape)
        return Source(name, rows or slice(0, shape[0]), columns or slice(0, shape[1]))

    def _matrix(self, *sources: Source, num_zeros: int = 0) -> Matrix:
        return Matrix(self._checkpoint, sources, self._dtype, self._note, num_zeros)

    @property
    def is_tied(self) -> bool:
        """The head is the embedding. One of its own is used even where the configuration ties it: so does transformers,
        if their values differ.
        """
        return self.config.tie_word_embeddings and "lm_head.weight" not in self._checkpoint

    def embedding(self) -> Matrix:
        """[this rank's part of the vocabulary, hidden]; fewer rows on the last ranks where it does not divide."""
        shape = (self.config.vocab_size, self.config.hidden_size)
        return self._matrix(self._source("model.embed_tokens.weight", shape, self.shard.part(shape[0])))

    def head(self) -> Matrix:
        """[this rank's part of the vocabulary, hidden]; of the embedding where tied. All ranks' parts are equally long:
        the last ones end in rows of zeros where the vocabulary does not divide.
        """
        vocab = self.config.vocab_size
        name = "model.embed_tokens.weight" if self.is_tied else "lm_head.weight"
        source = self._source(name, (vocab, self.config.hidden_size), self.shard.part(vocab))
        return self._matrix(source, num_zeros=-(-vocab // self.shard.size) - source.num_rows)

    def final_norm(self) -> torch.Tensor:
        return self._norm("model.norm", self.config.hidden_size)

    def layers(self) -> Iterator[LayerWeights]:
        """One layer at a time: norms and biases are read with it, matrices when they are asked for."""
        c = self.config
        for index in range(c.num_layers):
            prefix = f"model.layers.{index}."
            self._progress.at_layer(index)
            has_experts = c.layers[index].has_experts
            yield LayerWeights(
                qkv=self._qkv(prefix + "self_attn."),
                o=self._matrix(
                    self._source(prefix + "self_attn.o_proj.weight", (c.hidden_size, c.q_dim), columns=self._q)
                ),
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
        return self._vector(name + ".weight", length, part) + self.config.norm_offset

    def _vector(self, name: str, length: int, part: slice | None = None) -> torch.Tensor:
        self._check(name, (length,))
        part = part or slice(0, length)
        if self._headers_only:
            return torch.empty(part.stop - part.start, device="meta")
        vector = self._checkpoint.read(name, part).to(torch.float32)
        self._note(vector.nbytes)
        return vector

    def _qk_norms(self, attention: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        c = self.config
        if c.qk_norm == "none":
            return None, None
        if c.qk_norm == "head":
            return self._norm(attention + "q_norm", c.head_dim), self._norm(attention + "k_norm", c.head_dim)
        return self._norm(attention + "q_norm", c.q_dim, self._q), self._norm(attention + "k_norm", c.kv_dim, self._kv)

    def _qkv(self, attention: str) -> Matrix:
        c = self.config
        if not c.has_fused_tensors:
            parts = self._qkv_parts()
            return self._matrix(
                *(self._source(f"{attention}{n}.weight", (size, c.hidden_size), part) for n, size, part in parts)
            )
        shape = (c.q_dim + 2 * c.kv_dim, c.hidden_size)
        fused = (self._q, _moved(self._kv, c.q_dim), _moved(self._kv, c.q_dim + c.kv_dim))
        return self._matrix(*(self._source(attention + "qkv_proj.weight", shape, part) for part in fused))

    def _qkv_parts(self) -> tuple[tuple[str, int, slice], ...]:
        q_dim, kv_dim = self.config.q_dim, self.config.kv_dim
        return ("q_proj", q_dim, self._q), ("k_proj", kv_dim, self._kv), ("v_proj", kv_dim, self._kv)

    def _qkv_bias(self, attention: str) -> torch.Tensor:
        return torch.cat([self._vector(f"{attention}{n}.bias", size, part) for n, size, part in self._qkv_parts()])

    def _gate_up(self, mlp: str, names: tuple[str, str, str], inner: int) -> Matrix:
        c, part = self.config, self.shard.part(inner)
        if c.has_fused_tensors:
            shape = (2 * inner, c.hidden_size)
            parts = (part, _moved(part, inner))
            return self._matrix(*(self._source(mlp + "gate_up_proj.weight", shape, part) for part in parts))
        shape = (inner, c.hidden_size)
        return self._matrix(*(self._source(f"{mlp}{name}.weight", shape, part) for name in names[:2]))

    def _gate_up_bias(self, mlp: str) -> torch.Tensor:
        inner = self.config.intermediate_size
        part = self.shard.part(inner)
        return torch.cat([self._vector(f"{mlp}{name}.bias", inner, part) for name in _MATRICES[:2]])

    def _down(self, name: str, inner: int) -> Matrix:
        shape = (self.config.hidden_size, inner)
        return self._matrix(self._source(name + ".weight", shape, columns=self.shard.part(inner)))

    def _experts(self, prefix: str) -> ExpertWeights:
        """Expert by expert; checkpoints of Mixtral and Qwen3-MoE keep them apart."""
        experts = self.config.experts
        assert experts is not None, "a layer with experts, in a model without"
        inner = experts.intermediate_size
        names = [f"{prefix}{experts.expert_name}.{i}." for i in range(experts.count)]
        return ExpertWeights(
            router=self._matrix(
                self._source(f"{prefix}{experts.router_name}.weight", (experts.count, self.config.hidden_size))
            ),
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
