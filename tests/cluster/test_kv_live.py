"""`shoal serve` with KV tiers: two replicas share them, a killed replica leaves them, a killed connector takes along
cache only, and a restart of everything finds what is on disk.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from benchmarks.two_nodes import two_nodes
from cluster.process_sweep import kv_connectors
from replica.fake_runner import expected_output
from tests.cluster.shoal_process import ShoalProcess, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
MODEL = "smollm2-135m-instruct"
#: 25 blocks and a token, which is always computed
PROMPT = list(range(100, 501))


def arguments(folder: Path | None = None, **more: object) -> list[str]:
    # whoever waits for KV waits for it on a busy machine as well
    knobs = {"kv_cache.host_tier_gib": 0.0625, "kv_cache.load_wait_ms": 10_000, **more}
    if folder is not None:
        knobs |= {"kv_cache.disk_tier_gib": 0.0625, "kv_cache.disk_folder": str(folder)}
    return ["--replicas", "2", *(part for key, value in knobs.items() for part in ("--set", f"{key}={value}"))]


def ask(shoal: ShoalProcess, prompt: list[int], num_tokens: int = 4) -> int:
    """Cached tokens of an answer that is what an undisturbed run gives."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{shoal.url}/v1/completions", json={**body, "return_token_ids": True}, timeout=60).json()
    expected = expected_output(prompt, num_tokens, vocab_size=49152, eos=frozenset({2}))
    assert answer["choices"][0]["token_ids"] == expected
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def counters(shoal: ShoalProcess) -> dict[str, dict[str, float]]:
    """Of the replicas that are up, by id."""
    return {r["replica_id"]: r["counters"] for r in shoal.status()["replicas"] if r["state"] == "up"}


def total(shoal: ShoalProcess, name: str) -> float:
    return sum(one.get(name, 0) for one in counters(shoal).values())


def wait_connected(shoal: ShoalProcess) -> None:
    wait_until(lambda: total(shoal, "kv_connected") == 2, 60, "both replicas have the connector")


def wait_on_disk(shoal: ShoalProcess, num_blocks: int) -> None:
    wait_until(lambda: total(shoal, "tier_blocks_disk") >= num_blocks, 30, f"{num_blocks} blocks on disk")


def ask_until(shoal: ShoalProcess, condition: Callable[[], bool], what: str) -> None:
    """Ask for PROMPT, six at a time, until the replica that is meant has answered some: which one answers is decided by
    load, and short answers need not overlap. All of it is cached, in a replica's own pool or in a tier.
    """

    def is_met() -> bool:
        with ThreadPoolExecutor(6) as pool:
            assert set(pool.map(lambda _: ask(shoal, PROMPT, 40), range(6))) == {400}
        return condition()

    wait_until(is_met, 60, what)


def test_tiers_outlive_whoever_uses_them(tmp_path: Path) -> None:
    with ShoalProcess(*arguments(tmp_path)) as shoal:
        wait_connected(shoal)
        assert ask(shoal, PROMPT) == 0
        wait_on_disk(shoal, 25)
        ask_until(shoal, lambda: total(shoal, "kv_loads") >= 1, "the other one has loaded it")

        before = counters(shoal).keys()
        (connector,) = kv_connectors(shoal.process.pid)
        os.kill(shoal.pids("Replica")[0], signal.SIGKILL)
        wait_until(lambda: len(counters(shoal).keys() - before) == 1, 60, "another replica is up")
        wait_connected(shoal)
        (fresh,) = counters(shoal).keys() - before
        ask_until(shoal, lambda: counters(shoal)[fresh]["kv_loads"] >= 1, "it has loaded it")
        assert kv_connectors(shoal.process.pid) == [connector]

        with ThreadPoolExecutor(8) as pool:
            prompts = [[*PROMPT[:200], number, *PROMPT[:180]] for number in range(8)]
            answers = [pool.submit(ask, shoal, prompt, 60) for prompt in prompts]
            os.kill(connector, signal.SIGKILL)
            assert all(answer.result() >= 0 for answer in answers)
        wait_until(lambda: kv_connectors(shoal.process.pid) not in ([], [connector]), 60, "another connector")
        wait_connected(shoal)
        stored = total(shoal, "kv_blocks_stored")
        assert ask(shoal, PROMPT[7:]) == 0
        wait_until(lambda: total(shoal, "kv_blocks_stored") > stored, 30, "it stores again")
        assert total(shoal, "tier_stranded") == 0
        assert shoal.stop() == 0
    with ShoalProcess(*arguments(tmp_path)) as again:
        wait_connected(again)
        assert ask(again, PROMPT) == 400
        wait_until(lambda: total(again, "kv_blocks_loaded") == 25, 10, "it is told")
        assert again.stop(signal.SIGTERM) == 0


def test_two_ray_nodes_have_a_connector_each_and_share_over_tcp() -> None:
    with two_nodes(3) as nodes:
        # on each node is room for one replica
        with ShoalProcess(*arguments(num_cpus_per_replica=2), env=nodes.env) as shoal:
            wait_connected(shoal)
            assert len(kv_connectors(nodes.process.pid)) == 2
            wait_until(lambda: total(shoal, "tier_peers") == 2, 60, "each hears the other")
            assert ask(shoal, PROMPT) == 0
            wait_until(lambda: total(shoal, "tier_blocks_host") == 25, 30, "stored")
            ask_until(shoal, lambda: total(shoal, "tier_given_remote") >= 25, "the other node has them of the first")
            told = counters(shoal).values()
            block_bytes = max(one["tier_stored_bytes_host"] / one["tier_stored"] for one in told if one["tier_stored"])
            # given to all who asked meanwhile, and fetched once
            assert sum(one["tier_loaded_bytes_remote"] for one in told) == 25 * block_bytes
            assert total(shoal, "tier_stranded") == 0
            assert shoal.stop() == 0
        wait_until(lambda: kv_connectors(nodes.process.pid) == [], 10, "they end with the application")
