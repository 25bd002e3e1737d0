"""A TCP link between two processes of this machine that swallows: what arrives at their sockets for each other is
thrown away by the kernel, nobody is told, and new connections get no answer. Needs no network namespace and no
firewall: a packet filter that lets nothing through is attached to the sockets themselves (Linux, and the right to trace
them).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_ATTACH, _DETACH, _GETFD = 26, 27, 438  # SO_ATTACH_FILTER, SO_DETACH_FILTER; pidfd_getfd has one number everywhere
#: "take 0 bytes of it", the whole program
_NOTHING = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
_PROGRAM = struct.pack("HxxxxxxP", 1, ctypes.addressof(_NOTHING))


class NoLink(Exception):
    """These two have no connection, or this process may not touch their sockets."""


def _sockets(pid: int, stack: contextlib.ExitStack) -> list[socket.socket]:
    """Its IPv4 sockets, as descriptors of this process too. Raises NoLink."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        process = os.pidfd_open(pid)
    except OSError as error:
        raise NoLink(str(error)) from error
    stack.callback(os.close, process)
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if not os.readlink(link).startswith("socket:"):
                continue
            number = libc.syscall(_GETFD, process, int(link.name), 0)
            if number < 0:
                raise NoLink(f"pidfd_getfd: {os.strerror(ctypes.get_errno())}")
            one = stack.enter_context(socket.socket(fileno=number))
            if one.family == socket.AF_INET and one.type == socket.SOCK_STREAM:
                found.append(one)
    return found


def _peer(one: socket.socket) -> tuple[str, int] | None:
    try:
        host, port = one.getpeername()
    except OSError:
        return None
    return host, port


def _is_listening(one: socket.socket) -> bool:
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _between(here: list[socket.socket], there: list[socket.socket]) -> Iterator[socket.socket]:
    """Of `here`: ends of connections with `there`, and where such connections arrive."""
    ends = {(one.getsockname(), _peer(one)) for one in there if not _is_listening(one)}
    own = [one for one in here if not _is_listening(one) and (_peer(one), one.getsockname()) in ends]
    ports = {one.getsockname()[1] for one in own}
    yield from own
    yield from (one for one in here if _is_listening(one) and one.getsockname()[1] in ports)


@contextlib.contextmanager
def cut(one: int, other: int) -> Iterator[int]:
    """Between two processes by pid; yields how many sockets are deaf. Raises NoLink."""
    with contextlib.ExitStack() as stack:
        first, second = _sockets(one, stack), _sockets(other, stack)
        deaf = [*_between(first, second), *_between(second, first)]
        if not deaf:
            raise NoLink("they have no connection")
        for end in deaf:
            end.setsockopt(socket.SOL_SOCKET, _ATTACH, _PROGRAM)
        try:
            yield len(deaf)
        finally:
            for end in deaf:
                end.setsockopt(socket.SOL_SOCKET, _DETACH, 0)
