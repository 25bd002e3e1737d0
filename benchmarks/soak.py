"""`make soak ARGS="--requests 1000000 --minutes 10 --kills 20"`: public traces through one engine in virtual time
(`trace_soak.py`), the core of a KVConnector in a world that goes wrong (`kv_soak.py`), random clusters in virtual time
with faults, then kill -9 on a live cluster. 0 leaves a part out.

Every request has to end once with the reference tokens, every pool and counter has to be back at baseline. A slice of
it is in `tests/simulation/` and `tests/cluster/test_serve.py`; figures of the last full run are in `docs/soak.md`.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

from benchmarks import kill, kv_soak, trace_soak
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


def live(kills: int) -> int:
    """kill -9 of one of two replicas, `kills` times, fake runner. Returns the number of client errors."""
    errors = 0
    for number in range(kills):
        outcome = kill.measure(num_streams=32, output_len=100, runner="fake")
        errors += outcome.num_errors + outcome.num_unhealthy
        print(f"soak: kill {number + 1} of {kills}: {outcome}", flush=True)
    print(f"soak live: {kills} kills under 32 streams: {errors} errors")
    return errors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000, help="of the traces")
    parser.add_argument("--scale", type=float, default=trace_soak.SCALE, help="of the lengths in the traces")
    parser.add_argument("--traces", type=Path, default=trace_soak.TRACES, help="folder with both traces")
    parser.add_argument("--kv-steps", type=int, default=100_000, help="of the KVConnector's world")
    parser.add_argument("--minutes", type=float, default=10, help="of virtual-time clusters")
    parser.add_argument("--kills", type=int, default=20, help="on live clusters")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.requests:
        trace_soak.run(options.requests, options.seed, options.scale, options.traces)
    if options.kv_steps:
        counts = kv_soak.run(options.kv_steps, options.seed)
        print(f"soak kv: {options.kv_steps} steps, {counts['worlds']} worlds, nothing wrong", flush=True)
    if options.minutes:
        virtual(options.minutes, options.seed)
    return 1 if live(options.kills) else 0


if __name__ == "__main__":
    raise SystemExit(main())
