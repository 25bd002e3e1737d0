"""TORCH. What the ranks of one replica say to each other inside a step: sums behind o and down, logits to rank 0."""

from __future__ import annotations

from typing import Protocol

import torch


class Collective(Protocol):
    """Called by all ranks in the same order with the same shapes. Raises RuntimeError when a peer is gone."""

    def sum_(self, x: torch.Tensor) -> None:
        """Replace float32 `x` on every rank by the sum over the ranks, added in rank order: the same bits on each, and
        for each row whatever rows stand beside it. A ring reduction adds in an order that depends on where a value
        stands, which would end invariance from three ranks on.
        """
        ...

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor | None:
        """On rank 0 the ranks' [rows, n] side by side, [rows, n * ranks]; None elsewhere."""
        ...


class NoPeers:
    """The collective of a single rank."""

    def sum_(self, x: torch.Tensor) -> None:
        """Nothing to add."""

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor | None:
        """`x` itself."""
        return x


class GroupCollective:
    """Over a torch.distributed process group (gloo on CPU, NCCL on GPU)."""

    def __init__(self, group: torch.distributed.ProcessGroup) -> None:
        self._group = group
        self._size = torch.distributed.get_world_size(group)
        self._rank = torch.distributed.get_rank(group)

    def sum_(self, x: torch.Tensor) -> None:
        """See `Collective.sum_`."""
        parts = [torch.empty_like(x) for _ in range(self._size)]
        torch.distributed.all_gather(parts, x.contiguous(), group=self._group)
        x.copy_(parts[0])
        for part in parts[1:]:
            x.add_(part)

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor | None:
        """See `Collective.gather_columns`."""
        x = x.contiguous()
        if self._rank:
            torch.distributed.gather(x, None, group=self._group, group_dst=0)
            return None
        parts = [torch.empty_like(x) for _ in range(self._size)]
        torch.distributed.gather(x, parts, group=self._group, group_dst=0)
        return torch.cat(parts, dim=1)
