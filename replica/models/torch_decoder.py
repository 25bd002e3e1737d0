"""TORCH. The decoder of every family in torch operators: the form that several ranks share, and the base of the GPU
path. Plain Llama shapes on one CPU have a faster one (`native_decoder.py`).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from replica.attention.contract import AttentionStep, Mask, PagedAttention
from replica.collective import Collective, NoPeers
from replica.input_batch import InputBatch
from replica.models.decoder_config import DecoderConfig
from replica.models.experts import Experts
from replica.models.linear import MIN_ROWS, gated, make_linear, padded, softcapped
from replica.models.rope import rotary_tables
from replica.sampler import sample
from replica.shard import Shard
from replica.weights import LayerVectors, LayerWeights, WeightReader

Place = tuple[torch.Tensor, torch.Tensor]
Rotation = tuple[torch.Tensor, torch.Tensor]


class _Layer:
    """One layer's linears, norms and what it sees."""

    def __init__(self, weights: LayerWeights, config: DecoderConfig, index: int) -> None:
        self.vectors = weights.vectors
        self.qkv, self.o = make_linear(weights.qkv.read()), make_linear(weights.o.read())
        self.experts: Experts | None = None
        if weights.experts is not None:
            assert config.experts is not None, "a layer with experts, in a model without"
            self.experts = Experts(weights.experts, config.experts, config.activation)
        else:
            assert weights.gate_up is not None, "a layer without experts has an MLP"
            assert weights.down is not None, "gate and up come with down"
            self.gate_up, self.down = make_linear(weights.gate_up.read()), make_linear(weights.down.read())
        self.rope = config.layers[index].rope
        self.mask = Mask(config.attention_scale, config.layers[index].window, config.attention_softcap)


class TorchDecoder:
    """See `replica.models.decoder.Decoder`. Residual and norms in float32, matrix products in the pool's dtype.

    With several ranks each computes its own query heads, its part of the MLP and of the vocabulary: a sum for the
    embedding, two a layer (three with a norm over all queries), and the logits go to rank 0, which alone chooses.
    """

    def __init__(
        self,
        reader: WeightReader,
        pool: torch.Tensor,
        max_len: int,
        attention: PagedAttention,
        collective: Collective | None = None,
    ) -> None:
        self.config = reader.config
        self.kernels = f"torch {torch.__version__}, attention {attention.name}"
        self._collective = collective or NoPeers()
        self._shard = reader.shard
        #: query heads and KV heads of this rank
        self._num_heads, self._num_kv_heads = reader.config.num_heads // reader.shard.size, pool.shape[1]
        self.pool = pool
        self._attention = attention
        # the head is the largest and exists twice while it is packed: first, when nothing else is there
        self._head = make_linear(reader.head().read())
        #: of this rank's part of the vocabulary, whose first token is `_first_token`
        self._embedding = reader.embedding().read()
        self._first_token = reader.shard.part(self.config.vocab_size).start
        self._layers = [_Layer(weights, self.config, i) for i, weights in enumerate(reader.layers())]
        # Gemma was trained with this factor in its weights' dtype: 55.5 for the root of 3072 in bfloat16
        self._embedding_multiplier = float(torch.tensor(self.config.embedding_multiplier, dtype=pool.dtype))
        self._final_norm = reader.final_norm()
        self._ropes = [rotary_tables(rope, max_len) for rope in self.config.ropes]
        self._last_logits = torch.empty((0, self.config.vocab_size))

    def forward(self, batch: InputBatch) -> tuple[NDArray[np.int32], torch.Tensor]:
        """See `Decoder.forward`."""
        positions = torch.from_numpy(batch.positions).long()
        step = AttentionStep(
            seq_start=torch.from_numpy(batch.seq_start),
            positions=positions,
            block_tables=torch.from_numpy(batch.block_tables[batch.seq_slot]),
        )
        count = len(positions)
        hidden = torch.zeros((max(count, MIN_ROWS), self.config.hidden_size))
        hidden[:count] = self._embed(torch.from_numpy(batch.token_ids).long()) * self._embedding_multiplier
        rotations = [(cos[positions][:, None], sin[positions][:, None]) for cos, sin in self._ropes]
        block, offset = np.divmod(batch.slots, self.pool.shape[4])
        place = (torch.from_numpy(block), torch.from_numpy(offset))
        for index, layer in enumerate(self._layers):
            rotation = None if layer.rope is None else rotations[layer.rope]
            hidden = self._add(hidden, self._attend(index, hidden, count, rotation, place, step))
            hidden = self._add(hidden, self._mlp(layer, hidden, count))
        logits = self._logits(hidden[torch.from_numpy(batch.sample_rows).long()])
        self._last_logits = logits
        tokens = np.zeros(0, np.int32) if batch.ruled or not len(logits) else self.choose(batch)
        return tokens, logits

    def choose(self, batch: InputBatch) -> NDArray[np.int32]:
        """See `Decoder.choose`."""
        rows = self._last_logits[: batch.num_chosen].numpy()
        return sample(rows, batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.uniform)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """float32 [tokens, hidden]. Each rank has rows of its own; a sum of one of them and zeros is exact."""
        if self._shard.size == 1:
            return self._embedding[token_ids].float()
        places = token_ids - self._first_token
        is_ours = (places >= 0) & (places < len(self._embedding))
        rows = torch.zeros((len(token_ids), self.config.hidden_size))
        rows[is_ours] = self._embedding[places[is_ours]].float()
        self._collective.sum_(rows)
        return rows

    def _add(self, hidden: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
        factor = self.config.residual_multiplier
        return hidden + (change if factor == 1 else change * factor)

    def _attend(
        self,
        index: int,
        hidden: torch.Tensor,
        count: int,
        rotation: Rotation | None,
        place: Place,
        step: AttentionStep,
    ) -> torch.Tensor:
        """What attention adds to the residual, float32 [rows, hidden]."""
        layer = self._layers[index]
        vectors = layer.vectors
        qkv = layer.qkv(self._normed(hidden, vectors.input_norm))[:count].float()
        if vectors.qkv_bias is not None:
            qkv = qkv + vectors.qkv_bias
        heads = qkv.view(count, -1, self.config.head_dim)
        q, k, v = heads.split([self._num_heads, self._num_kv_heads, self._num_kv_heads], dim=1)
        q, k = self._qk_norms(vectors, q, k)
        if rotation is not None:
            q, k = _rotate(q, *rotation), _rotate(k, *rotation)
        self.pool[place[0], :, index, 0, place[1]] = k.to(self.pool.dtype)
        self.pool[place[0], :, index, 1, place[1]] = v.to(self.pool.dtype)
        mixed = torch.zeros((len(hidden), self._num_heads * self.config.head_dim), dtype=self.pool.dtype)
        query = q.to(self.pool.dtype)
        mixed[:count] = self._attention(query, self.pool, index, step, layer.mask).reshape(count, -1)
        return self._behind(layer.o(mixed).float(), vectors.o_bias, vectors.attention_out_norm)

    def _mlp(self, layer: _Layer, hidden: torch.Tensor, count: int) -> torch.Tensor:
        """What the MLP or its experts add to the residual, float32 [rows, hidden]."""
        vectors = layer.vectors
        x = self._normed(hidden, vectors.mlp_norm)
        if layer.experts is not None:
            return self._behind(layer.experts(x, count), None, vectors.mlp_out_norm)
        gate_up = layer.gate_up(x).float()
        if vectors.gate_up_bias is not None:
            gate_up = gate_up + vectors.gate_up_bias
        inner = gated(self.config.activation, gate_up).to(self.pool.dtype)
        return self._behind(layer.down(inner).float(), vectors.down_bias, vectors.mlp_out_norm)

    def _behind(self, part: torch.Tensor, bias: torch.Tensor | None, norm: torch.Tensor | None) -> torch.Tensor:
        """The ranks' parts added up in float32, with the bias and the norm behind them."""
        self._collective.sum_(part)
        if bias is not None:
            part = part + bias
        return part if norm is None else self._norm(part, norm)

    def _qk_norms(self, vectors: LayerVectors, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if vectors.q_norm is None or vectors.k_norm is None:
            return q, k
        if self.config.qk_norm == "head":
            return self._norm(q, vectors.q_norm), self._norm(k, vectors.k_norm)
        rows = [x.reshape(len(x), -1) for x in (q, k)]
        squares = torch.stack([row.square().sum(-1) for row in rows], dim=1)
        if not _counts_keys(self._shard, self.config):
            squares[:, 1] = 0
        self._collective.sum_(squares)
        means = squares / torch.tensor([self.config.q_dim, self.config.kv_dim])
        scales = torch.rsqrt(means + self.config.rms_norm_eps)
        q, k = ((row * scales[:, i : i + 1]).view(x.shape) for i, (row, x) in enumerate(zip(rows, (q, k), strict=True)))
        return q * vectors.q_norm.view(q.shape[1:]), k * vectors.k_norm.view(k.shape[1:])

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps) * weight

    def _normed(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """What a linear takes: normed where there is a norm before it, in the pool's dtype."""
        return (x if weight is None else self._norm(x, weight)).to(self.pool.dtype)

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocab]; no rows but on rank 0"""
        part = self._head(padded(self._normed(rows, self._final_norm)))[: len(rows)].float()
        logits = self._collective.gather_columns(part)
        if logits is None:
            return torch.empty((0, self.config.vocab_size))
        logits = logits[:, : self.config.vocab_size] / self.config.logits_scaling
        return softcapped(logits, self.config.logit_softcap).contiguous()


def _counts_keys(shard: Shard, config: DecoderConfig) -> bool:
    """Of several ranks that hold the same KV head, the first counts it in a sum over all of them."""
    return shard.rank == 0 or shard.kv_heads(config.num_kv_heads) != Shard(shard.rank - 1, shard.size).kv_heads(
        config.num_kv_heads
    )


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [tokens, heads, head_dim], of which the first 2 * cos.shape[-1] dimensions turn."""
    turned = 2 * cos.shape[-1]
    a, b = x[..., :turned].chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., turned:]], dim=-1)
