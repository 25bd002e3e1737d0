"""ASYNC. The index of a disk tier, kept as records that are appended to a file: which block is in which slot.

A record counts only if its own checksum is right, and reading ends at the first that is not: a kill in the middle of an
append loses that record alone. Slabs are checked against the `digest` of their record, so nothing has to be forced to
the disk in order: after a power cut a record without its bytes is a miss. Rewritten when most of it is history, under
another name that then takes the place.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import zlib
from pathlib import Path

import msgspec

#: crc32 of what follows, kind, lengths of hash and parent, slot, bytes of the slab, its xxh3, position
_RECORD = struct.Struct("<IBBBIIQI")
_STORED, _FORGOTTEN, _CLEARED = 1, 2, 3
_MAGIC = b"shoal-kv-index-2\n"
#: records that are history before it is worth to write the rest again
_MAX_HISTORY = 4096
logger = logging.getLogger(__name__)


class DiskEntry(msgspec.Struct, frozen=True):
    """A block on disk."""

    block_hash: bytes
    slot: int
    num_bytes: int
    #: xxh3 (64 bits) of the bytes
    digest: int
    #: in its chain, and the hash before it: for whoever decides what goes first
    position: int = 0
    parent: bytes = b""


class DiskJournal:
    """Not safe for several threads at once: the tier holds its lock."""

    def __init__(self, path: Path) -> None:
        """Reads what is there. Raises OSError."""
        self._path = path
        #: by slot, in the order of storing
        self.entries: dict[int, DiskEntry] = {}
        self._num_records = 0
        #: its end is no whole record
        self._is_torn = False
        with contextlib.suppress(FileNotFoundError):
            self._replay(path.read_bytes())
        self._file = -1
        self._rewrite()  # a torn end is gone, and what is appended from now on is found

    def put(self, entry: DiskEntry) -> None:
        """The slab is on disk. Takes the place of what the slot held."""
        self.entries.pop(entry.slot, None)
        self.entries[entry.slot] = entry
        self._append(_record(_STORED, entry))

    def remove(self, slot: int) -> None:
        """The slot holds nothing."""
        entry = self.entries.pop(slot, None)
        if entry is not None:
            self._append(_record(_FORGOTTEN, entry))

    def clear(self) -> None:
        """No slot holds anything, also after a power cut. Blocking. Raises OSError: that is not sure."""
        self.entries.clear()
        self._append(_record(_CLEARED, DiskEntry(b"", 0, 0, 0)))
        if self._is_torn:
            self._rewrite()
        os.fdatasync(self._file)

    def close(self) -> None:
        """Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _append(self, record: bytes) -> None:
        """Cannot fail: on a full disk the tier works on, and a restart finds less. What it finds is checked."""
        try:
            if self._is_torn or self._num_records > 2 * len(self.entries) + _MAX_HISTORY:
                self._rewrite()  # with what this record says
                return
            self._is_torn = os.write(self._file, record) != len(record)  # O_APPEND, one call
            self._num_records += 1
        except OSError as error:
            if not self._is_torn:
                logger.warning("%s cannot be written: %s", self._path, error.strerror)
            self._is_torn = True

    def _rewrite(self) -> None:
        fresh = self._path.with_suffix(".new")
        fresh.write_bytes(_MAGIC + b"".join(_record(_STORED, entry) for entry in self.entries.values()))
        os.replace(fresh, self._path)
        self.close()
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._num_records = len(self.entries)
        self._is_torn = False

    def _replay(self, data: bytes) -> None:
        at = len(_MAGIC)
        if data[:at] != _MAGIC:
            return
        while at + _RECORD.size <= len(data):
            check, kind, length, parent_length, slot, num_bytes, digest, position = _RECORD.unpack_from(data, at)
            middle = at + _RECORD.size + length
            end = middle + parent_length
            if end > len(data) or zlib.crc32(data[at + 4 : end]) != check:
                return
            self.entries.pop(slot, None)
            if kind == _STORED:
                block_hash, parent = data[middle - length : middle], data[middle:end]
                self.entries[slot] = DiskEntry(block_hash, slot, num_bytes, digest, position, parent)
            elif kind == _CLEARED:
                self.entries.clear()
            at = end


def _record(kind: int, entry: DiskEntry) -> bytes:
    lengths = (len(entry.block_hash), len(entry.parent))
    fields = (kind, *lengths, entry.slot, entry.num_bytes, entry.digest, entry.position)
    body = _RECORD.pack(0, *fields)[4:] + entry.block_hash + entry.parent
    return zlib.crc32(body).to_bytes(4, "little") + body
