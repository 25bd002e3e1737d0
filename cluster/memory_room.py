"""PURE. Does the memory of this machine hold what is about to be started? Linux finds out by killing something.

Counted is what is there in any case: processes, weights, KV. A KV pool is written when it is made, so all of it is
memory from the first minute on. Steps, texts and caches come on top, so what barely fits may still be too much.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from cluster.config import ClusterConfig
from replica.config import EngineConfig
from replica.safetensors_header import read_header
from replica.weight_files import weight_files

MIB = 1 << 20
# Measured as PSS with nothing running (Ray 2.60, Python 3.11, torch 2.13 for CPUs, 2026-11-30), without weights and KV.
# In sum with both: the default model 3,458 MiB by this, 3,463 measured; in float32 with 3 ranks 2,417 and 2,415.
#: Ray's six processes, Serve's two, `shoal serve` itself
_FIXED_MIB = 660
_ROUTER_MIB = 140
_PLAIN_MIB = 90  # a replica or rank that imports no torch
_TORCH_REPLICA_MIB = 300
_TORCH_RANK_MIB = 230
_ITEM_BYTES = {"bfloat16": 2, "float32": 4}


class Needs(msgspec.Struct, frozen=True):
    """Bytes, of the whole cluster on one machine."""

    processes: int
    weights: int
    kv: int
    #: the arena of the KV connector, and its process
    tier: int = 0

    @property
    def total(self) -> int:
        return self.processes + self.weights + self.kv + self.tier


def needs(config: ClusterConfig, engine: EngineConfig, folder: Path) -> Needs:
    """`engine`: resolved for this machine; `folder`: of the model, there already."""
    has_model = config.runner == "torch"
    mib = _FIXED_MIB + config.router.replicas * _ROUTER_MIB
    num_ranks = {role: config.of_role(role).num_ranks for role in config.replicas.counts}
    for role, ranks in num_ranks.items():
        if config.of_role(role).bundles is not None:
            replica_mib = _PLAIN_MIB + ranks * (_TORCH_RANK_MIB if has_model else _PLAIN_MIB)
        else:
            replica_mib = _TORCH_REPLICA_MIB if has_model else _PLAIN_MIB
        mib += config.most_of(role) * replica_mib
    tier_gib = config.kv_cache.host_tier_gib
    tier = int(tier_gib * 1024 * MIB) + (_PLAIN_MIB * MIB if tier_gib else 0)
    if not has_model or config.num_gpus_per_replica:
        return Needs(mib * MIB, 0, 0, tier)
    item = _ITEM_BYTES[engine.model.dtype]
    weights = sum(config.most_of(role) * weight_bytes(folder, item, ranks) for role, ranks in num_ranks.items())
    return Needs(mib * MIB, weights, config.most_replicas * kv_bytes(folder, engine), tier)


def weight_bytes(folder: Path, item: int, ranks: int = 1) -> int:
    """Of a replica's ranks together, `item` bytes an element. Ranks hold an embedding that is the head as well in two
    forms; the native decoder of a single rank does not.
    """
    tensors = [(name, place) for path in weight_files(folder)[0] for name, place in read_header(path).items()]
    elements = sum(math.prod(place.shape) for _, place in tensors)
    embedding = max((math.prod(place.shape) for name, place in tensors if "embed_tokens" in name), default=0)
    is_tied = not any("lm_head" in name for name, _ in tensors)
    return (elements + (embedding if is_tied and ranks > 1 else 0)) * item


def kv_bytes(folder: Path, engine: EngineConfig) -> int:
    """Of a replica, whatever its ranks make of it."""
    if engine.cache.num_blocks is None:
        return int((engine.cache.kv_cache_gib or 0) * 1024 * MIB)
    data = json.loads((folder / "config.json").read_text())
    shape: Mapping[str, Any] = data.get("text_config") or data
    try:
        heads = shape["num_attention_heads"]
        head_dim = shape.get("head_dim") or shape["hidden_size"] // heads
        kv_heads, layers = shape.get("num_key_value_heads") or heads, shape["num_hidden_layers"]
    except KeyError:  # a family that calls them otherwise: better not refused than wrongly
        return 0
    tokens = engine.cache.num_blocks * engine.cache.block_size
    return int(2 * tokens * layers * kv_heads * head_dim * _ITEM_BYTES[engine.model.dtype])


def memory_shortage(config: ClusterConfig, engine: EngineConfig, wanted: Needs, available: int) -> str:
    """Empty if it fits `available` bytes; else asked for, available, and what to change."""
    if wanted.total <= available:
        return ""
    num_blocks = engine.cache.num_blocks
    kv = f"kv_cache.num_blocks={num_blocks}" if num_blocks else f"kv_cache.kv_cache_gib={engine.cache.kv_cache_gib:g}"
    ranks = f" of {config.num_ranks} ranks" if config.num_ranks > 1 else ""
    tier = f", {_gib(wanted.tier)} for kv_cache.host_tier_gib" if wanted.tier else ""
    return (
        f"memory: {config.most_replicas} replica(s){ranks} and {config.router.replicas} router(s) need "
        f"{_gib(wanted.total)} GiB: {_gib(wanted.processes)} for processes, {_gib(wanted.weights)} for weights, "
        f"{_gib(wanted.kv)} for KV ({kv} each){tier}; available are {_gib(available)}. "
        "Lower replicas.both or what KV takes"
    )


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """What the machine and every cgroup around this process leave; file cache counts as left. Without Linux: no end."""
    try:
        meminfo = dict(line.split(":") for line in (proc / "meminfo").read_text().splitlines())
        left = [int(meminfo["MemAvailable"].split()[0]) << 10]
    except (OSError, KeyError, ValueError):
        return 1 << 62
    for folder, limit_name, usage_name, cache_key in _cgroups(proc, cgroups):
        try:
            limit, usage = (folder / limit_name).read_text().strip(), int((folder / usage_name).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit.isdigit():
            left.append(int(limit) - usage + int(stat.get(cache_key, 0)))
    return max(0, min(left))


def _cgroups(proc: Path, root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Folder, names of limit and usage, key of the file cache: of this process' memory cgroup and of all above it."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        relative = Path(path.lstrip("/"))
        if not controllers:
            names = ("memory.max", "memory.current", "inactive_file")
            top = root
        elif controllers == "memory":
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            top = root / "memory"
        else:
            continue
        for part in [relative, *relative.parents]:
            yield (top / part, *names)


def _gib(size: int) -> str:
    return f"{size / 1024 / MIB:.1f}"
