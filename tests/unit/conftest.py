"""Unit tests start no Ray and reach nothing beyond this machine."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

import pytest


def _is_local(address: Any) -> bool:
    """True for loopback and for Unix sockets (a path, or bytes for an abstract name)."""
    if isinstance(address, str | bytes):
        return True
    host = address[0]
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name that would have to be looked up, or "" for every interface
        return False


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray.init`, called outright or by the first `.remote()`, fails the test."""

    def refuse(*_args: Any, **_kwargs: Any) -> None:
        pytest.fail(
            "a unit test must not start Ray: move it to tests/cluster, or test the plain class behind the decorator"
        )

    monkeypatch.setattr("ray.init", refuse)


@pytest.fixture(autouse=True)
def loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket that binds or connects beyond loopback fails the test. (Sockets made in C, as gRPC's, are not seen.)"""
    for name in ("bind", "connect", "connect_ex"):
        original = getattr(socket.socket, name)

        def guarded(self: socket.socket, address: Any, _original: Any = original, _name: str = name) -> Any:
            if not _is_local(address):
                pytest.fail(f"a unit test must stay on loopback: socket.{_name}({address!r})")
            return _original(self, address)

        monkeypatch.setattr(socket.socket, name, guarded)
