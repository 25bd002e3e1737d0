"""TORCH. Which attention kernel serves a device, and why. A new kernel adds one row to `CAPABILITIES`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from replica.attention.contract import PagedAttention
from replica.attention.torch_paged import TorchPagedAttention
from replica.errors import ConfigError


@dataclass(frozen=True)
class Capability:
    """What one kernel can do. `block_multiple`: the pool's block size must be a multiple of it."""

    name: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    block_multiple: int
    make: Callable[[], PagedAttention]


#: in order of preference. The C++ attention is not here: it lives inside the native decoder's step.
CAPABILITIES: tuple[Capability, ...] = (
    Capability("torch", ("cpu", "cuda"), (torch.float32, torch.bfloat16, torch.float16), 1, TorchPagedAttention),
)


def select(device: str, dtype: torch.dtype, block_size: int) -> PagedAttention:
    """The first kernel that fits. Raises ConfigError listing what each one lacks."""
    reasons = []
    for kernel in CAPABILITIES:
        if device not in kernel.devices:
            reasons.append(f"{kernel.name} does not run on {device}")
        elif dtype not in kernel.dtypes:
            reasons.append(f"{kernel.name} does not take {dtype}")
        elif block_size % kernel.block_multiple:
            reasons.append(f"{kernel.name} needs block_size in multiples of {kernel.block_multiple}, not {block_size}")
        else:
            return kernel.make()
    raise ConfigError("no attention kernel fits: " + "; ".join(reasons))
