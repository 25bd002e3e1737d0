"""HTTP by hand over one socket: requests cut, mangled or left at any byte, and answers read as they came."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any, NamedTuple


class Reply(NamedTuple):
    """One HTTP response as it was on the wire; `body` is without its chunks."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> list[str]:
        """Every value of a header, in order."""
        return [value for key, value in self.headers if key.lower() == name.lower()]

    def json(self) -> Any:
        return json.loads(self.body)


class ConnectionEndedError(Exception):
    """The server closed before the answer was complete."""


class Wire:
    """One TCP connection. Every wait has a limit: a hang is a failure, not a stop."""

    def __init__(self, port: int, timeout_s: float = 10.0, receive_buffer_bytes: int | None = None) -> None:
        self._socket = socket.socket()
        self._socket.settimeout(timeout_s)
        if receive_buffer_bytes is not None:  # before connecting: the window is agreed on then
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self._socket.connect(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- out ----

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def post(self, path: str, body: dict[str, Any] | bytes) -> None:
        """A whole POST request; does not wait for the answer."""
        self.send(request_bytes("POST", path, body))

    def end_sending(self) -> None:
        """Half-close: the server sees the end of what we send."""
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()

    def reset(self) -> None:
        """Close with RST instead of FIN, as a killed client's kernel may."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    # ---- in ----

    def reply(self) -> Reply:
        """The next complete response. Raises ConnectionEndedError, or TimeoutError."""
        status, headers = self.head()
        fields = {key.lower(): value for key, value in headers}
        if "content-length" in fields:
            body = self._take(int(fields["content-length"]))
        elif fields.get("transfer-encoding") == "chunked":
            parts = []
            while part := self.chunk():
                parts.append(part)
            body = b"".join(parts)
        elif status in (204, 304) or status < 200:
            body = b""
        else:
            body = self.rest()
        return Reply(status, headers, body)

    def head(self) -> tuple[int, list[tuple[str, str]]]:
        """Status line and headers."""
        lines = self._until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        headers = [line.partition(":")[::2] for line in lines[1:] if line]
        return int(lines[0].split(" ")[1]), [(key.strip(), value.strip()) for key, value in headers]

    def chunk(self) -> bytes:
        """The next chunk of a chunked body, b"" at its end."""
        size = int(self._until(b"\r\n"), 16)
        data = self._take(size)
        self._until(b"\r\n")
        return data

    def events(self, count: int) -> list[Any]:
        """The next `count` events of an event stream whose head was read."""
        found: list[Any] = []
        while len(found) < count:
            data = self.chunk()
            if not data:
                raise ConnectionEndedError(f"the stream ended after {len(found)} of {count} events")
            found += parse_events(data)
        return found

    def rest(self) -> bytes:
        """Everything until the server closes. A reset counts as a close."""
        try:
            while data := self._socket.recv(65536):
                self._buffer += data
        except ConnectionResetError:
            pass
        data, self._buffer = self._buffer, b""
        return data

    def is_open(self) -> bool:
        """Whether the server has neither closed nor said anything; looks, does not wait."""
        timeout_s = self._socket.gettimeout()
        self._socket.setblocking(False)  # with a timeout set, Python waits whatever flags say
        try:
            self._socket.recv(1, socket.MSG_PEEK)
            return False
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        finally:
            self._socket.settimeout(timeout_s)

    def _until(self, mark: bytes) -> bytes:
        while mark not in self._buffer:
            self._more()
        data, self._buffer = self._buffer.split(mark, 1)
        return data

    def _take(self, count: int) -> bytes:
        while len(self._buffer) < count:
            self._more()
        data, self._buffer = self._buffer[:count], self._buffer[count:]
        return data

    def _more(self) -> None:
        try:
            data = self._socket.recv(65536)
        except ConnectionResetError:
            data = b""
        if not data:
            raise ConnectionEndedError(f"the server closed after {self._buffer[:200]!r}")
        self._buffer += data


def request_bytes(method: str, path: str, body: dict[str, Any] | bytes = b"", *headers: str) -> bytes:
    """A well-formed HTTP/1.1 request; `headers` are further lines."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *headers]
    if data:
        lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + data


def parse_events(data: bytes | str) -> list[Any]:
    """The events of a piece of an event stream that ends at an event's end; "[DONE]" stays text. Checks the framing."""
    text = data.decode() if isinstance(data, bytes) else data
    assert text.endswith("\n\n"), f"an event without its end: {text[-80:]!r}"
    blocks = text[:-2].split("\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks), text[:200]
    return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]
