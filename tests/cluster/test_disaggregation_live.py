"""`shoal serve` with prefill and decode replicas: answers are those of one replica, and `kill -9` of either kind in the
middle of requests costs no client anything.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from examples import prefill_decode, prefill_decode_nodes
from replica.fake_runner import expected_output
from tests.cluster.shoal_process import ROOT, ShoalProcess, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
MODEL = "smollm2-135m-instruct"
ALWAYS = ("--set", "disaggregation.decision=always")


def post(shoal: ShoalProcess, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{shoal.url}/v1/completions", json={"model": MODEL, **body}, timeout=120)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def counters(shoal: ShoalProcess, role: str) -> dict[str, dict[str, float]]:
    """Of the replicas of a role that are up, by id."""
    replicas = shoal.status()["replicas"]
    return {r["replica_id"]: r["counters"] for r in replicas if r["state"] == "up" and r["role"] == role}


def ask(shoal: ShoalProcess, number: int, num_tokens: int) -> None:
    prompt = [number + 3, *range(100, 200)]
    answer = post(shoal, prompt=prompt, max_tokens=num_tokens, temperature=0, ignore_eos=True, return_token_ids=True)
    expected = expected_output(prompt, num_tokens, vocab_size=49152, eos=frozenset({2}))
    assert answer["choices"][0]["token_ids"] == expected


def wait_connected(shoal: ShoalProcess) -> None:
    """Replicas can store and load: until then D computes."""

    def is_connected() -> bool:
        return all(one["kv_connected"] == 1 for role in ("prefill", "decode") for one in counters(shoal, role).values())

    wait_until(is_connected, 60, "all are connected to their connector")


def num_stepped_tokens(shoal: ShoalProcess) -> dict[str, int]:
    """Tokens of all steps, prompt and decode, by replica id."""
    text = httpx.get(f"{shoal.url}/metrics", timeout=10).text
    found = re.findall(r'^vllm:iteration_tokens_total_sum\{[^}]*engine="([^"]+)"[^}]*\} (\S+)$', text, re.MULTILINE)
    return {name: int(float(value)) for name, value in found}


def check_decode_loads(shoal: ShoalProcess) -> None:
    """A prompt of 200 tokens: one D loads its twelve full blocks, and computes the eight tokens behind them and the two
    output tokens that are not the last.
    """
    wait_connected(shoal)
    told = counters(shoal, "decode")
    before, loaded = num_stepped_tokens(shoal), sum(one["kv_blocks_loaded"] for one in told.values())
    post(shoal, prompt=list(range(1000, 1200)), max_tokens=3, temperature=0, ignore_eos=True)

    def figures() -> tuple[float, int]:
        blocks = sum(one["kv_blocks_loaded"] for one in counters(shoal, "decode").values())
        stepped = num_stepped_tokens(shoal)
        return blocks - loaded, sum(stepped[name] - before.get(name, 0) for name in told)

    wait_until(lambda: figures()[0] == 12 and figures()[1] >= 10, 10, "D has loaded all and told of it")
    assert figures() == (12, 10)


def kill_one(shoal: ShoalProcess, deployment: str, role: str, count: int) -> None:
    """In the middle of requests, which all get their answers; another one takes its place."""
    before = counters(shoal, role).keys()
    with ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(ask, shoal, number, 40) for number in range(1, 40)]
        answers[0].result()
        os.kill(shoal.pids(deployment)[0], signal.SIGKILL)
        for one in answers:
            one.result()
    wait_until(lambda: len(counters(shoal, role).keys() - before) == 1, 60, f"another {role} replica")
    assert len(counters(shoal, role)) == count


def test_whoever_is_killed_answers_are_whole() -> None:
    with ShoalProcess("--prefill", "1", "--decode", "2", *ALWAYS) as shoal:
        wait_until(lambda: len(counters(shoal, "prefill")) == 1 and len(counters(shoal, "decode")) == 2, 30, "all up")
        check_decode_loads(shoal)
        ask(shoal, 0, 3)
        assert [one["prefix_cache_queries"] for one in counters(shoal, "prefill").values()] == [301]
        turns = asyncio.run(prefill_decode.measure(shoal.url, MODEL, (64, 136)))
        assert [(t.is_remote, t.num_loaded, t.error) for t in turns] == [(True, 4, ""), (True, 8, "")], "the example"
        kill_one(shoal, "Prefill", "prefill", 1)
        kill_one(shoal, "Decode", "decode", 2)
        assert shoal.stop() == 0


@pytest.mark.long
def test_two_nodes_of_the_example_give_each_other_a_prompt_over_tcp() -> None:
    """It raises if no bytes crossed."""
    found = prefill_decode_nodes.run("--runner", "fake")
    assert found.num_loaded == 64
    assert len(set(found.hosts.values())) == 2, found.hosts
    # of the fake runner: 128 bytes a block; each once
    assert found.remote_bytes == 64 * 128


def asked() -> Sequence[dict[str, Any]]:
    text = "The lighthouse keeper wrote in her diary that the storm had come from the north, and that"
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    common = {"prompt": text, "return_token_ids": True, "max_tokens": 12}
    return (
        {**common, "temperature": 0, "logprobs": 2},
        {**common, "temperature": 0.9, "seed": 5, "n": 2},
        {**common, "temperature": 0, "stop": " the"},
        {**common, "temperature": 0, "structured_outputs": {"json": schema}, "max_tokens": 24},
        {**common, "temperature": 0.7, "seed": 6, "prompt_logprobs": 1, "presence_penalty": 0.5},
    )


def answers_of(shoal: ShoalProcess, salt: str) -> list[Any]:
    return [post(shoal, **body, cache_salt=salt)["choices"] for body in asked()]


@pytest.mark.long
def test_a_real_model_says_the_same_with_one_replica_and_with_two() -> None:
    """One cluster: who computes the prompt is a live knob."""
    with ShoalProcess("--prefill", "1", "--decode", "1", *ALWAYS, fake=False) as shoal:
        wait_until(lambda: len(counters(shoal, "prefill")) == len(counters(shoal, "decode")) == 1, 30, "both up")
        check_decode_loads(shoal)
        of_two = answers_of(shoal, "two")
        (prefill,) = counters(shoal, "prefill").values()
        assert prefill["prefix_cache_queries"] > 0
        command = [
            sys.executable,
            "-m",
            "cluster.cli",
            "set",
            "--port",
            str(shoal.port),
            "disaggregation.decision=never",
        ]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        assert answers_of(shoal, "one") == of_two
        assert counters(shoal, "prefill").popitem()[1]["prefix_cache_queries"] == prefill["prefix_cache_queries"]
        assert shoal.stop() == 0
