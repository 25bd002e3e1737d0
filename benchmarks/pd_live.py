"""A live cluster of one prefill and two decode replicas on two Ray nodes, for `pd_faults.py`: every prompt is handed
over, to at least one of the decode replicas from a connector to another one over TCP.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.kv_live import Shape, World
from benchmarks.servers import shoal
from benchmarks.two_nodes import two_nodes
from cluster.process_sweep import descendants, kv_connectors, parent, serve_replicas, start_time
from replica.arena_map import round_slot
from replica.config import GIB

SHAPE = Shape("fake", 128, 8, num_replicas=3, new_share=0.8)
#: small, and no smaller: a connector that has no room for P's chunk refuses it
POOL_BLOCKS, ARENA_SLOTS = 160, 400
#: how far a hand-over is, as its router writes it down
ASKED, SEATED, PLACED = "prompt is computed elsewhere", "has its seat", "prefill placed"
CONTINUED = "first tokens here, the decode replica goes on"
_STEPS = (ASKED, SEATED, PLACED, CONTINUED, "prefill failed", "the decode replica computes the prompt")


class Places(msgspec.Struct, frozen=True):
    """Pids, and the id of the decode replica that is not on P's node."""

    prefill: int
    decode: int
    decode_id: str
    prefill_connector: int
    decode_connector: int


class Journal(msgspec.Struct, frozen=True):
    """What the router knows of an unfinished request. `at`: its last step, by the wall clock."""

    step: str
    at: float
    decode_id: str


class PdWorld(World):
    """`root`: all processes of both nodes are below it."""

    root: int

    def connectors(self) -> list[int]:
        return kv_connectors(self.root)

    def replicas(self) -> list[int]:
        return serve_replicas(self.root, "Prefill") + serve_replicas(self.root, "Decode")

    def has_all(self, told: list[dict[str, Any]]) -> bool:
        """And the connectors hear each other."""
        connected = [one["counters"].get("kv_connected") for one in told]
        peers = [one["counters"]["tier_peers"] for one in told if "tier_peers" in one["counters"]]
        num = self.shape.num_replicas
        are_there = (len(self.connectors()), len(self.replicas())) == (2, num)
        return are_there and connected == [1] * num and peers == [1, 1]

    def has_begun(self, told: list[dict[str, Any]]) -> bool:
        return all(one["counters"]["kv_loads"] > 2 for one in told if one["role"] == "decode")

    async def places(self) -> Places:
        """Of this moment."""
        told = await self.status()
        ports = {one["replica_id"]: int(one["address"].rpartition(":")[2]) for one in told}
        (prefill,) = serve_replicas(self.root, "Prefill")
        # a worker's parent is the raylet of its node
        nodes = {pid: parent(pid) for pid in (*self.connectors(), *serve_replicas(self.root, "Decode"))}
        here = parent(prefill)
        decode = next(pid for pid in serve_replicas(self.root, "Decode") if nodes[pid] != here)
        (near,) = [pid for pid in self.connectors() if nodes[pid] == here]
        (far,) = [pid for pid in self.connectors() if nodes[pid] != here]
        listening = _listening_ports(decode)
        return Places(prefill, decode, next(name for name, port in ports.items() if port in listening), near, far)

    async def journals(self) -> list[Journal]:
        """Of those who run, and have a step of a hand-over behind them. A replica that is stopped costs a second."""
        return [one for one in await asyncio.gather(*map(self._journal, list(self.living))) if one is not None]

    async def until_journal(self, is_it: Callable[[Journal], bool], within_s: float) -> bool:
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            if any(map(is_it, await self.journals())):
                return True
        return False

    async def until_handed_over(self) -> None:
        """Blocks cross between the nodes, and P computes again."""

        def crossed(told: list[dict[str, Any]]) -> float:
            return sum(float(one["counters"].get("tier_loaded_bytes_remote", 0)) for one in told)

        before = crossed(await self.status())
        if not await self.until(lambda told: crossed(told) > before, 20):
            self.outcome.left.append("nothing crosses between the nodes any more")

    async def _journal(self, name: str) -> Journal | None:
        async with self._session.get(f"{self.server.url}/debug/requests/{name}") as response:
            if response.status != 200:
                return None
            told = await response.json()
        steps = [event for event in told.get("events", ()) if event["what"] in _STEPS]
        placed = [event["replica"] for event in told.get("events", ()) if event["what"] == "placed"]
        if told.get("outcome") or not steps or not placed:
            return None
        return Journal(steps[-1]["what"], told["arrived_at"] + steps[-1]["after_s"], placed[-1])


def _listening_ports(pid: int) -> set[int]:
    """On IPv4 and IPv6."""
    rows = [
        line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()
    ]
    ports = {row[9]: int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    return {ports[link[8:-1]] for link in links if link[8:-1] in ports}


@contextlib.asynccontextmanager
async def cluster(seed: int) -> AsyncIterator[PdWorld]:
    """Room for two replicas on the first node and one on the second."""
    knobs = {
        "disaggregation.decision": "always",
        # a prompt takes five steps of P, so that there is a middle
        "disaggregation.prefill.max_num_batched_tokens": 64,
        "num_cpus_per_replica": 2,
        "kv_cache.num_blocks": POOL_BLOCKS,
        "kv_cache.host_tier_gib": (ARENA_SLOTS + 0.5) * round_slot(SHAPE.block_bytes) / GIB,
        "http.admin_endpoints": "true",
    }
    arguments = ["--runner", SHAPE.runner, "--prefill", "1", "--decode", "2"]
    arguments += [part for name, value in knobs.items() for part in ("--set", f"{name}={value}")]
    with tempfile.TemporaryDirectory() as place, two_nodes(5) as nodes:
        server = shoal(Path(place), *arguments)
        server._env = {**server._env, **nodes.env}
        with server:
            world = PdWorld(server, SHAPE, Path(place), False, seed)
            world.root = nodes.process.pid
            async with world:
                yield world
                await world.pause()
            family = {pid: start_time(pid) for pid in world.replicas() + world.connectors()}
        for _ in range(100):
            alive = [pid for pid in descendants(nodes.process.pid) if pid in family]
            if not alive:
                break
            await asyncio.sleep(0.1)
        world.outcome.left += [f"process {pid}" for pid in alive]
