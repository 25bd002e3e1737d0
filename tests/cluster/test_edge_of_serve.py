"""What only the whole chain of client, Serve's proxy and router shows: the guard in the proxy, slow bodies, a reset by
HTTP.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.why import why
from replica.errors import ShoalError
from tests.cluster.shoal_process import ShoalProcess, wait_until

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def shoal() -> Iterator[ShoalProcess]:
    settings = ("--set", "http.admin_endpoints=true", "--set", "http.body_timeout_s=1")
    with ShoalProcess("--routers", "2", *settings) as process:
        yield process


def exchange(
    shoal: ShoalProcess,
    *headers: bytes,
    target: bytes = b"POST /v1/completions",
    body: bytes,
    length: int | None = None,
) -> tuple[int, dict[str, str], bytes]:
    """Raw bytes out; status, headers and body back."""
    head = [
        target + b" HTTP/1.1",
        b"host: x",
        b"content-length: %d" % (len(body) if length is None else length),
        *headers,
    ]
    with socket.create_connection(("127.0.0.1", shoal.port), timeout=20) as connection:
        connection.sendall(b"\r\n".join([*head, b"", body]))
        with connection.makefile("rb") as answer:
            status = int(answer.readline().split()[1])
            found: dict[str, str] = {}
            while line := answer.readline().strip():
                name, _, value = line.decode("latin-1").partition(":")
                assert name.lower() not in found, f"{name} twice"
                found[name.lower()] = value.strip()
            return status, found, answer.read(int(found["content-length"]))


BODY = json.dumps({"prompt": [5, 6, 7], "max_tokens": 2}).encode()


def test_headers_that_the_proxy_would_act_on_or_fail_on_end_there(shoal: ShoalProcess) -> None:
    status, headers, _ = exchange(shoal, b"x-request-id: mine", b"x-request-timeout-seconds: 0.000001", body=BODY)
    assert (status, headers["x-request-id"]) == (200, "mine")
    for bad in (b"\xff", b"x" * 500):
        status, headers, _ = exchange(shoal, b"x-request-id: " + bad, b"x-session-id: \xff", body=BODY)
        assert (status, len(headers["x-request-id"])) == (200, 32)
    status, headers, body = exchange(shoal, b"x-padding: " + b"x" * (64 << 10), body=BODY)
    assert (status, json.loads(body)["error"]["code"]) == (431, "headers_too_large")
    assert len(headers["x-request-id"]) == 32


def test_a_body_that_does_not_come_is_408(shoal: ShoalProcess) -> None:
    status, headers, body = exchange(shoal, body=BODY[:5], length=len(BODY))
    assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")
    assert "x-request-id" in headers


def test_a_reset_by_http(shoal: ShoalProcess) -> None:
    status, _, body = exchange(shoal, target=b"POST /reset_prefix_cache", body=b"")
    assert (status, json.loads(body)) == (200, {"reset": 1})
    _, _, text = exchange(shoal, target=b"GET /metrics", body=b"")
    assert b"shoal_prefix_cache_resets_total{" in text


def test_an_error_is_found_by_its_header_at_one_of_two_routers_and_in_the_logs(shoal: ShoalProcess) -> None:
    late = (b"x-request-id: late-1", b"x-request-deadline-ms: 30")
    status, headers, _ = exchange(shoal, *late, body=BODY[:5], length=len(BODY))
    assert (status, headers["x-request-id"]) == (504, "late-1")
    told = why("127.0.0.1", shoal.port, "late-1")
    assert (told["outcome"], told["events"][-1]["what"]) == ("refused", "answered 504")
    (line,) = (line for line in shoal.lines if "shoal: logs: " in line)
    logs = Path(line.split()[2])

    def written(pattern: str, text: str) -> bool:
        return any(text in file.read_text() for file in logs.glob(pattern))

    name = f"request {told['request_id']}, X-Request-Id late-1 failed with 504"
    wait_until(lambda: written("*Router*.log", name), 10, "a line on the error in the log of its router")
    wait_until(lambda: written("*Replica*.log", "fake runner"), 10, "what a replica says of its device in its log")


@pytest.mark.parametrize("name", ["..", "%00", "a/b", "x" * 128])
def test_ids_that_a_proxy_might_stumble_over_are_not_known(shoal: ShoalProcess, name: str) -> None:
    with pytest.raises(ShoalError, match="404 Neither this router nor a replica knows"):
        why("127.0.0.1", shoal.port, name)
