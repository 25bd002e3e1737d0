"""TORCH. Matrix products and pointwise functions whose result for a row does not depend on the other rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from replica.attention.row_exp import by_rows, row_exp_
from replica.models.decoder_config import Activation

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
    """The fastest invariant linear for this device; give it `MIN_ROWS` rows or more."""
    if weight.device.type == "cpu" and torch.backends.mkldnn.is_available():
        return _prepacked(weight)
    return lambda x: F.linear(x, weight)


def padded(rows: torch.Tensor) -> torch.Tensor:
    """`rows` [count, k] with rows of zeros behind them, up to `MIN_ROWS`."""
    missing = MIN_ROWS - len(rows)
    return rows if missing <= 0 else F.pad(rows, (0, 0, 0, missing))


def gated(activation: Activation, gate_up: torch.Tensor) -> torch.Tensor:
    """float32 [rows, 2 * inner], gate beside up -> activation(gate) * up."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return gate / (1 + row_exp_(-gate)) * up
    tanh = "tanh" if activation == "gelu_tanh" else "none"
    return by_rows(lambda x: F.gelu(x, approximate=tanh), gate) * up


def softcapped(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    """cap * tanh(x / cap); `x` itself without a cap."""
    return x if cap is None else by_rows(torch.tanh, x / cap) * cap
