"""Replicas leave and come under open streams: another number of them, a rolling update, a node that is drained."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from benchmarks import servers
from benchmarks.checked_streams import Load

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
    short_ttft_ms: float = 0.0
    note: str = ""


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


async def scale(url: str, port: int, count: int, load: Load) -> DrainOutcome:
    """`shoal scale` under `load`."""
    command = [sys.executable, "-m", "cluster.cli", "scale", "--replicas", str(count), "--port", str(port)]
    return await _under(load, command)


async def redeploy(url: str, port: int, load: Load, drain_s: float = 31.0) -> DrainOutcome:
    """Every replica and router is replaced."""
    outcome = await _under(load, [sys.executable, "-c", REDEPLOY, str(port), str(drain_s)])
    return outcome


async def _under(load: Load, command: list[str]) -> DrainOutcome:
    async with load:
        started = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        _, said = await process.communicate()
        drained_s, num_open = time.monotonic() - started, load.num_open
    errors = load.errors if process.returncode == 0 else [said.decode()[-500:], *load.errors]
    ttft = sorted(o.ttft_s for o in load.short)
    return DrainOutcome(
        len(load.long) + len(load.short),
        errors,
        drained_s,
        load.longest_pause_s,
        num_open,
        time.monotonic() - started,
        1000 * ttft[len(ttft) // 2] if ttft else 0.0,
    )


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
