"""ASYNC. Bodies of requests: JSON, of a bounded length, in a bounded time, and in bounded memory all together.

Whatever is wrong with a body, the rest of it is still read (and dropped) before the answer: a client in the middle of
an upload would else see a reset and not the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Receive, Scope

from replica.errors import RouterBusyError
from router.http_errors import HttpError
from router.http_middleware import header
from router.sentences import short

#: a body over its limit is read and dropped up to here, then the connection is closed
MAX_DISCARDED_BYTES = 64 << 20
#: what `Retry-After` says when long bodies hold all the memory there is for them: they need a second or two each
BUSY_RETRY_S = 2.0


class ClientGoneError(Exception):
    """The client went away; there is nobody to answer."""


class BodyLimits:
    """How much memory request bodies may take. A body's first `free_bytes` are not counted: short requests are served
    while a flood of long ones is refused.
    """

    def __init__(self, max_body_bytes: int, max_pending_bytes: int, free_bytes: int, timeout_s: float) -> None:
        self.max_body_bytes = max_body_bytes
        self.free_bytes = free_bytes
        self.timeout_s = timeout_s
        self._max_pending_bytes = max_pending_bytes
        #: bytes of bodies that are being read, wait for a thread, or are in one
        self.num_pending_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Raises `RouterBusyError` when there is no room for more."""
        if self.num_pending_bytes + num_bytes > self._max_pending_bytes:
            raise RouterBusyError(
                f"The router has {self.num_pending_bytes} bytes of long request bodies in work; "
                f"allowed: {self._max_pending_bytes}. Send it again a little later.",
                BUSY_RETRY_S,
            )
        self.num_pending_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.num_pending_bytes -= num_bytes


class Body:
    """A body that was read. `release` it when what was made of it is done."""

    __slots__ = ("_data", "_limits", "_num_taken", "is_long")

    def __init__(self, data: bytes, limits: BodyLimits, num_taken: int) -> None:
        self._data = data
        #: too long to be worked on while running streams wait
        self.is_long = len(data) > limits.free_bytes
        self._limits = limits
        self._num_taken = num_taken

    def take(self) -> bytes:
        """The bytes, once: what is made of them is as large again, so nobody else keeps them. They count on, for it."""
        data, self._data = self._data, b""
        return data

    def release(self) -> None:
        """What was made of it is done. Idempotent."""
        self._limits.give_back(self._num_taken)
        self._num_taken = 0
        self._data = b""


async def read_body(scope: Scope, receive: Receive, limits: BodyLimits) -> Body:
    """The body of a request, which must be JSON by its headers.

    Raises `HttpError` 415, 413 or 408, `RouterBusyError` when too many long bodies are in work, `ClientGoneError`.
    """
    content_length = header(scope, b"content-length") or b"0"
    if content_length.isdigit() and (len(content_length) >= 20 or int(content_length) > MAX_DISCARDED_BYTES):
        raise too_large(limits.max_body_bytes)
    reader = _Reader(limits)
    try:
        reader.wrong = wrong_format(scope)
        async with asyncio.timeout(limits.timeout_s):
            while (message := await receive())["type"] == "http.request":
                reader.take(message.get("body", b""))
                if not message.get("more_body", False):
                    return reader.body()
        raise ClientGoneError
    except TimeoutError:
        raise HttpError(
            408,
            f"The request body was not complete within {limits.timeout_s:g} s.",
            "request_timeout",
            {"connection": "close"},
        ) from None
    finally:
        reader.close()


class _Reader:
    """Collects the pieces of one body; from the first thing that is wrong on, only counts them."""

    def __init__(self, limits: BodyLimits) -> None:
        self.wrong: Exception | None = None
        self._limits = limits
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._num_taken = 0

    def take(self, piece: bytes) -> None:
        limits = self._limits
        self._num_bytes += len(piece)
        if self._num_bytes > MAX_DISCARDED_BYTES:
            raise too_large(limits.max_body_bytes)
        if self._num_bytes > limits.max_body_bytes:
            self._drop(too_large(limits.max_body_bytes))
        elif self.wrong is None and piece:
            num_wanted = max(0, self._num_bytes - limits.free_bytes) - self._num_taken
            if num_wanted > 0:
                try:
                    limits.take(num_wanted)
                except RouterBusyError as error:
                    self._drop(error)
                    return
                self._num_taken += num_wanted
            self._pieces.append(piece)

    def body(self) -> Body:
        """Everything has come. Raises what was wrong with it."""
        if self.wrong is not None:
            raise self.wrong
        body = Body(b"".join(self._pieces), self._limits, self._num_taken)
        self._num_taken = 0  # the body's from here on
        return body

    def close(self) -> None:
        """Give back what no body took over."""
        self._limits.give_back(self._num_taken)
        self._num_taken = 0
        self._pieces.clear()

    def _drop(self, why: Exception) -> None:
        self.wrong = self.wrong or why
        self.close()


def too_large(max_bytes: int) -> HttpError:
    return HttpError(
        413, f"The request body is too large; allowed: {max_bytes} bytes.", "request_too_large", {"connection": "close"}
    )


def wrong_format(scope: Scope) -> HttpError | None:
    """415 for a body that says it is something else than plain JSON. One that says nothing is taken for JSON."""
    for name, is_right, allowed in _FORMAT_HEADERS:
        value = header(scope, name)
        if value is not None and not is_right(value):
            said = short(value.decode("latin-1"))
            label = name.decode("ascii").title()
            return HttpError(415, f"{label} is {said}; allowed: {allowed}.", "unsupported_media_type")
    return None


def _is_json(value: bytes) -> bool:
    media_type, *parameters = [part.strip().lower() for part in value.split(b";")]
    if media_type and media_type != b"application/json" and not media_type.endswith(b"+json"):
        return False
    charsets = [p.partition(b"=")[2].strip(b'" ') for p in parameters if p.startswith(b"charset")]
    return all(charset in (b"utf-8", b"utf8", b"us-ascii") for charset in charsets)


def _is_plain(value: bytes) -> bool:
    return all(part.strip().lower() in (b"", b"identity") for part in value.split(b","))


_FORMAT_HEADERS: tuple[tuple[bytes, Callable[[bytes], bool], str], ...] = (
    (b"content-encoding", _is_plain, "identity, that is, a body that is not compressed"),
    (b"content-type", _is_json, "application/json, in UTF-8"),
)
