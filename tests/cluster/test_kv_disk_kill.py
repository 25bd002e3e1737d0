"""kill -9 of a process that writes to its disk tier: what is found after is whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import xxhash

from cluster.kv_connector.disk_tier import DiskItem, DiskTier
from replica.arena_map import HAS_ARENAS
from replica.kv_messages import KVSpace

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(not HAS_ARENAS, reason="the disk tier is for Linux")]
SLAB, NUM_SLOTS = 64 << 10, 64
SPACE = KVSpace("model", 16, SLAB, 1, "layout")

#: writes fresh blocks over old ones for ever, one half of the slots and then the other, the hash being the content's
#: first bytes; a line for each half
WRITER = """
import asyncio, itertools, mmap, os, sys
from pathlib import Path
from tests.cluster.test_kv_disk_kill import SLAB, NUM_SLOTS, opened, DiskItem
async def main():
    tier = await opened(Path(sys.argv[1]))
    room = memoryview(mmap.mmap(-1, SLAB * NUM_SLOTS))
    slabs = [room[slot * SLAB:(slot + 1) * SLAB] for slot in range(NUM_SLOTS)]
    half = NUM_SLOTS // 2
    for begin in itertools.cycle((0, half)):
        for slab in slabs[begin:begin + half]:
            slab[:] = os.urandom(16) * (SLAB // 16)
        items = [DiskItem(slot, bytes(slabs[slot][:16]), slabs[slot]) for slot in range(begin, begin + half)]
        await asyncio.gather(*(tier.write(items[start:start + 8]) for start in range(0, half, 8)))
        print("round", flush=True)
asyncio.run(main())
"""


async def opened(folder: Path) -> DiskTier:
    return await DiskTier.open(folder, SPACE, SLAB, NUM_SLOTS * SLAB)


def write_and_be_killed(folder: Path, num_rounds: int) -> None:
    command = [sys.executable, "-c", WRITER, str(folder)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as child:
        assert child.stdout is not None
        for _ in range(num_rounds):
            assert child.stdout.readline() == "round\n"
        child.kill()  # in the middle of the next round, wherever that is


@pytest.mark.parametrize("num_rounds", [1, 2, 7])
async def test_everything_that_is_found_is_whole(tmp_path: Path, num_rounds: int) -> None:
    write_and_be_killed(tmp_path, num_rounds)
    tier = await opened(tmp_path)
    entries = tier.entries()
    assert len(entries) >= NUM_SLOTS // 2, "the half that was not written over"
    for entry in entries:
        memory = memoryview(bytearray(SLAB))
        (digest,) = await tier.read([DiskItem(entry.slot, entry.block_hash, memory)])
        assert digest == xxhash.xxh3_64_intdigest(memory)
        assert memory[:16] == entry.block_hash
    assert tier.stats.num_lost == 0, "an entry goes before its slab is written over, and comes after"
    await tier.close()
