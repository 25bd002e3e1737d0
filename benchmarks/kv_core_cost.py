"""`python -m benchmarks.kv_core_cost`: what the core of a KVConnector costs, CPU us a block, with a full arena.

100,000 blocks in chains of 64, everything is evicting; messages of 64 blocks and of one, as decoding sends them. The
medians of several rounds; encoding and sockets are not in it.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import time
from collections.abc import Callable

from cluster.kv_connector.config import KVCacheConfig
from cluster.kv_connector.core import ConnectorCore
from cluster.kv_connector.instructions import Instruction, ReadDisk, Send, WriteDisk
from replica.kv_messages import (
    Acquire,
    Acquired,
    Hello,
    KVPeer,
    KVSpace,
    KVTier,
    Release,
    Reserve,
    Reserved,
    Seal,
    TierEvent,
)
from replica.messages import ReplicaId, ReplicaLoad, RouterId, StepOutput, decode_up, encode
from replica.tier_feed import TierFeed
from router.kv_tiers import KVTiers

SPACE = KVSpace("model", 16, 4096, 1, "layout")
CHAIN = 64


class Driver:
    """One holder and a disk that answers at once."""

    def __init__(self, config: KVCacheConfig, num_slots: int, num_disk_slots: int) -> None:
        identity = KVPeer("node", "0")
        self.core = ConnectorCore(config, SPACE, num_slots, num_disk_slots, identity=identity, slot_bytes=4096)
        self.core.on_hello(1, Hello(KVPeer("replica", "0"), "engine", SPACE), 0.0)
        self.now = 0.0
        self.next_id = 0

    def number(self) -> int:
        self.next_id += 1
        return self.next_id

    def chain(self, number: int) -> list[bytes]:
        return [hashlib.blake2b(b"%d %d" % (number, i), digest_size=16).digest() for i in range(CHAIN)]

    def answer_jobs(self, told: list[Instruction]) -> None:
        jobs = list(told)
        while jobs:
            job = jobs.pop()
            if isinstance(job, WriteDisk):
                jobs += self.core.on_disk_written(job.job, 1, self.now)
            elif isinstance(job, ReadDisk):
                jobs += self.core.on_disk_read(job.job, job.checksum, self.now)

    def store(self, hashes: list[bytes], first: int = 0, before: bytes = b"") -> None:
        number = self.number()
        parents = [before, *hashes[:-1]]
        positions = list(range(first, first + len(hashes)))
        told = self.core.on_message(1, Reserve(number, hashes, True, parents, positions), self.now)
        slots = next(t.message.slots for t in told if isinstance(t, Send) and isinstance(t.message, Reserved))
        written = [i for i, slot in enumerate(slots) if slot >= 0]
        self.answer_jobs(self.core.on_message(1, Seal(number, written), self.now))

    def load(self, hashes: list[bytes]) -> int:
        number = self.number()
        told = self.core.on_message(1, Acquire(number, hashes, 1.0), self.now)
        self.answer_jobs(told)
        self.core.on_message(1, Release([number]), self.now)
        return sum(len(t.message.slots) for t in told if isinstance(t, Send) and isinstance(t.message, Acquired))

    def tick(self) -> None:
        self.now += 0.05
        self.core.on_time(self.now)


def us_per_block(work: Callable[[int], None], rounds: int, blocks: int) -> float:
    """Median over rounds; each is `work(round)` over `blocks` blocks."""
    times = []
    for number in range(rounds):
        start = time.process_time()
        work(number)
        times.append((time.process_time() - start) / blocks * 1e6)
    return statistics.median(times)


def measure(eviction: str, num_slots: int, with_disk: bool) -> dict[str, float]:
    driver = Driver(KVCacheConfig(eviction=eviction), num_slots, 2 * num_slots if with_disk else 0)
    many, rounds = 100, 9
    chains = [driver.chain(number) for number in range(2 * num_slots // CHAIN)]
    for chain in chains:
        driver.store(chain)
        driver.tick()
    fresh = [driver.chain(len(chains) + number) for number in range(rounds * many)]

    def store(number: int) -> None:
        for chain in fresh[number * many : (number + 1) * many]:
            driver.store(chain)

    def store_one(number: int) -> None:
        chain = driver.chain(1_000_000 + number)
        for i in range(CHAIN):
            driver.store(chain[i : i + 1], i, chain[i - 1] if i else b"")

    def load(number: int) -> None:
        for chain in fresh[-many:]:
            assert driver.load(chain) == CHAIN

    def miss(number: int) -> None:
        for chain in chains[:many]:
            driver.load(chain)

    found = {
        "store, 64 at once": us_per_block(store, rounds, many * CHAIN),
        "store, one at a time": us_per_block(store_one, rounds, CHAIN),
        "lease and release, 64 at once": us_per_block(load, rounds, many * CHAIN),
    }
    if not with_disk:
        found["look up, and miss (a chain)"] = us_per_block(miss, rounds, many)
    return found


def events(num_blocks: int, at_once: int) -> dict[str, float]:
    """From the connector's event to a router's book: CPU us a block, `at_once` in each message."""
    feed, view, replica_id, router_id = TierFeed(), KVTiers(), ReplicaId("a"), RouterId("r")
    feed.connected("node")
    feed.chosen(0.0)
    view.hear(replica_id, feed.take(router_id, 0.0))
    hashes = [hashlib.blake2b(b"%d" % i, digest_size=16).digest() for i in range(num_blocks)]
    spent = {"event, at the replica": 0.0, "event, at a router": 0.0}
    for start in range(0, num_blocks, at_once):
        began = time.process_time()
        feed.learn(TierEvent(0, {KVTier.HOST: hashes[start : start + at_once]}))
        told = encode(StepOutput("i", ReplicaLoad(), kv_events=feed.take(router_id, 0.0)))
        sent = time.process_time()
        message = decode_up(told)
        assert isinstance(message, StepOutput)
        view.hear(replica_id, message.kv_events)
        spent["event, at the replica"] += sent - began
        spent["event, at a router"] += time.process_time() - sent
    assert view.num_blocks("node")["host"] == num_blocks
    return {name: seconds / num_blocks * 1e6 for name, seconds in spent.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=100_000)
    options = parser.parse_args()
    for eviction in ("lru", "cost"):
        for with_disk in (False, True):
            for name, us in measure(eviction, options.blocks, with_disk).items():
                print(f"{eviction:4} {'disk' if with_disk else 'host'}  {name:32} {us:6.2f} us")
    for at_once in (64, 1):
        for name, us in events(options.blocks, at_once).items():
            print(f"          {name}, {at_once} in a message{us:12.2f} us")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
