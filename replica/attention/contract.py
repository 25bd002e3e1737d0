"""TORCH. What every attention kernel takes and gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class AttentionStep:
    """Where the queries of one step lie and which keys they see; the same for all layers."""

    seq_start: torch.Tensor  # int [num_seqs + 1], first query row of each sequence
    positions: torch.Tensor  # int [num_tokens], position of each query row
    block_tables: torch.Tensor  # int [num_seqs, blocks]


@dataclass(frozen=True)
class Mask:
    """What one layer makes of query times key, and which keys a query sees."""

    scale: float
    #: so many last positions, the query's own included; None: all up to it
    window: int | None = None
    #: scores become softcap * tanh(score / softcap)
    softcap: float | None = None


class PagedAttention(Protocol):
    """Causal attention of query rows over the paged pool. A row at position p sees keys 0..p of its own sequence, or
    those of a window that ends at p.

    Its result must not depend on the other rows of the call: same bits alone, in a chunk, beside other sequences.
    """

    name: str

    def __call__(
        self, query: torch.Tensor, pool: torch.Tensor, layer: int, step: AttentionStep, mask: Mask
    ) -> torch.Tensor:
        """query: [num_tokens, num_heads, head_dim]; pool: [blocks, kv_heads, layers, 2, block_size, head_dim], K and V
        of the query tokens already written. Returns [num_tokens, num_heads, head_dim] in the query's dtype."""
        ...
