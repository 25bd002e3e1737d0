"""PURE. What stands between an engine and the way to its KVConnector, whatever that is: the socket of the node, or a
test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from replica.config import CacheConfig
from replica.kv_messages import ArenaPlace, FromConnector, KVSpace, ToConnector
from replica.kv_side import KVSide
from replica.step import RunnerInfo

#: order of bytes in a block: `models/kv_pool.py`
KV_LAYOUT = "kv_heads, layers, 2, block_size, head_dim"


class KVEvents:
    """Told on the engine's loop."""

    def __init__(self, side: KVSide, clock: Callable[[], float], after: Callable[[], object]) -> None:
        """`after` is called when something may have changed."""
        self._side, self._clock, self._after = side, clock, after

    def on_connected(self, place: ArenaPlace, lease_s: float) -> None:
        """Welcomed. `place` is where ranks get the arena."""
        self._side.connected(place, lease_s, self._clock())
        self._after()

    def on_message(self, message: FromConnector) -> None:
        """All but Welcome and Unwelcome, in order."""
        self._side.receive(message, self._clock())
        self._after()

    def on_gone(self) -> None:
        """Between two `on_connected`, exactly once."""
        self._side.gone()
        self._after()


class KVLink(Protocol):
    """The way to the KVConnector of this node. It connects and beats by itself, again and again."""

    def start(self, space: KVSpace, events: KVEvents) -> None:
        """Begin to connect; from then on `events` are told."""
        ...

    def send(self, message: ToConnector) -> object:
        """Never blocks. Lost if nobody is connected: `on_gone` follows or has been told."""
        ...

    async def close(self) -> None:
        """What the replica has is given back. Idempotent; `events` are told nothing any more."""
        ...


def slot_layout(cache: CacheConfig) -> str:
    """What a slot holds; replicas that do not agree on it share nothing."""
    return KV_LAYOUT if cache.offload_dtype == "model" else f"{KV_LAYOUT}; {cache.offload_dtype}"


def no_tier_because(info: RunnerInfo, cache: CacheConfig) -> str | None:
    """Why a replica cannot use a KVConnector; None: it can."""
    if not cache.enable_prefix_caching:
        return "kv_cache.enable_prefix_caching is off: without hashes nobody finds a block"
    if info.window is not None:
        return f"all layers of the model have a window ({info.window} tokens), and what it has passed is given back"
    if not info.block_bytes:
        return "the KV of this runner cannot be copied: its ranks are on several nodes, or its pool is not block-major"
    return None
