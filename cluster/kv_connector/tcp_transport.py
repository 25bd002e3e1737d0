"""ASYNC. The taking end of `tcp`: slabs of other connectors straight into slots of our arena, over several sockets.

A fetch is cut into requests of a few slabs, which its lanes (a connection and a thread each) take from one heap, so a
slow lane has less to do. Each lane has two requests out, never more: what is on its way is bounded. What a broken lane
did not bring goes back to the heap, for the others or for another connection.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import xxhash

from cluster.kv_connector.tcp_giver import EVENT_BEAT_S, MAX_EVENT_BYTES
from cluster.kv_connector.tcp_socket import Identity, connect, cut, read_frame, receive_into, send_all, set_limits
from cluster.kv_connector.tcp_wire import ABSENT, EVENTS, LENGTH, SLAB_HEADER, SLAB_MAGIC, PeerError, Want, encode
from cluster.kv_connector.transport import PeerAddress
from replica.kv_messages import TierEvent, decode_from_connector

#: of one fetch; more did not help on loopback
NUM_LANES = 4
#: of all fetches together
MAX_LANES = 16
#: of a request: 23 slabs of 360 KiB. With 3 MiB both ends together took 0.65 CPU seconds a GiB, with 8 0.54
REQUEST_BYTES = 8 << 20
REQUESTS_OUT = 2
#: between two pieces of what is on its way; the first piece of a request may take until the deadline (disk)
STALL_S = 2.0
CONNECT_S = 2.0
#: lanes that end without need are made again so often
NUM_ROUNDS = 3
#: an unused connection is closed
IDLE_S = 60.0
logger = logging.getLogger(__name__)


class FetchStats(msgspec.Struct):
    """Since the start."""

    fetched_bytes: int = 0
    #: slabs whose checksum was wrong
    num_corrupt: int = 0
    #: connections that ended in the middle of something
    num_broken: int = 0


class TcpTransport:
    """`Transport` over TCP. One for all peers."""

    def __init__(self, identity: Identity, slab: Callable[[int], memoryview], num_lanes: int = NUM_LANES) -> None:
        """`slab`: of a slot of our arena."""
        self._identity = identity
        self._slab = slab
        self._num_lanes = num_lanes
        self._free_lanes = asyncio.Semaphore(MAX_LANES)
        self._pool = ThreadPoolExecutor(MAX_LANES, "shoal-kv-take")
        #: connections nobody uses, and since when
        self._idle: dict[PeerAddress, list[tuple[float, socket.socket]]] = {}
        self._running: set[asyncio.Task[list[bool]]] = set()
        self._request_ids = itertools.count()
        self._is_closed = False
        self.stats = FetchStats()

    async def fetch(
        self, peer: PeerAddress, hashes: list[bytes], slots: list[int], within_s: float, generation: int = 0
    ) -> list[bool]:
        """See `Transport`."""
        assert len(hashes) == len(slots), "a slot for each hash"
        if self._is_closed or not hashes:
            return [False] * len(hashes)
        work = _Fetch(hashes, [self._slab(slot) for slot in slots], time.monotonic() + within_s, self._num_lanes)
        work.generation = generation
        task = asyncio.create_task(self._fetch(peer, work))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            work.give_up()
            await asyncio.wait([task])  # the slots are the threads' until then
            raise

    async def close(self) -> None:
        """Idempotent."""
        self._is_closed = True
        for task in list(self._running):
            task.cancel()
        if self._running:
            await asyncio.wait(list(self._running))
        for _, one in itertools.chain(*self._idle.values()):
            one.close()
        self._idle.clear()
        await asyncio.to_thread(self._pool.shutdown)

    async def subscribe(self, peer: PeerAddress) -> AsyncIterator[TierEvent]:
        """What the peer has, then every change, in order. Ends with PeerError; begin again then."""
        link = await connect(peer, self._identity, CONNECT_S, wants=EVENTS)
        try:
            for number in itertools.count():
                event = await _next_event(link)
                if event.number != number:
                    raise PeerError(f"event {event.number} came where {number} was expected")
                yield event
        finally:
            link.close()

    # ---- one fetch ----

    async def _fetch(self, peer: PeerAddress, work: _Fetch) -> list[bool]:
        try:
            for _ in range(NUM_ROUNDS):
                if not await self._round(peer, work):
                    break
        except asyncio.CancelledError:  # by `close`: `_round` has waited for its lanes
            pass
        self.stats.fetched_bytes += work.num_bytes
        self.stats.num_corrupt += work.num_corrupt
        self.stats.num_broken += work.num_broken
        return work.arrived

    async def _round(self, peer: PeerAddress, work: _Fetch) -> bool:
        """With as many lanes as there are; True: some slabs may still come in another round."""
        wanted = min(self._num_lanes, work.num_requests)
        lanes = [asyncio.create_task(self._lane(peer, work, is_first=number == 0)) for number in range(wanted)]
        try:
            await asyncio.wait(lanes)
        except asyncio.CancelledError:
            work.give_up()
            await asyncio.wait(lanes)
            raise
        return any(lane.result() for lane in lanes) and work.is_open

    async def _lane(self, peer: PeerAddress, work: _Fetch, is_first: bool) -> bool:
        """True: it had a connection. Others than the first give way when many fetches run."""
        if not is_first and self._free_lanes.locked():
            return False
        opening = asyncio.ensure_future(self._open(peer, work))
        work.opening.add(opening)
        try:
            link = await opening
        except (PeerError, TimeoutError) as error:
            logger.warning("KV of connector %s at %s: %s", peer.peer.peer_id, peer.host, error or "no lane is free")
            return False
        except asyncio.CancelledError:  # given up
            return False
        finally:
            work.opening.discard(opening)
        try:
            is_whole = work.add(link)
            if is_whole:
                loop = asyncio.get_running_loop()
                is_whole = await loop.run_in_executor(self._pool, work.take, link, self._request_ids)
            work.remove(link)
            if is_whole and not self._is_closed:
                self._idle.setdefault(peer, []).append((time.monotonic(), link))
            else:
                link.close()
            return True
        finally:
            self._free_lanes.release()

    async def _open(self, peer: PeerAddress, work: _Fetch) -> socket.socket:
        """A connection, and one of the lanes that there are in all, which the caller gives back."""
        async with asyncio.timeout(work.seconds_left):
            await self._free_lanes.acquire()
        try:
            link = self._take_idle(peer)
            if link is None:
                link = await connect(peer, self._identity, min(CONNECT_S, work.seconds_left))
                link.setblocking(True)
            return link
        except BaseException:
            self._free_lanes.release()
            raise

    def _take_idle(self, peer: PeerAddress) -> socket.socket | None:
        found = None
        oldest = time.monotonic() - IDLE_S
        for address, links in list(self._idle.items()):
            while links and links[0][0] < oldest:
                links.pop(0)[1].close()
            if address == peer and links:
                found = links.pop()[1]
            if not links:
                del self._idle[address]
        return found


class _Fetch:
    """One fetch, as its lanes see it. The public calls but `take` return at once."""

    def __init__(self, hashes: list[bytes], slabs: list[memoryview], deadline: float, num_lanes: int) -> None:
        self._hashes = hashes
        self._slabs = slabs
        self._deadline = deadline
        self.arrived = [False] * len(hashes)
        per_lane = -(-len(hashes) // num_lanes)
        per_request = max(1, min(REQUEST_BYTES // max(1, len(slabs[0])), per_lane))
        self._heap = deque(
            list(range(start, min(start + per_request, len(hashes)))) for start in range(0, len(hashes), per_request)
        )
        self.num_requests = len(self._heap)
        self._lock = threading.Lock()
        self._links: set[socket.socket] = set()
        self._is_given_up = False
        #: connections that come
        self.opening: set[asyncio.Future[socket.socket]] = set()
        #: of the taker, told to the giver
        self.generation = 0
        self.num_bytes = self.num_corrupt = self.num_broken = 0

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    @property
    def is_open(self) -> bool:
        """Something is missing and may still come."""
        return bool(self._heap) and not self._is_given_up and self.seconds_left > 0

    def add(self, link: socket.socket) -> bool:
        """A lane begins. False: too late."""
        with self._lock:
            if not self._is_given_up:
                self._links.add(link)
            return not self._is_given_up

    def remove(self, link: socket.socket) -> None:
        """Its lane has ended."""
        with self._lock:
            self._links.discard(link)

    def give_up(self) -> None:
        """All lanes end now."""
        with self._lock:
            self._is_given_up = True
            for link in self._links:
                cut(link)
        for opening in self.opening:
            opening.cancel()

    # ---- on a thread ----

    def take(self, link: socket.socket, request_ids: itertools.count[int]) -> bool:
        """Bring slabs until none is left. False: the connection cannot be used any more."""
        out: deque[tuple[int, list[int]]] = deque()
        try:
            set_limits(link, write_s=STALL_S)
            while True:
                while len(out) < REQUESTS_OUT and (indices := self._next_request()):
                    request_id = next(request_ids) & 0xFFFFFFFF
                    out.append((request_id, indices))
                    hashes = [self._hashes[i] for i in indices]
                    want = encode(Want(request_id, hashes, self.seconds_left, self.generation))
                    send_all(link, [LENGTH.pack(len(want)), want])
                if not out:
                    return True
                request_id, indices = out[0]
                is_first = True
                while indices:
                    self._take_one(link, request_id, indices[0], is_first)
                    indices.pop(0)
                    is_first = False
                out.popleft()
        except PeerError as error:
            with self._lock:
                self._heap.extend(indices for _, indices in out if indices)
                self.num_broken += not self._is_given_up
            logger.debug("a lane ended: %s", error)
            return False

    def _next_request(self) -> list[int]:
        with self._lock:
            if self._is_given_up or not self._heap or self.seconds_left == 0:
                return []
            return self._heap.popleft()

    def _take_one(self, link: socket.socket, request_id: int, index: int, is_first: bool) -> None:
        """Raises PeerError; the slab may come from elsewhere then."""
        head = bytearray(SLAB_HEADER.size)
        left = self.seconds_left
        receive_into(link, memoryview(head), left if is_first else min(left, STALL_S))
        magic, number, length, digest = SLAB_HEADER.unpack(head)
        if magic != SLAB_MAGIC or number != request_id:
            raise PeerError("it sent something else than what was asked for")
        if length == ABSENT:
            return
        slab = self._slabs[index]
        if length != len(slab):
            raise PeerError(f"it sent a slab of {length} bytes; ours have {len(slab)}")
        receive_into(link, slab, min(self.seconds_left, STALL_S))
        is_right = xxhash.xxh3_64_intdigest(slab) == digest
        with self._lock:
            self.arrived[index] = is_right
            self.num_bytes += length
            self.num_corrupt += not is_right


async def _next_event(link: socket.socket) -> TierEvent:
    while True:
        try:
            async with asyncio.timeout(3 * EVENT_BEAT_S):
                frame = await read_frame(link, MAX_EVENT_BYTES)
        except TimeoutError:
            raise PeerError(f"nothing for {3 * EVENT_BEAT_S:g} s") from None
        if not frame:
            continue
        try:
            event = decode_from_connector(frame)
        except msgspec.DecodeError as error:
            raise PeerError(f"not a message of ours: {error}") from None
        if isinstance(event, TierEvent):
            return event
        raise PeerError(f"{type(event).__name__} where an event was expected")
