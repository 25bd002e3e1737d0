"""Replicas whose ranks are Ray actors: killed, stopped, and left behind, under load. The figures are printed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import httpx
import pytest

from benchmarks.rank_loss import EVERYTHING, RANK_KILLED, LossOutcome, measure
from benchmarks.servers import free_port
from cluster.process_sweep import rank_workers
from replica.fake_runner import expected_output
from tests.cluster.shoal_process import ROOT, ShoalProcess, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def outcomes() -> dict[str, LossOutcome]:
    """Two replicas of two ranks each with the fake runner; one loss after the other."""
    return measure(EVERYTHING)


@pytest.mark.parametrize("name", [name for name, _, _ in EVERYTHING])
def test_no_client_sees_a_loss_and_the_replica_serves_again(outcomes: dict[str, LossOutcome], name: str) -> None:
    found = outcomes[name]
    print(name, found)
    assert found.errors == []
    assert found.num_streams > 0
    assert found.num_unhealthy == 0
    # a stopped process tells nobody: it is silent for three of its reports, and for three of Serve's checks
    assert found.noticed_s < (5.0 if name == "replica_stopped" else 1.0)
    assert found.whole_s < 40.0


def test_ranks_do_not_outlive_their_replica(outcomes: dict[str, LossOutcome]) -> None:
    found = outcomes["replica_killed"]
    print(f"ranks of a killed replica were gone after {1000 * found.gone_s:.0f} ms")
    assert found.num_orphans == 0


def test_the_only_replica_takes_its_streams_back_also_while_the_server_stops() -> None:
    """Nowhere else to go: what had begun is held until the group steps again, and goes on with the same tokens. The
    second time SIGINT comes while it is mended: that is finished first, within `drain_s`.
    """
    with ShoalProcess("--tensor-parallel-size", "2", "--set", "scheduler.max_num_seqs=8") as shoal:

        async def run() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=shoal.url, timeout=60) as client:
                body = {"model": MODEL, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
                bodies = [{**body, "prompt": [n + 3, 5, 6], "return_token_ids": True} for n in range(4)]
                answers = [asyncio.create_task(client.post("/v1/completions", json=body)) for body in bodies]
                for step in (40, 80):
                    await asyncio.to_thread(_until_step, shoal, step)
                    os.kill(rank_workers(shoal.process.pid)[0], signal.SIGKILL)
                await asyncio.to_thread(wait_until, lambda: _state(shoal) == "restarting", 10, "it is mended")
                shoal.process.send_signal(signal.SIGINT)
                return list(await asyncio.gather(*answers))

        for number, answer in enumerate(asyncio.run(run())):
            assert answer.status_code == 200, answer.text
            expected = expected_output([number + 3, 5, 6], 400, vocab_size=49152, eos=frozenset({2}))
            assert answer.json()["choices"][0]["token_ids"] == expected
        assert shoal.process.wait(timeout=60) == 0
    said = "".join(shoal.lines)
    assert said.count("; it begins again") == 2
    assert said.count("whole again after") == 2


def _until_step(shoal: ShoalProcess, step: int) -> None:
    is_there = lambda: _state(shoal) == "up" and shoal.status()["replicas"][0]["step"] >= step  # noqa: E731
    wait_until(is_there, 30, f"step {step}")


def _state(shoal: ShoalProcess) -> str:
    return str(shoal.status()["replicas"][0]["state"])


@pytest.mark.long
@pytest.mark.model
def test_three_ranks_of_the_real_model_survive_a_loss() -> None:
    """A rank dies while its peers wait for it inside a collective."""
    found = measure([RANK_KILLED], runner="torch", num_ranks=3, num_replicas=1, num_streams=3, output_len=20)
    print("real model", found)
    outcome = found["rank_killed"]
    assert outcome.errors == []
    assert outcome.noticed_s < 1.0


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--tensor-parallel-size", "2"), "sizes that do: 1, 3"),
        (("--num-gpus-per-replica", "2", "--runner", "fake"), "there is room for 0. Free: 127.0.0.1 has"),
    ],
)
def test_what_cannot_be_is_refused_within_seconds(flags: tuple[str, ...], sentence: str) -> None:
    began = time.monotonic()
    command = [sys.executable, "-m", "cluster.cli", "serve", "--port", str(free_port()), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    print(f"refused after {time.monotonic() - began:.1f} s: {done.stderr}")
    assert done.returncode in (1, 2)
    assert sentence in done.stderr
