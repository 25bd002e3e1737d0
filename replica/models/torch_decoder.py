"""TORCH. A Llama-type decoder in torch operators: the fallback without a compiler, the form that several ranks share,
and the base of the GPU path.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from replica.attention.contract import AttentionStep, PagedAttention
from replica.attention.row_exp import row_exp_
from replica.collective import Collective, NoPeers
from replica.input_batch import InputBatch
from replica.models.decoder import rotary_tables
from replica.sampler import sample
from replica.weights import LayerWeights, WeightReader

Linear = Callable[[torch.Tensor], torch.Tensor]

# oneDNN takes another path for one row (torch 2.13, bf16: about 140 of 900,000 outputs differ at K = 1536; float32:
# nearly all) and, with a float32 weight packed for one row, for other row counts too. Four rows and more with a weight
# packed for 32 gave one class up to 768 rows in both types; on Zen 4 four rows are also faster than one (11.6 against
# 13.3 ms a step).
MIN_ROWS = 4
_PACKED_FOR_ROWS = 32


def _prepacked(weight: torch.Tensor) -> Linear:
    """x -> x @ weight.T through oneDNN's own weight layout, 1.1 to 2.6 times as fast as F.linear."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR_ROWS)

    def linear(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        return out

    return linear


def make_linear(weight: torch.Tensor) -> Linear:
    """The fastest invariant linear for this device."""
    if weight.device.type == "cpu" and torch.backends.mkldnn.is_available():
        return _prepacked(weight)
    return lambda x: F.linear(x, weight)


class _Layer:
    """One layer's linears and norms."""

    def __init__(self, weights: LayerWeights) -> None:
        self.qkv, self.o, self.down = make_linear(weights.qkv), make_linear(weights.o), make_linear(weights.down)
        self.gate_up = make_linear(torch.cat([weights.gate, weights.up]))
        self.input_norm, self.post_norm = weights.input_norm, weights.post_norm


class TorchDecoder:
    """See `replica.models.decoder.Decoder`. Residual and norms in float32, matrix products in the pool's dtype.

    With several ranks each computes its own query heads, its part of the MLP and of the vocabulary: two sums a layer,
    and the logits go to rank 0, which alone chooses.
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
        self._collective = collective or NoPeers()
        #: query heads and KV heads of this rank
        self._num_heads, self._num_kv_heads = reader.config.num_heads // reader.shard.size, pool.shape[1]
        self.kernels = f"torch {torch.__version__}, attention {attention.name}"
        self._pool = pool
        self._attention = attention
        self._layers = [_Layer(weights) for weights in reader.layers()]
        self._embedding = reader.embedding()
        self._head = make_linear(reader.head())
        self._final_norm = reader.final_norm()
        self._cos, self._sin = rotary_tables(self.config, max_len)
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
        hidden[:count] = self._embedding[torch.from_numpy(batch.token_ids).long()].float()
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        block, offset = np.divmod(batch.slots, self._pool.shape[4])
        place = (torch.from_numpy(block), torch.from_numpy(offset))
        for index in range(self.config.num_layers):
            hidden = self._layer(index, hidden, count, cos, sin, place, step)
        logits = self._logits(hidden[torch.from_numpy(batch.sample_rows).long()])
        self._last_logits = logits
        tokens = np.zeros(0, np.int32) if batch.ruled or not len(logits) else self.choose(batch)
        return tokens, logits

    def choose(self, batch: InputBatch) -> NDArray[np.int32]:
        """See `Decoder.choose`."""
        rows = self._last_logits[: batch.num_chosen].numpy()
        return sample(rows, batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.uniform)

    def _layer(
        self,
        index: int,
        hidden: torch.Tensor,
        count: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
        place: tuple[torch.Tensor, torch.Tensor],
        step: AttentionStep,
    ) -> torch.Tensor:
        c = self.config
        layer = self._layers[index]
        qkv = layer.qkv(self._norm(hidden, layer.input_norm))[:count].float()
        q, k, v = qkv.view(count, -1, c.head_dim).split(
            [self._num_heads, self._num_kv_heads, self._num_kv_heads], dim=1
        )
        self._pool[place[0], :, index, 0, place[1]] = _rotate(k, cos, sin).to(self._pool.dtype)
        self._pool[place[0], :, index, 1, place[1]] = v.to(self._pool.dtype)
        mixed = torch.zeros((len(hidden), self._num_heads * c.head_dim), dtype=self._pool.dtype)
        query = _rotate(q, cos, sin).to(self._pool.dtype)
        mixed[:count] = self._attention(query, self._pool, index, step).reshape(count, -1)
        hidden = hidden + self._summed(layer.o(mixed))
        gate, up = layer.gate_up(self._norm(hidden, layer.post_norm)).float().chunk(2, dim=-1)
        return hidden + self._summed(layer.down((gate / (1 + row_exp_(-gate)) * up).to(self._pool.dtype)))

    def _summed(self, part: torch.Tensor) -> torch.Tensor:
        """float32 sum of the ranks' parts."""
        total = part.float()
        self._collective.sum_(total)
        return total

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return (x * scale * weight).to(self._pool.dtype)

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocab]; no rows but on rank 0"""
        count = len(rows)
        padded = F.pad(self._norm(rows, self._final_norm), (0, 0, 0, max(0, MIN_ROWS - count)))
        logits = self._collective.gather_columns(self._head(padded)[:count].float())
        if logits is None:
            return torch.empty((0, self.config.vocab_size))
        return logits[:, : self.config.vocab_size].contiguous()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
