"""ASYNC (threads). Hashes of whole files, kept in the cache folder beside what tells whether a file is still the same.

KV of other weights must never be found, and samples do not tell them apart: whoever scales a norm, or tunes one layer,
changes kilobytes of gigabytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import xxhash

#: hashed on a thread, in reads of `_READ_BYTES` that stay in the core's cache
_PIECE_BYTES, _READ_BYTES = 64 << 20, 1 << 20
_NUM_THREADS = 4
#: time stamps are this coarse on some file systems: what was hashed sooner after a change may have changed since
_COARSE_NS = 2_000_000_000


class _Known(msgspec.Struct, frozen=True):
    """Of a file: its identity when it was hashed. The time of change cannot be set back, other than that of writing."""

    path: str
    size: int
    inode: int
    written_ns: int
    changed_ns: int
    digest: str = ""


def file_digest(path: Path, folder: Path) -> str:
    """Hex xxh3 of all bytes of `path`. Read in full (a second for 10 GB that are in memory) unless `folder` has the
    hash of just this file. Raises OSError.
    """
    path = path.resolve()
    found = path.stat()
    if found.st_size <= _PIECE_BYTES:  # a few milliseconds: not worth a record
        return _digest(path, found.st_size)
    now = _Known(str(path), found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)
    place = folder / f"{hashlib.blake2b(str(path).encode(), digest_size=16).hexdigest()}.json"
    with contextlib.suppress(OSError, msgspec.DecodeError):
        known = msgspec.json.decode(place.read_bytes(), type=_Known)
        is_settled = place.stat().st_mtime_ns - known.changed_ns > _COARSE_NS
        if is_settled and known.digest and msgspec.structs.replace(known, digest="") == now:
            return known.digest
    digest = _digest(path, found.st_size)
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time
        folder.mkdir(parents=True, exist_ok=True)
        fresh = place.with_suffix(f".{os.getpid()}")
        fresh.write_bytes(msgspec.json.encode(msgspec.structs.replace(now, digest=digest)))
        os.replace(fresh, place)
    return digest


def _digest(path: Path, size: int) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def piece(start: int) -> bytes:
        hasher, at, end = xxhash.xxh3_128(), start, min(start + _PIECE_BYTES, size)
        while at < end:
            data = os.pread(descriptor, min(_READ_BYTES, end - at), at)
            if not data:
                raise OSError(f"{path} was cut short while it was read, at byte {at}")
            hasher.update(data)
            at += len(data)
        return hasher.digest()

    try:
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            return xxhash.xxh3_128_hexdigest(b"".join(pool.map(piece, range(0, size, _PIECE_BYTES))))
    finally:
        os.close(descriptor)
