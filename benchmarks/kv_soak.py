"""`python -m benchmarks.kv_soak --steps 100000`: the core of a KVConnector in a world that goes wrong (`kv_world.py`).

Everything is looked at after every step, all books every few; at the end of each world all pools are at baseline. A
slice is in `tests/property/test_kv_connector.py`.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter

from benchmarks.kv_events import ACTIONS, WildWorld
from cluster.kv_connector.config import KVCacheConfig

STEPS_OF_WORLD = 2000


def random_world(rng: random.Random) -> WildWorld:
    """Tiny tiers, so that everything is always full."""
    config = KVCacheConfig(
        eviction=rng.choice(["lru", "cost"]),
        tier_admission=rng.choice(["always", "second_use"]),
        disk_admission=rng.choice(["always", "second_use"]),
    )
    return WildWorld(config, rng.choice([4, 12, 30]), rng.choice([0, 3, 20, 60]))


def run(num_steps: int, first_seed: int, every: int = 5) -> Counter[str]:
    """Raises AssertionError, after it has said which seed repeats it. Checks all books every so many steps."""
    counts: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + -(-num_steps // STEPS_OF_WORLD)):
        rng = random.Random(seed)
        world = random_world(rng)
        step = 0
        try:
            for step in range(STEPS_OF_WORLD):
                world.step(rng.randrange(len(ACTIONS)), rng)
                if step % every == 0:
                    world.check()
            world.end()
        except BaseException:
            print(f"kv soak: failed at step {step}; again: --seed {seed} --steps {STEPS_OF_WORLD}", file=sys.stderr)
            raise
        counts.update(world.counts)
        counts["worlds"] += 1
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=5, help="steps between two looks at all books")
    options = parser.parse_args()
    start = time.process_time()
    counts = run(options.steps, options.seed, options.every)
    said = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    print(f"kv soak: {options.steps} steps in {time.process_time() - start:.0f} s of CPU, nothing wrong: {said}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
