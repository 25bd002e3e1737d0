"""`python -m benchmarks.kv_kills --rounds 5 [--shape torch] [--only disk_full]`: a live cluster with KV tiers,
 and what goes wrong with whoever holds KV, while clients stream. Each stream's tokens are compared.

The moment is made certain (`kv_faults.py`). Pool, arena and disk are so small that all of them are always full. After
each fault all requests end, and then pools and tiers have to be at baseline; at the end nothing is left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import time

from benchmarks.kv_faults import FAULTS, Missed, NotHere, faults_of
from benchmarks.kv_live import SHAPES, Outcome, Shape, cluster


async def run(names: list[str], rounds: int, shape: Shape, seed: int = 0) -> Outcome:
    """Every fault in turn, `rounds` times."""
    began = time.monotonic()
    async with cluster(shape, seed) as world:
        outcome = world.outcome
        world.go()
        if not await world.until(lambda told: all(one["counters"]["kv_loads"] > 2 for one in told), 30):
            outcome.missed.append("nothing was loaded before the first fault")
        for name in names * rounds:
            world.go()
            try:
                await FAULTS[name](world)
                outcome.faults[name] += 1
            except Missed as error:
                outcome.missed.append(f"{name}: {error}")
            except NotHere as error:
                outcome.skipped.append(f"{name}: {error}")
            await world.until_whole()
            await world.pause()
            await world.look_for_rest(name)
        told = ("kv_blocks_loaded", "kv_blocks_stored", "kv_offloads", "tier_given_disk", "tier_no_room")
        outcome.counters = {name: int(await world.figure(name)) for name in told}
    outcome.duration_s = time.monotonic() - began
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1, help="of all faults")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="fake")
    parser.add_argument("--only", choices=sorted(FAULTS), nargs="+", help="default: all that this shape can have")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    names = options.only or faults_of(options.shape)
    outcome = asyncio.run(run(names, options.rounds, SHAPES[options.shape], options.seed))
    print(f"kv kills, {options.shape}: {outcome}")
    return 1 if outcome.num_bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
