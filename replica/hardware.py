"""PURE. Looks at the machine once, at start, so that `config.resolve` can stay a function of plain data."""

from __future__ import annotations

import os
from pathlib import Path

from replica.config import Hardware
from replica.native.cpu import cpu_flags

#: instruction sets that multiply bfloat16: x86 AVX-512 and AMX, ARM
_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


def available_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def detect_hardware() -> Hardware:
    """The machine at hand, as a CPU machine."""
    return Hardware(available_cores(), _memory_bytes(), bool(cpu_flags() & _BFLOAT16_FLAGS))


def _memory_bytes() -> int:
    """Memory this process may use: a container's limit where there is one."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total
