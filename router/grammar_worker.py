"""ASYNC. Checks clients' grammars in a process of its own, which may be killed: `structured.reason_against` with a
limit in seconds and bytes around it.

llguidance bounds its work, but not all of it: a few hundred bytes of a Lark grammar that intersects patterns took
seconds and gigabytes, and a chain of references overflowed its stack. Here that costs the worker, and the client a 400.
Answers are remembered, since clients send the same schema again and again.
"""

from __future__ import annotations

import contextlib
import resource
import select
import struct
import subprocess
import sys
import threading
from collections import OrderedDict
from typing import IO

from router.structured import reason_against

#: most seconds and bytes of address space for one check: ordinary schemas take milliseconds, and the largest ones that
#: `schema_bounds` lets through about half a second
MAX_CHECK_S = 2.0
MAX_BYTES = 1 << 30
#: starting Python and loading the library, on a machine that is busy
_MAX_START_S = 30.0
_MAX_REMEMBERED = 512
_SIZE = struct.Struct("<I")
TOO_MUCH = "it takes too much time or memory to follow"


class GrammarChecker:
    """Call it from any thread; one check at a time. The first one starts the worker, and so does one after a kill."""

    def __init__(self, max_check_s: float = MAX_CHECK_S) -> None:
        self._max_check_s = max_check_s
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None
        self._known: OrderedDict[str, str] = OrderedDict()

    def reason_against(self, grammar: str) -> str:
        """Why `grammar` cannot be used, or "" when it can."""
        with self._lock:
            known = self._known.get(grammar)
            if known is not None:
                self._known.move_to_end(grammar)
                return known
            reason = self._ask(grammar)
            if reason == TOO_MUCH:
                return reason  # perhaps the machine was busy: the next one who asks gets a fresh look
            self._known[grammar] = reason
            if len(self._known) > _MAX_REMEMBERED:
                self._known.popitem(last=False)
            return reason

    def close(self) -> None:
        """End the worker. Idempotent."""
        with self._lock:
            self._kill()

    def _ask(self, grammar: str) -> str:
        if self._worker is not None and self._worker.poll() is not None:
            self._kill()  # somebody else ended it; that says nothing about this grammar
        worker = self._worker or self._start()
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            _write(worker.stdin, grammar.encode())
            if select.select([worker.stdout], [], [], self._max_check_s)[0]:
                answer = _read(worker.stdout)
                if answer is not None:
                    return answer.decode()
        except OSError:
            pass  # it died of the grammar
        self._kill()
        return TOO_MUCH

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "router.grammar_worker"]
        pipe = subprocess.PIPE
        # what a dying library prints is about a client's grammar, and of no use to anybody
        self._worker = worker = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, bufsize=0)
        assert worker.stdout is not None
        if not select.select([worker.stdout], [], [], _MAX_START_S)[0] or _read(worker.stdout) is None:
            self._kill()
            raise RuntimeError("the process that checks grammars did not start")
        return worker

    def _kill(self) -> None:
        worker, self._worker = self._worker, None
        if worker is None:
            return
        worker.kill()
        worker.wait()
        for pipe in (worker.stdin, worker.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _write(pipe: IO[bytes], data: bytes) -> None:
    rest = memoryview(_SIZE.pack(len(data)) + data)
    while rest:
        rest = rest[pipe.write(rest) :]


def _read(pipe: IO[bytes]) -> bytes | None:
    """One message, None at the end of the pipe."""
    size = _read_exactly(pipe, _SIZE.size)
    return None if size is None else _read_exactly(pipe, _SIZE.unpack(size)[0])


def _read_exactly(pipe: IO[bytes], count: int) -> bytes | None:
    parts = []
    while count:
        part = pipe.read(count)
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def main() -> None:
    """The worker: grammars in, reasons out, until the pipe ends."""
    import llguidance  # noqa: F401  # before the limit and before the first check is timed

    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    source, sink = open(0, "rb", buffering=0), open(1, "wb", buffering=0)  # noqa: SIM115  # for the process's life
    _write(sink, b"ready")
    while (grammar := _read(source)) is not None:
        _write(sink, reason_against(grammar.decode()).encode())


if __name__ == "__main__":
    main()
