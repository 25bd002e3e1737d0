"""`lru` against `cost` on traces with prefixes: `python -m benchmarks.kv_eviction [--folder ../shared/traces]`.

The core of a connector itself, without time: each request leases what is there of its prompt, and stores the rest. One
id of a trace is a block of 512 tokens. *Hits* are blocks given over blocks asked for; *work* counts each block by what
computing it costs where attention weighs as much as the rest at 2,048 tokens: deeper ones are dearer.
"""

from __future__ import annotations

import argparse
import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from benchmarks.findings import DOCS, put_tables
from cluster.kv_connector.config import Admission, KVCacheConfig
from cluster.kv_connector.core import ConnectorCore
from cluster.kv_connector.instructions import Instruction, Send
from cluster.simulation.traces import PREFIX_BLOCK_TOKENS, TraceRequest, read_mooncake, synthetic
from replica.kv_messages import Acquire, Acquired, Hello, KVPeer, KVSpace, Release, Reserve, Reserved, Seal

TRACE = "mooncake_conversation_trace.jsonl"
WORK_DOUBLES_AT_TOKENS = 2048
CAPACITIES = (1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000)
Eviction = Literal["lru", "cost"]


class Way(msgspec.Struct, frozen=True):
    """How a tier decides. `pool` blocks of an LRU lie before it: what a replica's own pool has is not asked for."""

    eviction: Eviction
    admission: Admission = "always"
    pool: int = 0


class Worth(msgspec.Struct, frozen=True):
    """Shares of all blocks of all prompts, and of the work for them, that came from the tier."""

    hits: float
    work: float
    stored: int


class Tier:
    """A connector with one holder."""

    def __init__(self, way: Way, num_slots: int) -> None:
        config = KVCacheConfig(eviction=way.eviction, tier_admission=way.admission)
        space = KVSpace("trace", PREFIX_BLOCK_TOKENS, 1, 1, "")
        self._core = ConnectorCore(config, space, num_slots, 0, identity=KVPeer("n", "0"), slot_bytes=1)
        self._core.on_hello(1, Hello(KVPeer("r", "0"), "engine", space, False), 0.0)
        self._number = 0

    def load(self, hashes: Sequence[bytes], first: int) -> int:
        """Blocks given of the leading ones."""
        self._number += 1
        before = hashes[first - 1] if first else b""
        told = self._core.on_message(1, Acquire(self._number, list(hashes[first:]), 0.0, [], first, before), 0.0)
        self._core.on_message(1, Release([self._number]), 0.0)
        return sum(len(m.slots) for m in _said(told) if isinstance(m, Acquired))

    def store(self, hashes: Sequence[bytes], first: int) -> int:
        """Blocks that got a slot, of those from `first` on."""
        self._number += 1
        parents = [hashes[i - 1] if i else b"" for i in range(first, len(hashes))]
        positions = list(range(first, len(hashes)))
        message = Reserve(self._number, list(hashes[first:]), parents=parents, positions=positions)
        told = self._core.on_message(1, message, 0.0)
        slots = next(m.slots for m in _said(told) if isinstance(m, Reserved))
        written = [i for i, slot in enumerate(slots) if slot >= 0]
        self._core.on_message(1, Seal(self._number, written), 0.0)
        return len(written)


class Pool:
    """A replica's own: the block used longest ago goes."""

    def __init__(self, num_blocks: int) -> None:
        self._most = num_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def use(self, hashes: Sequence[bytes]) -> int:
        """Leading blocks that were there; all are now, used from the tail to the head."""
        found = next((i for i, h in enumerate(hashes) if h not in self._blocks), len(hashes))
        for block_hash in reversed(hashes if self._most else ()):
            self._blocks[block_hash] = None
            self._blocks.move_to_end(block_hash)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)
        return found


def chains(requests: Iterable[TraceRequest]) -> list[list[bytes]]:
    """Hashes, a prompt each. An id stands for all before it as well."""
    return [
        [hashlib.blake2b(b"%d" % one, digest_size=16).digest() for one in request.prefix_ids] for request in requests
    ]


def run(prompts: Sequence[Sequence[bytes]], way: Way, num_slots: int) -> Worth:
    """All prompts in their order, each stored before the next one comes."""
    tier, pool = Tier(way, num_slots), Pool(way.pool)
    num_asked = num_given = num_stored = 0
    work_asked = work_given = 0.0
    depth = PREFIX_BLOCK_TOKENS / WORK_DOUBLES_AT_TOKENS
    for hashes in prompts:
        first = pool.use(hashes)
        given = tier.load(hashes, first) if first < len(hashes) else 0
        num_stored += tier.store(hashes, first + given)
        num_asked += len(hashes)
        num_given += given
        work_asked += sum(1 + depth * i for i in range(len(hashes)))
        work_given += sum(1 + depth * i for i in range(first, first + given))
    return Worth(num_given / num_asked, work_given / work_asked, num_stored)


def _said(told: Iterable[Instruction]) -> list[object]:
    return [one.message for one in told if isinstance(one, Send)]


WAYS = {
    "lru": Way("lru"),
    "cost": Way("cost"),
    "lru, pool of 1,000": Way("lru", pool=1_000),
    "cost, pool of 1,000": Way("cost", pool=1_000),
    "lru, second_use": Way("lru", "second_use"),
    "cost, second_use": Way("cost", "second_use"),
}


def all_ways(prompts: Sequence[Sequence[bytes]]) -> dict[str, dict[int, Worth]]:
    """By name and capacity."""
    return {name: {size: run(prompts, way, size) for size in CAPACITIES} for name, way in WAYS.items()}


def table(found: dict[str, dict[int, Worth]]) -> str:
    """Hits, and work in brackets, in per cent."""
    lines = ["| blocks in the tier | " + " | ".join(f"{size:,}" for size in CAPACITIES) + " |"]
    lines.append("|---" * (len(CAPACITIES) + 1) + "|")
    for name, row in found.items():
        cells = (f"{100 * one.hits:.1f} ({100 * one.work:.1f})" for one in row.values())
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("../shared/traces"))
    parser.add_argument("--write", action="store_true", help="table and drawing of docs/findings.md")
    options = parser.parse_args()
    with (options.folder / TRACE).open(encoding="utf-8") as lines:
        prompts = chains(read_mooncake(lines))
    found = all_ways(prompts)
    drawn = chains(one for one in synthetic(1) if one.prefix_ids)
    for eviction in ("lru", "cost"):
        found[f"{eviction}, synthetic"] = {size: run(drawn, Way(eviction), size) for size in CAPACITIES}
    print(table(found))
    if options.write:
        from benchmarks.findings_plots import draw_eviction

        page = DOCS / "findings.md"
        page.write_text(put_tables(page.read_text(encoding="utf-8"), {"eviction": table(found)}), encoding="utf-8")
        print(draw_eviction(found, DOCS / "figures"))


if __name__ == "__main__":
    main()
