"""Claims of replicas that leave and of tenants that share: nothing is lost in a drain, nobody suffers from a flood."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import drain, fairness, servers
from benchmarks.checked_streams import Load
from benchmarks.claims import Measured, claim


@claim("admission.drain")
def drains(full: bool) -> Iterator[tuple[str, Measured]]:
    """Three replicas to one and back under 32 streams, each token checked; fake runner, two routers."""
    with tempfile.TemporaryDirectory() as folder, _cluster(folder) as server:
        for name, count in (("down", 1), ("up", 3)):
            outcome = asyncio.run(_scaled(server, count, 2000 if full else 1000))
            yield from _told(name, outcome)


@claim("admission.rolling")
def rolling(full: bool) -> Iterator[tuple[str, Measured]]:
    """Every replica and router is replaced under 32 streams and 8 new ones a second."""
    with tempfile.TemporaryDirectory() as folder, _cluster(folder) as server:
        outcome = asyncio.run(_rolled(server, 2500 if full else 1200))
        yield from _told("update", outcome)


@claim("admission.fair")
def fair(full: bool) -> Iterator[tuple[str, Measured]]:
    """A tenant beside one that sends ten times as much; eight places, alternating rounds, equal weights."""
    for share in (0.25, 0.5) if full else (0.25,):
        found = fairness.measure(share, 4 if full else 2, 10.0)
        note = f"{found.solo_ms:.0f} ms alone, {found.beside_ms:.0f} beside; the other {found.large_ms:.0f}, "
        note += f"{found.num_refused} of its requests refused"
        bound = 1.2 if share < 0.5 else None  # at half of what there is, which is all of its share, it waits for itself
        name = f"{share:g}"
        yield name, Measured(found.beside_ms / found.solo_ms, "of the TTFT p50 alone", bound, note=note)
        # no turn shortens the step that runs, nor takes the others' streams out of its own (docs/tenants.md)
        most = None if bound is None else 1000 * fairness.unavoidable_s()
        yield f"{name}.left", Measured(found.beside_ms - found.solo_ms, "ms more than alone", most)
        yield f"{name}.refused", Measured(len(found.errors), "of the small one refused", 0 if bound else None)


def _cluster(folder: str) -> servers.Server:
    return servers.shoal(Path(folder), "--runner", "fake", "--replicas", "3", "--routers", "2")


async def _scaled(server: servers.Server, count: int, tokens: int) -> drain.DrainOutcome:
    return await drain.scale(server.port, count, Load(server.url, long_tokens=tokens))


async def _rolled(server: servers.Server, tokens: int) -> drain.DrainOutcome:
    await drain.until_up(server.url, 3)
    return await drain.redeploy(server.process.pid, server.port, Load(server.url, long_tokens=tokens))


def _told(name: str, found: drain.DrainOutcome) -> Iterator[tuple[str, Measured]]:
    note = f"of {found.num_streams} streams; {found.num_open} of 32 long ones were open when the command had ended"
    if found.errors:
        note += f"; {found.errors[:1]}"
    yield f"{name}.errors", Measured(len(found.errors), "errors", 0, note=note)
    note = f"longest pause {found.pause_s:.2f} s, all ended after {found.whole_s:.0f} s, "
    note += f"TTFT p50 of new ones {found.short_ttft_ms:.0f} ms"
    yield f"{name}.drained", Measured(found.drained_s, "s until all was done", note=note)
