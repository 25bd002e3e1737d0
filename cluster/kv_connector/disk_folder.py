"""ASYNC. The folder of a disk tier: one subfolder a KVSpace, held by one process at a time, within a number of bytes.

    <folder>/<digest of the space>.<n>/   space.json  lock  index  slabs-000, slabs-001, ...

KV of another model, revision, dtype, layout, RoPE setting, block size or TP degree has another digest and is never
looked at. `n` is above 0 only while several connectors of one machine use the same folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import shutil
from pathlib import Path

import msgspec

from replica.errors import ConfigError
from replica.kv_messages import KVSpace

#: of the files; another one is another space
LAYOUT_VERSION = 1
#: connectors on one folder
MAX_CONNECTORS = 8
_GIB = 1 << 30
logger = logging.getLogger(__name__)


class SpaceHeader(msgspec.Struct, frozen=True):
    """First thing in a space's folder, for people and for the check."""

    layout_version: int
    slab_bytes: int
    space: KVSpace


def space_name(space: KVSpace, slab_bytes: int) -> str:
    """Of its subfolder; a hash that is the same in every process."""
    header = msgspec.json.encode(SpaceHeader(LAYOUT_VERSION, slab_bytes, space))
    return hashlib.blake2b(header, digest_size=12).hexdigest()


class SpaceFolder:
    """A subfolder that is ours until `close`. Raises ConfigError: it cannot be made, written or locked."""

    def __init__(self, folder: Path, space: KVSpace, slab_bytes: int) -> None:
        name = space_name(space, slab_bytes)
        self._lock = -1
        try:
            for number in range(MAX_CONNECTORS):
                self.path = folder / f"{name}.{number}"
                self.path.mkdir(parents=True, exist_ok=True)
                if self._take_lock():
                    self._write_header(SpaceHeader(LAYOUT_VERSION, slab_bytes, space))
                    return
        except OSError as error:
            self.close()
            raise ConfigError(f"kv_cache.disk_folder: {folder} cannot be used: {error.strerror or error}") from None
        raise ConfigError(
            f"kv_cache.disk_folder: {folder} is used by {MAX_CONNECTORS} connectors already; give another folder"
        )

    def make_room(self, wanted: int, limit: int) -> None:
        """Remove spaces that nobody uses, the longest unused first, until they and `wanted` bytes fit into `limit`."""
        others = [one for one in self.path.parent.iterdir() if one != self.path and (one / "space.json").is_file()]
        others.sort(key=lambda one: (one / "space.json").stat().st_mtime)
        sizes = {one: folder_bytes(one) for one in others}
        for one in others:
            if wanted + sum(sizes.values()) <= limit:
                return
            if remove_unused(one):
                logger.info("removed KV of another model or setting: %s (%.2f GiB)", one.name, sizes.pop(one) / _GIB)

    @property
    def generation(self) -> int:
        """Of what is here: `TierEvent.generation`. 0: never cleared, or not known, and then others will say so."""
        try:
            return int((self.path / "generation").read_text())
        except (OSError, ValueError):
            return 0

    def keep_generation(self, generation: int) -> None:
        """After the index was emptied, never before: what is found at a restart is at least of this one."""
        with contextlib.suppress(OSError):  # lost, it costs what is on disk: other nodes tell a higher one
            fresh = self.path / "generation.new"
            fresh.write_text(str(generation))
            os.replace(fresh, self.path / "generation")

    def close(self) -> None:
        """Idempotent. The files stay."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _take_lock(self) -> bool:
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        if not _is_same_file(lock, self.path / "lock"):  # removed by `remove_unused` in between
            os.close(lock)
            return False
        self._lock = lock
        return True

    def _write_header(self, header: SpaceHeader) -> None:
        path = self.path / "space.json"
        with contextlib.suppress(OSError, msgspec.DecodeError):
            if msgspec.json.decode(path.read_bytes(), type=SpaceHeader) == header:
                os.utime(path)
                return
        for old in (*self.path.glob("slabs-*"), self.path / "index"):  # cut short, or two digests that are equal
            old.unlink(missing_ok=True)
        fresh = path.with_suffix(".new")
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode(header)))
        os.replace(fresh, path)


def folder_bytes(folder: Path) -> int:
    """On disk, of the files in it."""
    total = 0
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            total += path.stat().st_blocks * 512
    return total


def remove_unused(folder: Path) -> bool:
    """False: somebody holds it, or it cannot be removed."""
    try:
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / "space.json").unlink(missing_ok=True)
        shutil.rmtree(folder)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            logger.warning("%s cannot be removed: %s", folder, error)
        return False
    finally:
        os.close(lock)
    return True


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
