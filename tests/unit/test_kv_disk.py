"""The disk tier of a connector: what it stores is what it gives back, or nothing; cases F-06 to F-13."""

from __future__ import annotations

import asyncio
import errno
import logging
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import xxhash

from cluster.kv_connector import disk_journal, disk_tier
from cluster.kv_connector.config import KVCacheConfig
from cluster.kv_connector.connector import Connector
from cluster.kv_connector.disk_folder import SpaceFolder, space_name
from cluster.kv_connector.disk_tier import DiskItem, DiskTier
from replica.arena_map import HAS_ARENAS
from replica.block_hash import chain_hashes, root_hash
from replica.errors import ConfigError
from replica.kv_messages import KVPeer, KVSpace

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not HAS_ARENAS, reason="the disk tier is for Linux"),
]
SLAB = 8192
SPACE = KVSpace("model", 16, SLAB, 1, "h-l-2-t-d")


def name_of(number: int) -> bytes:
    return (number + 1).to_bytes(16, "little")


def room(size: int = SLAB) -> memoryview:
    """At the start of a page, as a slot of the arena."""
    return memoryview(mmap.mmap(-1, max(size, 1)))[:size]


def item(number: int, slot: int | None = None, size: int = SLAB) -> DiskItem:
    """Bytes that say whose they are."""
    memory = room(size)
    memory[:] = (name_of(number) * (size // 16 + 1))[:size]
    return DiskItem(number if slot is None else slot, name_of(number), memory)


async def opened(folder: Path, space: KVSpace = SPACE, num_slots: int = 16, use_direct: bool = True) -> DiskTier:
    return await DiskTier.open(folder, space, space.block_bytes, num_slots * space.block_bytes, use_direct)


async def write(tier: DiskTier, items: list[DiskItem]) -> list[bool]:
    """Which of them were stored, with the right checksum."""
    digests = await tier.write(items)
    expected = [xxhash.xxh3_64_intdigest(one.memory) for one in items]
    assert [one for one in digests if one is not None] == [e for e, d in zip(expected, digests, strict=True) if d]
    return [one is not None for one in digests]


async def found(tier: DiskTier, *numbers: int, size: int = SLAB) -> list[bool]:
    """Which of these blocks come back; those that do are what was stored."""
    wanted = [DiskItem(number, name_of(number), room()) for number in numbers]
    arrived = [one is not None for one in await tier.read(wanted)]
    for number, one, ok in zip(numbers, wanted, arrived, strict=True):
        assert not ok or one.memory[:size] == item(number, size=size).memory, "bytes that nobody stored"
    return arrived


@pytest.mark.parametrize("use_direct", [True, False])
async def test_what_is_stored_comes_back(tmp_path: Path, use_direct: bool) -> None:
    tier = await opened(tmp_path, use_direct=use_direct)
    assert await write(tier, [item(number) for number in range(10)]) == [True] * 10
    assert await found(tier, *range(12)) == [True] * 10 + [False] * 2
    assert await found(tier, 9, 0, 3, 2) == [True] * 4
    assert tier.stats == disk_tier.DiskStats(read_bytes=14 * SLAB, written_bytes=10 * SLAB)
    await tier.close()
    await tier.close()


async def test_f_13_a_slot_holds_exactly_what_was_stored_last(tmp_path: Path) -> None:
    tier = await opened(tmp_path)
    for size in (SLAB, 100, 0, 4096, SLAB - 1, 1, SLAB):
        assert await write(tier, [item(1, size=size), item(2, size=size)]) == [True, True]
        assert [entry.num_bytes for entry in tier.entries()] == [size, size]
        assert await found(tier, 1, 2, size=size) == [True, True]
    assert await tier.read([DiskItem(1, name_of(1), room(100))]) == [None], "room for less than was stored"
    await tier.close()


def started(command: list[str], root: Path, environ: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root, env=environ, text=True)


async def test_f_10_a_restart_finds_everything(tmp_path: Path) -> None:
    """Another process, with another seed of Python's own hash."""
    script = (
        "import asyncio, sys\nfrom pathlib import Path\nfrom tests.unit import test_kv_disk as t\n"
        "from replica.block_hash import chain_hashes, root_hash\n"
        "async def main():\n"
        "    tier = await t.opened(Path(sys.argv[1]))\n"
        "    hashes = chain_hashes(root_hash('model'), list(range(160)), 16)\n"
        "    items = [t.DiskItem(i, h, t.item(i).memory) for i, h in enumerate(hashes)]\n"
        "    assert all(await t.write(tier, items))\n"
        "    print('written', flush=True)\n"
        "    sys.stdin.read()\n"
        "asyncio.run(main())\n"
    )
    environ = {**os.environ, "PYTHONHASHSEED": "77"}
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", script, str(tmp_path)]
    with started(command, root, environ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "written\n"
        second = await opened(tmp_path)  # beside it, in a folder of its own
        assert second.entries() == []
        await second.close()
        child.send_signal(signal.SIGKILL)
    tier = await opened(tmp_path)
    hashes = chain_hashes(root_hash("model"), list(range(160)), 16)
    assert {entry.slot: entry.block_hash for entry in tier.entries()} == dict(enumerate(hashes))
    back = [DiskItem(i, h, room()) for i, h in enumerate(hashes)]
    assert all(await tier.read(back))
    assert [one.memory for one in back] == [item(i).memory for i in range(10)]
    await tier.close()


async def test_f_06_nothing_is_found_before_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = await opened(tmp_path)
    assert all(await write(tier, [item(1, slot=5)]))
    begun, go_on = threading.Event(), threading.Event()
    pwritev = os.pwritev

    def slow(*arguments: object) -> int:
        begun.set()
        assert go_on.wait(30)
        return pwritev(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("os.pwritev", slow)
    writing = asyncio.create_task(write(tier, [item(2, slot=5)]))
    await asyncio.to_thread(begun.wait, 30)
    assert tier.entries() == []
    assert await tier.read([DiskItem(5, name_of(1), room()), DiskItem(5, name_of(2), room())]) == [None, None]
    go_on.set()
    assert await writing == [True]
    assert [entry.block_hash for entry in tier.entries()] == [name_of(2)]
    await tier.close()


async def test_f_12_what_is_forgotten_while_it_is_written_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = await opened(tmp_path)
    go_on = threading.Event()
    pwritev = os.pwritev

    def slow(*arguments: object) -> int:
        assert go_on.wait(30)
        return pwritev(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("os.pwritev", slow)
    first = asyncio.create_task(write(tier, [item(1)]))
    second = asyncio.create_task(write(tier, [item(2)]))
    await asyncio.sleep(0)
    tier.forget(1, name_of(1))
    tier.forget(2, name_of(9))  # somebody else's: nothing happens
    go_on.set()
    assert (await first, await second) == ([False], [True])
    go_on.clear()
    third = asyncio.create_task(write(tier, [item(3)]))
    await asyncio.sleep(0)
    assert await tier.clear()
    go_on.set()
    assert await third == [False]
    assert tier.entries() == []
    await tier.close()
    again = await opened(tmp_path)
    assert again.entries() == []
    await again.close()


# ---- damage ----


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(3 * SLAB + 17)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


def delete(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(("damage", "lost"), [(cut, set(range(8, 16))), (flip, {3}), (delete, set(range(16)))])
async def test_f_07_damage_while_it_is_closed(
    tmp_path: Path, damage: Callable[[Path], None], lost: set[int], caplog: pytest.LogCaptureFixture
) -> None:
    tier = await opened(tmp_path)
    assert all(await write(tier, [item(number) for number in range(16)]))
    await tier.close()
    damage(tier.path / "slabs-000")
    tier = await opened(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert await found(tier, *range(16)) == [number not in lost for number in range(16)]
        assert len(caplog.records) == len(lost), "once each"
        assert await found(tier, *range(16)) == [number not in lost for number in range(16)]
        assert len(caplog.records) == len(lost)
    assert tier.stats.num_lost == len(lost)
    assert all(await write(tier, [item(number) for number in range(16)]))
    assert all(await found(tier, *range(16)))
    await tier.close()


@pytest.mark.parametrize(("damage", "lost"), [(cut, set(range(8, 16))), (flip, {3}), (delete, set())])
async def test_f_07_damage_while_it_is_open(tmp_path: Path, damage: Callable[[Path], None], lost: set[int]) -> None:
    tier = await opened(tmp_path, use_direct=False)
    assert all(await write(tier, [item(number) for number in range(16)]))
    damage(tier.path / "slabs-000")
    assert await found(tier, *range(16)) == [number not in lost for number in range(16)]
    assert {entry.slot for entry in tier.entries()} == set(range(16)) - lost
    await tier.close()


async def test_f_07_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad sector: the read of a run fails, and only the block that lies there is lost."""
    tier = await opened(tmp_path)
    assert all(await write(tier, [item(number) for number in range(8)]))
    read = os.preadv

    def bad(file: int, parts: list[memoryview], offset: int) -> int:
        if offset <= 2 * SLAB < offset + sum(map(len, parts)):
            raise OSError(errno.EIO, "Input/output error")
        return read(file, parts, offset)

    monkeypatch.setattr("os.preadv", bad)
    assert await found(tier, *range(8)) == [number != 2 for number in range(8)]
    await tier.close()


async def test_f_07_a_miss_does_not_remove_what_was_stored_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = await opened(tmp_path)
    assert all(await write(tier, [item(1)]))
    begun, go_on = threading.Event(), threading.Event()
    read = os.preadv

    def slow(*arguments: object) -> int:
        got = read(*arguments)  # type: ignore[arg-type]
        begun.set()
        assert go_on.wait(30)
        arguments[1][0][:1] = b"x"  # type: ignore[index]  # what a slot that is written meanwhile looks like
        return got

    monkeypatch.setattr("os.preadv", slow)
    reading = asyncio.create_task(found(tier, 1))
    await asyncio.to_thread(begun.wait, 30)
    monkeypatch.setattr("os.preadv", read)
    assert await write(tier, [item(1)]) == [True]
    go_on.set()
    assert await reading == [False]
    assert await found(tier, 1) == [True]
    await tier.close()


async def test_f_10_slabs_without_an_index_are_nobodys_and_their_room_is_used_again(tmp_path: Path) -> None:
    tier = await opened(tmp_path)
    assert all(await write(tier, [item(number) for number in range(6)]))
    size = sum(path.stat().st_size for path in tier.path.glob("slabs-*"))
    await tier.close()
    (tier.path / "index").unlink()
    again = await opened(tmp_path)
    assert again.entries() == []
    assert await found(again, *range(6)) == [False] * 6
    assert all(await write(again, [item(number) for number in range(6)]))
    assert await found(again, *range(6)) == [True] * 6
    assert sum(path.stat().st_size for path in again.path.glob("slabs-*")) == size
    await again.close()


async def test_f_12_a_generation_is_kept_when_the_index_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = await opened(tmp_path)
    assert tier.generation == 0
    assert all(await write(tier, [item(1)]))
    assert await tier.clear(7)
    await tier.close()
    tier = await opened(tmp_path)
    assert (tier.generation, tier.entries()) == (7, [])

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk_journal.DiskJournal, "clear", fails)
    assert not await tier.clear(8)
    assert tier.generation == 7, "what is there is still of before"
    await tier.close()
    (tier.path / "generation").write_text("seven")
    tier = await opened(tmp_path)
    assert tier.generation == 0
    await tier.close()


def test_a_torn_index_loses_its_end_alone(tmp_path: Path) -> None:
    for kept in range(0, 500, 9):
        check_torn(tmp_path / f"index{kept}", kept)


def check_torn(path: Path, kept: int) -> None:
    journal = disk_journal.DiskJournal(path)
    entries = [
        disk_journal.DiskEntry(name_of(slot), slot, SLAB, 7 * slot, slot, name_of(slot - 1)) for slot in range(8)
    ]
    for entry in entries:
        journal.put(entry)
    journal.close()
    data = path.read_bytes()
    size = (len(data) - len(disk_journal._MAGIC)) // 8
    path.write_bytes(data[: len(disk_journal._MAGIC) + min(kept, 8 * size)])
    journal = disk_journal.DiskJournal(path)
    assert list(journal.entries.values()) == entries[: kept // size]
    journal.put(entries[7])
    journal.close()
    again = disk_journal.DiskJournal(path)
    assert entries[7] in again.entries.values(), "what comes behind a torn record is found"
    again.close()


def test_the_index_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_journal, "_MAX_HISTORY", 10)
    journal = disk_journal.DiskJournal(tmp_path / "index")
    for number in range(500):
        journal.put(disk_journal.DiskEntry(name_of(number), number % 5, SLAB, number))
        if number % 3 == 0:
            journal.remove(number % 5)
    kept = list(journal.entries.values())
    journal.close()
    assert (tmp_path / "index").stat().st_size < 30 * 50
    again = disk_journal.DiskJournal(tmp_path / "index")
    assert list(again.entries.values()) == kept
    again.close()


# ---- other spaces, full disks, other processes ----


@pytest.mark.parametrize(
    "change",
    [
        {"model_fingerprint": "the same name, other weights"},
        {"block_size": 32},
        {"tensor_parallel_size": 2},
        {"layout": "another"},
    ],
)
async def test_f_09_another_configuration_finds_nothing(tmp_path: Path, change: dict[str, object]) -> None:
    other = msgspec.structs.replace(SPACE, **change)
    tier = await opened(tmp_path, num_slots=4)
    assert all(await write(tier, [item(number) for number in range(4)]))
    await tier.close()
    tier = await DiskTier.open(tmp_path, other, SLAB, 8 * SLAB)
    assert tier.entries() == []
    await tier.close()
    tier = await opened(tmp_path, num_slots=4)
    assert tier.entries() == [], "the other one needed all of the room"
    await tier.close()


async def test_f_09_the_longest_unused_space_makes_room(tmp_path: Path) -> None:
    spaces = [msgspec.structs.replace(SPACE, model_fingerprint=str(number)) for number in range(3)]
    for at, space in enumerate(spaces):
        tier = await DiskTier.open(tmp_path, space, SLAB, 4 * SLAB if at == 2 else 40 * SLAB)
        assert all(await write(tier, [item(number) for number in range(2)]))
        await tier.close()
        os.utime(tier.path / "space.json", (at, at))
    assert set(os.listdir(tmp_path)) == {f"{space_name(spaces[2], SLAB)}.0"}


async def test_f_09_the_header_is_checked_too(tmp_path: Path) -> None:
    tier = await opened(tmp_path)
    assert all(await write(tier, [item(1)]))
    await tier.close()
    header = tier.path / "space.json"
    header.write_text(header.read_text().replace('"layout_version": 1', '"layout_version": 0'))
    tier = await opened(tmp_path)
    assert tier.entries() == []
    await tier.close()


async def test_a_full_disk_makes_the_tier_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk_tier, "FILE_BYTES", 4 * SLAB)
    allocate = os.posix_fallocate
    left = 11 * SLAB

    def limited(file: int, offset: int, size: int) -> None:
        nonlocal left
        if os.fstat(file).st_size >= size:
            return
        if size > left:
            raise OSError(errno.ENOSPC, "No space left on device")
        left -= size
        allocate(file, offset, size)

    monkeypatch.setattr("os.posix_fallocate", limited)
    tier = await opened(tmp_path, num_slots=32)
    assert tier.num_slots == 10, "files of 4, 4 and 2"
    assert "kv_cache.disk_tier_gib" in caplog.text
    assert "No space left" in caplog.text
    assert all(await write(tier, [item(number) for number in range(10)]))
    assert all(await found(tier, *range(10)))
    with pytest.raises(IndexError):
        await write(tier, [item(10)])
    await tier.close()
    tier = await opened(tmp_path, num_slots=32)
    assert all(await found(tier, *range(10))), "still full: what is there stays"
    await tier.close()
    left = 0
    with pytest.raises(ConfigError, match=r"disk_tier_gib.*No space left"):
        await opened(tmp_path / "other")


async def test_others_keep_some_room_on_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "FILE_BYTES", 4 * SLAB)
    real = os.statvfs(tmp_path)

    def room(num_slabs: int) -> None:
        blocks = num_slabs * SLAB // real.f_frsize
        monkeypatch.setattr(disk_tier, "SPARE_BYTES", max(0, (real.f_bavail - blocks) * real.f_frsize))

    monkeypatch.setattr(disk_tier, "SPARE_SHARE", 1.0)
    monkeypatch.setattr("os.statvfs", lambda _: real)  # what others do meanwhile is not this test's
    room(4)
    tier = await opened(tmp_path, num_slots=8)
    assert tier.num_slots == 8, "each file fits: what was taken shows in the real one"
    await tier.close()
    room(2)
    tier = await opened(tmp_path / "other", num_slots=8)
    assert tier.num_slots == 2
    assert "stay free" in tier.shortage
    await tier.close()


async def test_an_index_that_cannot_be_written_costs_the_disk_and_not_the_memory(tmp_path: Path) -> None:
    tier = await opened(tmp_path)
    index = tier.path / "index"
    await tier.close()
    index.unlink()
    index.mkdir()
    with pytest.raises(ConfigError, match=r"kv_cache\.disk_folder: the index in .* cannot be written: Is a directory"):
        await opened(tmp_path)
    config = KVCacheConfig(host_tier_gib=0.01, disk_tier_gib=0.01)
    before = len(os.listdir("/proc/self/fd"))
    connector = await Connector.open(config, SPACE, KVPeer("n", "1"), tmp_path)
    assert connector.disk is None
    assert "the index" in connector.disk_shortage
    await connector.close()
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_a_write_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = await opened(tmp_path)
    assert all(await write(tier, [item(1)]))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.pwritev", full)
    assert await write(tier, [item(1), item(2)]) == [False, False]
    assert tier.entries() == [], "half of it may be over the old one"
    assert tier.stats.num_failed_writes == 2
    await tier.close()


async def test_no_room_for_the_index_costs_a_restart_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = await opened(tmp_path)
    monkeypatch.setattr("os.write", lambda *_: 3)
    assert all(await write(tier, [item(1)]))
    monkeypatch.undo()
    assert await found(tier, 1) == [True]
    assert all(await write(tier, [item(2)]))
    await tier.close()
    again = await opened(tmp_path)
    assert len(again.entries()) == 2
    await again.close()


def test_a_folder_has_one_holder(tmp_path: Path) -> None:
    held = [SpaceFolder(tmp_path, SPACE, SLAB) for _ in range(8)]
    assert len({one.path for one in held}) == 8
    with pytest.raises(ConfigError, match="used by 8 connectors"):
        SpaceFolder(tmp_path, SPACE, SLAB)
    held[2].close()
    again = SpaceFolder(tmp_path, SPACE, SLAB)
    assert again.path == held[2].path
    other = SpaceFolder(tmp_path, msgspec.structs.replace(SPACE, layout="x"), SLAB)
    other.make_room(1 << 30, 0)
    assert all(one.path.is_dir() for one in (*held, again)), "spaces in use stay"
    for one in (*held, again, other):
        one.close()


async def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="disk_folder"):
        await opened(tmp_path / "file")
    with pytest.raises(ConfigError, match="disk_tier_gib"):
        await opened(tmp_path, num_slots=0)
