"""TORCH. Paged attention in plain torch operators: fallback without a compiler, reference for other kernels.

Invariance comes from constant shapes: queries are padded to tiles of 8 rows, keys are taken 64 at a time, and each tile
goes through matrix products of one size, so the library underneath always takes the same path for a row.
"""

from __future__ import annotations

import torch

from replica.attention.contract import AttentionStep, Mask
from replica.attention.row_exp import by_rows, row_exp_

TILE = 8
PIECE = 64


class TorchPagedAttention:
    """See `PagedAttention`. Works on any device; slow, since it gathers keys and values through copies."""

    name = "torch"

    def __call__(
        self, query: torch.Tensor, pool: torch.Tensor, layer: int, step: AttentionStep, mask: Mask
    ) -> torch.Tensor:
        output = torch.empty_like(query)
        starts = step.seq_start.tolist()
        for i in range(len(starts) - 1):
            rows = slice(starts[i], starts[i + 1])
            blocks = step.block_tables[i]
            output[rows] = self._sequence(query[rows], pool, layer, step.positions[rows], blocks, mask)
        return output

    def _sequence(
        self,
        query: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        positions: torch.Tensor,
        blocks: torch.Tensor,
        mask: Mask,
    ) -> torch.Tensor:
        count, heads, dim = query.shape
        kv_heads, block_size = pool.shape[1], pool.shape[4]
        tiles, group = -(-count // TILE), heads // kv_heads
        end = int(positions[-1]) + 1
        # Pieces before the first key that any row sees are left out. A row that sees nothing of a piece adds zeros to
        # zeros there, so where the first piece lies changes no bit.
        first_seen = 0 if mask.window is None else max(0, int(positions[0]) - mask.window + 1)
        begin = first_seen // PIECE * PIECE
        padded = query.new_zeros((tiles * TILE, heads, dim), dtype=torch.float32)
        padded[:count] = query.float()
        # [kv_heads, tiles, TILE * group, dim]
        q = (
            padded.view(tiles, TILE, kv_heads, group, dim)
            .permute(2, 0, 1, 3, 4)
            .reshape(kv_heads, tiles, TILE * group, dim)
        )
        limit = positions.new_full((tiles * TILE,), end - 1)
        limit[:count] = positions
        limit = limit.view(tiles, TILE, 1).expand(tiles, TILE, group).reshape(tiles, TILE * group, 1)
        # Of the first piece, blocks that no row sees may be somebody else's by now: zeros stand there.
        held = blocks[first_seen // block_size : -(-end // block_size)]
        length = -(-end // PIECE) * PIECE - begin
        keys, values = _gather(pool, layer, held, first_seen // block_size * block_size - begin, end - begin, length)

        top = q.new_full((kv_heads, tiles, TILE * group, 1), -torch.inf)
        total, acc = torch.zeros_like(top), torch.zeros_like(q)
        for first in range(begin, end, PIECE):
            piece = slice(first - begin, first - begin + PIECE)
            k, v = keys[:, None, piece], values[:, None, piece]
            scores = torch.matmul(q, k.transpose(-1, -2).expand(-1, tiles, -1, -1)) * mask.scale
            if mask.softcap is not None:
                scores = by_rows(torch.tanh, scores / mask.softcap) * mask.softcap
            at = torch.arange(first, first + PIECE, device=q.device)
            visible = at <= limit if mask.window is None else (at <= limit) & (at > limit - mask.window)
            scores = scores.masked_fill(~visible, -torch.inf)
            new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
            known = new_top if mask.window is None else new_top.masked_fill(new_top == -torch.inf, 0)
            weights = row_exp_(scores - known)
            shrink = row_exp_((top - known).expand(*top.shape[:-1], 16).contiguous())[..., :1]
            total = total * shrink + weights.sum(-1, keepdim=True)
            acc = acc * shrink + torch.matmul(weights, v.expand(-1, tiles, -1, -1))
            top = new_top
        out = (acc / total).view(kv_heads, tiles, TILE, group, dim).permute(1, 2, 0, 3, 4).reshape(-1, heads, dim)
        return out[:count].to(query.dtype)


def _gather(
    pool: torch.Tensor, layer: int, blocks: torch.Tensor, at: int, known: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one sequence and layer, float32 [kv_heads, length, dim], with `blocks` from row `at` on; what lies
    before row 0 is left out. Zeros stand before the blocks and from row `known` on: what an earlier owner of the last
    block left behind may be NaN, and 0 * NaN is NaN.
    """
    taken = pool[blocks.long(), :, layer].float()  # [blocks, kv_heads, 2, block_size, dim]
    kv_heads, dim = taken.shape[1], taken.shape[-1]
    flat = taken.permute(2, 1, 0, 3, 4).reshape(2, kv_heads, -1, dim)[:, :, max(0, -at) :]
    padded = flat.new_zeros((2, kv_heads, length, dim))
    begin = max(0, at)
    padded[:, :, begin : min(known, begin + flat.shape[2])] = flat[:, :, : known - begin]
    return padded[0], padded[1]
