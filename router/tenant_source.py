"""ASYNC. Where a router's tenants come from: the configuration, what lies over it now, and a file that may change.

A Kubernetes Secret is changed by a symlink that points elsewhere, an editor renames another file into place, and
somebody writes into the file itself: all three are another file behind the path, or another time and length of the
same. A file that cannot be used changes nothing; it is told once, and looked at again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from replica.errors import ConfigError
from router.tenant_desk import TenantDesk
from router.tenants import Tenant

logger = logging.getLogger(__name__)

#: between two looks at the file: a stat of it, 20 us on a thread
LOOK_S = 1.0
#: 1,000 keys take 85 KB and 0.2 s on a thread
MAX_FILE_BYTES = 1 << 20
#: two changes within one tick of the file system's clock leave equal times, so what is younger is read again
_SURE_AFTER_S = 2.0


class TenantRules(NamedTuple):
    """Passed in, as a router knows no configuration. Both raise ConfigError."""

    #: text of the file -> what it says
    parse: Callable[[bytes], Any]
    #: configuration at the start, what lies over it, what the file says -> tenants
    in_force: Callable[[Mapping[str, Any], Mapping[str, Any], Any], Sequence[Tenant]]


class WatchedFile:
    """A small file, read again only when it may have changed."""

    def __init__(self, path: str, wall_clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._wall_clock = wall_clock
        self._seen: tuple[int, ...] | None = None
        self._is_sure = False
        self._text = b""

    def look(self) -> bytes:
        """What it holds. Raises OSError or ConfigError."""
        now = self._wall_clock()
        with open(self._path, "rb") as file:  # stat and bytes of one and the same file, whatever the path names later
            stat = os.fstat(file.fileno())
            seen = (stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size)
            if seen == self._seen and self._is_sure:
                return self._text
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise ConfigError(f"has more than {MAX_FILE_BYTES >> 20} MiB; allowed: at most that")
        self._seen, self._is_sure = seen, now - stat.st_ctime >= _SURE_AFTER_S
        self._text = text
        return text


class TenantSource:
    """Keeps a desk's tenants those of configuration and file."""

    def __init__(
        self,
        desk: TenantDesk,
        rules: TenantRules,
        start: Mapping[str, Any],
        path: str | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`start`: the configuration at the start."""
        self._desk, self._rules, self._start, self._clock = desk, rules, start, clock
        self._path = path
        self._file = None if path is None else WatchedFile(path)
        self._overlay: Mapping[str, Any] = {}
        #: the text that is in force, and what `rules.parse` made of it
        self._text = b""
        self._told: Any = {}
        #: the last that could not be used, and why: it is not parsed again at each look
        self._bad: tuple[bytes, ConfigError] | None = None
        self._last_failure = ""
        self._task: asyncio.Task[None] | None = None

    def load(self) -> None:
        """At the start. Raises ConfigError: a router that knows no tenants would answer 401 beside others that do."""
        if self._file is not None:
            try:
                self._text = self._file.look()
                self._told = self._rules.parse(self._text)
            except (OSError, ConfigError) as error:
                raise ConfigError(f"tenants.file {self._path}: {_words(error)}") from None
        self._exchange(self._told)

    def lay(self, overlay: Mapping[str, Any]) -> None:
        """Something else lies over the configuration. Raises ConfigError, and then nothing has changed."""
        before, self._overlay = self._overlay, overlay
        try:
            self._exchange(self._told)
        except ConfigError:
            self._overlay = before
            raise

    def watch(self) -> None:
        """Look at the file from now on. On the event loop."""
        if self._file is not None:
            self._task = asyncio.create_task(self._run(), name="shoal-tenants-file")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def look(self) -> None:
        """Take what the file says if that is news. Reading and parsing happen on a thread. Never raises."""
        try:
            news = await asyncio.get_running_loop().run_in_executor(None, self._read)
            if news is not None:
                self._take(*news)
        except Exception as error:
            self._failed(error)
            return
        if self._last_failure:
            self._last_failure, self._desk.is_file_good = "", True
            logger.info("tenants.file %s can be used again", self._path)

    def _read(self) -> tuple[bytes, Any] | None:
        """Text and what it says; None: it is what is in force. Raises OSError or ConfigError. On a thread."""
        assert self._file is not None
        text = self._file.look()
        if text == self._text:
            return None
        if self._bad is not None and text == self._bad[0]:
            raise self._bad[1]
        try:
            return text, self._rules.parse(text)
        except ConfigError as error:
            self._bad = text, error
            raise

    def _take(self, text: bytes, told: Any) -> None:
        try:
            self._exchange(told)
        except ConfigError as error:
            self._bad = text, error
            raise
        self._text, self._told = text, told
        logger.info("tenants.file %s is read again: %d tenants", self._path, len(self._desk.names))

    async def _run(self) -> None:
        while True:
            # a file system that hangs stops this alone: tenants stay what they were
            await asyncio.sleep(LOOK_S)
            await self.look()

    def _exchange(self, told: Any) -> None:
        self._desk.exchange(self._rules.in_force(self._start, self._overlay, told), self._clock())

    def _failed(self, error: Exception) -> None:
        words = _words(error)
        if words == self._last_failure:
            return
        self._last_failure, self._desk.is_file_good = words, False
        self._desk.num_bad_files += 1
        logger.error("tenants.file %s cannot be used, the tenants stay as they were: %s", self._path, words)


def _words(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
