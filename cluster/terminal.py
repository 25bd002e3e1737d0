"""ASYNC. What a person reads, apart from what Ray writes.

Ray prints on both streams of the process that starts it, from Python and past it. So the streams go to a log, and our
own lines to a copy of the stderr that was there before.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import TextIO

from cluster.ray_words import overheard
from replica.cache_folder import cache_folder

#: logs of earlier starts that are kept
_MOST_LOGS = 20

_terminal: TextIO | None = None


def say(line: str) -> None:
    """One line for whoever started us. A terminal that is gone is no reason to stop serving."""
    with contextlib.suppress(OSError):
        print(f"shoal: {line}", file=_terminal or sys.stderr, flush=True)


def divert(log: Path) -> None:
    """From now on both streams of this process, and of those it starts, end in `log`; `say` goes on as before."""
    global _terminal
    sys.stdout.flush()
    sys.stderr.flush()
    # line by line, so that a crash loses nothing
    _terminal = os.fdopen(os.dup(2), "w", buffering=1, errors="replace")
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="replace", closefd=False)
    sys.stdout = _Overhearing(os.fdopen(1, "wb", closefd=False), errors="replace", line_buffering=True)


class _Overhearing(io.TextIOWrapper):
    """A stream into the log, on which Ray says, among much else, a few things that a person has to know."""

    def write(self, text: str) -> int:
        if line := overheard(text):
            say(line)
        return super().write(text)


def new_log(port: int) -> Path:
    """Where what Ray says of this start will be. The oldest ones make room."""
    folder = cache_folder() / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    old = sorted(folder.glob("serve-*.log"), key=lambda path: path.stat().st_mtime)
    for path in old[: max(0, len(old) + 1 - _MOST_LOGS)]:
        path.unlink(missing_ok=True)
    return folder / f"serve-{port}-{os.getpid()}.log"
