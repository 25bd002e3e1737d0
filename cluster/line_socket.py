"""ASYNC. What a replica has for the terminal of `shoal serve`, as datagrams: nobody asks, so it costs nothing until
there is news. An abstract Unix socket: good on this node, and of other nodes nothing is heard.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable

_MAX_BYTES = 1000
_UCRED = struct.calcsize("3i")


class LineSocket:
    """The end that listens. `name` is what `tell` wants."""

    def __init__(self) -> None:
        self.name = f"shoal-lines-{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind("\0" + self.name)

    def follow(self, say: Callable[[str], object]) -> None:
        """From now on `say` gets each line, on a thread that ends with the process."""
        threading.Thread(target=self._listen, args=(say,), name="shoal-lines", daemon=True).start()

    def close(self) -> None:
        """Nobody listens any more."""
        self._socket.close()

    def receive(self) -> str:
        """The next line, printable; empty if it came from somebody else. Blocks."""
        data, ancillary, _, _ = self._socket.recvmsg(_MAX_BYTES, socket.CMSG_SPACE(_UCRED))
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                _, user, _ = struct.unpack("3i", content[:_UCRED])
                if user == os.getuid():
                    return "".join(c if c.isprintable() else " " for c in data.decode(errors="replace"))
        return ""

    def _listen(self, say: Callable[[str], object]) -> None:
        while True:
            if line := self.receive():
                say(line)


def tell(name: str, line: str) -> None:
    """To the socket `name`, if it is there; never waits."""
    if not name:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.setblocking(False)
        out.sendto(line.encode()[:_MAX_BYTES], "\0" + name)
