"""ASYNC. A port that is ours from the first look until the end, though Serve's proxy listens on it only seconds later.

Ray opens a hundred connections while it starts, and the kernel gives them any free port from 32768 on.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import sys

from replica.errors import ConfigError


def check_port(port: int) -> None:
    """Raises ConfigError for a number that is no port."""
    if not 1 <= port <= 65535:
        raise ConfigError(f"--port: {port} is not a port; allowed are 1 to 65535")


class PortHold:
    """Two sockets that never listen: one bound to the port, one to a name that only `shoal serve` uses.

    Serve's proxy sets SO_REUSEADDR and SO_REUSEPORT and may bind and listen beside the first; the kernel gives the port
    to nobody else of another user, and to no connection. Of two starts at the same moment both could bind, and later
    share the port without a word: the name (abstract, so it goes with the process) belongs to one of them.
    Raises ConfigError with the reason.
    """

    def __init__(self, host: str, port: int) -> None:
        self._sockets = [socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)]
        try:
            bound = self._sockets[0]
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that ended lately do not count
            bound.bind((host, port))
            # only now, so that somebody who listens there was in the way
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if sys.platform == "linux":
                self._sockets.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                self._sockets[1].bind(f"\0shoal-serve-{host}-{port}")
        except OSError as error:
            self.close()
            reason = "Address already in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
            raise ConfigError(f"--host {host} --port {port}: cannot listen there: {reason}") from None

    def close(self) -> None:
        """Idempotent."""
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.close()
