"""TORCH. A mixture of experts in place of an MLP. Rows of one expert are computed together, each on its own terms."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from replica.attention.row_exp import row_exp_
from replica.models.decoder_config import Activation, ExpertsConfig
from replica.models.linear import gated, make_linear, padded
from replica.weights import ExpertWeights


class Experts:
    """One layer's router and experts; with several ranks all of the router and this rank's part of each expert.

    A row's result is a sum over its own experts by ascending index: other rows change neither terms nor order.
    """

    def __init__(self, weights: ExpertWeights, config: ExpertsConfig, activation: Activation) -> None:
        self._config = config
        self._activation = activation
        self._router = make_linear(weights.router.read())
        self._gate_up = [make_linear(matrix.read()) for matrix in weights.gate_up]
        self._down = [make_linear(matrix.read()) for matrix in weights.down]

    def __call__(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """x: [rows >= MIN_ROWS, hidden], of which the first `count` mean something. Returns float32 [rows, hidden]."""
        shares, experts = self._route(self._router(x)[:count].float())
        total = torch.zeros(x.shape, dtype=torch.float32)
        for index in experts.unique().tolist():
            rows, place = torch.where(experts == index)
            inner = gated(self._activation, self._gate_up[index](padded(x[rows])).float()).to(x.dtype)
            out = self._down[index](inner)[: len(rows)].float()
            total[rows] += out * shares[rows, place, None]
        return total

    def _route(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [rows, experts] -> weights and indices, [rows, per_token] each."""
        count = logits.shape[1]
        shifted = F.pad(logits - logits.amax(-1, keepdim=True), (0, -count % 16), value=-torch.inf)
        weights = row_exp_(shifted)[:, :count]
        weights = weights / weights.sum(-1, keepdim=True)
        top, experts = torch.topk(weights, self._config.per_token, dim=-1)
        return top / top.sum(-1, keepdim=True) if self._config.normalises else top, experts
