"""ASYNC. The arena that a connector owns: memory for `num_slots` slabs, mapped by the replicas of its node.

A `memfd` has no name: nothing has to be unlinked, a kill leaves nothing, `/dev/shm` and its size do not matter. Its
size is sealed, so that nobody who has the descriptor can cut it short under the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import sys
import threading
from collections.abc import Callable

from cluster.memory_room import available_bytes
from replica.arena_map import HAS_ARENAS, ArenaError, ArenaMap, round_slot
from replica.errors import ConfigError

#: left to everything else on the machine
SPARE_BYTES = 256 << 20
_GIB = 1 << 30


def check_room(wanted: int, available: int, key: str = "kv_cache.host_tier_gib") -> None:
    """Raises ConfigError: what is asked for, what is there, and the key to change."""
    room = max(0, available - SPARE_BYTES)
    if wanted > room:
        raise ConfigError(
            f"{key}: {wanted / _GIB:.2f} GiB are asked for, {available / _GIB:.2f} GiB are free "
            f"(machine and cgroups; {SPARE_BYTES >> 20} MiB of them stay free); allowed are at most {room / _GIB:.2f}"
        )


class Arena:
    """The creator's end. `map` is how it reads and writes; `descriptor` is what others get."""

    def __init__(self, num_slots: int, slab_bytes: int, available: int | None = None) -> None:
        """`available`: bytes of memory that are free; None: looked up. Raises ConfigError."""
        if not HAS_ARENAS:
            raise ConfigError(f"kv_cache.host_tier_gib: the host tier needs Linux; this is {sys.platform}")
        if num_slots < 1 or slab_bytes < 1:
            raise ConfigError(
                f"kv_cache.host_tier_gib: too small for one block of {slab_bytes} bytes; allowed are sizes from there"
            )
        slot_bytes = round_slot(slab_bytes)
        check_room(num_slots * slot_bytes, available_bytes() if available is None else available)
        self.slab_bytes = slab_bytes
        self.descriptor = os.memfd_create("shoal-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, num_slots * slot_bytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
            self.map = ArenaMap(self.descriptor, num_slots, slot_bytes)
        except (OSError, ArenaError) as error:
            os.close(self.descriptor)
            raise ConfigError(f"kv_cache.host_tier_gib: {error}") from None
        self.has_huge_pages = self.map.prefer_huge_pages()
        self._is_given_up = threading.Event()
        self._filling: asyncio.Future[None] | None = None

    @property
    def num_slots(self) -> int:
        return self.map.num_slots

    @property
    def slot_bytes(self) -> int:
        return self.map.slot_bytes

    def slab(self, slot: int) -> memoryview:
        """A block's bytes."""
        return self.map.slab(slot, self.slab_bytes)

    async def prefault(self, on_progress: Callable[[int, int], None] = lambda done, of: None) -> None:
        """Take the memory, on a thread. `on_progress(done, of)` in bytes, on the loop. Raises ConfigError when it runs
        out. The arena can be used meanwhile: a slab that is not there yet costs its page faults.
        """
        loop, size = asyncio.get_running_loop(), self.map.num_bytes

        def tell(done: int) -> None:
            if self._is_given_up.is_set():
                raise _GivenUp
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(on_progress, done, size)

        def fill() -> None:
            with contextlib.suppress(_GivenUp):
                self.map.populate(True, tell)

        self._filling = loop.run_in_executor(None, fill)
        try:
            await asyncio.shield(self._filling)
        except ArenaError as error:
            raise ConfigError(f"kv_cache.host_tier_gib: {error}") from None

    async def close(self) -> None:
        """Idempotent. Others keep what they have mapped."""
        self._is_given_up.set()
        if self._filling is not None:
            await asyncio.wait([self._filling])
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            self.map.close()


class _GivenUp(Exception):
    """Nobody wants the memory any more."""
