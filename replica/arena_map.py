"""ASYNC. An arena of KV slabs in the memory of this process: `docs/kv_connector.md`. Linux only.

The arena is a `memfd`: the mapping stays good when its creator dies, and the memory is free when the last process that
maps it or holds its descriptor is gone. Knows nothing of what is in a slab.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

#: slots begin at multiples of it: what O_DIRECT asks for, and a page belongs to one slab
SLOT_ALIGNMENT = 4096
#: mapped in pieces, so that it can be told how far it is and given up in between
POPULATE_CHUNK = 64 << 20
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # Linux 5.14
_MADV_HUGEPAGE = 14
_CUDA_HOST_REGISTER_PORTABLE = 1

HAS_ARENAS = sys.platform == "linux" and hasattr(os, "memfd_create")


class ArenaError(Exception):
    """The memory cannot be had or mapped; the text says why."""


def round_slot(slab_bytes: int) -> int:
    """Bytes of a slot that holds a slab."""
    return -(-slab_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


class ArenaMap:
    """All slots of an arena. Whoever closes it must hold no view of it any more: memory under a view stays mapped."""

    def __init__(self, descriptor: int, num_slots: int, slot_bytes: int) -> None:
        """The descriptor stays the caller's, who may close it at once. Raises ArenaError."""
        if not HAS_ARENAS:
            raise ArenaError(f"arenas of KV blocks need Linux; this is {sys.platform}")
        size = os.fstat(descriptor).st_size
        if num_slots < 1 or slot_bytes < 1 or size < num_slots * slot_bytes:
            raise ArenaError(f"an arena of {size} bytes does not hold {num_slots} slots of {slot_bytes}")
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        try:
            self._memory = mmap.mmap(descriptor, num_slots * slot_bytes)
        except OSError as error:
            raise ArenaError(f"{size} bytes of the arena cannot be mapped: {error.strerror}") from None
        #: all of it
        self.view = memoryview(self._memory)
        #: [num_slots, slot_bytes]
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self.view, np.uint8).reshape(num_slots, slot_bytes)
        self._is_pinned = False

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.slot_bytes

    @property
    def address(self) -> int:
        """Where it begins in this process."""
        return int(self.array.ctypes.data)

    def slab(self, slot: int, num_bytes: int | None = None) -> memoryview:
        """The first `num_bytes` (default: all) of a slot, writable."""
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"slot {slot} of an arena with {self.num_slots}")
        length = self.slot_bytes if num_bytes is None else num_bytes
        assert length <= self.slot_bytes, f"{length} bytes of a slot with {self.slot_bytes}"
        return self.view[slot * self.slot_bytes : slot * self.slot_bytes + length]

    def populate(self, is_new: bool, on_progress: Callable[[int], None] = lambda done: None) -> None:
        """Blocking, for a thread: have every page in this process' tables, so that no copy meets a page fault.

        `is_new`: pages are made, where attaching only finds them. `on_progress` gets the bytes done. Raises ArenaError
        when memory runs out, where a plain write would be killed by SIGBUS. Kernels before 5.14: nothing happens.
        """
        for start, length in _chunks(self.num_bytes):
            advice = _MADV_POPULATE_WRITE if is_new else _MADV_POPULATE_READ
            code = _advise(self.address + start, length, advice)
            if code == errno.EINVAL:
                return
            if code:
                raise ArenaError(f"memory for {self.num_bytes} bytes cannot be had: {os.strerror(code)} at {start}")
            on_progress(start + length)

    def prefer_huge_pages(self) -> bool:
        """Ask for pages of 2 MiB. False where the machine has them off for shared memory (the default of Linux)."""
        try:
            with open("/sys/kernel/mm/transparent_hugepage/shmem_enabled") as file:
                is_allowed = not {"[never]", "[deny]"} & set(file.read().split())
        except OSError:
            return False
        return is_allowed and _advise(self.address, self.num_bytes, _MADV_HUGEPAGE) == 0

    def pin(self) -> bool:
        """Register it with the GPU runtime, for copies at full speed. False without one. Not verified on a GPU yet."""
        runtime = _gpu_runtime()
        if runtime is None or self._is_pinned:
            return self._is_pinned
        code = runtime.cudaHostRegister(self.address, self.num_bytes, _CUDA_HOST_REGISTER_PORTABLE)
        self._is_pinned = int(code) == 0
        return self._is_pinned

    def close(self) -> None:
        """Idempotent. Where somebody still holds a view, the memory goes with the last one."""
        runtime = _gpu_runtime() if self._is_pinned else None
        if runtime is not None:
            runtime.cudaHostUnregister(self.address)
            self._is_pinned = False
        self.array = np.empty((0, self.slot_bytes), np.uint8)
        try:
            self.view.release()
            self._memory.close()
        except BufferError:
            pass


def _chunks(size: int) -> Iterator[tuple[int, int]]:
    return ((start, min(POPULATE_CHUNK, size - start)) for start in range(0, size, POPULATE_CHUNK))


def _advise(address: int, length: int, advice: int) -> int:
    """0 or the error. By ctypes: `mmap.madvise` keeps the interpreter's lock, and this takes 0.2 to 0.6 s a GiB."""
    code = _libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), advice)
    return ctypes.get_errno() if code else 0


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _gpu_runtime() -> Any:
    """Of a torch that is loaded already and sees a GPU, else None: a connector never loads torch for this."""
    torch = sys.modules.get("torch")
    return torch.cuda.cudart() if torch is not None and torch.cuda.is_available() else None
