"""ASYNC. Frames over a stream socket, a 4-byte little-endian length before each: between a replica and its connector,
and a replica and its ranks.

A descriptor may come along with a frame. Nothing blocks: a reader that is too slow is cut off when more than
`MAX_WAITING_BYTES` wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence

#: what may wait for a reader that does not read
MAX_WAITING_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")
_CHUNK = 256 << 10
_MAX_DESCRIPTORS = 4


def pack_frame(frame: bytes) -> bytes:
    """As it travels."""
    return _LENGTH.pack(len(frame)) + frame


class FrameInbox:
    """Bytes in, whole frames out."""

    def __init__(self, max_frame_bytes: int) -> None:
        self._data = bytearray()
        self._max_frame_bytes = max_frame_bytes

    def add(self, data: bytes) -> list[bytes]:
        """The frames that are complete with it. Raises ValueError: one is longer than allowed."""
        self._data += data
        frames, at, size = [], 0, _LENGTH.size
        while len(self._data) - at >= size:
            (length,) = _LENGTH.unpack_from(self._data, at)
            if length > self._max_frame_bytes:
                raise ValueError(f"it sent a message of {length} bytes; allowed are {self._max_frame_bytes}")
            end = at + size + length
            if len(self._data) < end:
                break
            frames.append(bytes(memoryview(self._data)[at + size : end]))
            at = end
        del self._data[:at]
        return frames


class FrameSocket:
    """One end, on the event loop. The callbacks may be set until the loop runs again."""

    def __init__(self, peer: socket.socket, max_frame_bytes: int) -> None:
        self._socket = peer
        self._loop = asyncio.get_running_loop()
        self._max_frame_bytes = max_frame_bytes
        self._inbox = FrameInbox(max_frame_bytes)
        self._outbox: deque[tuple[memoryview, Sequence[int]]] = deque()
        self._descriptors: list[int] = []
        self.num_waiting_bytes = 0
        self.on_frame: Callable[[bytes], None] = lambda frame: None
        #: once, with the reason; not after `close`
        self.on_closed: Callable[[str], None] = lambda reason: None
        self.is_open = True
        self._is_finishing = False
        peer.setblocking(False)
        self._loop.add_reader(peer.fileno(), self._on_readable)

    def send(self, frame: bytes, descriptors: Sequence[int] = ()) -> None:
        """Never blocks. Lost if the other end is gone, which `on_closed` tells. The descriptors are duplicated."""
        if not self.is_open or self._is_finishing:
            return
        assert len(frame) <= self._max_frame_bytes, f"a message of {len(frame)} bytes"
        held = [os.dup(one) for one in descriptors]
        self._outbox.append((memoryview(pack_frame(frame)), held))
        self.num_waiting_bytes += _LENGTH.size + len(frame)
        if len(self._outbox) == 1:
            self._flush()
            if self._outbox:
                self._loop.add_writer(self._socket.fileno(), self._flush)
        if self.num_waiting_bytes > MAX_WAITING_BYTES:
            self._loop.call_soon(self._lose, f"it does not read: {self.num_waiting_bytes} bytes wait for it")

    def finish(self) -> None:
        """Nothing more is sent after what waits. The other side is heard until it closes, which `on_closed` tells."""
        self._is_finishing = True
        if self.is_open and not self._outbox:
            self._shut_writing()

    def take_descriptor(self) -> int | None:
        """The oldest that came and was not taken; the caller closes it."""
        return self._descriptors.pop(0) if self._descriptors else None

    def close(self) -> None:
        """Idempotent; `on_closed` is not called. What was sent before and fits the kernel's buffer still arrives."""
        if not self.is_open:
            return
        self.is_open = False
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        for _, held in self._outbox:
            _close_all(held)
        self._outbox.clear()
        _close_all(self._descriptors)
        self._descriptors.clear()

    def _shut_writing(self) -> None:
        with contextlib.suppress(OSError):  # it has gone: the reader finds out
            self._socket.shutdown(socket.SHUT_WR)

    def _lose(self, reason: str) -> None:
        if self.is_open:
            self.close()
            self.on_closed(reason)

    def _flush(self) -> None:
        while self._outbox:
            data, held = self._outbox[0]
            try:
                sent = socket.send_fds(self._socket, [data], held) if held else self._socket.send(data)
            except BlockingIOError:
                return
            except OSError as error:
                self._loop.call_soon(self._lose, error.strerror or str(error))
                return
            _close_all(held)
            self.num_waiting_bytes -= sent
            if sent < len(data):
                self._outbox[0] = data[sent:], ()
                return
            self._outbox.popleft()
        if self._is_finishing:
            self._shut_writing()
        self._loop.remove_writer(self._socket.fileno())

    def _on_readable(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, _CHUNK, _MAX_DESCRIPTORS)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(error.strerror or str(error))
            return
        self._descriptors += descriptors
        if len(self._descriptors) > _MAX_DESCRIPTORS:
            self._lose("it sent descriptors that nobody asked for")
            return
        if not data:
            self._lose("it closed the connection")
            return
        try:
            frames = self._inbox.add(data)
        except ValueError as error:
            self._lose(str(error))
            return
        for frame in frames:
            if self.is_open:
                self.on_frame(frame)


def _close_all(descriptors: Sequence[int]) -> None:
    for one in descriptors:
        with contextlib.suppress(OSError):
            os.close(one)
