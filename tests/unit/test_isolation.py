"""The guards of this tier do guard."""

from __future__ import annotations

import socket

import pytest


def test_ray_cannot_be_started() -> None:
    import ray

    with pytest.raises(pytest.fail.Exception, match="must not start Ray"):
        ray.init()


def test_a_remote_call_cannot_start_ray_either() -> None:
    import ray

    function = ray.remote(lambda: 1)
    with pytest.raises(pytest.fail.Exception, match="must not start Ray"):
        function.remote()
    assert not ray.is_initialized()


@pytest.mark.parametrize("address", [("192.0.2.1", 80), ("0.0.0.0", 0), ("", 0), ("example.invalid", 80)])
@pytest.mark.parametrize("method", ["bind", "connect", "connect_ex"])
def test_sockets_beyond_loopback_are_refused(method: str, address: tuple[str, int]) -> None:
    with socket.socket() as sock, pytest.raises(pytest.fail.Exception, match="loopback"):
        getattr(sock, method)(address)


@pytest.mark.parametrize("address", [("127.0.0.1", 0), ("localhost", 0)])
def test_loopback_is_allowed(address: tuple[str, int]) -> None:
    with socket.socket() as sock:
        sock.bind(address)
        assert sock.getsockname()[0] == "127.0.0.1"
