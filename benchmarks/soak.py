"""`make soak ARGS="--requests 1000000 --minutes 10 --process-kills 300 --kills 20 --drains 10"`: public traces through
one engine in virtual time (`trace_soak.py`), the core of a KVConnector in a world that goes wrong (`kv_soak.py`),
random clusters in virtual time with faults, kill -9 of replica processes without Ray (`kills.py`), then of replicas of
a live cluster (`kills_live.py`), faults of whoever holds KV (`kv_kills.py`), drains, floods. 0 leaves a part out.

Every request has to end once with the reference tokens, every pool and counter has to be back at baseline. A slice of
it is in `tests/simulation/`, `tests/cluster/test_kills.py` and `test_serve.py`; figures of the last full run are in
`docs/soak.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from benchmarks import drain, flood, kills_live, kv_kills, kv_soak, servers, trace_soak
from benchmarks.checked_streams import Load
from benchmarks.kills import random_kills
from benchmarks.kv_faults import faults_of
from benchmarks.kv_live import SHAPES
from cluster.simulation.records import SimRecord
from cluster.simulation.sim_cluster import SimCluster, SimConfig
from cluster.simulation.workloads import burst, engine
from replica.fake_runner import expected_output
from replica.messages import FinishReason, ReplicaId

VOCAB = 49152
EOS = frozenset({2})


def random_cluster(seed: int) -> tuple[SimCluster, int]:
    """A cluster of random shape with random kills planned, and its number of routers."""
    rng = random.Random(seed)
    num_replicas, num_routers = rng.randint(1, 4), rng.randint(1, 3)
    config = SimConfig(
        engine=engine(
            cap=rng.choice([1, 4, 16]),
            max_num_seqs=rng.choice([1, 4, 16]),
            max_num_batched_tokens=rng.choice([1, 16, 64, 256]),
            long_prefill_token_threshold=rng.choice([0, 0, 24]),
            watermark=rng.choice([0.0, 0.1]),
        ),
        num_replicas=num_replicas,
        num_routers=num_routers,
        num_blocks=rng.choice([20, 40, 400]),
        policy=rng.choice(["least-tokens", "round-robin"]),
    )
    cluster = SimCluster(config)
    # at most two, so that no request can lose three replicas in a row, which would rightly end it
    for number in rng.sample(range(num_replicas), k=min(num_replicas, 2)):
        if rng.random() < 0.7:
            cluster.kill_at(rng.random() * 3, ReplicaId(f"replica-{number}"), replace_after_s=rng.random() * 2)
    return cluster, num_routers


def check(cluster: SimCluster, records: list[SimRecord]) -> None:
    """Raises AssertionError if anything was lost, doubled, wrong or left behind."""
    cluster.validate()
    for record in records:
        request = record.request
        assert record.num_ends == 1, record
        seed = request.seed if request.temperature > 0 else 0
        reference = expected_output(request.prompt_token_ids, request.max_tokens, seed=seed, vocab_size=VOCAB, eos=EOS)
        assert record.token_ids == reference[: len(record.token_ids)], record
        assert record.finish_reason in (None, FinishReason.LENGTH), record
        if record.finish_reason is FinishReason.LENGTH:
            assert len(record.token_ids) == request.max_tokens, record
        assert not record.failure, record  # every dead replica is replaced in time, and two losses are survived
    for router in cluster.routers.values():
        assert router.dispatcher.num_requests == router.dispatcher.num_held == 0
    for replica in cluster.replicas.values():
        assert replica.core.num_unfinished == replica.runner.num_known == 0
        assert replica.core.blocks.num_free == replica.core.blocks.num_blocks


def virtual(minutes: float, first_seed: int) -> None:
    """Random clusters until the time is up; prints a line every ten seconds."""
    end, told = time.monotonic() + 60 * minutes, time.monotonic()
    seed, requests, tokens, preemptions = first_seed, 0, 0, 0
    while time.monotonic() < end:
        cluster, num_routers = random_cluster(seed)
        load = burst(150, 3.0, seed=seed, num_routers=num_routers, abort_share=0.2)
        try:
            records = cluster.run(load)
            check(cluster, records)
        except BaseException:
            print(f"soak: seed {seed} failed", file=sys.stderr)
            raise
        seed, requests = seed + 1, requests + len(records)
        tokens += sum(len(record.token_ids) for record in records)
        preemptions += sum(r.core.scheduler.counters.preemptions for r in cluster.replicas.values())
        if time.monotonic() - told > 10:
            told = time.monotonic()
            print(
                f"soak: {seed - first_seed} clusters, {requests} requests, {tokens} tokens, {preemptions} preemptions",
                flush=True,
            )
    print(
        f"soak virtual: {seed - first_seed} clusters, {requests} requests, {tokens} tokens, "
        f"{preemptions} preemptions: nothing lost"
    )


def processes(kills: int, seed: int) -> int:
    """kill -9 of replica processes without Ray, two routers in this process. Returns the number of faults."""
    outcome = asyncio.run(random_kills(kills, seed=seed))
    print(f"soak processes: {outcome}", flush=True)
    return len(outcome.faults) + len(outcome.left)


def live(kills: int, seed: int) -> int:
    """kill -9 of one of two replicas of one live cluster, fake runner. Returns the number of faults."""
    outcome = kills_live.measure(kills, num_streams=32, output_len=100, seed=seed)
    print(f"soak live: {outcome}", flush=True)
    return len(outcome.faults) + outcome.num_unhealthy


def kv_faults(rounds: int, seed: int) -> int:
    """All faults of whoever holds KV, on one live cluster, fake runner. Returns what went wrong."""
    outcome = asyncio.run(kv_kills.run(faults_of("fake"), rounds, SHAPES["fake"], seed))
    print(f"soak kv live: {outcome}", flush=True)
    return outcome.num_bad


def flooded(minutes: float) -> int:
    """2,000 clients at four routers, one of which is killed half way. Returns what is wrong with the outcome."""
    shape = msgspec.structs.replace(flood.SHAPES["router_killed"], num_clients=2000, seconds=60 * minutes)
    found = flood.measure(shape)
    print(f"soak: {found}", flush=True)
    above = sum(r.max_queued > r.cap or r.max_places > r.cap for r in found.replicas)
    wrong = above + found.num_hanging + found.wrong_answers + found.without_retry_after + found.left
    print(f"soak flood: {sum(found.codes.values())} requests, use {found.least_use:.4f} of the cap: {wrong} wrong")
    return wrong + found.permits_left


def drains(count: int) -> int:
    """One of three replicas and back, then a rolling update, `count` times on one cluster. Returns the errors."""
    errors: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        shape = ("--runner", "fake", "--replicas", "3", "--routers", "2")
        with servers.shoal(Path(folder), *shape) as server:

            async def one(number: int) -> None:
                for replicas in (1, 3):
                    found = await drain.scale(server.port, replicas, Load(server.url, long_tokens=1000))
                    errors.extend(found.errors)
                    print(f"soak: {replicas} replica(s), {number + 1} of {count}: {found}", flush=True)
                load = Load(server.url, long_tokens=1200)
                found = await drain.redeploy(server.process.pid, server.port, load, 30.0 + (number + 1) % 2)
                errors.extend(found.errors)
                print(f"soak: rolling update {number + 1} of {count}: {found}", flush=True)

            for number in range(count):
                asyncio.run(one(number))
    print(f"soak drains: {count} rounds under 32 streams: {len(errors)} errors")
    return len(errors)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000, help="of the traces")
    parser.add_argument("--scale", type=float, default=trace_soak.SCALE, help="of the lengths in the traces")
    parser.add_argument("--traces", type=Path, default=trace_soak.TRACES, help="folder with both traces")
    parser.add_argument("--kv-steps", type=int, default=100_000, help="of the KVConnector's world")
    parser.add_argument("--minutes", type=float, default=10, help="of virtual-time clusters")
    parser.add_argument("--process-kills", type=int, default=300, help="of replica processes without Ray")
    parser.add_argument("--kills", type=int, default=20, help="on a live cluster")
    parser.add_argument("--kv-rounds", type=int, default=5, help="of all faults of KV tiers, on a live cluster")
    parser.add_argument("--drains", type=int, default=10, help="rounds of fewer, more and new replicas, live")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flood", type=float, default=0, help="minutes of a flood at a live cluster")
    options = parser.parse_args()
    if options.requests:
        trace_soak.run(options.requests, options.seed, options.scale, options.traces)
    if options.kv_steps:
        counts = kv_soak.run(options.kv_steps, options.seed)
        print(f"soak kv: {options.kv_steps} steps, {counts['worlds']} worlds, nothing wrong", flush=True)
    if options.minutes:
        virtual(options.minutes, options.seed)
    faults = processes(options.process_kills, options.seed) if options.process_kills else 0
    faults += live(options.kills, options.seed) if options.kills else 0
    faults += kv_faults(options.kv_rounds, options.seed) if options.kv_rounds else 0
    faults += drains(options.drains) if options.drains else 0
    faults += flooded(options.flood) if options.flood else 0
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
