"""What goes wrong in `kv_kills.py`, each at a moment that is seen and not hoped for: a process is stopped, what is then
on its way is looked at, and it dies or goes on.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks.kv_live import ARENA_SLOTS, World
from cluster.process_sweep import command_line, descendants, rank_workers, start_time
from replica.arena_map import round_slot
from replica.kv_messages import KV_LEASE_S


class Missed(Exception):
    """The moment did not come; the text says which."""


class NotHere(Exception):
    """This machine does not allow it; the text says what."""


#: what fits a minute
SHORT = ("connector_killed_in_load", "replica_killed_with_leases", "disk_full", "bytes_flipped_on_disk")
#: where a runner is not on a thread of its replica
ELSEWHERE = {
    "process": ("runner_killed_in_copy", "connector_killed_in_load", "replica_killed_with_leases"),
    "ranks": ("rank_killed_in_copy", "connector_killed_in_load", "connector_killed_in_store", "bytes_flipped_on_disk"),
}
ELSEWHERE["fake ranks"] = ELSEWHERE["ranks"]
Fault = Callable[[World], Awaitable[None]]
FAULTS: dict[str, Fault] = {}


def faults_of(shape: str) -> list[str]:
    """That can happen to a cluster of this shape."""
    only = {"rank_killed_in_copy", "runner_killed_in_copy"}
    return list(ELSEWHERE.get(shape, sorted(FAULTS.keys() - only)))


def fault(function: Fault) -> Fault:
    FAULTS[function.__name__] = function
    return function


async def _stop_connector(world: World, *asked: str, both: bool = False) -> int:
    """It stands still, and a replica, or each of both, has asked it for something of these. Three tries: with everybody
    waiting for loads nothing is computed that could be stored.
    """
    (pid,) = world.connectors()

    def have_asked(told: list[dict[str, Any]]) -> bool:
        whose = [any(one["counters"][name] > 0 for name in asked) for one in told]
        return len(told) == world.shape.num_replicas and (all(whose) if both else any(whose))

    for _ in range(3):
        os.kill(pid, signal.SIGSTOP)
        if await world.until(have_asked, 4):
            return pid
        os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(1)
    raise Missed(f"nothing is on its way: {', '.join(asked)}")


def _is_there(pid: int, began: int | None) -> bool:
    return began is not None and start_time(pid) == began


async def kill(world: World, pid: int) -> None:
    """And it is gone."""
    began = start_time(pid)
    os.kill(pid, signal.SIGKILL)
    await world.until(lambda _: not _is_there(pid, began))


async def _kill_in_copy(world: World, pids: list[int]) -> None:
    """One of these stands still with copies before it, and never gets to their end."""

    def is_copying(told: list[dict[str, Any]]) -> bool:
        return any(one["counters"][name] > 0 for one in told for name in ("kv_loading", "kv_storing"))

    for _ in range(10):
        pid = world.rng.choice(pids)
        os.kill(pid, signal.SIGSTOP)
        if await world.until(is_copying, 2):
            await kill(world, pid)
            return
        os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(world.rng.uniform(0.05, 0.3))
    raise Missed("it stopped between copies, ten times")


@fault
async def rank_killed_in_copy(world: World) -> None:
    """The other ranks have done their parts."""
    await _kill_in_copy(world, rank_workers(world.server.process.pid))


@fault
async def runner_killed_in_copy(world: World) -> None:
    """A runner in a process of its own; its replica ends with it."""
    below = [pid for replica in world.replicas() for pid in descendants(replica)]
    await _kill_in_copy(world, [pid for pid in below if "spawn_main" in command_line(pid)])


@fault
async def connector_killed_in_load(world: World) -> None:
    """With a load unanswered."""
    await kill(world, await _stop_connector(world, "kv_wanting"))


@fault
async def connector_killed_in_store(world: World) -> None:
    """With an offer unanswered, or being copied."""
    await kill(world, await _stop_connector(world, "kv_storing"))


@fault
async def connector_killed_at_work(world: World) -> None:
    """Under load, without a stop before: wherever reads, writes and copies are."""
    given = await world.figure("tier_given_disk")
    if not await world.until(lambda told: sum(one["counters"].get("tier_given_disk", 0) for one in told) > given):
        raise Missed("nothing is read from disk")
    (pid,) = world.connectors()
    await kill(world, pid)


async def _replica_with_answers(world: World) -> int:
    """A stopped replica that the connector has answered: slots are leased to it and reserved for it."""
    connector = await _stop_connector(world, "kv_wanting", "kv_storing", both=True)
    replica = world.rng.choice(world.replicas())
    os.kill(replica, signal.SIGSTOP)
    os.kill(connector, signal.SIGCONT)
    await asyncio.sleep(0.5)  # it reads what lies there
    return replica


@fault
async def replica_killed_with_leases(world: World) -> None:
    """In the middle of loads and stores: the connector has given what it asked for, and it has not answered yet."""
    await kill(world, await _replica_with_answers(world))


@fault
async def replica_killed_with_questions(world: World) -> None:
    """The connector reads the questions of a replica that is gone."""
    connector = await _stop_connector(world, "kv_wanting", "kv_storing", both=True)
    await kill(world, world.rng.choice(world.replicas()))
    os.kill(connector, signal.SIGCONT)


@fault
async def both_killed(world: World) -> None:
    """Connector and replica at once."""
    connector = await _stop_connector(world, "kv_wanting", "kv_storing", both=True)
    replica = world.rng.choice(world.replicas())
    os.kill(replica, signal.SIGKILL)
    await kill(world, connector)


async def _frozen_connector(world: World, seconds: float) -> None:
    pid = await _stop_connector(world, "kv_wanting", "kv_storing", both=True)
    await asyncio.sleep(seconds)
    os.kill(pid, signal.SIGCONT)


@fault
async def connector_frozen_5_s(world: World) -> None:
    """Shorter than loads wait, and than a lease."""
    await _frozen_connector(world, 5.0)


@fault
async def connector_frozen_beyond_lease(world: World) -> None:
    """Loads give up, and all its words lie unread for longer than a lease."""
    await _frozen_connector(world, KV_LEASE_S + 2.0)


@fault
async def replica_frozen_5_s(world: World) -> None:
    """Its leases live."""
    pid = await _replica_with_answers(world)
    await asyncio.sleep(5.0)
    os.kill(pid, signal.SIGCONT)


@fault
async def replica_frozen_beyond_lease(world: World) -> None:
    """The connector and the routers have given it up, and it goes on with leases that it has no more."""
    pid = await _replica_with_answers(world)
    await asyncio.sleep(KV_LEASE_S + 3.0)
    os.kill(pid, signal.SIGCONT)


def _slab_files(world: World) -> list[Path]:
    return sorted(world.folder.glob("*/slabs-*"))


def _flip(world: World) -> None:
    """A bit of every slab on disk."""
    slot_bytes = round_slot(world.shape.block_bytes)
    for path in _slab_files(world):
        file = os.open(path, os.O_RDWR)
        try:
            for start in range(0, os.fstat(file).st_size, slot_bytes):
                at = start + world.rng.randrange(world.shape.block_bytes)
                (byte,) = os.pread(file, 1, at) or b"\0"
                os.pwrite(file, bytes([byte ^ 1 << world.rng.randrange(8)]), at)
        finally:
            os.close(file)


@fault
async def bytes_flipped_on_disk(world: World) -> None:
    """Again and again while clients load from there, until a damaged slab was asked for."""
    before = await world.figure("tier_corrupt")
    end = time.monotonic() + 15
    while await world.figure("tier_corrupt") <= before:
        if time.monotonic() > end:
            raise Missed("no damaged slab was read")
        await asyncio.to_thread(_flip, world)
        await asyncio.sleep(0.1)


@fault
async def disk_full(world: World) -> None:
    """Nobody can write a byte to its file system any more, which was too small for the tier from the start; then there
    is room again.
    """
    if not world.has_own_disk:
        raise NotHere("no file systems of our own (unshare -m)")
    ballast = world.folder / "ballast"

    def fill() -> None:
        with ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                return

    await asyncio.to_thread(fill)
    stored = await world.figure("tier_stored_bytes_disk")
    evicted = await world.figure("tier_evictions_disk")

    def goes_on(told: list[dict[str, Any]]) -> bool:
        """Slabs are written in place of others, whose records the journal cannot take."""
        figures = [one["counters"] for one in told if "tier_stored" in one["counters"]]
        return any(
            bool(f["tier_stored_bytes_disk"] > stored and f["tier_evictions_disk"] > evicted + ARENA_SLOTS)
            for f in figures
        )

    happened = await world.until(goes_on, 15)
    ballast.unlink()
    if not happened:
        raise Missed("nothing was written to the full disk")


@fault
async def arena_full(world: World) -> None:
    """Each store takes another block's slot, or finds none: all of them are leased, on their way, or being written."""
    before = await world.figure("tier_no_room") + await world.figure("tier_evictions_host")

    def is_full(told: list[dict[str, Any]]) -> bool:
        figures = [one["counters"] for one in told]
        now = sum(f.get("tier_no_room", 0) + f.get("tier_evictions_host", 0) for f in figures)
        return bool(now > before + ARENA_SLOTS)

    if not await world.until(is_full, 15):
        raise Missed("the arena had room")
