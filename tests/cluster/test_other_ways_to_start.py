"""Joining a Ray that runs already, and `serve run cluster.app:build`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from benchmarks.servers import free_port
from cluster.process_sweep import descendants, start_time
from replica.fake_runner import expected_output
from tests.cluster.shoal_process import ROOT, ShoalProcess, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

# a Ray that belongs to somebody else: prints its address, ends when its standard input does
SOMEBODYS_RAY = """
import ray, sys
context = ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
print(context.address_info["gcs_address"], flush=True)
sys.stdin.read()
ray.shutdown()
"""
# Ray makes up a token for a cluster that a program starts; sharing it is Ray's business and not what is tested here
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "disabled"}


@pytest.fixture
def ray_address() -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SOMEBODYS_RAY],
        env={**os.environ, **LOOPBACK},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    family = {pid: start_time(pid) for pid in descendants(process.pid)}
    process.communicate(timeout=60)
    wait_until(lambda: not any(start_time(pid) == began for pid, began in family.items()), 20, "the end of Ray")


def complete(url: str) -> list[int]:
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    return list(answer.json()["choices"][0]["token_ids"])


REFERENCE = expected_output([5, 6, 7], 4, vocab_size=49152, eos=frozenset({2}))


def test_joins_a_running_ray_and_leaves_it_running(ray_address: str) -> None:
    for _ in range(2):  # the second time proves that the first left nothing in the way
        process = ShoalProcess(env={"RAY_ADDRESS": ray_address, **LOOPBACK})
        with process as shoal:
            assert any(f"joining Ray at {ray_address}" in line for line in shoal.lines)
            assert complete(shoal.url) == REFERENCE
            assert shoal.stop() == 0


def test_serve_run_with_our_builder(ray_address: str) -> None:
    port = free_port()
    program = (
        "import sys; from ray import serve; from ray.serve.config import HTTPOptions; "
        "from ray.serve.scripts import cli; "
        f"serve.start(http_options=HTTPOptions(host='127.0.0.1', port={port})); sys.argv[0] = 'serve'; cli()"
    )
    arguments = ["run", "cluster.app:build", "runner=fake", "replicas.both=2", "--route-prefix", "/"]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env={**os.environ, "RAY_ADDRESS": ray_address, **LOOPBACK},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: process.poll() is not None or is_up(port), 60, "serve run to answer")
        assert process.poll() is None
        assert complete(f"http://127.0.0.1:{port}") == REFERENCE
        status = httpx.get(f"http://127.0.0.1:{port}/status").json()
        assert len(status["replicas"]) == 2
    finally:
        process.terminate()
        process.wait(60)


def is_up(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def test_a_model_that_is_not_there_is_a_sentence_and_leaves_nothing() -> None:
    process = ShoalProcess("--model", "no-such-model", fake=False)
    _, errors = process.process.communicate(timeout=120)
    assert process.process.returncode in (1, 2)
    assert "no-such-model" in errors
    assert "Traceback" not in errors
    assert descendants(process.process.pid) == []
