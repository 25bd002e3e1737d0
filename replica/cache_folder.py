"""PURE. Where Shoal keeps what it can make again: converted models, compiled kernels. Knows no content."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """The cache's root: `SHOAL_CACHE`, else `~/.cache/shoal`. Not created here."""
    environ = os.environ if environ is None else environ
    return Path(environ.get("SHOAL_CACHE") or Path.home() / ".cache" / "shoal").expanduser()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`, against other processes; waits for the holder. The file is there only
    as long as somebody holds it.

    The lock goes with the process: a killed holder leaves the file, and it harms nobody.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_at(file, path):
                continue  # the holder before took it away: others may hold one of this name already
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _is_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
