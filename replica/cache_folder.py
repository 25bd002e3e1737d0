"""PURE. Where Shoal keeps what it can make again: converted models, compiled kernels. Knows no content."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """The cache's root: `SHOAL_CACHE`, else `~/.cache/shoal`. Not created here."""
    environ = os.environ if environ is None else environ
    return Path(environ.get("SHOAL_CACHE") or Path.home() / ".cache" / "shoal").expanduser()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file `path` (made if absent), against other processes; waits for the holder.

    The lock goes with the process, so a killed holder leaves nothing to clean up.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
