"""ASYNC. KV blocks on disk: files that are allocated before anything is stored, in slots of one slab.

Which slot a block gets, and who makes room, is decided elsewhere: this carries it out and keeps the index, so that a
restart finds what was stored. A slab that is not what was written (cut, flipped, gone, unreadable) is a miss: it is
said once and its entry is gone. Bytes go between arena and disk without the page cache where the file system allows
that (O_DIRECT), so nothing is in memory twice.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import mmap
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from cluster.kv_connector.disk_folder import SpaceFolder
from cluster.kv_connector.disk_journal import DiskEntry, DiskJournal
from replica.arena_map import SLOT_ALIGNMENT, round_slot
from replica.errors import ConfigError
from replica.kv_messages import KVSpace

#: of one file: what a damaged one takes along, and the step in which a disk that is full makes the tier smaller
FILE_BYTES = 256 << 20
#: of the file system, whichever is less, is left to others
SPARE_BYTES, SPARE_SHARE = 1 << 30, 0.05
#: reads and writes at a time: two keep a disk busy, the others wait for its answers
NUM_THREADS = 4
#: at most so many bytes in one call
RUN_BYTES = 2 << 20
_GIB = 1 << 30
logger = logging.getLogger(__name__)


class DiskItem(NamedTuple):
    """A block and the memory that it goes to or comes from."""

    slot: int
    #: to read: empty for whatever block the slot holds
    block_hash: bytes
    memory: memoryview
    #: to write: kept beside the hash (`DiskEntry`)
    position: int = 0
    parent: bytes = b""


class DiskStats(msgspec.Struct):
    """Since it was opened."""

    read_bytes: int = 0
    written_bytes: int = 0
    #: slabs that could not be read, or were not what was written
    num_lost: int = 0
    num_failed_writes: int = 0


#: items and the turn of their writing, in slots that follow each other
_Run = list[tuple[DiskItem, int]]


class DiskTier:
    """Made by `open`. All but reads and writes are calls that return at once.

    Memory that is read into and written from begins at multiples of 4,096 and may be used up to the next one: a slot of
    the arena. Other memory works too, through a copy.
    """

    def __init__(self, folder: SpaceFolder, slab_bytes: int, num_slots: int, use_direct: bool = True) -> None:
        """Blocking; see `open`."""
        self._folder = folder
        self.slab_bytes = slab_bytes
        self._slot_bytes = round_slot(slab_bytes)
        self._slots_per_file = max(1, FILE_BYTES // self._slot_bytes)
        self.is_direct = use_direct
        self._lock = threading.Lock()
        self._files: list[int] = []
        self.stats = DiskStats()
        #: turn and hash of what is being written, by slot: a write that was overtaken is not entered
        self._writing: dict[int, tuple[int, bytes]] = {}
        self._turns = itertools.count()
        #: why there are fewer slots than were asked for; empty: there are as many
        self.shortage = ""
        try:
            self._journal = DiskJournal(folder.path / "index")
        except OSError as error:
            raise ConfigError(
                f"kv_cache.disk_folder: the index in {folder.path} cannot be written: {error.strerror or error}"
            ) from None
        self.num_slots = self._allocate(num_slots)
        for entry in list(self._journal.entries.values()):
            if entry.slot >= self.num_slots or entry.num_bytes > self.slab_bytes:
                self._journal.remove(entry.slot)
        self._pool = ThreadPoolExecutor(NUM_THREADS, "shoal-kv-disk")

    @classmethod
    async def open(
        cls, folder: Path, space: KVSpace, slab_bytes: int, max_bytes: int, use_direct: bool = True
    ) -> DiskTier:
        """With what an earlier process of the same space left. Raises ConfigError: no folder, or no room for a slab.

        `max_bytes` bounds all spaces in `folder` that nobody else uses: others than `space` are removed for it, the
        longest unused first. On a full disk the tier is as large as there is room.
        """

        def make() -> DiskTier:
            space_folder = SpaceFolder(folder, space, slab_bytes)
            try:
                num_slots = max_bytes // round_slot(slab_bytes)
                space_folder.make_room(num_slots * round_slot(slab_bytes), max_bytes)
                return cls(space_folder, slab_bytes, num_slots, use_direct)
            except BaseException:
                space_folder.close()
                raise

        return await asyncio.to_thread(make)

    @property
    def path(self) -> Path:
        """Of its files."""
        return self._folder.path

    def entries(self) -> list[DiskEntry]:
        """What can be read, the longest stored first."""
        with self._lock:
            return list(self._journal.entries.values())

    def write(self, items: list[DiskItem]) -> Coroutine[Any, Any, list[int | None]]:
        """Store each item's memory in place of what its slot held: the xxh3 of each. None: it could not be written, or
        was forgotten meanwhile; the slot is free. Neighbouring slots in a row go in one call: worth half of the CPU.
        What the slots held is forgotten at once, before anybody awaits the rest.
        """
        with self._lock:
            turns = [next(self._turns) for _ in items]
            for item, turn in zip(items, turns, strict=True):
                self._writing[item.slot] = turn, item.block_hash
                self._journal.remove(item.slot)
        return self._on_threads(self._write, list(zip(items, turns, strict=True)))

    async def read(self, items: list[DiskItem]) -> list[int | None]:
        """Exactly the bytes that were stored, at the start of each item's memory: the xxh3 of each. None: a miss, and
        its memory holds anything.
        """
        return await self._on_threads(self._read, [(item, 0) for item in items])

    def forget(self, slot: int, block_hash: bytes = b"") -> None:
        """Nothing happens if the slot holds another block by now (empty: whatever it holds). A write that is on its way
        is not entered.
        """
        with self._lock:
            entry = self._journal.entries.get(slot)
            if entry is not None and block_hash in (b"", entry.block_hash):
                self._journal.remove(slot)
            if slot in self._writing and block_hash in (b"", self._writing[slot][1]):
                del self._writing[slot]

    @property
    def generation(self) -> int:
        """Of what was there at the start."""
        return self._folder.generation

    async def clear(self, generation: int = 0) -> bool:
        """Forget everything, also what is being written; what comes is of `generation`. False: the disk does not take
        that, and a restart may find some of it again.
        """
        try:
            await asyncio.to_thread(self._clear, generation)
        except OSError as error:
            logger.warning("%s cannot be cleared: %s", self.path, error.strerror)
            return False
        return True

    async def close(self) -> None:
        """Idempotent. What is being read and written is waited for; the files stay."""
        await asyncio.to_thread(self._pool.shutdown)
        with self._lock:
            self._journal.close()
            for file in self._files:
                os.close(file)
            self._files.clear()
            self._folder.close()

    async def _on_threads(self, work: Callable[[_Run], list[int | None]], items: _Run) -> list[int | None]:
        """To the end even if nobody waits any more: the memory belongs to the threads until then."""
        loop = asyncio.get_running_loop()
        running = [loop.run_in_executor(self._pool, work, run) for run in self._runs(items)]
        if not running:
            return []
        waiting = asyncio.ensure_future(asyncio.wait(running))
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            await waiting
            raise
        return [one for part in running for one in part.result()]

    def _runs(self, items: _Run) -> Iterator[_Run]:
        """Cut where the next slot does not follow, and into pieces that keep all threads busy."""
        most = max(1, min(RUN_BYTES // self._slot_bytes, -(-len(items) // NUM_THREADS), 1000))
        run: _Run = []
        for item, turn in items:
            self._place(item.slot)  # raises for a slot that there is not
            follows = run and item.slot == run[-1][0].slot + 1 and item.slot % self._slots_per_file
            if run and (not follows or len(run) == most):
                yield run
                run = []
            run.append((item, turn))
        if run:
            yield run

    # ---- on a thread ----

    def _clear(self, generation: int) -> None:
        with self._lock:
            self._writing.clear()
            self._journal.clear()
        self._folder.keep_generation(generation)

    def _allocate(self, num_slots: int) -> int:
        """As many slots as there is room for. Raises ConfigError when that is none."""
        wanted, problem = num_slots, ""
        while len(self._files) * self._slots_per_file < wanted and not problem:
            first = len(self._files) * self._slots_per_file
            asked = count = min(self._slots_per_file, wanted - first)
            path = self.path / f"slabs-{len(self._files):03}"
            there = path.stat().st_size // self._slot_bytes if path.exists() else 0
            file, problem = self._open_file(path, count * self._slot_bytes)
            while file is None and count > max(1, there):  # the end of a full disk, and room left for the index
                count = max(count // 2, there)
                file, _ = self._open_file(path, count * self._slot_bytes)
            if file is not None:
                self._files.append(file)
            if count < asked or file is None:
                wanted = first + (count if file is not None else 0)
        for old in sorted(self.path.glob("slabs-*"))[len(self._files) :]:
            old.unlink(missing_ok=True)
        if wanted < 1:
            reason = problem or f"one block takes {self._slot_bytes} bytes"
            raise ConfigError(f"kv_cache.disk_tier_gib: no disk tier in {self.path}: {reason}; give less or free space")
        if problem:
            asked_gib, used_gib = num_slots * self._slot_bytes / _GIB, wanted * self._slot_bytes / _GIB
            self.shortage = (
                f"kv_cache.disk_tier_gib: {asked_gib:.2f} GiB are asked for, {used_gib:.2f} are used: {problem}"
            )
            logger.warning("%s", self.shortage)
        return wanted

    def _open_file(self, path: Path, size: int) -> tuple[int | None, str]:
        """A descriptor, or why not."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            if path.exists() and not os.access(path, os.R_OK | os.W_OK):
                path.unlink()  # its entries are misses, its room is used again
            try:
                file = os.open(path, flags | (os.O_DIRECT if self.is_direct else 0), 0o600)
            except OSError as error:
                if error.errno != errno.EINVAL or not self.is_direct:
                    raise
                self.is_direct = False  # a file system without it
                file = os.open(path, flags, 0o600)
        except OSError as error:
            return None, f"{path.name}: {error.strerror or error}"
        size_before = os.fstat(file).st_size
        try:
            _check_room(file, size - size_before)
            os.posix_fallocate(file, 0, size)
            if size_before > size:
                os.ftruncate(file, size)
        except OSError as error:
            os.ftruncate(file, size_before)  # of a restart on a full disk: what is there stays
            os.close(file)
            if not size_before:
                path.unlink()
            return None, f"{path.name}: {error.strerror or error}"
        return file, ""

    def _write(self, run: _Run) -> list[int | None]:
        """Slots in a row. Between them nothing may be left out, so each but the last is written in full."""
        file, offset = self._place(run[0][0].slot)
        digests = [xxhash.xxh3_64_intdigest(item.memory) for item, _ in run]
        parts = [_aligned(item.memory, self._slot_bytes) for item, _ in run[:-1]]
        last = run[-1][0].memory
        assert all(len(item.memory) <= self.slab_bytes for item, _ in run), f"more than {self.slab_bytes} bytes"
        parts.append(_aligned(last, round_slot(len(last))))
        length = sum(len(part) for part in parts)
        try:
            if os.pwritev(file, parts, offset) != length:
                raise OSError(errno.EIO, "written in part")
            self._drop_from_cache(file, offset, length, is_written=True)
        except OSError as error:
            with self._lock:
                self.stats.num_failed_writes += len(run)
            logger.warning("%d KV blocks not written to %s: %s", len(run), self.path.name, error.strerror)
            return [None] * len(run)
        with self._lock:
            self.stats.written_bytes += sum(len(item.memory) for item, _ in run)
            return [self._enter(item, turn, digest) for (item, turn), digest in zip(run, digests, strict=True)]

    def _enter(self, item: DiskItem, turn: int, digest: int) -> int | None:
        """Its bytes are on disk: from now on it can be found, if it is still wanted."""
        if self._writing.get(item.slot) != (turn, item.block_hash):
            return None
        del self._writing[item.slot]
        size = len(item.memory)
        self._journal.put(DiskEntry(item.block_hash, item.slot, size, digest, item.position, item.parent))
        return digest

    def _read(self, run: _Run) -> list[int | None]:
        """Slots in a row; those that are not what they should be are left out before."""
        with self._lock:
            entries = [self._journal.entries.get(item.slot) for item, _ in run]
        wanted = [
            entry is not None and item.block_hash in (b"", entry.block_hash) and len(item.memory) >= entry.num_bytes
            for (item, _), entry in zip(run, entries, strict=True)
        ]
        if len(run) > 1 and not all(wanted):
            return [one for item in run for one in self._read([item])]
        if not all(wanted):
            return [None]
        found = [entry for entry in entries if entry is not None]
        file, offset = self._place(run[0][0].slot)
        views = [item.memory[: entry.num_bytes] for (item, _), entry in zip(run, found, strict=True)]
        parts = [_aligned(view, self._slot_bytes, is_filled=False) for view in views[:-1]]
        parts.append(_aligned(views[-1], round_slot(len(views[-1])), is_filled=False))
        try:
            got, problem = os.preadv(file, parts, offset), "the file is cut short"
            self._drop_from_cache(file, offset, sum(len(part) for part in parts))
        except OSError as error:
            got, problem = 0, error.strerror or str(error)
            if len(run) > 1:  # which of them?
                return [one for item in run for one in self._read([item])]
        arrived: list[int | None] = []
        for number, (entry, view, part) in enumerate(zip(found, views, parts, strict=True)):
            if got < number * self._slot_bytes + entry.num_bytes:
                arrived.append(None)
                self._give_up(entry, problem)
            elif xxhash.xxh3_64_intdigest(part[: entry.num_bytes]) != entry.digest:
                arrived.append(None)
                self._give_up(entry, "its checksum is wrong")
            else:
                if part.obj is not view.obj:  # a room of its own
                    view[:] = part[: entry.num_bytes]
                arrived.append(entry.digest)
        with self._lock:
            self.stats.read_bytes += sum(
                entry.num_bytes for entry, ok in zip(found, arrived, strict=True) if ok is not None
            )
        return arrived

    def _give_up(self, entry: DiskEntry, problem: str) -> None:
        """What was stored in the slot meanwhile stays."""
        with self._lock:
            self.stats.num_lost += 1
            is_ours = self._journal.entries.get(entry.slot) is entry
            if is_ours:
                self._journal.remove(entry.slot)
        if is_ours:
            logger.warning("KV block in slot %d of %s is not used: %s", entry.slot, self.path.name, problem)

    def _place(self, slot: int) -> tuple[int, int]:
        """File and offset."""
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"slot {slot} of a disk tier with {self.num_slots}")
        number, within = divmod(slot, self._slots_per_file)
        return self._files[number], within * self._slot_bytes

    def _drop_from_cache(self, file: int, offset: int, length: int, is_written: bool = False) -> None:
        if self.is_direct:
            return
        if is_written:  # dirty pages cannot be dropped
            os.fdatasync(file)
        os.posix_fadvise(file, offset, length, os.POSIX_FADV_DONTNEED)


def _check_room(file: int, num_bytes: int) -> None:
    """Others need the file system too: logs, and who runs the machine. Raises OSError."""
    found = os.statvfs(file)
    free, spare = found.f_bavail * found.f_frsize, int(min(SPARE_BYTES, SPARE_SHARE * found.f_blocks * found.f_frsize))
    if num_bytes > max(0, free - spare):
        text = f"{free / _GIB:.2f} GiB of the file system are free, and {spare / _GIB:.2f} of them stay free"
        raise OSError(errno.ENOSPC, text)


def _aligned(memory: memoryview, length: int, is_filled: bool = True) -> memoryview:
    """`length` bytes that O_DIRECT takes: `memory` itself if it can be, else a copy (`is_filled`) or room for one."""
    if length == len(memory) and (length == 0 or _address(memory) % SLOT_ALIGNMENT == 0):
        return memory
    room = memoryview(mmap.mmap(-1, length))
    if is_filled:
        room[: len(memory)] = memory
    return room


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)
