"""`python -m benchmarks.k8s_live drain edit head`: the rendered RayService on a real Ray of several nodes, as KubeRay's
operator would run it, and what an operator does to it under streams whose every token is checked.

drain  a replica's pod is told to stop: preStop, SIGTERM, grace period as rendered
router the same of a router's pod
edit   `serveConfigV2` is changed: a live knob, nobody is replaced
roll   the same with a knob of the start: everybody is
head   SIGKILL to all of the head's pod, with its state in Redis; a new head with another address

Nothing leaves this process's own namespaces. One line of JSON a figure. Skips with exit code 77 and a sentence.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import yaml

from benchmarks import pod_network, redis_server
from benchmarks.checked_streams import Load
from benchmarks.k8s_operator import Operator, Site, manifest
from benchmarks.pod_network import Pod
from benchmarks.servers import ROOT

SKIPPED = 77
#: one spare pod of a replica: its replacement begins at once
SPARE = ("--pods", '{"router": 1, "both": 3}', "--replicas", '{"router": 1, "both": 2}')


class NotHere(Exception):
    """No namespaces or no Redis; the text says what."""


def played(*arguments: str, timeout_s: float = 570) -> dict[str, dict[str, Any]]:
    """Figures by name, from a process of its own. Raises NotHere, and RuntimeError for a run that failed."""
    command = [sys.executable, "-m", "benchmarks.k8s_live", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout_s)
    if done.returncode == SKIPPED:
        raise NotHere(done.stderr.strip())
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return {one["name"]: one for one in map(json.loads, done.stdout.splitlines())}


class Figure(msgspec.Struct, frozen=True):
    """Of one thing that was done under load. `num_on_it`: streams that what was ended had at that moment."""

    name: str
    num_streams: int
    errors: list[str]
    num_on_it: int
    took_s: float
    pause_s: float
    note: str = ""


async def replicas(operator: Operator) -> dict[str, dict[str, Any]]:
    """By id, those that are up as one router sees them."""
    async with aiohttp.ClientSession() as session, session.get(f"{operator.url()}/status") as response:
        status = await response.json()
    return {one["replica_id"]: one for one in status["replicas"] if one["state"] == "up"}


async def off_loop(work: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, work, *arguments)


class Scenes:
    """`size`: tokens of a long stream."""

    def __init__(self, operator: Operator, size: int, num_long: int) -> None:
        self.operator, self.size, self.num_long = operator, size, num_long
        self.config = yaml.safe_load(operator.service["spec"]["serveConfigV2"])

    def load(self, size: int | None = None) -> Load:
        per_s = 4.0
        return Load(
            self.operator.url, num_long=self.num_long, long_tokens=size or self.size, per_s=per_s, short_tokens=5
        )

    def told(self, name: str, load: Load, num_on_it: int, took_s: float, note: str = "") -> Figure:
        num = len(load.long) + len(load.short)
        return Figure(name, num, load.errors, num_on_it, took_s, load.longest_pause_s, note)

    async def drain(self) -> AsyncIterator[Figure]:
        yield await self._drained("drain.replica")

    async def router(self) -> AsyncIterator[Figure]:
        yield await self._drained("drain.router", is_router=True)

    async def _drained(self, name: str, is_router: bool = False) -> Figure:
        """The busiest pod. Only when it has gone the operator makes another: to KubeRay one that ends is there."""
        load = self.load()
        async with load:
            pod, num_on_it = await self._busiest(is_router)
            num_open = load.num_open
            took_s = await off_loop(pod.terminate)
            left = load.num_open
            await off_loop(self.operator.replace, pod)
        note = f"{num_open} long streams were open, {left} when the pod had gone; preStop {pod.plan.pre_stop_s:g} s"
        await off_loop(self.operator.until_runs)
        return self.told(name, load, num_on_it, took_s, note)

    async def _busiest(self, is_router: bool) -> tuple[Pod, int]:
        """The pod, and how many sequences run on it (of a router that is not known)."""
        workers = self.operator.network.workers("router" if is_router else "")
        if is_router:
            there = self.operator.places()
            return next(pod for pod in workers if pod.address in there), 0
        running: dict[str, int] = {}
        for one in (await replicas(self.operator)).values():
            host = one["address"].rpartition(":")[0]
            running[host] = running.get(host, 0) + one["running"]
        host = max(running, key=lambda key: running[key])
        return next(pod for pod in workers if pod.address == host), running[host]

    async def edit(self) -> AsyncIterator[Figure]:
        for deployment in self.config["applications"][0]["deployments"]:
            deployment["user_config"] = {"scheduler": {"max_num_seqs": 48}}
        yield await self._edited("edit.live", are_new=False)

    async def roll(self) -> AsyncIterator[Figure]:
        self.config["applications"][0]["args"]["drain_s"] -= 1
        yield await self._edited("edit.roll", are_new=True)

    async def _edited(self, name: str, are_new: bool) -> Figure:
        before = await replicas(self.operator)
        load = self.load()
        async with load:
            started = time.monotonic()
            num_open = load.num_open
            await off_loop(self.operator.apply, self.config)
            if are_new:
                await off_loop(self._until_new, set(before))
            else:
                await self._until_in_force({name: one["config"] for name, one in before.items()})
            await off_loop(self.operator.until_runs)
            took_s = time.monotonic() - started
        after = await replicas(self.operator)
        is_as_wanted = not before.keys() & after.keys() if are_new else before.keys() == after.keys()
        note = f"{len(before.keys() & after.keys())} of {len(before)} replicas stayed"
        figure = self.told(name, load, num_open, took_s, note)
        wrong = [] if is_as_wanted else [f"replicas before {sorted(before)}, after {sorted(after)}"]
        return msgspec.structs.replace(figure, errors=[*figure.errors, *wrong])

    async def _until_in_force(self, old: dict[str, str]) -> None:
        """No replica has the configuration of before; `old` by its id. Raises TimeoutError."""
        for _ in range(600):
            if all(one["config"] != old.get(name) for name, one in (await replicas(self.operator)).items()):
                return
            await asyncio.sleep(0.1)
        raise TimeoutError("the new configuration is not in force after a minute")

    def _until_new(self, old: set[str]) -> None:
        """All replicas that Serve has are others than `old`."""

        def are_new() -> bool:
            deployments = self.operator.application().get("deployments") or {}
            there = {one["replica_id"] for each in deployments.values() for one in each.get("replicas") or []}
            return bool(there) and not there & old

        self.operator.until(are_new, 200, "every replica is a new one")

    async def head(self) -> AsyncIterator[Figure]:
        operator = self.operator
        before = await replicas(operator)
        load = self.load()
        async with load:
            num_open = load.num_open
            old = operator.network.head
            started = time.monotonic()
            await off_loop(old.kill)
            await asyncio.sleep(2.0)  # while there is none, streams begin and go on
            new = await off_loop(operator.replace, old)
            await off_loop(operator.until_runs)
            took_s = time.monotonic() - started
            left = load.num_open
        after = await replicas(operator)
        note = f"{left} of {num_open} long streams were still open when the head was back, at {new.address} instead of "
        note += f"{old.address}; {len(before.keys() & after.keys())} of {len(before)} replicas stayed"
        figure = self.told("head.streams", load, num_open, took_s, note)
        yield (
            figure
            if before.keys() == after.keys()
            else msgspec.structs.replace(
                figure, errors=[*figure.errors, f"replicas before {sorted(before)}, after {sorted(after)}"]
            )
        )
        # the new head must be able to do something: the replacement of a pod needs all of it
        yield await self._drained("head.drain_after")


async def play(operator: Operator, names: list[str], size: int, num_long: int) -> None:
    scenes = Scenes(operator, size, num_long)
    for name in names:
        async for figure in getattr(scenes, name)():
            print(msgspec.json.encode(figure).decode(), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scenes", nargs="+", choices=["drain", "router", "edit", "roll", "head"])
    parser.add_argument("--manifest", default="tp2", help="of k8s/rayservice")
    parser.add_argument("--pods", default='{"router": 2, "both": 3}', help="of each group, as JSON")
    parser.add_argument("--replicas", default='{"router": 2, "both": 3}', help="and routers, as JSON")
    parser.add_argument("--ranks", type=int, default=1, help="of a replica")
    parser.add_argument("--longest", type=int, default=90, help="seconds that a stream may take")
    parser.add_argument("--tokens", type=int, default=600, help="of a long stream")
    parser.add_argument("--streams", type=int, default=32, help="long ones")
    parser.add_argument("--keep", type=Path, help="where logs stay")
    arguments = parser.parse_args()
    try:
        redis_server.command()  # here, where there is a network
    except redis_server.NoRedis as error:
        print(error, file=sys.stderr)
        return SKIPPED
    if not pod_network.is_inside() and (why := pod_network.why_not()):
        print(why, file=sys.stderr)
        return SKIPPED
    pod_network.enter("benchmarks.k8s_live", sys.argv[1:])
    folder = Path(tempfile.mkdtemp())
    try:
        site = Site(json.loads(arguments.pods), json.loads(arguments.replicas), arguments.ranks)
        site = msgspec.structs.replace(site, longest_stream_s=arguments.longest)
        started = time.monotonic()
        with Operator(site.fit(manifest(arguments.manifest)), folder) as operator:
            print(json.dumps({"name": "up", "took_s": time.monotonic() - started}), flush=True)
            asyncio.run(play(operator, arguments.scenes, arguments.tokens, arguments.streams))
    finally:
        if arguments.keep is not None:
            shutil.copytree(folder, arguments.keep, symlinks=True, ignore=shutil.ignore_patterns("sockets", "ports*"))
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
