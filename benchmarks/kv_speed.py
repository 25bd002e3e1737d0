"""How near copies, sockets and files of the KVConnector come to the limit of the machine, measured in turns with it.

    python -m benchmarks.kv_speed arena|tcp|disk

Each measurement returns the rates of both in pairs, taken one right after the other, since a busy machine changes from
second to second.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import mmap
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import numpy as np

from cluster.kv_connector.arena import Arena
from cluster.kv_connector.disk_tier import DiskItem, DiskTier
from cluster.kv_connector.tcp_giver import TcpGiver
from cluster.kv_connector.tcp_socket import Identity
from cluster.kv_connector.tcp_transport import NUM_LANES, TcpTransport
from cluster.kv_connector.transport import PeerAddress, ReadLease
from replica.arena_map import ArenaMap
from replica.kv_messages import KVPeer, KVSpace, KVTier
from replica.slab_copy import copy_slabs

#: of a block of the default model: 3 heads, 30 layers, keys and values, 16 tokens, 64 channels, bfloat16
SLAB_BYTES = 360 << 10
#: 1,024 tokens
PROMPT_BLOCKS = 64
GIB = 1 << 30


class Pair(msgspec.Struct, frozen=True):
    """Rates in bytes/s and seconds of CPU for each GiB, ours and the limit's; medians over rounds."""

    ours: float
    limit: float
    cpu_s: float
    limit_cpu_s: float
    #: median over rounds of ours / limit
    share: float


Run = Callable[[], tuple[float, float]]


def timed(work: Callable[[], object], num_bytes: int) -> tuple[float, float]:
    """Bytes/s and CPU seconds a GiB, of this process and of children that were waited for."""
    cpu, begin = cpu_now(), time.perf_counter()
    work()
    wall, cpu = time.perf_counter() - begin, cpu_now() - cpu
    return num_bytes / wall, cpu / num_bytes * GIB


def cpu_now() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def in_turns(ours: Run, limit: Run, rounds: int) -> Pair:
    """The first round of each only warms up."""
    found = [(ours(), limit()) for _ in range(rounds + 1)][1:]
    return Pair(
        ours=statistics.median(one[0] for one, _ in found),
        limit=statistics.median(one[0] for _, one in found),
        cpu_s=statistics.median(one[1] for one, _ in found),
        limit_cpu_s=statistics.median(one[1] for _, one in found),
        share=statistics.median(one[0] / other[0] for one, other in found),
    )


# ---- arena ----


def arena(rounds: int, num_bytes: int = GIB) -> Pair:
    """Slabs from a pool into the arena and back, in scattered order, beside one copy of as many bytes."""
    num_slots = num_bytes // 2 // SLAB_BYTES
    owner = Arena(num_slots, SLAB_BYTES)
    other = ArenaMap(owner.descriptor, owner.num_slots, owner.slot_bytes)  # as a replica has it
    other.populate(True)
    pool = np.ones((num_slots, SLAB_BYTES), np.uint8)
    order = np.random.default_rng(7).permutation(num_slots)
    in_arena = other.address + order.astype(np.int64) * other.slot_bytes
    in_pool = pool.ctypes.data + np.arange(num_slots, dtype=np.int64) * SLAB_BYTES
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)

    def there_and_back() -> None:
        copy_slabs(in_arena, in_pool, SLAB_BYTES)
        copy_slabs(in_pool, in_arena, SLAB_BYTES)

    try:
        return in_turns(
            lambda: timed(there_and_back, 2 * num_slots * SLAB_BYTES),
            lambda: timed(lambda: np.copyto(target, source), num_bytes),
            rounds,
        )
    finally:
        other.close()
        asyncio.run(owner.close())


# ---- tcp ----


class EverySlab:
    """Gives slot `int(hash)`."""

    async def lease_for_peer(
        self, reader: KVPeer, hashes: list[bytes], within_s: float, generation: int = 0
    ) -> ReadLease:
        return ReadLease([int(one) for one in hashes])

    def release_of_peer(self, lease: ReadLease) -> None:
        pass

    def held_blocks(self) -> dict[KVTier, list[bytes]]:
        return {}


def identity(name: str) -> Identity:
    """Both ends of a measurement."""
    return Identity(KVPeer(name, "1"), KVSpace("bench", 16, SLAB_BYTES, 1, "slabs"), SLAB_BYTES, b"bench")


def give(num_slots: int) -> None:
    """The other process: prints the ports of a giver and of bare sockets, ends with its standard input."""

    async def main() -> None:
        owner = Arena(num_slots, SLAB_BYTES)
        owner.map.array[:] = 1
        giver = TcpGiver("127.0.0.1", identity("giver"), EverySlab(), owner.slab)
        bare = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=_give_bare, args=(bare, owner.map.view), daemon=True).start()
        print(json.dumps([giver.port, bare.getsockname()[1]]), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        os._exit(0)

    asyncio.run(main())


def _give_bare(listener: socket.socket, memory: memoryview) -> None:
    """To each connection: as many bytes as it asks for in 8 bytes, again and again."""

    def serve(peer: socket.socket) -> None:
        while head := peer.recv(8, socket.MSG_WAITALL):
            peer.sendall(memory[: int.from_bytes(head, "little")])

    while True:
        peer, _ = listener.accept()
        threading.Thread(target=serve, args=(peer,), daemon=True).start()


def _take_bare(links: list[socket.socket], memory: memoryview, each: int) -> None:
    def take(link: socket.socket, view: memoryview) -> None:
        link.sendall(each.to_bytes(8, "little"))
        at = 0
        while at < each:
            at += link.recv_into(view[at : at + SLAB_BYTES], 0, socket.MSG_WAITALL)

    threads = [threading.Thread(target=take, args=(link, memory[number * each :])) for number, link in enumerate(links)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def process_cpu(pid: int) -> float:
    """Of another process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.asynccontextmanager
async def giving(num_slots: int) -> AsyncIterator[tuple[subprocess.Popen[bytes], int, int]]:
    """The other process and its ports."""
    command = [sys.executable, "-m", "benchmarks.kv_speed", "give", str(num_slots)]
    pipe = subprocess.PIPE
    with await asyncio.to_thread(subprocess.Popen, command, stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None
        port, bare = json.loads(await asyncio.to_thread(child.stdout.readline))
        try:
            yield child, port, bare
        finally:
            child.kill()


async def tcp(rounds: int, num_slots: int = 720) -> Pair:
    """Slabs of another process over loopback, beside as many bare sockets; CPU is of both processes."""
    owner = Arena(num_slots, SLAB_BYTES)
    await owner.prefault()
    taker = TcpTransport(identity("taker"), owner.slab)
    hashes, slots = [b"%d" % one for one in range(num_slots)], list(range(num_slots))
    num_bytes = num_slots * SLAB_BYTES
    each = num_bytes // NUM_LANES
    memory = owner.map.view
    ours: list[tuple[float, float]] = []
    limit: list[tuple[float, float]] = []
    async with giving(num_slots) as (child, port, bare):
        links = [socket.create_connection(("127.0.0.1", bare)) for _ in range(NUM_LANES)]
        peer = PeerAddress(KVPeer("giver", "1"), "127.0.0.1", port)
        for _ in range(rounds + 1):
            for found in (ours, limit):
                cpu, begin = cpu_now() + process_cpu(child.pid), time.perf_counter()
                if found is ours:
                    arrived = await taker.fetch(peer, hashes, slots, 60.0)
                    assert all(arrived), f"{arrived.count(False)} slabs did not arrive"
                else:
                    await asyncio.to_thread(_take_bare, links, memory, each)
                wall, cpu = time.perf_counter() - begin, cpu_now() + process_cpu(child.pid) - cpu
                found.append((num_bytes / wall, cpu / num_bytes * GIB))
        for link in links:
            link.close()
    await taker.close()
    await owner.close()
    turns = iter(zip(ours, limit, strict=True))
    pairs = list(turns)
    both = iter([one for pair in pairs for one in pair])
    return in_turns(lambda: next(both), lambda: next(both), rounds)


# ---- disk ----


class DiskPairs(msgspec.Struct, frozen=True):
    """Both directions."""

    written: Pair
    read: Pair
    is_direct: bool
    #: what the limit was measured with
    by: str


async def disk(folder: Path, rounds: int, num_slots: int = 720) -> DiskPairs:
    """The tier's slabs beside a sequential job of the same size on the same file system: fio if it is there."""
    owner = Arena(num_slots, SLAB_BYTES)
    await owner.prefault()
    owner.map.array[:] = np.random.default_rng(7).integers(0, 256, SLAB_BYTES, np.uint8)
    num_bytes = num_slots * SLAB_BYTES
    source = mmap.mmap(-1, num_bytes)
    fio = shutil.which("fio") or os.environ.get("SHOAL_FIO", "")
    with tempfile.TemporaryDirectory(dir=folder) as place:
        space = KVSpace("bench", 16, SLAB_BYTES, 1, "slabs")
        tier = await DiskTier.open(Path(place), space, SLAB_BYTES, num_bytes)
        plain = Path(place) / "plain"
        found: dict[str, list[tuple[float, float]]] = {"write": [], "read": [], "limit write": [], "limit read": []}
        for _ in range(rounds + 1):
            for way in ("write", "read"):
                cpu, begin = cpu_now(), time.perf_counter()
                await _move_all(tier, owner, way)
                wall = time.perf_counter() - begin
                found[way].append((num_bytes / wall, (cpu_now() - cpu) / num_bytes * GIB))
                work = (
                    functools.partial(_fio, plain, num_bytes, way)
                    if fio
                    else functools.partial(_direct, plain, source, way)
                )
                found[f"limit {way}"].append(await asyncio.to_thread(work))
        is_direct = tier.is_direct
        await tier.close()
    await owner.close()

    def pair(way: str) -> Pair:
        ours, limits = iter(found[way]), iter(found[f"limit {way}"])
        return in_turns(lambda: next(ours), lambda: next(limits), rounds)

    return DiskPairs(pair("write"), pair("read"), is_direct, "fio" if fio else "a loop with O_DIRECT")


async def _move_all(tier: DiskTier, owner: Arena, way: str) -> None:
    """A prompt's blocks at a time, two prompts on their way."""
    items = [DiskItem(slot, b"%016d" % slot, owner.slab(slot)) for slot in range(owner.num_slots)]
    starts = iter(range(0, len(items), PROMPT_BLOCKS))

    async def mover() -> None:
        for start in starts:
            move = tier.write if way == "write" else tier.read
            assert all(await move(items[start : start + PROMPT_BLOCKS])), f"{way} failed"

    await asyncio.gather(mover(), mover())


def _direct(path: Path, room: mmap.mmap, way: str) -> tuple[float, float]:
    """1 MiB at a time, one after the other, out of as much memory: one hot buffer would be written 1.5 x as fast."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    memory = memoryview(room)

    def run() -> None:
        for at in range(0, len(memory), 1 << 20):
            if way == "write":
                os.pwrite(file, memory[at : at + (1 << 20)], at)
            else:
                os.preadv(file, [memory[at : at + (1 << 20)]], at)

    try:
        os.posix_fallocate(file, 0, len(memory))
        return timed(run, len(memory))
    finally:
        os.close(file)


def _fio(path: Path, num_bytes: int, way: str) -> tuple[float, float]:
    """Sequential, 1 MiB, O_DIRECT, four at a time."""
    fio = shutil.which("fio") or os.environ["SHOAL_FIO"]
    command = [
        fio, "--name=limit", f"--filename={path}", f"--size={num_bytes}", f"--rw={way}", "--bs=1M", "--direct=1",
        "--ioengine=libaio", "--iodepth=4", "--output-format=json", "--overwrite=1",
    ]  # fmt: skip
    cpu = cpu_now()
    done = subprocess.run(command, capture_output=True, check=True)
    job = json.loads(done.stdout[done.stdout.index(b"{") :])["jobs"][0][way]
    return float(job["bw_bytes"]), (cpu_now() - cpu) / num_bytes * GIB


def main() -> None:
    what = sys.argv[1] if len(sys.argv) > 1 else ""
    if what == "give":
        give(int(sys.argv[2]))
    elif what == "arena":
        print(arena(5))
    elif what == "tcp":
        print(asyncio.run(tcp(5)))
    elif what == "disk":
        print(asyncio.run(disk(Path.cwd(), 3)))
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
