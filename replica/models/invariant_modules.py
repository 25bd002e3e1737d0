"""TORCH. Makes the modules of a transformers model give a row the same bits whatever rows stand beside it."""

from __future__ import annotations

from typing import Any

import torch

from replica.attention.row_exp import by_rows
from replica.models.linear import make_linear, padded

_ACTIVATION_MODULES = ("transformers.activations", "torch.nn.modules.activation")
#: of these modules, what is no function of single elements
_NOT_POINTWISE = (torch.nn.MultiheadAttention, torch.nn.Softmax, torch.nn.GLU, torch.nn.LogSoftmax)


def make_invariant(model: Any, max_len: int) -> None:
    """Replace linears, activations and rotary tables of `model` in place. Packed linears take the place of the weights,
    so that they are held once; an embedding tied to one stays.
    """
    from transformers.pytorch_utils import Conv1D

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear:
                setattr(parent, name, _Linear(child.weight, child.bias))
            elif type(child) is Conv1D:
                setattr(parent, name, _Linear(child.weight.t(), child.bias))
            elif type(child).__name__.endswith("RotaryEmbedding"):
                setattr(parent, name, _Rotary(child, max_len))
            elif type(child).__module__ in _ACTIVATION_MODULES and not isinstance(child, _NOT_POINTWISE):
                setattr(parent, name, _Pointwise(child))


class _Linear(torch.nn.Module):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]
        self._linear = make_linear(weight.detach())
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = self._linear(padded(rows))[: len(rows)]
        if self._bias is not None:
            out = out + self._bias
        return out.view(*x.shape[:-1], -1)


class _Pointwise(torch.nn.Module):
    def __init__(self, function: torch.nn.Module) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return by_rows(self._function, x)


class _Rotary(torch.nn.Module):
    """Looks rotations up that were computed once for all positions: a cosine in the middle of a vector and one at its
    end may differ in the last bit.
    """

    def __init__(self, original: torch.nn.Module, max_len: int) -> None:
        super().__init__()
        self._original = original
        self._max_len = max_len
        self._tables: dict[tuple[Any, ...], tuple[torch.Tensor, ...]] = {}

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        key = (x.dtype, *args, *sorted(kwargs.items()))
        if key not in self._tables:
            self._tables[key] = self._original(x, torch.arange(self._max_len)[None], *args, **kwargs)
        return tuple(table[:, position_ids[0]] for table in self._tables[key])
