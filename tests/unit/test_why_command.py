"""`shoal why` and `shoal status` against servers that are not there, not ours, or not willing: a sentence."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator

import pytest

from cluster.cli import main
from cluster.why import why


@contextlib.contextmanager
def server(*answers: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """Answers its connections with these bytes in turn, the last one again and again. Its port, what it was asked."""
    asked: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def work() -> None:
        while True:
            with contextlib.suppress(OSError), listener.accept()[0] as connection:
                if not (question := connection.recv(65536)):
                    return
                asked.append(question)
                connection.sendall(answers[min(len(asked), len(answers)) - 1])

    thread = threading.Thread(target=work)
    thread.start()
    port = listener.getsockname()[1]
    try:
        yield port, asked
    finally:
        with socket.create_connection(("127.0.0.1", port)):
            pass  # it asks nothing, which ends the thread
        thread.join(10)
        listener.close()
        assert not thread.is_alive()


def http(status: str, body: object, *headers: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(data)}", "Connection: close", *headers])
    return head.encode() + b"\r\n\r\n" + data


def error(status: str, message: str) -> bytes:
    return http(status, {"error": {"message": message, "type": "t", "param": None, "code": None}})


def said(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> str:
    """One line on stderr, and nothing else."""
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("shoal: ")
    assert err.count("\n") == 1
    assert len(err) < 400
    return err


NOT_OURS = {
    "another protocol": b"SSH-2.0-OpenSSH_9.2\r\n",
    "binary": bytes(range(256)),
    "silence": b"",
    "half an answer": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}",
    "a page": http("200 OK", b"<html>hello</html>"),
    "no text": http("200 OK", b"\xff\xfe"),
    "a list": http("200 OK", [1, 2]),
    "another object": http("200 OK", {"status": "fine"}),
    "deep": http("200 OK", b"[" * 100_000),
    "an error of its own": http("500 Oops", b"<html>"),
    "half an error": b"HTTP/1.1 500 Oops\r\nContent-Length: 100\r\n\r\n{}",
    "a list as an error": http("404 Not Found", [1]),
    "elsewhere": http("302 Found", b"", "Location: http://127.0.0.1:9/"),
}


@pytest.mark.parametrize("command", [("why",), ("why", "cmpl-1"), ("status",)])
@pytest.mark.parametrize("answer", NOT_OURS.values(), ids=NOT_OURS)
def test_whatever_answers_there_is_told_in_a_sentence(
    answer: bytes, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with server(answer) as (port, _):
        told = said(capsys, 1, *command, "--port", str(port))
    assert f":{port}/" in told


@pytest.mark.parametrize(
    ("arguments", "code", "why_not"),
    [
        (["why", ""], 2, "'' is no id of a request"),
        (["why", "x" * 129], 2, "is no id of a request"),
        (["why", "\udcff"], 2, "is no id of a request"),
        (["why", "ü\n"], 2, "is no id of a request"),
        (["why", "--port", "0"], 2, "0 is not a port"),
        (["why", "--port", "99999"], 2, "99999 is not a port"),
        (["why", "--port", "1"], 1, "Connection refused"),
        (["status", "--port", "1"], 1, "Connection refused"),
        (["why", "--host", "a b"], 1, "nothing of ours answers"),
        (["why", "--host", ""], 1, "nothing of ours answers"),
        (["why", "--host", "x" * 70 + ".invalid"], 1, "nothing of ours answers"),
        (["why", "--host", "::1", "--port", "1"], 1, "http://[::1]:1/"),
        (["why", "--api-key", "a\nb"], 2, "printable ASCII"),
    ],
)
def test_what_cannot_be_asked_is_told_in_a_sentence(
    arguments: list[str], code: int, why_not: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = said(capsys, code, *arguments)
    assert why_not in told
    assert "a\nb" not in told


def test_a_missing_key_is_told_with_the_flag_and_a_key_follows_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    with server(error("401 Unauthorized", "The API key is missing.")) as (port, _):
        assert "The API key is missing. (--api-key KEY sends one)" in said(capsys, 1, "why", "--port", str(port))
    with server(http("200 OK", {})) as (other, asked_other):
        to_other = http("302 Found", b"", f"Location: http://127.0.0.1:{other}/")
        with server(to_other) as (port, asked):
            said(capsys, 1, "why", "--port", str(port), "--api-key", "secret")
        assert b"Bearer secret" in asked[0]
        assert asked_other == []


def test_another_router_is_asked_until_one_has_its_own_notes() -> None:
    """The proxy gives each connection to one of the routers; a refusal is known to one of them alone."""
    hearsay = {"request_id": "r", "sequences": [], "silent_replicas": [], "router_id": "b"}
    unknown = error("404 Not Found", "Neither this router nor a replica knows 'r'")
    with server(unknown, http("200 OK", hearsay), http("200 OK", hearsay | {"age_s": 1.0})) as (port, asked):
        assert why("127.0.0.1", port, "r")["age_s"] == 1.0
        assert len(asked) == 3
    with server(http("200 OK", hearsay), unknown) as (port, asked):
        assert why("127.0.0.1", port, "r") == hearsay, "the best word there is"


def test_a_reader_that_has_enough_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe, server(http("200 OK", {"requests": [], "silent_replicas": []})) as (port, _):
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["why", "--port", str(port)]) == 0
