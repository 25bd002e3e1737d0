"""ASYNC. The giving end of `tcp`: slabs of our arena for connectors of other nodes, and what we have.

One thread for each connection that takes slabs, on which nothing runs but leases (asked of the loop), checksums and
`sendmsg` out of the arena.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError as LeaseCancelled

import msgspec
import xxhash

from cluster.kv_connector.tcp_socket import Identity, admit, cut, receive_into, send_all, set_limits, write_frame
from cluster.kv_connector.tcp_wire import (
    ABSENT,
    EVENTS,
    LENGTH,
    MAX_WANT_BYTES,
    SLAB_HEADER,
    SLAB_MAGIC,
    SLABS,
    LinkBudget,
    PeerError,
    Want,
    decode_want,
)
from cluster.kv_connector.transport import ReadLease, SlabSource
from replica.kv_messages import KVPeer, KVTier, TierEvent, encode_kv

HANDSHAKE_S = 3.0
#: a reader that takes nothing for so long is cut off
STALL_S = 5.0
#: at least, in one call: several small slabs, or one large one that is in the processor's cache from its checksum
SEND_BYTES = 256 << 10
#: what may wait for a subscriber; one that is slower comes again and hears everything
MAX_EVENT_BYTES = 64 << 20
#: to a subscriber when nothing happens
EVENT_BEAT_S = 2.0
#: connections at a time
MAX_READERS = 256
_WEEK_S = 7 * 86400.0
logger = logging.getLogger(__name__)


class TcpGiver:
    """Listens at once, at `port`."""

    def __init__(
        self,
        host: str,
        identity: Identity,
        source: SlabSource,
        slab: Callable[[int], memoryview],
        max_bytes_per_s: float | None = None,
        port: int = 0,
    ) -> None:
        """`slab`: of a slot of our arena. `max_bytes_per_s`: a slower link, for experiments. Raises OSError."""
        self._identity = identity
        self._source = source
        self._slab = slab
        self._budget = LinkBudget(max_bytes_per_s) if max_bytes_per_s else None
        self._budget_lock = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self._listener = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=128
        )
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._peers: dict[socket.socket, asyncio.Task[None]] = {}
        self._subscribers: set[_Subscriber] = set()
        self._leasing: set[asyncio.Task[object]] = set()
        #: other things than slabs over TCP that are given here, by name: served on the loop until it returns or raises
        self.others: dict[str, Callable[[socket.socket, KVPeer], Awaitable[None]]] = {}
        #: what was told last, or is true from the start
        self.generation = 0
        self._is_closed = False
        self._accepting = self._loop.create_task(self._accept())

    def publish(
        self, stored: dict[KVTier, list[bytes]], removed: list[bytes], is_cleared: bool = False, generation: int = 0
    ) -> None:
        """Tell all subscribers. Never blocks."""
        self.generation = generation
        for one in list(self._subscribers):
            one.tell(stored, removed, is_cleared, generation)

    async def close(self) -> None:
        """Idempotent. When it returns no thread reads the arena."""
        self._is_closed = True
        self._accepting.cancel()
        self._listener.close()
        for peer, task in list(self._peers.items()):
            cut(peer)
            task.cancel()
        for leasing in list(self._leasing):
            leasing.cancel()
        if self._peers:
            await asyncio.wait(list(self._peers.values()))

    async def _accept(self) -> None:
        while True:
            try:
                peer, _ = await self._loop.sock_accept(self._listener)
            except OSError:
                if self._is_closed:
                    return
                await asyncio.sleep(0.1)  # no descriptors left
                continue
            if len(self._peers) >= MAX_READERS:
                peer.close()
                continue
            peer.setblocking(False)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = self._peers[peer] = self._loop.create_task(self._serve(peer))
            task.add_done_callback(functools.partial(self._forget, peer))

    def _forget(self, peer: socket.socket, _: asyncio.Task[None]) -> None:
        self._peers.pop(peer, None)
        peer.close()

    async def _serve(self, peer: socket.socket) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                said = await admit(peer, self._identity)
            if said.wants == EVENTS:
                await self._serve_events(peer)
                return
            if said.wants != SLABS:
                if said.wants not in self.others:
                    raise PeerError(f"it wants {said.wants!r}, which is not given here")
                await self.others[said.wants](peer, said.reader)
                return
            peer.setblocking(True)
            done = self._loop.create_future()
            threading.Thread(
                target=self._serve_slabs, args=(peer, said.reader, done), name="shoal-kv-give", daemon=True
            ).start()
            while not done.done():  # to its end, whoever cancels: the thread reads the arena
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([done])
        except (PeerError, TimeoutError) as error:
            logger.info("connection of another connector ended: %s", error or "no handshake in time")

    # ---- slabs, on a thread ----

    def _serve_slabs(self, peer: socket.socket, reader: KVPeer, done: asyncio.Future[None]) -> None:
        try:
            set_limits(peer, write_s=STALL_S)
            head = bytearray(LENGTH.size)
            while True:
                receive_into(peer, memoryview(head), _WEEK_S)
                (length,) = LENGTH.unpack(head)
                if length > MAX_WANT_BYTES:
                    raise PeerError(f"it wants {length} bytes of hashes; allowed are {MAX_WANT_BYTES}")
                body = bytearray(length)
                receive_into(peer, memoryview(body), STALL_S)
                self._give(peer, reader, decode_want(body))
        except (PeerError, msgspec.DecodeError) as error:
            logger.debug("no more slabs for %s: %s", reader.peer_id, error)
        except BaseException:
            logger.exception("giving slabs to %s failed", reader.peer_id)
        finally:
            self._loop.call_soon_threadsafe(done.set_result, None)

    def _give(self, peer: socket.socket, reader: KVPeer, want: Want) -> None:
        within_s = min(max(want.within_s, 0.0), 600.0)
        coming = asyncio.run_coroutine_threadsafe(self._lease(reader, want, within_s), self._loop)
        try:
            lease = coming.result()
        except (LeaseCancelled, TimeoutError):
            self._send(peer, want.request_id, [-1] * len(want.hashes))
            return
        try:
            self._send(peer, want.request_id, lease.slots)
        finally:
            self._loop.call_soon_threadsafe(self._source.release_of_peer, lease)

    async def _lease(self, reader: KVPeer, want: Want, within_s: float) -> ReadLease:
        task = asyncio.current_task()
        assert task is not None
        self._leasing.add(task)
        try:
            async with asyncio.timeout(within_s + 1):
                lease = await self._source.lease_for_peer(reader, want.hashes, within_s, want.generation)
        finally:
            self._leasing.discard(task)
        assert len(lease.slots) == len(want.hashes), "a slot for each hash"
        return lease

    def _send(self, peer: socket.socket, request_id: int, slots: list[int]) -> None:
        parts: list[memoryview | bytes] = []
        size = 0
        for slot in slots:
            if slot < 0:
                parts.append(SLAB_HEADER.pack(SLAB_MAGIC, request_id & 0xFFFFFFFF, ABSENT, 0))
                continue
            slab = self._slab(slot)
            digest = xxhash.xxh3_64_intdigest(slab)
            parts += (SLAB_HEADER.pack(SLAB_MAGIC, request_id & 0xFFFFFFFF, len(slab), digest), slab)
            size += len(slab)
            if size >= SEND_BYTES or len(parts) > 500:  # IOV_MAX is 1,024
                self._pace(size)
                send_all(peer, parts)
                parts, size = [], 0
        self._pace(size)
        send_all(peer, parts)

    def _pace(self, size: int) -> None:
        if self._budget is not None:
            with self._budget_lock:
                delay = self._budget.delay(size, time.monotonic())
            time.sleep(delay)

    # ---- events ----

    async def _serve_events(self, peer: socket.socket) -> None:
        subscriber = _Subscriber()
        held = self._source.held_blocks()  # tells the others first, of a new generation as well
        subscriber.tell(held, [], False, self.generation)
        self._subscribers.add(subscriber)
        try:
            while not subscriber.is_too_slow:
                async with asyncio.timeout(STALL_S):
                    await write_frame(peer, await subscriber.next_frame())
        finally:
            self._subscribers.discard(subscriber)


class _Subscriber:
    """Frames that wait for one."""

    def __init__(self) -> None:
        self._frames: list[bytes] = []
        self._num_bytes = 0
        self._number = 0
        self._more = asyncio.Event()
        self.is_too_slow = False

    def tell(self, stored: dict[KVTier, list[bytes]], removed: list[bytes], is_cleared: bool, generation: int) -> None:
        frame = encode_kv(TierEvent(self._number, stored, removed, is_cleared, generation))
        self._number += 1
        self._frames.append(frame)
        self._num_bytes += len(frame)
        self.is_too_slow = self.is_too_slow or (self._num_bytes > MAX_EVENT_BYTES and len(self._frames) > 1)
        self._more.set()

    async def next_frame(self) -> bytes:
        """Empty: nothing happened for a while."""
        if not self._frames:
            self._more.clear()
            try:
                async with asyncio.timeout(EVENT_BEAT_S):
                    await self._more.wait()
            except TimeoutError:
                return b""
        frame = self._frames.pop(0)
        self._num_bytes -= len(frame)
        return frame
