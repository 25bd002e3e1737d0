"""PURE. The shape of a model as the runner knows it, whatever family it is of. Nothing here reads files or computes."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

Activation = Literal["silu", "gelu", "gelu_tanh"]


class ModelShape(msgspec.Struct, frozen=True):
    """What the runner, the KV pool and the cut into ranks need of any model."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int

    @property
    def q_dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_dim

    def block_bytes(self, block_size: int, itemsize: int, num_kv_heads: int) -> int:
        """Of one KV block: K and V of `block_size` tokens over all layers, for so many heads."""
        return num_kv_heads * self.num_layers * 2 * block_size * self.head_dim * itemsize

    @property
    def to_cut(self) -> ModelShape:
        """As `replica.shard` should see it."""
        return self

    @property
    def usual_length(self) -> int:
        """The context where nobody asks for another."""
        return self.max_position_embeddings

    @property
    def window(self) -> int | None:
        """If all layers have one, the largest; None where a layer sees everything, or nothing is known."""
        return None


class RopeConfig(msgspec.Struct, frozen=True):
    """One table of rotations."""

    theta: float
    #: leading dimensions of each head that are rotated; the others pass
    rotary_dim: int
    #: default, linear, llama3, yarn or longrope
    kind: str = "default"
    #: what that kind needs beside theta, by its name in config.json
    parameters: dict[str, Any] = {}


class LayerConfig(msgspec.Struct, frozen=True):
    """How one layer differs from its neighbours."""

    #: index into `DecoderConfig.ropes`; None: keys and queries are not rotated
    rope: int | None = 0
    #: a query sees so many last positions, its own included; None: all
    window: int | None = None
    has_experts: bool = False


class ExpertsConfig(msgspec.Struct, frozen=True):
    """Mixture of experts in place of the MLP."""

    count: int
    per_token: int
    intermediate_size: int
    #: the weights of a token's experts are made to add up to 1
    normalises: bool
    #: names in the checkpoint, below the layer: router, expert; of an expert gate, up, down
    router_name: str
    expert_name: str
    matrix_names: tuple[str, str, str]


class DecoderConfig(ModelShape, frozen=True, kw_only=True):
    """A decoder of RMS norms, rotated grouped-query attention and gated MLPs, and in what its families differ."""

    rms_norm_eps: float
    tie_word_embeddings: bool
    ropes: tuple[RopeConfig, ...]
    layers: tuple[LayerConfig, ...]
    #: factor of query times key
    attention_scale: float
    activation: Activation = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    #: q, k, v in one tensor, gate and up in another
    has_fused_tensors: bool = False
    #: before attention and MLP, behind them, or both
    norms: Literal["before", "behind", "both"] = "before"
    #: added to every norm's weight
    norm_offset: float = 0.0
    #: RMS norm of queries and keys: of each head, or of all heads as one row
    qk_norm: Literal["none", "head", "row"] = "none"
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    #: logits are divided by it
    logits_scaling: float = 1.0
    experts: ExpertsConfig | None = None

    @property
    def usual_length(self) -> int:
        """For longrope the length up to which its short factors hold. What a token's rotation is depends on nothing
        else in the batch, so the choice between the two sets of factors has to be one for the whole run.
        """
        originals = [int(r.parameters["original_max_position_embeddings"]) for r in self.ropes if r.kind == "longrope"]
        return min([self.max_position_embeddings, *originals])

    @property
    def window(self) -> int | None:
        """Attention reads nothing before it, in any layer."""
        sizes = [layer.window for layer in self.layers if layer.window is not None]
        return max(sizes) if sizes and len(sizes) == len(self.layers) else None

    @property
    def to_cut(self) -> ModelShape:
        """As `replica.shard` should see it: what is cut of the MLPs is what all of their widths have in common."""
        widths = [self.intermediate_size] if not all(layer.has_experts for layer in self.layers) else []
        if self.experts is not None:
            widths.append(self.experts.intermediate_size)
        return msgspec.structs.replace(self, intermediate_size=math.gcd(*widths))

    @property
    def is_plain(self) -> bool:
        """True for the shape that Llama has, and nothing beside it: what the native kernels compute."""
        plain = DecoderConfig(
            *(getattr(self, name) for name in ModelShape.__struct_fields__),
            rms_norm_eps=self.rms_norm_eps,
            tie_word_embeddings=self.tie_word_embeddings,
            ropes=self.ropes,
            layers=(LayerConfig(),) * self.num_layers,
            attention_scale=self.attention_scale,
        )
        return self == plain and len(self.ropes) == 1 and self.ropes[0].rotary_dim == self.head_dim
