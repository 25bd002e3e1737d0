"""A port that is held: for Serve's proxy, and for nobody else."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import closing

import pytest

from benchmarks.servers import free_port
from cluster.port_hold import PortHold
from replica.errors import ConfigError

IP_LOCAL_PORT_RANGE = 51  # Linux 6.3 and later: from which ports a connection gets its own


@pytest.fixture
def port() -> Iterator[int]:
    port = free_port()
    hold = PortHold("127.0.0.1", port)
    yield port
    hold.close()


def as_serve_listens(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen()
    return listener


def test_serve_listens_beside_the_hold_and_gets_every_connection(port: int) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    with as_serve_listens(port) as listener:
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", port), timeout=5), listener.accept()[0]:
                pass
    with as_serve_listens(port):  # its proxy was started anew
        pass


def test_a_second_start_is_refused_before_and_after_serve_listens(port: int) -> None:
    for _ in range(2):
        with pytest.raises(ConfigError, match=rf"--port {port}: cannot listen there: Address already in use"):
            PortHold("127.0.0.1", port)
        with as_serve_listens(port), pytest.raises(ConfigError, match="already in use"):
            PortHold("127.0.0.1", port)


def test_no_connection_is_given_the_port() -> None:
    with socket.socket() as probe:  # one of those that the kernel hands out
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with closing(PortHold("127.0.0.1", port)), socket.socket() as server, socket.socket() as other:
        server.bind(("127.0.0.1", 0))
        server.listen()
        try:
            other.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("HH", port, port))
        except OSError:
            pytest.skip("this kernel cannot be asked for a connection from one port")
        with pytest.raises(OSError, match="Cannot assign requested address"):
            other.connect(server.getsockname())
