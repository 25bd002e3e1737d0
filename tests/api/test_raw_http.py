"""Malformed and hostile HTTP over raw sockets, against both parsers that uvicorn has: every connection is answered or
closed, nothing is a 5xx, nothing hangs, and nothing of it is left in router or replica.
"""

from __future__ import annotations

import contextlib
import gzip
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from router.http_middleware import MAX_HEADER_BYTES, MAX_TARGET_BYTES
from tests.api.calls import CHAT, COMPLETIONS, answer, complete, error_of, pieces_of
from tests.api.harness import ApiUnderTest, fake_api
from tests.api.wire import ConnectionEndedError, Reply, Wire, parse_events, request_bytes

GOOD = b'{"prompt":"x","max_tokens":2}'
IN_CHUNKS = b"1d\r\n" + GOOD + b"\r\n0\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
LAST = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module", params=["h11", "httptools"])
def _server(request: pytest.FixtureRequest) -> Iterator[ApiUnderTest]:
    with fake_api(http=request.param) as api:
        yield api


@pytest.fixture
def api(_server: ApiUnderTest, caplog: pytest.LogCaptureFixture) -> Iterator[ApiUnderTest]:
    """The server; after each test it serves a good request, is idle, and has logged no error."""
    yield _server
    assert answer(complete(_server, max_tokens=2))["usage"]["completion_tokens"] == 2
    _server.check_idle()
    bad = [record.getMessage() for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]
    assert bad == []


def head(*lines: str, start: str = f"POST {COMPLETIONS} HTTP/1.1") -> bytes:
    """The head of a request, as these lines say and no other."""
    return "\r\n".join([start, *lines, "", ""]).encode("latin-1")


def conversation(api: ApiUnderTest, data: bytes) -> list[Reply]:
    """Every reply to `data` and to a last good request, until the server closes. A hang is a TimeoutError."""
    replies = []
    with Wire(api.port) as wire:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before it was all there
            wire.send(data + LAST)
        try:
            while True:
                replies.append(wire.reply())
        except ConnectionEndedError:
            return replies


def abandoned(api: ApiUnderTest, data: bytes) -> bytes:
    """What the server says to a client that stops in the middle of `data` and waits for the connection's end."""
    with Wire(api.port) as wire:
        wire.send(data)
        wire.end_sending()
        return wire.rest()


# ---- request lines ----

NO_REQUEST = {
    "garbage": b"GARBAGE\r\n\r\n",
    "only-a-method": b"GET\r\n\r\n",
    "no-http": b"GET /health HTP/1.1\r\nHost: x\r\n\r\n",
    "nulls": b"\x00" * 64 + b"\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(64)) + b"\r\n\r\n",
    "null-in-target": b"GET /hea\x00lth HTTP/1.1\r\nHost: x\r\n\r\n",
    "null-in-header": b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: a\x00b\r\n\r\n",
    "no-colon": b"GET /health HTTP/1.1\r\nHost: x\r\nno colon here\r\n\r\n",
    "space-in-name": b"GET /health HTTP/1.1\r\nHost: x\r\nX A: b\r\n\r\n",
    "empty-name": b"GET /health HTTP/1.1\r\nHost: x\r\n: b\r\n\r\n",
    "negative-length": head("Host: x", "Content-Length: -1") + GOOD,
    "signed-length": head("Host: x", "Content-Length: +29") + GOOD,
    "length-is-no-number": head("Host: x", "Content-Length: many") + GOOD,
    "length-with-two-numbers": head("Host: x", "Content-Length: 29, 30") + GOOD,
    "lengths-disagree": head("Host: x", "Content-Length: 29", "Content-Length: 30") + GOOD,
    "length-beyond-64-bit": head("Host: x", f"Content-Length: {1 << 70}") + GOOD,
    "bad-chunk-size": head("Host: x", "Transfer-Encoding: chunked") + b"zz\r\n" + GOOD + b"\r\n0\r\n\r\n",
    "negative-chunk-size": head("Host: x", "Transfer-Encoding: chunked") + b"-5\r\n" + GOOD + b"\r\n0\r\n\r\n",
    "chunk-size-beyond-64-bit": head("Host: x", "Transfer-Encoding: chunked") + b"f" * 40 + b"\r\n" + GOOD,
    "chunk-without-its-end": head("Host: x", "Transfer-Encoding: chunked") + b"1d\r\n" + GOOD + b"XX0\r\n\r\n",
}


@pytest.mark.parametrize("data", NO_REQUEST.values(), ids=NO_REQUEST)
def test_what_is_no_http_is_refused_or_cut(api: ApiUnderTest, data: bytes) -> None:
    replies = conversation(api, data)
    assert all(400 <= reply.status < 500 for reply in replies), replies
    assert len(replies) <= 1, "it went on after what it could not read"


DOUBTFUL = {
    "http-2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "http-9.9": b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
    "http-0.9": b"GET /health\r\n\r\n",
    "lower-case-method": b"get /health HTTP/1.1\r\nHost: x\r\n\r\n",
    "unknown-method": b"BREW /health HTTP/1.1\r\nHost: x\r\n\r\n",
    "two-spaces": b"GET  /health HTTP/1.1\r\nHost: x\r\n\r\n",
    "bare-line-feeds": b"GET /health HTTP/1.1\nHost: x\n\n",
    "no-host": b"GET /health HTTP/1.1\r\n\r\n",
    "two-hosts": b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    "absolute-target": b"GET http://elsewhere/health HTTP/1.1\r\nHost: x\r\n\r\n",
    "asterisk": b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    "connect": b"CONNECT elsewhere:443 HTTP/1.1\r\nHost: x\r\n\r\n",
    "trace": b"TRACE /health HTTP/1.1\r\nHost: x\r\n\r\n",
    "folded-header": b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: a\r\n  b\r\n\r\n",
    "target-not-ascii": "GET /v1/models/\u00fc\u00e9 HTTP/1.1\r\nHost: x\r\n\r\n".encode(),
    "target-not-utf-8": b"GET /v1/models/%ff%fe HTTP/1.1\r\nHost: x\r\n\r\n",
    "target-with-null": b"GET /v1/models/%00 HTTP/1.1\r\nHost: x\r\n\r\n",
    "target-with-dots": b"GET /../../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
    "target-with-bad-escape": b"GET /v1/models/%zz HTTP/1.1\r\nHost: x\r\n\r\n",
    "header-not-ascii": b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: \xff\xfe\x80\r\n\r\n",
    "authorization-not-ascii": b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\n\r\n",
    "length-and-chunks": head("Host: x", "Content-Length: 4", "Transfer-Encoding: chunked") + IN_CHUNKS,
    "chunks-and-gzip": head("Host: x", "Transfer-Encoding: gzip, chunked") + IN_CHUNKS,
    "unknown-encoding": head("Host: x", "Transfer-Encoding: zip") + GOOD,
    "same-length-twice": head("Host: x", "Content-Length: 29", "Content-Length: 29") + GOOD,
    "body-without-length": head("Host: x") + GOOD,
    "body-longer-than-its-length": head("Host: x", "Content-Length: 29") + GOOD + b"left over",
    "get-with-body": b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc",
    "gzip-body": head("Host: x", "Content-Encoding: gzip", "Content-Length: 29") + GOOD,
    "expect-the-unknown": head("Host: x", "Expect: 300-who-knows", "Content-Length: 29") + GOOD,
    "head-of-a-post": b"HEAD /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.mark.parametrize("data", DOUBTFUL.values(), ids=DOUBTFUL)
def test_what_may_be_read_this_way_or_that_is_never_our_fault(api: ApiUnderTest, data: bytes) -> None:
    if data.startswith(b"HEAD"):  # its reply has a length and no body
        assert b" 405 " in abandoned(api, data).split(b"\r\n")[0]
        return
    for reply in conversation(api, data):
        assert 200 <= reply.status < 500, reply
        assert reply.status < 400 or b"Traceback" not in reply.body


@pytest.mark.parametrize("upgrade", ["h2c", "websocket"])
def test_a_wish_for_another_protocol_is_not_heard(api: ApiUnderTest, upgrade: str) -> None:
    with Wire(api.port) as wire:
        lines = ("Host: x", "Connection: Upgrade, HTTP2-Settings", f"Upgrade: {upgrade}", "HTTP2-Settings: AAMAAABk")
        wire.send(head(*lines, start="GET /health HTTP/1.1"))
        assert wire.reply().status == 200
        wire.send(HEALTH)
        assert wire.reply().status == 200


# ---- long heads ----


@pytest.mark.parametrize(
    ("data", "allowed"),
    [
        (head("Host: x", "X-Bomb: " + "a" * (1 << 20), start="GET /health HTTP/1.1"), {400, 431}),
        (head("Host: x", *(f"X-{n}: {n}" for n in range(20_000)), start="GET /health HTTP/1.1"), {400, 431}),
        (head("Host: x", "X-Long: " + "a" * (MAX_HEADER_BYTES - 2000), start="GET /health HTTP/1.1"), {200}),
        (head("Host: x", start="GET /" + "a" * (1 << 20) + " HTTP/1.1"), {400, 414, 431}),
        (head("Host: x", start="GET /health?" + "a" * (MAX_TARGET_BYTES + 1) + " HTTP/1.1"), {414}),
        (head("Host: x", start="GET /v1/models/" + "a" * 4000 + " HTTP/1.1"), {404}),
        (head("Host: x", "X-Request-Id: " + "a" * 5000, start="GET /health HTTP/1.1"), {200}),
    ],
    ids=["one-huge", "very-many", "just-fits", "huge-target", "long-query", "long-model", "long-request-id"],
)
def test_long_heads(api: ApiUnderTest, data: bytes, allowed: set[int]) -> None:
    replies = conversation(api, data)
    assert {reply.status for reply in replies[:1]} <= allowed
    if allowed == {200}:
        (request_id,) = replies[0].header("x-request-id")
        assert len(request_id) <= 128
    # a parser may cut a head that long; what it may not is wait for more of it
    assert replies or allowed & {400, 431}


def test_a_head_that_never_ends_is_cut(api: ApiUnderTest) -> None:
    """4 MiB of a header line: cut on the way, or refused when its end comes. (httptools joins the pieces of a line one
    by one: 64 MiB would keep the loop busy for 11 s, before any of our code could look.)
    """
    with Wire(api.port) as wire:
        try:
            wire.send(b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: ")
            for _ in range(4):
                wire.send(b"a" * (1 << 20))
            wire.send(b"\r\n\r\n")
            assert wire.reply().status in (400, 431)
        except (BrokenPipeError, ConnectionResetError, ConnectionEndedError):
            pass


# ---- bodies ----

CUT_OFF = {
    "nothing": b"",
    "half-a-line": b"POST /v1/comp",
    "half-a-head": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConte",
    "no-body": head("Host: x", "Content-Length: 100"),
    "half-a-body": head("Host: x", "Content-Length: 100") + GOOD,
    "no-chunk": head("Host: x", "Transfer-Encoding: chunked"),
    "half-a-chunk": head("Host: x", "Transfer-Encoding: chunked") + b"1d\r\n" + GOOD[:10],
    "no-last-chunk": head("Host: x", "Transfer-Encoding: chunked") + b"1d\r\n" + GOOD + b"\r\n",
    "half-a-last-chunk": head("Host: x", "Transfer-Encoding: chunked") + b"1d\r\n" + GOOD + b"\r\n0\r\n",
    "waits-for-100-continue": head("Host: x", "Expect: 100-continue", "Content-Length: 100"),
}


@pytest.mark.parametrize("data", CUT_OFF.values(), ids=CUT_OFF)
@pytest.mark.parametrize("leave", ["end", "close", "reset"])
def test_a_request_cut_off_leaves_nothing(api: ApiUnderTest, data: bytes, leave: str) -> None:
    admitted = api.counter("admitted")
    if leave == "end":
        said = abandoned(api, data)
        assert said == b"" or said.startswith((b"HTTP/1.1 100", b"HTTP/1.1 4")), said[:200]
    else:
        with Wire(api.port) as wire:
            wire.send(data)
            api.until(lambda: api.server.server_state.connections)
            getattr(wire, leave)()
    api.until(api.is_idle)
    assert api.counter("admitted") == admitted, "half a request reached a replica"


def test_a_body_that_comes_byte_by_byte_is_read(api: ApiUnderTest) -> None:
    with Wire(api.port) as wire:
        wire.send(head("Host: x", f"Content-Length: {len(GOOD)}"))
        for position in range(len(GOOD)):
            wire.send(GOOD[position : position + 1])
        assert wire.reply().status == 200
        wire.send(head("Host: x", "Transfer-Encoding: chunked"))
        for position in range(len(GOOD)):
            wire.send(b"1;name=value\r\n" + GOOD[position : position + 1] + b"\r\n")
        wire.send(b"0\r\nX-Trailer: yes\r\n\r\n")
        assert wire.reply().status == 200


def test_expect_100_continue_is_answered(api: ApiUnderTest) -> None:
    with Wire(api.port) as wire:
        wire.send(head("Host: x", "Expect: 100-continue", f"Content-Length: {len(GOOD)}"))
        assert wire.head()[0] == 100
        wire.send(GOOD)
        assert wire.reply().status == 200


BAD_JSON = {
    "null-bytes": b'{"prompt":"x",\x00"max_tokens":2}',
    "null-byte-in-text": b'{"prompt":"a\x00b","max_tokens":2}',
    "only-nulls": b"\x00" * 100,
    "not-utf-8": b'{"prompt":"\xff\xfe","max_tokens":2}',
    "half-a-character": b'{"prompt":"\xf0\x9f\x98","max_tokens":2}',
    "overlong": b'{"prompt":"\xc0\xaf","max_tokens":2}',
    "surrogates-in-utf-8": b'{"prompt":"\xed\xa0\x80","max_tokens":2}',
    "utf-16": '{"prompt":"x","max_tokens":2}'.encode("utf-16"),
    "deep": b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep-objects": b'{"prompt":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    "open-and-never-closed": b'{"prompt":' + b"[" * 100_000,
    "huge-number": b'{"prompt":"x","max_tokens":' + b"9" * 100_000 + b"}",
    "huge-exponent": b'{"prompt":"x","temperature":1e999999}',
    "nan": b'{"prompt":"x","temperature":NaN}',
    "infinity": b'{"prompt":"x","temperature":Infinity}',
    "comment": b'{"prompt":"x"/* y */}',
    "trailing": b'{"prompt":"x"} {"prompt":"y"}',
    "form": b"prompt=x&max_tokens=2",
    "multipart": b"--x\r\nContent-Disposition: form-data; name=prompt\r\n\r\nx\r\n--x--\r\n",
    "gzip": gzip.compress(GOOD, mtime=0),
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", BAD_JSON.values(), ids=BAD_JSON)
def test_bodies_that_are_no_request_are_told_so(api: ApiUnderTest, path: str, body: bytes) -> None:
    with Wire(api.port) as wire:
        wire.post(path, body)
        error_of(wire.reply(), 400)
        wire.send(HEALTH)
        assert wire.reply().status == 200, "the connection is as good as before"


def test_the_last_of_equal_names_counts_as_everywhere(api: ApiUnderTest) -> None:
    with Wire(api.port) as wire:
        wire.post(COMPLETIONS, b'{"prompt":"x","max_tokens":1,"max_tokens":3,"ignore_eos":true}')
        assert wire.reply().json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("framing", ["length", "chunks", "length-only-announced"])
def test_a_body_over_the_limit_is_413_and_not_a_reset(api: ApiUnderTest, framing: str) -> None:
    body = b" " * (9 << 20)
    with Wire(api.port) as wire:
        if framing == "length":
            wire.send(head("Host: x", f"Content-Length: {len(body)}") + body)
        elif framing == "chunks":
            wire.send(head("Host: x", "Transfer-Encoding: chunked") + b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n")
        else:  # more than anybody would read to the end
            wire.send(head("Host: x", f"Content-Length: {1 << 40}"))
        error_of(wire.reply(), 413, code="request_too_large")


# ---- several requests on a connection ----


def test_pipelined_requests_are_answered_in_order(api: ApiUnderTest) -> None:
    bodies = [{"prompt": "x", "max_tokens": count, "ignore_eos": True} for count in (3, 1, 2)]
    with Wire(api.port) as wire:
        wire.send(b"".join(request_bytes("POST", COMPLETIONS, body) for body in bodies) + HEALTH)
        counts = [wire.reply().json()["usage"]["completion_tokens"] for _ in bodies]
        assert counts == [3, 1, 2]
        assert wire.reply().status == 200


def test_a_stream_among_pipelined_requests(api: ApiUnderTest) -> None:
    stream: dict[str, Any] = {"prompt": "x", "max_tokens": 5, "stream": True}
    with Wire(api.port) as wire:
        wire.send(request_bytes("POST", COMPLETIONS, stream) + request_bytes("POST", COMPLETIONS, b"{") + HEALTH)
        assert parse_events(wire.reply().body)[-1] == "[DONE]"
        error_of(wire.reply(), 400)
        assert wire.reply().status == 200


def test_a_client_that_leaves_after_pipelining_leaves_nothing(api: ApiUnderTest) -> None:
    """httptools tells only the last request of a pipeline that the client has gone: the one that runs ends by its own
    limit, and the others never start.
    """
    with Wire(api.port) as wire:
        body = {"prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True}
        wire.send(request_bytes("POST", COMPLETIONS, body) * 5)
        wire.head()
        wire.events(2)
        wire.reset()
    api.until(api.is_idle)


@pytest.mark.parametrize("keep", [False, True])
def test_http_1_0(api: ApiUnderTest, keep: bool) -> None:
    body = b'{"prompt":"x","max_tokens":2,"ignore_eos":true}'  # its seed is drawn, and might end it after one token
    lines = ["Host: x", f"Content-Length: {len(body)}", *(["Connection: keep-alive"] if keep else [])]
    with Wire(api.port) as wire:
        wire.send(head(*lines, start=f"POST {COMPLETIONS} HTTP/1.0") + body)
        reply = wire.reply()
        assert reply.status == 200
        assert reply.json()["usage"]["completion_tokens"] == 2


def test_a_stream_over_http_1_0(api: ApiUnderTest) -> None:
    """It comes in chunks from httptools, which an old client may not know; from h11 it ends with the connection."""
    body = b'{"prompt":"x","max_tokens":4,"stream":true}'
    with Wire(api.port) as wire:
        wire.send(head("Host: x", f"Content-Length: {len(body)}", start=f"POST {COMPLETIONS} HTTP/1.0") + body)
        assert parse_events(wire.reply().body)[-1] == "[DONE]"
        assert wire.rest() == b""


def test_many_connections_that_say_nothing_cost_the_others_nothing(api: ApiUnderTest) -> None:
    wires = [Wire(api.port) for _ in range(200)]
    try:
        for wire in wires[::2]:
            wire.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert answer(complete(api, max_tokens=3))["choices"]
    finally:
        for wire in wires:
            wire.close()
    api.until(lambda: len(api.server.server_state.connections) <= 1)


# ---- clients that are slow ----


@pytest.mark.slow
def test_a_body_that_does_not_come_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    with fake_api(body_timeout_s=0.05) as api:
        for framing in ("Content-Length: 100", "Transfer-Encoding: chunked"):
            with Wire(api.port) as wire:
                wire.send(head("Host: x", framing) + (b"" if "chunked" in framing else GOOD))
                error_of(wire.reply(), 408, code="request_timeout")
                assert wire.rest() == b"", "the connection stays open for a body that is not awaited"
    assert [record for record in caplog.records if record.exc_info] == []


@pytest.mark.slow
def test_a_client_that_reads_late_gets_everything_and_holds_nobody_up(api: ApiUnderTest) -> None:
    """The tokens wait for a reader who does not read, and the engine does not; when it reads, all of them are there."""
    body = {"prompt": "x", "max_tokens": 1500, "n": 4, "ignore_eos": True, "temperature": 0.7, "seed": 1}
    with Wire(api.port, receive_buffer_bytes=4096) as wire:
        wire.post(COMPLETIONS, {**body, "stream": True})
        api.until(lambda: not api.replicas[0].engine.core.num_unfinished and api.backend.load() == 0, 60)
        assert answer(complete(api, max_tokens=3))["choices"]
        chunks = parse_events(wire.reply().body)
    assert chunks.pop() == "[DONE]"
    expected = answer(api.http.post(COMPLETIONS, json=body))["choices"]
    for choice in expected:
        assert "".join(pieces_of(chunks, choice["index"])) == choice["text"]
    assert [choice["finish_reason"] for choice in expected] == ["length"] * 4
