"""Slabs between connectors over TCP: right bytes or none, whatever the other side does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash

from cluster.kv_connector import tcp_giver, tcp_socket, tcp_transport
from cluster.kv_connector.arena import Arena
from cluster.kv_connector.tcp_giver import TcpGiver
from cluster.kv_connector.tcp_socket import Identity, admit, read_frame, write_frame
from cluster.kv_connector.tcp_transport import TcpTransport
from cluster.kv_connector.tcp_wire import (
    ABSENT,
    EVENTS,
    MAX_WANT_BYTES,
    SLAB_HEADER,
    SLAB_MAGIC,
    LinkBudget,
    PeerError,
    decode_want,
)
from cluster.kv_connector.transport import PeerAddress, ReadLease, Transport
from replica.arena_map import HAS_ARENAS
from replica.kv_messages import KVPeer, KVSpace, KVTier, TierEvent
from tests.cluster.harness import until

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(not HAS_ARENAS, reason="arenas of KV blocks are for Linux")]
SLAB = 40_000
SPACE = KVSpace("model", 16, SLAB, 1, "layout")
GIVER = KVPeer("giver", "1")
IDENTITY = Identity(KVPeer("taker", "1"), SPACE, SLAB, b"secret")
NUM_SLOTS = 64


def name_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def content(number: int) -> bytes:
    return (b"%08d" % number) * (SLAB // 8)


class Source:
    """Block `n` lies in slot `n`, if it is below `num_blocks`."""

    def __init__(self, num_blocks: int = NUM_SLOTS) -> None:
        self.num_blocks = num_blocks
        self.num_out = self.num_leases = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def lease_for_peer(
        self, reader: KVPeer, hashes: list[bytes], within_s: float, generation: int = 0
    ) -> ReadLease:
        assert reader == IDENTITY.me
        await self.may_answer.wait()
        self.num_out += 1
        self.num_leases += 1
        numbers = [int.from_bytes(one, "little") for one in hashes]
        return ReadLease([number if number < self.num_blocks else -1 for number in numbers], self.num_leases)

    def release_of_peer(self, lease: ReadLease) -> None:
        self.num_out -= 1

    def held_blocks(self) -> dict[KVTier, list[bytes]]:
        return {KVTier.HOST: [name_of(number) for number in range(self.num_blocks)]}


@asynccontextmanager
async def giving(
    source: Source, max_bytes_per_s: float | None = None, **changes: Any
) -> AsyncIterator[tuple[TcpGiver, PeerAddress, Arena]]:
    """Ends with every lease given back."""
    arena = Arena(NUM_SLOTS, SLAB)
    for slot in range(NUM_SLOTS):
        arena.slab(slot)[:] = content(slot)
    identity = msgspec.structs.replace(IDENTITY, **{"me": GIVER, **changes})
    giver = TcpGiver("127.0.0.1", identity, source, arena.slab, max_bytes_per_s)
    try:
        yield giver, PeerAddress(GIVER, "127.0.0.1", giver.port), arena
    finally:
        await giver.close()
        await giver.close()
        assert source.num_out == 0
        await arena.close()


class Taker:
    """A transport and its arena."""

    def __init__(self, num_lanes: int = 4) -> None:
        self.arena = Arena(NUM_SLOTS, SLAB)
        self.transport = TcpTransport(IDENTITY, self.arena.slab, num_lanes)

    async def fetch(self, peer: PeerAddress, *numbers: int, within_s: float = 20.0) -> list[bool]:
        """Block `n` into slot `n`; what is called arrived is right."""
        transport: Transport = self.transport
        slots = [number % NUM_SLOTS for number in numbers]
        for slot in slots:
            self.arena.slab(slot)[:] = bytes(SLAB)
        arrived = await transport.fetch(peer, [name_of(number) for number in numbers], slots, within_s)
        for number, slot, ok in zip(numbers, slots, arrived, strict=True):
            assert not ok or bytes(self.arena.slab(slot)) == content(number), "bytes that nobody sealed"
        return arrived


@asynccontextmanager
async def taking(num_lanes: int = 4) -> AsyncIterator[Taker]:
    taker = Taker(num_lanes)
    try:
        yield taker
    finally:
        await taker.transport.close()
        await taker.transport.close()
        await taker.arena.close()


async def test_slabs_arrive_over_and_over() -> None:
    source = Source(60)
    async with giving(source) as (_, peer, _arena), taking() as taker:
        for _ in range(3):
            assert await taker.fetch(peer, *range(64)) == [True] * 60 + [False] * 4
        assert await taker.fetch(peer, 5) == [True]
        assert await taker.fetch(peer) == []
        many = await asyncio.gather(*(taker.fetch(peer, *range(start, start + 2)) for start in range(0, 60, 2)))
        assert all(all(one) for one in many)
        assert taker.transport.stats.num_broken == 0
        assert taker.transport.stats.fetched_bytes == (3 * 60 + 1 + 60) * SLAB


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"token": b"another"}, "does not know this cluster's token"),
        ({"space": msgspec.structs.replace(SPACE, block_size=32)}, "block_size is 16 there and 32 here"),
        (
            {"space": msgspec.structs.replace(SPACE, model_fingerprint="x")},
            "model_fingerprint is 'model' there and 'x'",
        ),
        ({"space": msgspec.structs.replace(SPACE, tensor_parallel_size=2)}, "tensor_parallel_size is 1 there and 2"),
        ({"slab_bytes": SLAB // 2}, "slabs have 40000 bytes there and 20000 here"),
        ({"me": KVPeer("giver", "2")}, "connector giver of incarnation 1 is gone; here is giver of incarnation 2"),
    ],
)
async def test_who_does_not_fit_hears_why(
    changes: dict[str, Any], sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = Source()
    async with giving(source, **changes) as (_, peer, _arena), taking() as taker:
        assert await taker.fetch(peer, 1, 2) == [False, False]
        assert sentence in caplog.text
        assert source.num_leases == 0
        with pytest.raises(PeerError, match=sentence):
            await anext(taker.transport.subscribe(peer))


async def test_another_version_of_the_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    async with giving(Source()) as (_, peer, _arena):
        monkeypatch.setattr(tcp_socket, "PROTOCOL_VERSION", 2)  # of what the taker says
        with pytest.raises(PeerError, match="KV protocol 2 is spoken there, 1 here"):
            await tcp_socket.connect(peer, IDENTITY, 5.0)


# ---- givers that fail ----

Giving = Callable[[socket.socket, list[int]], None]


def whole(link: socket.socket, number: int) -> None:
    body = content(number)
    link.sendall(SLAB_HEADER.pack(SLAB_MAGIC, whole.request_id, SLAB, xxhash.xxh3_64_intdigest(body)) + body)  # type: ignore[attr-defined]


def stalls(link: socket.socket, numbers: list[int]) -> None:
    """Two slabs and a half; the connection stays open."""
    for number in numbers[:2]:
        whole(link, number)
    link.sendall(SLAB_HEADER.pack(SLAB_MAGIC, whole.request_id, SLAB, 0) + content(9)[: SLAB // 2])  # type: ignore[attr-defined]
    link.recv(1)


def dies(link: socket.socket, numbers: list[int]) -> None:
    whole(link, numbers[0])
    whole(link, numbers[1])
    link.sendall(content(9)[:10])


def sends_garbage(link: socket.socket, numbers: list[int]) -> None:
    whole(link, numbers[0])
    whole(link, numbers[1])
    link.sendall(b"\xff" * SLAB)


def sends_too_much(link: socket.socket, numbers: list[int]) -> None:
    whole(link, numbers[0])
    whole(link, numbers[1])
    link.sendall(SLAB_HEADER.pack(SLAB_MAGIC, whole.request_id, 1 << 31, 0))  # type: ignore[attr-defined]
    link.sendall(content(9))


def answers_another_request(link: socket.socket, numbers: list[int]) -> None:
    whole(link, numbers[0])
    whole(link, numbers[1])
    link.sendall(SLAB_HEADER.pack(SLAB_MAGIC, whole.request_id + 1, SLAB, 0) + content(9))  # type: ignore[attr-defined]


def is_corrupt(link: socket.socket, numbers: list[int]) -> None:
    """Right form, wrong bytes."""
    whole(link, numbers[0])
    whole(link, numbers[1])
    for _ in numbers[2:]:
        link.sendall(SLAB_HEADER.pack(SLAB_MAGIC, whole.request_id, SLAB, 1) + content(9))  # type: ignore[attr-defined]


@asynccontextmanager
async def faulty(how: Giving) -> AsyncIterator[PeerAddress]:
    """A giver whose every connection ends in the same way."""
    identity = msgspec.structs.replace(IDENTITY, me=GIVER)
    loop = asyncio.get_running_loop()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)

    async def serve(link: socket.socket) -> None:
        with link:
            await admit(link, identity)
            want = decode_want(await read_frame(link, MAX_WANT_BYTES))
            link.setblocking(True)
            whole.request_id = want.request_id  # type: ignore[attr-defined]
            await asyncio.to_thread(how, link, [int.from_bytes(one, "little") for one in want.hashes])

    async def accept() -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                link, _ = await loop.sock_accept(listener)
                tasks.create_task(serve(link))

    accepting = asyncio.create_task(accept())
    try:
        yield PeerAddress(GIVER, "127.0.0.1", listener.getsockname()[1])
    finally:
        accepting.cancel()
        await asyncio.wait([accepting])
        listener.close()


@pytest.mark.parametrize(
    "how",
    [stalls, dies, sends_garbage, sends_too_much, answers_another_request, is_corrupt],
    ids=lambda how: how.__name__,
)
async def test_exactly_what_did_not_arrive_is_missing(how: Giving, monkeypatch: pytest.MonkeyPatch) -> None:
    """One lane: each connection brings two slabs and fails; three connections are made."""
    monkeypatch.setattr(tcp_transport, "STALL_S", 0.05)
    async with faulty(how) as peer, taking(num_lanes=1) as taker:
        arrived = await taker.fetch(peer, *range(8))
        assert arrived == ([True] * 2 + [False] * 6 if how is is_corrupt else [True] * 6 + [False] * 2)
        assert taker.transport.stats.num_corrupt == (6 if how is is_corrupt else 0)


async def test_it_goes_on_over_another_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A giver that ends each connection after one request; the rest comes over new ones and over other lanes."""
    monkeypatch.setattr(tcp_transport, "NUM_ROUNDS", 100)

    def once(link: socket.socket, numbers: list[int]) -> None:
        for number in numbers:
            whole(link, number)

    async with faulty(once) as peer, taking(num_lanes=1) as taker:
        monkeypatch.setattr(tcp_transport, "REQUEST_BYTES", 2 * SLAB)
        assert await taker.fetch(peer, *range(10)) == [True] * 10
        assert taker.transport.stats.num_broken >= 4


async def test_a_giver_that_never_answers_costs_the_deadline() -> None:
    source = Source()
    source.may_answer.clear()
    async with giving(source) as (_, peer, _arena), taking() as taker:
        assert await taker.fetch(peer, 1, 2, within_s=0.05) == [False, False]
        source.may_answer.set()
        assert await taker.fetch(peer, 1, 2) == [True, True]


async def test_nothing_is_written_after_a_fetch_was_cancelled() -> None:
    """The slots belong to others then."""
    async with giving(Source(), max_bytes_per_s=4e6) as (_, peer, _arena), taking() as taker:
        fetching = asyncio.create_task(taker.fetch(peer, *range(64)))
        await until(lambda: any(bytes(taker.arena.slab(slot)[:1]) == b"0" for slot in range(64)))
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        taker.arena.map.array[:] = 7
        assert await taker.fetch(peer, 0) == [True]
        assert (taker.arena.map.array[1:] == 7).all()


async def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    async with taking() as taker:
        assert await taker.fetch(PeerAddress(GIVER, "127.0.0.1", port), 1, 2) == [False, False]


@pytest.mark.parametrize("said", [b"\xff\xff\xff\xff", b"\x03\0\0\0abc", b"GET / HTTP/1.1\r\n\r\n", b""])
async def test_strangers_are_shut_out(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_giver, "HANDSHAKE_S", 0.1)
    async with giving(Source()) as (giver, peer, _arena), taking() as taker:
        reader, writer = await asyncio.open_connection("127.0.0.1", giver.port)
        writer.write(said)
        with contextlib.suppress(ConnectionResetError):  # there was more to read
            assert await reader.read() == b""
        writer.close()
        monkeypatch.undo()
        assert await taker.fetch(peer, 1) == [True]


async def test_a_reader_that_does_not_read_gives_the_lease_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_giver, "STALL_S", 0.1)
    source = Source()
    async with giving(source) as (_, peer, _arena):
        link = await tcp_socket.connect(peer, IDENTITY, 5.0)
        from cluster.kv_connector.tcp_wire import Want, encode

        for number in range(20):
            await write_frame(link, encode(Want(number, [name_of(one) for one in range(64)], 1.0)))
        await until(lambda: source.num_leases > 0 and source.num_out == 0)
        link.close()


async def test_a_slow_link() -> None:
    budget = LinkBudget(100.0)
    assert [budget.delay(50, 0.0), budget.delay(50, 0.0), budget.delay(50, 10.0)] == [0.5, 1.0, 0.5]
    loop = asyncio.get_running_loop()
    async with giving(Source(), max_bytes_per_s=16e6) as (_, peer, _arena), taking() as taker:
        begin = loop.time()
        assert all(await taker.fetch(peer, *range(64)))
        assert loop.time() - begin >= 0.95 * 64 * SLAB / 16e6


# ---- another process ----

OTHER = """
import asyncio, sys
from tests.cluster import test_kv_tcp as t
async def main():
    async with t.giving(t.Source(), max_bytes_per_s=4e6) as (giver, _, _):
        print(giver.port, flush=True)
        await asyncio.to_thread(sys.stdin.read)
asyncio.run(main())
"""


def other_process() -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", OTHER]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_giver_that_is_killed_or_frozen(how: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_transport, "STALL_S", 0.1)
    monkeypatch.setattr(tcp_transport, "CONNECT_S", 0.1)
    with other_process() as child:
        assert child.stdout is not None
        peer = PeerAddress(GIVER, "127.0.0.1", int(child.stdout.readline()))
        async with taking() as taker:
            assert await taker.fetch(peer, 3, within_s=10.0) in ([True], [False])  # a machine may be too busy for 0.1 s
            fetching = asyncio.create_task(taker.fetch(peer, *range(64), within_s=3.0))
            await until(lambda: taker.arena.map.array[:60, 0].any())
            os.kill(child.pid, how)
            arrived = await fetching
            assert not all(arrived)
        child.kill()


# ---- events ----


async def test_a_subscriber_hears_everything_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_giver, "EVENT_BEAT_S", 0.01)
    source = Source(2)
    async with giving(source) as (giver, peer, _arena), taking() as taker:
        events = taker.transport.subscribe(peer)
        assert await anext(events) == TierEvent(0, {KVTier.HOST: [name_of(0), name_of(1)]})
        for number in range(50):
            giver.publish({KVTier.DISK: [name_of(number)]}, [name_of(number + 1)])
        giver.publish({}, [], is_cleared=True)
        for number in range(50):
            assert await anext(events) == TierEvent(number + 1, {KVTier.DISK: [name_of(number)]}, [name_of(number + 1)])
        assert await anext(events) == TierEvent(51, is_cleared=True)
        await giver.close()
        with pytest.raises(PeerError):
            await anext(events)


async def test_a_subscriber_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_giver, "MAX_EVENT_BYTES", 1 << 20)
    async with giving(Source(2)) as (giver, peer, _arena):
        link = await tcp_socket.connect(peer, IDENTITY, 5.0, wants=EVENTS)
        await until(lambda: len(giver._subscribers) == 1)
        for number in range(1000):
            giver.publish({KVTier.HOST: [name_of(one) for one in range(number, number + 1000)]}, [])
        monkeypatch.setattr(tcp_giver, "STALL_S", 0.05)
        await until(lambda: not giver._subscribers)
        link.close()


def test_the_head_of_a_slab() -> None:
    assert SLAB_HEADER.size == 64
    assert SLAB_HEADER.pack(SLAB_MAGIC, 1, ABSENT, 0)[:4] == b"SHKV"
