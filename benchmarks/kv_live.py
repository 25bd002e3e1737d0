"""A live cluster with KV tiers that are always full, clients whose tokens are compared, and what a
fault needs to see and do: for `kv_kills.py` and `kv_faults.py`; with prefill and decode replicas, `pd_live.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from benchmarks.servers import Server, shoal
from cluster.process_sweep import descendants, kv_connectors, serve_replicas, start_time
from replica.arena_map import round_slot
from replica.config import GIB
from replica.fake_runner import expected_output

VOCAB, EOS = 49152, frozenset({2})
OPENING, OWN, OUTPUT = 160, 160, 24
#: blocks of 16 tokens; prompts and answers are about 290, without the new ones
POOL_BLOCKS, ARENA_SLOTS, DISK_SLOTS = 96, 96, 240
#: of /dev/shm, what a container has
SHM_MIB = 64
#: what a process of the cluster sees of them is not what is outside
_MOUNTS = 'mount -t tmpfs -o size="$1" tmpfs "$0" && mount -t tmpfs -o size="$2" tmpfs /dev/shm && shift 2 && exec "$@"'


class Shape(msgspec.Struct, frozen=True):
    """What runs. `block_bytes`: of a slab; `arguments`: of `shoal serve`; a real model's prompts are learnt first."""

    runner: str
    block_bytes: int
    num_streams: int
    num_replicas: int = 2
    arguments: tuple[str, ...] = ()
    num_prompts: int = 24
    #: of prompts, the share that was not there before (with the fake runner)
    new_share: float = 0.3


SHAPES = {
    "fake": Shape("fake", 128, 12),
    "torch": Shape("torch", 368_640, 6),
    "process": Shape("fake", 128, 12, arguments=("--set", "runner_placement=process")),
    "ranks": Shape("torch", 368_640, 4, 1, ("--tensor-parallel-size", "3"), num_prompts=10),
    "fake ranks": Shape("fake", 256, 8, 1, ("--tensor-parallel-size", "2")),
}


class Outcome(msgspec.Struct):
    """`wrong`: tokens; `errors`: answers that are none; `left`: what was not at baseline, or there after the end;
    `missed`: faults whose moment never came.
    """

    faults: Counter[str] = msgspec.field(default_factory=Counter)
    num_streams: int = 0
    wrong: list[str] = []
    errors: list[str] = []
    most_stranded: int = 0
    left: list[str] = []
    missed: list[str] = []
    skipped: list[str] = []
    counters: dict[str, int] = {}
    duration_s: float = 0.0

    @property
    def num_bad(self) -> int:
        return len(self.wrong) + len(self.errors) + self.most_stranded + len(self.left) + len(self.missed)

    def __str__(self) -> str:
        done = ", ".join(f"{count} {name}" for name, count in sorted(self.faults.items()))
        told = ", ".join(f"{count} {name}" for name, count in self.counters.items())
        bad = [*self.wrong, *self.errors, *self.left, *self.missed]
        return (
            f"{self.faults.total()} faults in {self.duration_s:.0f} s ({done}), {self.num_streams} streams; "
            f"{len(self.wrong)} with wrong tokens, {len(self.errors)} errors, {self.most_stranded} stranded, "
            f"{len(self.left)} left behind, {len(self.missed)} missed {bad[:3]}; {told}"
            + "".join(f"; skipped: {one}" for one in self.skipped)
        )


class World:
    """The cluster, its clients, and what faults need to see and do."""

    def __init__(self, server: Server, shape: Shape, folder: Path, has_own_disk: bool, seed: int) -> None:
        self.server, self.shape = server, shape
        #: of the disk tier, as this process sees it
        self.folder = Path(f"/proc/{server.process.pid}/root{folder}") if has_own_disk else folder
        self.has_own_disk = has_own_disk
        self.rng = random.Random(seed)
        self.outcome = Outcome()
        self._prompts = self._make_prompts()
        self._expected: dict[tuple[int, ...], list[int]] = {}
        self._may_begin = asyncio.Event()
        self._is_over = False
        self.num_running = 0
        #: X-Request-Ids of those that run
        self.living: set[str] = set()

    async def __aenter__(self) -> World:
        timeout = aiohttp.ClientTimeout(total=None, sock_read=120)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
        await self.until_whole()
        await self._learn()
        self._clients = [asyncio.create_task(self._client()) for _ in range(self.shape.num_streams)]
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._is_over = True
        self._may_begin.set()
        await asyncio.gather(*self._clients)
        await self._session.close()

    # ---- who is there ----

    def connectors(self) -> list[int]:
        return kv_connectors(self.server.process.pid)

    def replicas(self) -> list[int]:
        return serve_replicas(self.server.process.pid, "Replica")

    async def status(self) -> list[dict[str, Any]]:
        """Of the replicas that are up."""
        async with self._session.get(f"{self.server.url}/status") as response:
            told = [one for one in (await response.json())["replicas"] if one["state"] == "up"]
        stranded = (int(one["counters"].get("tier_stranded", 0)) for one in told)
        self.outcome.most_stranded = max([self.outcome.most_stranded, *stranded])
        return told

    async def figure(self, name: str, combine: Callable[[Iterable[float]], float] = sum) -> float:
        return combine([one["counters"].get(name, 0) for one in await self.status()] or [0])

    async def until(self, condition: Callable[[list[dict[str, Any]]], bool], within_s: float = 20.0) -> bool:
        """Asked again and again; False: it never was."""
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            if condition(await self.status()):
                return True
            await asyncio.sleep(0.02)
        return False

    def has_all(self, told: list[dict[str, Any]]) -> bool:
        """All replicas, a connector, and they have it."""
        connected = [one["counters"].get("kv_connected") for one in told]
        num = self.shape.num_replicas
        return connected == [1] * num and len(self.connectors()) == 1 and len(self.replicas()) == num

    def has_begun(self, told: list[dict[str, Any]]) -> bool:
        """KV comes and goes."""
        return all(one["counters"]["kv_loads"] > 2 for one in told)

    async def until_whole(self) -> None:
        """Everybody who can be lost is there."""
        if not await self.until(self.has_all, 120):
            raise TimeoutError("the replicas and their tiers are not there within two minutes")

    # ---- clients ----

    def go(self) -> None:
        self._may_begin.set()

    async def pause(self) -> None:
        """Nobody begins anything; what runs comes to its end."""
        self._may_begin.clear()
        while self.num_running:  # noqa: ASYNC110 (nobody would set an event)
            await asyncio.sleep(0.02)

    def _make_prompts(self) -> list[list[int]]:
        openings = [[self.rng.randrange(3, VOCAB) for _ in range(OPENING)] for _ in range(3)]
        return [
            openings[number % 3] + [self.rng.randrange(3, VOCAB) for _ in range(OWN)]
            for number in range(self.shape.num_prompts)
        ]

    def _next_prompt(self) -> list[int]:
        """Often one that was there before; with the fake runner, whose tokens are known, also a new one."""
        prompt = self.rng.choice(self._prompts)
        if self.shape.runner == "fake" and self.rng.random() < self.shape.new_share:
            return prompt[:OPENING] + [self.rng.randrange(3, VOCAB) for _ in range(OWN)]
        return prompt

    async def _learn(self) -> None:
        """The undisturbed run of a real model, one after the other."""
        if self.shape.runner != "fake":
            for prompt in self._prompts:
                tokens, error = await self._read(prompt)
                assert len(tokens) == OUTPUT, error
                self._expected[tuple(prompt)] = tokens

    async def _client(self) -> None:
        while not self._is_over:
            await self._may_begin.wait()
            self.num_running += 1
            prompt = self._next_prompt()
            tokens, error = await self._read(prompt)
            while error.startswith("503") and self.shape.num_replicas == 1:  # the only one mends itself: come again
                await asyncio.sleep(0.3)
                tokens, error = await self._read(prompt)
            self.num_running -= 1
            self.outcome.num_streams += 1
            expected = self._expected.get(tuple(prompt)) or expected_output(prompt, OUTPUT, vocab_size=VOCAB, eos=EOS)
            if error:
                self.outcome.errors.append(error)
            elif tokens != expected:
                self.outcome.wrong.append(f"{tokens} instead of {expected}")

    async def _read(self, prompt: list[int]) -> tuple[list[int], str]:
        body = {"model": self.server.model, "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
        tokens: list[int] = []
        name = f"kill-{self.rng.getrandbits(60):x}"
        self.living.add(name)
        try:
            async with self._session.post(
                f"{self.server.url}/v1/completions", json=body, headers={"X-Request-Id": name}
            ) as response:
                if response.status != 200:
                    return tokens, f"{response.status}: {(await response.text())[:200]}"
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        chunk = json.loads(line[6:])
                        if "error" in chunk:
                            return tokens, str(chunk["error"])[:200]
                        tokens += [token for choice in chunk["choices"] for token in choice["token_ids"]]
        except (aiohttp.ClientError, TimeoutError) as error:
            return tokens, repr(error)
        finally:
            self.living.discard(name)
        return tokens, ""

    # ---- baseline ----

    async def look_for_rest(self, after: str) -> None:
        """All is over: every block of every pool is free, and nothing is held of any tier."""
        told: list[dict[str, Any]] = []

        def rest(one: dict[str, Any]) -> list[str]:
            held = [f"{name} {one[name]}" for name in ("queued", "running", "returning") if one[name]]
            if one["kv_blocks_free"] != one["kv_blocks"]:
                held.append(f"{one['kv_blocks'] - one['kv_blocks_free']} blocks of the pool")
            names = ["kv_wanting", "kv_loading", "kv_awaited", "kv_storing", "kv_swapped"]
            names += [f"tier_{name}" for name in ("leased", "reserved", "staging", "quarantined", "stranded")]
            return held + [f"{name} {one['counters'][name]:g}" for name in names if one["counters"].get(name)]

        def is_clean(now: list[dict[str, Any]]) -> bool:
            told[:] = now
            return len(now) == self.shape.num_replicas and not any(rest(one) for one in now)

        if not await self.until(is_clean, 15):
            self.outcome.left += [f"after {after}: {rest(one)}" for one in told]


def can_mount() -> bool:
    """Whether this process may have file systems of its own."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0


@contextlib.asynccontextmanager
async def cluster(shape: Shape, seed: int) -> AsyncIterator[World]:
    """Where that is allowed with a disk of its own, too small for what is asked for, and a small /dev/shm."""
    slot_bytes = round_slot(shape.block_bytes)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "kv"
        folder.mkdir()
        knobs = {
            "kv_cache.num_blocks": POOL_BLOCKS,
            "kv_cache.host_tier_gib": (ARENA_SLOTS + 0.5) * slot_bytes / GIB,
            "kv_cache.disk_tier_gib": 2 * DISK_SLOTS * slot_bytes / GIB,
            "kv_cache.disk_folder": folder,
            "kv_cache.load_wait_ms": 8000,
            "scheduler.preemption_mode": "offload",
        }
        arguments = ["--runner", shape.runner, "--replicas", str(shape.num_replicas), *shape.arguments]
        arguments += [part for name, value in knobs.items() for part in ("--set", f"{name}={value}")]
        server = shoal(Path(place), *arguments)
        has_own_disk = can_mount()
        if has_own_disk:
            room = DISK_SLOTS * slot_bytes + (256 << 10)
            prefix = ["unshare", "-m", "sh", "-c", _MOUNTS, str(folder), str(room), f"{SHM_MIB}m"]
            server._command = [*prefix, *server._command]
        with server:
            family = {pid: start_time(pid) for pid in descendants(server.process.pid)}
            async with World(server, shape, folder, has_own_disk, seed) as world:
                yield world
                await world.pause()
            family |= {pid: start_time(pid) for pid in descendants(server.process.pid)}
        alive = [pid for pid, began in family.items() if began is not None and start_time(pid) == began]
        world.outcome.left += [f"process {pid}" for pid in alive]
        strangers = [one.name for one in folder.glob("*/*") if not one.name.startswith(("slabs-", "index", "lock"))]
        world.outcome.left += [f"file {name}" for name in strangers]
