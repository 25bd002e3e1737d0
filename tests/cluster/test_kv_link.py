"""Replicas of a node and its connector: the arena in several processes, kill -9 of each, and the Unix socket."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cluster.kv_connector import service as service_module
from cluster.kv_connector.arena import Arena, check_room
from cluster.kv_connector.service import KVService, Member
from replica import frame_socket, kv_link
from replica.arena_map import HAS_ARENAS, ArenaError, ArenaMap
from replica.errors import ConfigError
from replica.kv_link import KVLink, KVLinkHandler
from replica.kv_messages import (
    MAX_KV_MESSAGE_BYTES,
    Acquire,
    Acquired,
    Beat,
    Cleared,
    FromConnector,
    Hello,
    KVPeer,
    KVSpace,
    Release,
    ToConnector,
    Unwelcome,
    Welcome,
    encode_kv,
)
from tests.cluster.harness import until

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(not HAS_ARENAS, reason="arenas of KV blocks are for Linux")]
ROOT = Path(__file__).parents[2]
SPACE = KVSpace("model", 16, 5000, 1, "layout")


# ---- the arena ----

#: maps the arena that it inherits, writes one slot, says so, ends as it is told
ATTACH = """
import os, sys
from replica.arena_map import ArenaMap
arena = ArenaMap(int(sys.argv[1]), 8, 8192)
arena.populate(False)
arena.slab(int(sys.argv[2]))[:5] = b"hello"
print("written", flush=True)
if sys.stdin.readline() == "exit\\n":
    sys.exit(0)
os.kill(os.getpid(), 9)
"""

#: owns an arena, lets it be mapped through its descriptor, is killed
CREATE = """
import os, sys, asyncio
from cluster.kv_connector.arena import Arena
async def main():
    arena = Arena(8, 5000)
    arena.slab(3)[:5] = b"there"
    print(os.getpid(), arena.descriptor, flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""


def child(script: str, *arguments: str, descriptors: tuple[int, ...] = ()) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, pass_fds=descriptors)


def say(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


async def test_those_who_attach_may_die_in_any_way() -> None:
    arena = Arena(8, 5000)
    names = sorted(os.listdir("/dev/shm"))
    try:
        for slot, how in enumerate(("exit", "kill", "kill")):
            with child(ATTACH, str(arena.descriptor), str(slot), descriptors=(arena.descriptor,)) as process:
                assert hear(process) == "written"
                say(process, how)
                assert process.wait() == (0 if how == "exit" else -signal.SIGKILL)
            assert [bytes(arena.slab(one)[:5]) for one in range(slot + 1)] == [b"hello"] * (slot + 1)
        assert not [one for one in os.listdir("/dev/shm") if one not in names and "shoal" in one]
    finally:
        await arena.close()


async def test_a_creator_that_is_killed_leaves_the_mapping() -> None:
    with child(CREATE) as process:
        pid, descriptor = hear(process).split()
        opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
        arena = ArenaMap(opened, 8, 8192)
        with pytest.raises(PermissionError):
            os.ftruncate(opened, 4096)  # nobody cuts it short under the others
        os.close(opened)
        say(process, "die")
        assert process.wait() == -signal.SIGKILL
    assert bytes(arena.slab(3)[:5]) == b"there"
    arena.slab(4)[:] = b"x" * 8192
    arena.close()


async def test_prefault_tells_how_far_it_is_and_gives_up() -> None:
    arena = Arena(4 * 16384, 4096)  # 256 MiB
    told: list[int] = []
    await arena.prefault(lambda done, of: told.append(done * 4 // of))
    await until(lambda: told[-1:] == [4])
    assert told == [1, 2, 3, 4]
    await arena.close()
    await arena.close()
    given_up = Arena(4 * 16384, 4096)
    filling = asyncio.create_task(given_up.prefault())
    await asyncio.sleep(0)
    await given_up.close()
    await filling
    assert given_up.descriptor == -1


async def test_an_arena_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache\.host_tier_gib: 8.00 GiB are asked for, 2.00 GiB are free.*1.75"):
        check_room(8 << 30, 2 << 30)
    with pytest.raises(ConfigError, match=r"kv_cache\.host_tier_gib"):
        Arena(1 << 30, 4096, available=4 << 30)
    with pytest.raises(ConfigError, match="too small for one block of 4096"):
        Arena(0, 4096)
    arena = Arena(2, 4096)
    with pytest.raises(ArenaError, match="8192 bytes does not hold 3 slots"):
        ArenaMap(arena.descriptor, 3, 4096)
    with pytest.raises(IndexError):
        arena.slab(2)
    await arena.close()


# ---- the socket ----


class Handler:
    """Welcomes everybody but `stranger`; answers each Acquire."""

    def __init__(self, incarnation: str = "1") -> None:
        self.incarnation = incarnation
        self.heard: list[tuple[str, ToConnector]] = []
        self.gone: list[str] = []
        self.lease_s = 10.0

    def on_hello(self, member: Member, hello: Hello) -> Welcome | Unwelcome:
        if hello.member == "stranger":
            return Unwelcome("KV cannot be exchanged: block_size is 32 there and 16 here")
        return Welcome(KVPeer("connector", self.incarnation), 8, 8192, self.lease_s)

    def on_message(self, member: Member, message: ToConnector) -> None:
        assert member.hello is not None
        self.heard.append((member.hello.member, message))
        if isinstance(message, Acquire):
            member.send(Acquired(message.lease_id, [1, 2]))

    def on_gone(self, member: Member) -> None:
        assert member.hello is not None
        self.gone.append(member.hello.member)


class Replica(KVLinkHandler):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.welcomes: list[Welcome] = []
        self.arenas: list[ArenaMap] = []
        self.heard: list[FromConnector] = []
        self.lost: list[str] = []
        self.refused: list[str] = []

    def on_connected(self, welcome: Welcome, arena: ArenaMap) -> None:
        self.welcomes.append(welcome)
        self.arenas.append(arena)

    def on_message(self, message: FromConnector) -> None:
        self.heard.append(message)

    def on_lost(self, reason: str) -> None:
        self.lost.append(reason)

    def on_refused(self, message: str) -> None:
        self.refused.append(message)


def hello(member: str) -> Hello:
    return Hello(KVPeer("replica", "7"), member, SPACE)


@asynccontextmanager
async def door(handler: Handler, name: str | None = None) -> AsyncIterator[tuple[KVService, Arena]]:
    arena = Arena(8, 5000)
    service = KVService(handler, arena.descriptor, name)
    try:
        yield service, arena
    finally:
        service.close()
        service.close()
        await arena.close()


@asynccontextmanager
async def link(service: KVService, member: str = "engine") -> AsyncIterator[tuple[KVLink, Replica]]:
    async def find() -> str:
        return service.name

    replica = Replica()
    made = KVLink(hello(member), find, replica)
    made.start()
    try:
        yield made, replica
    finally:
        await made.close()
        await made.close()
        for arena in replica.arenas:
            arena.close()


async def test_a_replica_gets_the_arena_and_answers() -> None:
    handler = Handler()
    async with door(handler) as (service, arena), link(service) as (one, replica), link(service, "rank") as (_, rank):
        await until(lambda: bool(replica.welcomes and rank.welcomes))
        arena.slab(3)[:4] = b"abcd"
        assert bytes(replica.arenas[0].slab(3)[:4]) == b"abcd"
        rank.arenas[0].slab(4)[:4] = b"efgh"
        assert bytes(arena.slab(4)[:4]) == b"efgh"
        for lease in range(100):
            assert one.send(Acquire(lease, [bytes([lease]) * 16], 1.0))
        one.send(Release([1]))
        await until(lambda: len(replica.heard) == 100)
        assert replica.heard == [Acquired(lease, [1, 2]) for lease in range(100)]
        await until(lambda: len(handler.heard) == 101)
        assert rank.heard == []
        for member in service.members:
            member.send(Cleared(1))
        await until(lambda: rank.heard == [Cleared(1)])
    assert sorted(handler.gone) == ["engine", "rank"]


async def test_it_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = Handler()
    handler.lease_s = 0.03
    async with door(handler) as (service, _), link(service) as (_, _replica):
        await until(lambda: len(handler.heard) >= 3)
        assert handler.heard[0] == ("engine", Beat())


async def test_a_connector_that_dies_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_link, "FIRST_WAIT_S", 0.001)
    first = Handler()
    async with door(first) as (service, arena), link(service) as (one, replica):
        await until(lambda: one.is_connected)
        arena.slab(0)[:1] = b"1"
        service.close()
        await until(lambda: bool(replica.lost))
        assert not one.send(Beat()), "nobody is connected"
        assert bytes(replica.arenas[0].slab(0)[:1]) == b"1", "what was leased may be read to its end"
        async with door(Handler("2"), service.name) as (_, _arena):
            await until(lambda: len(replica.welcomes) == 2)
            assert [welcome.connector.incarnation for welcome in replica.welcomes] == ["1", "2"]
            assert bytes(replica.arenas[1].slab(0)[:1]) == b"\0", "another arena"
            assert one.is_connected
    assert len(replica.lost) == 1


async def test_who_does_not_fit_hears_why(monkeypatch: pytest.MonkeyPatch) -> None:
    async with door(Handler()) as (service, _), link(service, "stranger") as (one, replica):
        await until(lambda: bool(replica.refused))
        assert replica.refused == ["KV cannot be exchanged: block_size is 32 there and 16 here"]
        assert not one.is_connected
        assert not service.members


async def test_a_member_may_be_told_to_go() -> None:
    """What was sent before still arrives, and it is gone when it says so."""
    handler = Handler()
    async with door(handler) as (service, _), link(service) as (one, replica):
        await until(lambda: one.is_connected)
        (member,) = service.members
        for lease in range(300):
            member.send(Acquired(lease, list(range(5000))))
        member.finish()
        member.send(Cleared(1))
        await until(lambda: bool(replica.lost))
        assert len(replica.heard) == 300
        await until(lambda: handler.gone == ["engine"])


@pytest.mark.parametrize(
    "said",
    [
        b"\x05\0\0\0hello",
        (MAX_KV_MESSAGE_BYTES + 1).to_bytes(4, "little"),
        b"\xff\xff\xff\xff",
        len(encode_kv(Beat())).to_bytes(4, "little") + encode_kv(Beat()),  # before hello
    ],
)
async def test_who_talks_nonsense_is_shut_out(said: bytes) -> None:
    handler = Handler()
    async with door(handler) as (service, _):
        stranger = socket.socket(socket.AF_UNIX)
        stranger.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(stranger, service.name)
        await loop.sock_sendall(stranger, said)
        assert await loop.sock_recv(stranger, 100) == b""
        stranger.close()
        assert handler.heard == []
        assert handler.gone == []


async def test_who_says_nothing_is_shut_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "HELLO_S", 0.01)
    async with door(Handler()) as (service, _):
        stranger = socket.socket(socket.AF_UNIX)
        stranger.setblocking(False)
        await asyncio.get_running_loop().sock_connect(stranger, service.name)
        assert await asyncio.get_running_loop().sock_recv(stranger, 100) == b""
        stranger.close()


async def test_who_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_socket, "MAX_WAITING_BYTES", 1 << 20)
    handler = Handler()
    async with door(handler) as (service, _):
        stranger = socket.socket(socket.AF_UNIX)
        stranger.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(stranger, service.name)
        frame = encode_kv(hello("slow"))
        await loop.sock_sendall(stranger, len(frame).to_bytes(4, "little") + frame)
        await until(lambda: len(service.members) == 1)
        (member,) = service.members
        while member.is_connected:
            member.send(Acquired(1, list(range(10000))))
            await asyncio.sleep(0)
        assert handler.gone == ["slow"]
        assert not service.members
        stranger.close()


async def test_no_descriptor_is_left() -> None:
    before = len(os.listdir("/proc/self/fd"))
    async with door(Handler()) as (service, _), link(service) as (one, _replica):
        await until(lambda: one.is_connected)
    assert len(os.listdir("/proc/self/fd")) == before
