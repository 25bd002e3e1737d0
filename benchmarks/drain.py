"""Replicas leave and come under open streams: another number of them, a rolling update, a node that is drained."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

import aiohttp
import msgspec

from benchmarks import servers
from benchmarks.checked_streams import Load
from cluster.process_sweep import serve_replicas, start_time

ROOT = servers.ROOT


class DrainOutcome(msgspec.Struct, frozen=True):
    """`drained_s`: from the command until all who had to go were gone, and who had to come were up."""

    num_streams: int
    errors: list[str]
    drained_s: float
    pause_s: float
    #: long streams that were still open then
    num_open: int
    #: seconds from the command until all streams had ended
    whole_s: float
    #: median of the short ones
    short_ttft_ms: float


#: a new version of the whole application from the outside, as a deploy script would do it
REDEPLOY = """
import sys, logging
from cluster.live_apply import attached, in_force
with attached(None, int(sys.argv[1])):
    from ray import serve
    from cluster.app import APP_NAME, build_from
    from cluster.config import load
    changed = load(in_force().now.model_dump(), {"drain_s": float(sys.argv[2])})
    serve.run(build_from(changed), name=APP_NAME, route_prefix="/", blocking=False)
"""


async def scale(port: int, count: int, load: Load) -> DrainOutcome:
    """`shoal scale` under `load`."""
    return await _under(
        load, [sys.executable, "-m", "cluster.cli", "scale", "--replicas", str(count), "--port", str(port)]
    )


async def redeploy(driver_pid: int, port: int, load: Load, drain_s: float = 31.0) -> DrainOutcome:
    """Every replica and router is replaced. `driver_pid`: of the `shoal serve`."""
    going = {pid: start_time(pid) for pid in serve_replicas(driver_pid, "Replica")}
    return await _under(load, [sys.executable, "-c", REDEPLOY, str(port), str(drain_s)], going)


async def _under(load: Load, command: list[str], going: dict[int, int | None] | None = None) -> DrainOutcome:
    """`going`: processes whose end is waited for; else the command itself waits, and says how long it took."""
    async with load:
        started = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        saying = asyncio.create_task(process.communicate())
        if going is not None:
            while not saying.done() and _living(going):
                await asyncio.wait([saying], timeout=0.05)
            drained_s, num_open = time.monotonic() - started, load.num_open
        _, told = await saying
        if going is None:
            found = re.search(rb"after ([0-9.]+) s", told)
            drained_s, num_open = float(found[1]) if found else float("nan"), load.num_open
    errors = load.errors if process.returncode == 0 else [told.decode()[-500:], *load.errors]
    ttft = sorted(outcome.ttft_s for outcome in load.short)
    return DrainOutcome(
        num_streams=len(load.long) + len(load.short),
        errors=errors,
        drained_s=drained_s,
        pause_s=load.longest_pause_s,
        num_open=num_open,
        whole_s=time.monotonic() - started,
        short_ttft_ms=1000 * ttft[len(ttft) // 2] if ttft else 0.0,
    )


def _living(processes: dict[int, int | None]) -> Iterable[int]:
    return [pid for pid, began in processes.items() if start_time(pid) == began]


async def replicas(url: str) -> dict[str, dict[str, Any]]:
    """By id, those that are up."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/status") as response:
        status = await response.json()
    return {r["replica_id"]: r for r in status["replicas"] if r["state"] == "up"}


async def until_up(url: str, count: int) -> None:
    for _ in range(1200):
        if len(await replicas(url)) == count:
            return
        await asyncio.sleep(0.05)
    raise TimeoutError(f"{count} replicas were not up within a minute")
