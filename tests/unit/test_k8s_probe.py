"""The probe of the pods, against a real HTTP server on loopback."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from cluster.k8s import probe

RAYLET, PROXY = "/api/local_raylet_healthz", "/-/healthz"
OK = (200, b"success")


@pytest.fixture
def main() -> Any:
    return probe.main


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, tuple[int, bytes]]]:
    """What the server answers by path; both ports of the probe point at it."""
    table: dict[str, tuple[int, bytes]] = {RAYLET: OK, PROXY: OK}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = table.get(self.path, (404, b"no such path"))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("SHOAL_PROBE_AGENT_PORT", str(server.server_port))
        monkeypatch.setenv("SHOAL_PROBE_SERVE_PORT", str(server.server_port))
        yield table
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("raylet", "proxy", "ready", "alive"),
    [
        (OK, OK, 0, 0),
        (OK, (503, b"Route table is not populated yet."), 1, 0),
        (OK, (200, b"Route table is not populated yet."), 1, 0),
        (OK, (503, b"This node is being drained."), 1, 0),
        ((503, b"raylet does not answer"), OK, 1, 1),
    ],
)
def test_verdict(
    main: Any,
    answers: dict[str, tuple[int, bytes]],
    raylet: tuple[int, bytes],
    proxy: tuple[int, bytes],
    ready: int,
    alive: int,
) -> None:
    answers.update({RAYLET: raylet, PROXY: proxy})
    assert (main(["ready"]), main(["alive"])) == (ready, alive)


def test_nobody_listens(main: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SHOAL_PROBE_AGENT_PORT", "1")
    monkeypatch.setenv("SHOAL_PROBE_SERVE_PORT", "1")
    assert main(["ready"]) == 1
    assert "no answer from raylet, serve proxy" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["live"], ["ready", "alive"]])
def test_wrong_usage(main: Any, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "usage" in capsys.readouterr().err


def test_cases_g_03_a_proxy_without_routes_is_not_ready(main: Any, answers: dict[str, tuple[int, bytes]]) -> None:
    """G-03: it answers 200 before it knows the routes, and a deployed model would be a 404."""
    answers[PROXY] = (200, b"Route table is not populated yet.")
    assert main(["ready"]) == 1
    answers[PROXY] = OK
    assert main(["ready"]) == 0


def test_cases_g_06_a_pod_that_loads_is_alive_however_long(main: Any, answers: dict[str, tuple[int, bytes]]) -> None:
    """G-06: no replica yet, hence no proxy. Liveness asks the raylet alone, so a long load restarts nothing."""
    del answers[PROXY]
    assert (main(["ready"]), main(["alive"])) == (1, 0)
