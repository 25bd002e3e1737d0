"""Claims of loss: what clients see of replicas that are cut off, killed or frozen while they answer."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator

from benchmarks import servers
from benchmarks.claims import Measured, claim
from benchmarks.load import percentiles

RECOVERY_TESTS = ("tests/cluster/test_recovery.py", "tests/equivalence/test_recovery_rules.py")


@claim("admission.recover")
def recover(full: bool) -> Iterator[tuple[str, Measured]]:
    """All output positions x kinds of request: the client's bytes are those of an undisturbed run. Full: each kind of
    loss with each kind of request, and the default model in bfloat16.
    """
    for path in RECOVERY_TESTS:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", path]
        env = {**os.environ, **({"RECOVERY_FULL": "1"} if full else {})}
        done = subprocess.run(command, cwd=servers.ROOT, env=env, capture_output=True, text=True, check=False)
        verdict = (done.stdout.strip().splitlines() or ["pytest said nothing"])[-1]
        name = path.split("/")[1]
        yield name, Measured(float(done.returncode != 0), "runs with a failing case", 0, note=verdict)


@claim("admission.kills")
def kills(full: bool) -> Iterator[tuple[str, Measured]]:
    """Random kill -9 of replica processes of our own (no Ray), fake runner, two routers in this process; each token is
    known.
    """
    from benchmarks.kills import random_kills

    found = asyncio.run(random_kills(300 if full else 30))
    yield "", Measured(len(found.faults) + len(found.left), "errors, tokens or blocks wrong", 0, note=str(found))
    pauses = percentiles(found.pauses_s)
    yield "p50", Measured(pauses["p50"], "ms pause")
    yield "p99", Measured(pauses["p99"], "ms pause", 1000)


@claim("admission.kill_real")
def kill_real(full: bool) -> Iterator[tuple[str, Measured]]:
    """kill -9 of one of two replicas on real Ray, real model; token ids compared with an undisturbed run."""
    from benchmarks.kills_live import measure

    runs = {"model": measure(30 if full else 2, runner="torch", num_streams=8, output_len=60)}
    if full:
        runs["fake"] = measure(30, runner="fake")
    for runner, found in runs.items():
        bad = len(found.faults) + found.num_unhealthy
        yield runner, Measured(bad, "client errors, wrong tokens, /health not 200", 0, note=str(found))
        gaps = percentiles(found.gaps_s)
        yield f"{runner}.p50", Measured(gaps["p50"], "ms gap over the kill, all streams")
        yield f"{runner}.p99", Measured(gaps["p99"], "ms gap over the kill, all streams")


@claim("admission.frozen")
def frozen(full: bool) -> Iterator[tuple[str, Measured]]:
    """SIGSTOP and SIGCONT of one of two replicas with two routers: for less than `give_up_silent_s` (it goes on where
    it was), and for longer (it is fenced, wakes up, and nothing of it counts any more).
    """
    from benchmarks.kills import freeze

    for stopped_s in (5.0, 15.0):
        for seed in range(5 if full else 1):
            found = asyncio.run(freeze(stopped_s, seed=seed))
            bad = len(found.faults) + len(found.left)
            yield f"{stopped_s:.0f}s", Measured(bad, "errors, tokens or blocks wrong", 0, note=str(found))
