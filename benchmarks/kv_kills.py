"""`python -m benchmarks.kv_kills --rounds 5 [--shape torch] [--only disk_full]`: a live cluster with KV tiers,
 and what goes wrong with whoever holds KV, while clients stream. Each stream's tokens are compared.

The moment is made certain (`kv_faults.py`). Pool, arena and disk are so small that all of them are always full. After
each fault all requests end, and then pools and tiers have to be at baseline; at the end nothing is left behind.
`--shape pd`: prefill and decode replicas on two nodes (`pd_faults.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from benchmarks import pd_live
from benchmarks.kv_faults import FAULTS, Missed, NotHere, faults_of
from benchmarks.kv_live import SHAPES, Outcome, Shape, World, cluster
from benchmarks.pd_faults import PD_FAULTS

W = TypeVar("W", bound=World)


async def run(names: list[str], rounds: int, shape: Shape, seed: int = 0) -> Outcome:
    """Every fault in turn, `rounds` times."""
    return await _run(names * rounds, FAULTS, cluster(shape, seed))


async def run_pd(names: list[str], rounds: int, seed: int = 0) -> Outcome:
    """The same with prefill and decode replicas on two nodes."""
    return await _run(names * rounds, PD_FAULTS, pd_live.cluster(seed))


async def _run(
    names: list[str],
    faults: Mapping[str, Callable[[W], Awaitable[None]]],
    opened: AbstractAsyncContextManager[W],
) -> Outcome:
    began = time.monotonic()
    async with opened as world:
        outcome = world.outcome
        world.go()
        if not await world.until(world.has_begun, 30):
            outcome.missed.append("nothing was loaded before the first fault")
        for name in names:
            world.go()
            try:
                await faults[name](world)
                outcome.faults[name] += 1
            except Missed as error:
                outcome.missed.append(f"{name}: {error}")
            except NotHere as error:
                outcome.skipped.append(f"{name}: {error}")
            await world.until_whole()
            await world.pause()
            await world.look_for_rest(name)
            print(f"{time.monotonic() - began:.0f} s: {name}, {outcome.num_bad} bad", file=sys.stderr, flush=True)
        told = (
            "kv_blocks_loaded",
            "kv_blocks_stored",
            "kv_offloads",
            "tier_given_disk",
            "tier_given_remote",
            "tier_no_room",
        )
        outcome.counters = {name: int(await world.figure(name)) for name in told}
    outcome.duration_s = time.monotonic() - began
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1, help="of all faults")
    parser.add_argument("--shape", choices=[*sorted(SHAPES), "pd"], default="fake")
    parser.add_argument(
        "--only", choices=sorted({**FAULTS, **PD_FAULTS}), nargs="+", help="default: all that this shape can have"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.shape == "pd":
        outcome = asyncio.run(run_pd(options.only or list(PD_FAULTS), options.rounds, options.seed))
    else:
        names = options.only or faults_of(options.shape)
        outcome = asyncio.run(run(names, options.rounds, SHAPES[options.shape], options.seed))
    print(f"kv kills, {options.shape}: {outcome}")
    return 1 if outcome.num_bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
