"""The rows of docs/overload.md that only a whole cluster shows: a router and a proxy that are killed."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import httpx
import pytest

from cluster.process_sweep import descendants
from tests.api.overload_table import rows
from tests.cluster.shoal_process import ShoalProcess, wait_until
from tests.cluster.test_serve import body, is_at_baseline, tokens_of

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def proxies(shoal: ShoalProcess) -> list[int]:
    """Processes of Serve's proxy: Ray writes what an actor is into its command line."""
    found = []
    for pid in descendants(shoal.process.pid):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"ray::ProxyActor" in line:
            found.append(pid)
    return found


def test_killed() -> None:
    """A stream is cut without an end mark, what had no byte yet is a 500 of Serve's, and all that ran is freed."""
    assert {rows()[name].status for name in ("on-router-killed", "on-proxy-killed")} == {"cut"}
    with ShoalProcess() as shoal, httpx.Client(base_url=shoal.url, timeout=60) as client:
        for name in ("router", "proxy"):
            wait_until(lambda: len(shoal.pids("Router")) == len(proxies(shoal)) == 1, 60, "one of each")
            (victim,) = shoal.pids("Router") if name == "router" else proxies(shoal)
            request = client.build_request("POST", "/v1/completions", json=body(1, 4000, stream=True))
            stream = client.send(request, stream=True)
            assert stream.status_code == 200
            lines = stream.iter_lines()
            assert tokens_of(next(lines))
            whole = client.build_request("POST", "/v1/completions", json=body(2, 4000))
            answers: list[int] = []
            pending = threading.Thread(target=_put_status, args=(client, whole, answers))
            pending.start()
            wait_until(lambda: shoal.status()["requests"] == 2, 20, "both requests under way")
            os.kill(victim, signal.SIGKILL)
            rest: list[str] = []
            with pytest.raises(httpx.RemoteProtocolError):
                rest.extend(lines)
            assert "data: [DONE]" not in rest
            stream.close()
            pending.join(30)
            assert answers == ([int(rows()["router-killed"].status)] if name == "router" else [0])
            wait_until(lambda: _answers(shoal), 60, "an answer")
            wait_until(lambda: is_at_baseline(shoal), 20, "pools at baseline")


def _put_status(client: httpx.Client, request: httpx.Request, answers: list[int]) -> None:
    """0: the connection was cut before a status line."""
    try:
        answers.append(client.send(request).status_code)
    except httpx.TransportError:
        answers.append(0)


def _answers(shoal: ShoalProcess) -> bool:
    try:
        return httpx.post(f"{shoal.url}/v1/completions", json=body(3, 2), timeout=30).status_code == 200
    except httpx.TransportError:
        return False
