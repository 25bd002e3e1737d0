"""ASYNC. What a replica and its ranks say to each other, over Unix sockets on a node and TCP between nodes.

Everything goes this way but steps on a node (`replica/step_channel.py`). A closed socket is how both ends learn of each
other's death, within milliseconds and without Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Sequence

import msgspec

from replica.frame_socket import FrameInbox, FrameSocket, pack_frame
from replica.step import RunnerInfo

#: first byte of a frame: a message, or a step or its result
_CONTROL, _RAW = b"\0", b"\1"
_CHUNK = 256 << 10
#: of a step, or of a grammar's text
_MAX_FRAME_BYTES = 64 << 20
#: whoever connects has so long to say who it is
_HELLO_S = 10.0


# ---- messages ----


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First word of a rank. `token` shows that the replica started it."""

    token: str
    rank: int


class Note(msgspec.Struct, frozen=True, tag="note"):
    """How far it is, for the log."""

    text: str


class Led(msgspec.Struct, frozen=True, tag="led"):
    """Rank 0: peers of this generation meet at this port of mine."""

    generation: int
    host: str
    port: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """It has joined its peers, holds its part of the model, and knows no sequence."""

    generation: int
    info: RunnerInfo
    #: bytes of weights and of KV that it holds
    held_bytes: tuple[int, int] = (0, 0)


class NotReady(msgspec.Struct, frozen=True, tag="not_ready"):
    """It could not; `error` names the class."""

    generation: int
    error: str
    text: str


class StepFailed(msgspec.Struct, frozen=True, tag="step_failed"):
    """It raised in a step, and has left its peers."""

    step: int
    text: str


class Left(msgspec.Struct, frozen=True, tag="left"):
    """It waits for the next generation."""

    generation: int


class GrammarDone(msgspec.Struct, frozen=True, tag="grammar_done"):
    """Empty `text`: compiled."""

    grammar_id: int
    text: str = ""
    is_invalid: bool = False


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """It lives. Only between nodes; on a node shared memory says so. The rest is what `Pulse` holds."""

    begun: int
    ended: int
    in_collective: bool


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """First word to a rank. `has_pulse`: a descriptor of that memory comes along; else it sends beats."""

    has_pulse: bool


class Lead(msgspec.Struct, frozen=True, tag="lead"):
    """To rank 0: open a place where the peers of this generation can meet."""

    generation: int


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Meet the peers, load if nothing is loaded, begin empty. `has_frames`: a descriptor of the memory where steps
    arrive comes along; else they come through the socket.
    """

    generation: int
    host: str
    port: int
    has_frames: bool
    #: all ranks load now, so they can try themselves out together
    is_first: bool


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """The generation is over."""

    generation: int


class Grammar(msgspec.Struct, frozen=True, tag="grammar"):
    """Compile it, beside the steps."""

    grammar_id: int
    text: str


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End."""


UpMessage = Hello | Note | Led | Ready | NotReady | StepFailed | Left | GrammarDone | Beat
DownMessage = Welcome | Lead | Join | Leave | Grammar | Stop
_encode = msgspec.msgpack.Encoder().encode
_decode_up = msgspec.msgpack.Decoder(UpMessage).decode
_decode_down = msgspec.msgpack.Decoder(DownMessage).decode


class Endpoint(msgspec.Struct, frozen=True):
    """Where a rank finds its replica. `unix` is an abstract name, good on the node `node` only."""

    token: str
    unix: str
    node: str
    host: str = ""
    port: int = 0


# ---- the replica's end ----


class RankLink:
    """The replica's end of one rank's socket, on the event loop."""

    def __init__(self, peer: socket.socket, on_message: Callable[[RankLink, UpMessage], None]) -> None:
        self.on_message = on_message
        self.is_local = peer.family == socket.AF_UNIX
        #: by the kernel's word, in our own numbering; 0 on another node
        self.pid = _peer_pid(peer) if self.is_local else 0
        self.on_result: Callable[[bytes], None] = lambda data: None
        self.on_closed: Callable[[], None] = lambda: None
        if not self.is_local:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._frames = FrameSocket(peer, _MAX_FRAME_BYTES)
        self._frames.on_frame = self._on_frame
        self._frames.on_closed = lambda reason: self.on_closed()

    @property
    def is_open(self) -> bool:
        return self._frames.is_open

    def send(self, message: DownMessage, descriptors: Sequence[int] = ()) -> None:
        """Never blocks. Lost if the other end is gone, which `on_closed` tells."""
        self._frames.send(_CONTROL + _encode(message), descriptors)

    def send_frame(self, frame: bytes) -> None:
        """A step."""
        self._frames.send(_RAW + frame)

    def close(self) -> None:
        """Idempotent; `on_closed` is not called."""
        self._frames.close()

    def _on_frame(self, frame: bytes) -> None:
        if frame[:1] == _RAW:
            self.on_result(frame[1:])
            return
        try:
            message = _decode_up(frame[1:])
        except msgspec.DecodeError:  # not one of ours
            self.close()
            self.on_closed()
            return
        self.on_message(self, message)


class RankDoor:
    """Where ranks come in. Whoever does not know the token is shut out again."""

    def __init__(self, node: str, host: str | None, on_hello: Callable[[int, RankLink], None]) -> None:
        """`host`: listen there for ranks of other nodes as well."""
        self._on_hello = on_hello
        self._loop = asyncio.get_running_loop()
        token, name = secrets.token_hex(16), f"\0shoal-{secrets.token_hex(8)}"
        local = socket.socket(socket.AF_UNIX)
        local.bind(name)
        self._listeners = [local]
        self.endpoint = Endpoint(token, name, node)
        if host is not None:
            remote = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
            self._listeners.append(remote)
            self.endpoint = Endpoint(token, name, node, host, remote.getsockname()[1])
        self._strangers: set[RankLink] = set()
        for listener in self._listeners:
            listener.listen(128)
            listener.setblocking(False)
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    def close(self) -> None:
        """Nobody comes in any more."""
        for listener in self._listeners:
            if listener.fileno() >= 0:
                self._loop.remove_reader(listener.fileno())
                listener.close()
        for link in self._strangers:
            link.close()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            peer, _ = listener.accept()
            link = RankLink(peer, self._identify)
            self._strangers.add(link)
            link.on_closed = lambda: self._strangers.discard(link)
            self._loop.call_later(_HELLO_S, self._shut_out, link)

    def _identify(self, link: RankLink, message: UpMessage) -> None:
        if isinstance(message, Hello) and hmac.compare_digest(message.token, self.endpoint.token):
            self._strangers.discard(link)
            self._on_hello(message.rank, link)
        else:
            self._shut_out(link)

    def _shut_out(self, link: RankLink) -> None:
        if link in self._strangers:
            self._strangers.discard(link)
            link.close()


def _peer_pid(peer: socket.socket) -> int:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", credentials)[0]
    return pid


# ---- a rank's end ----


class ReplicaSocket:
    """A rank's end, for threads: one receives, any may send."""

    def __init__(self, endpoint: Endpoint, rank: int, node: str) -> None:
        """Raises OSError if the replica is not there."""
        self.is_local = node == endpoint.node
        if self.is_local:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(endpoint.unix)
        else:
            self._socket = socket.create_connection((endpoint.host, endpoint.port))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lock = threading.Lock()
        self._inbox = FrameInbox(_MAX_FRAME_BYTES)
        self._descriptors: list[int] = []
        self._ready: list[bytes] = []
        self.send(Hello(endpoint.token, rank))

    def send(self, message: UpMessage) -> None:
        """Raises OSError if the replica is gone."""
        self._send(_CONTROL, _encode(message))

    def send_result(self, result: bytes) -> None:
        """Raises OSError if the replica is gone."""
        self._send(_RAW, result)

    def receive(self) -> DownMessage | bytes:
        """The next message, or a frame as bytes. Raises EOFError when the replica is gone."""
        while not self._ready:
            try:
                if self.is_local:
                    data, descriptors, _, _ = socket.recv_fds(self._socket, _CHUNK, 8)
                    self._descriptors += descriptors
                else:
                    data = self._socket.recv(_CHUNK)
            except OSError:
                data = b""
            if not data:
                raise EOFError("the replica is gone")
            self._ready = self._inbox.add(data)
        frame = self._ready.pop(0)
        return frame[1:] if frame[:1] == _RAW else _decode_down(frame[1:])

    def take_descriptor(self) -> int | None:
        """The next one that came along, in the order of the messages."""
        return self._descriptors.pop(0) if self._descriptors else None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send(self, kind: bytes, body: bytes) -> None:
        with self._lock:
            self._socket.sendall(pack_frame(kind + body))
