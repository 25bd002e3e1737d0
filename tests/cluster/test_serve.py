"""The whole cluster on real Ray with the fake runner, through HTTP, as its users meet it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections import Counter
from collections.abc import Iterator

import httpx
import openai
import pytest

from replica.fake_runner import expected_output
from tests.cluster.shoal_process import ShoalProcess, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

CAP = 6
MODEL = "smollm2-135m-instruct"
VOCAB = 49152


@pytest.fixture(scope="module", params=[1, 3], ids=["1 router", "3 routers"])
def shoal(request: pytest.FixtureRequest) -> Iterator[ShoalProcess]:
    """Two replicas with a small cap behind one and behind three routers."""
    with ShoalProcess(
        "--replicas", "2", "--routers", str(request.param),
        "--set", f"router.max_queued_requests_per_replica={CAP}",
        "--set", "scheduler.max_num_seqs=8",
    ) as process:  # fmt: skip
        yield process


def body(number: int, max_tokens: int, **more: object) -> dict[str, object]:
    return {
        "model": MODEL,
        "prompt": [number + 3, 5, 6],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }


def expected(number: int, num_tokens: int) -> list[int]:
    return expected_output([number + 3, 5, 6], num_tokens, vocab_size=VOCAB, eos=frozenset({2}))


async def post(client: httpx.AsyncClient, number: int, max_tokens: int) -> httpx.Response:
    return await client.post("/v1/completions", json=body(number, max_tokens))


def test_openai_client_streams_chat(shoal: ShoalProcess) -> None:
    client = openai.OpenAI(base_url=f"{shoal.url}/v1", api_key="none")
    stream = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=12, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


def test_ops_endpoints(shoal: ShoalProcess) -> None:
    assert shoal.health() == 200
    assert httpx.get(f"{shoal.url}/version").json()["version"]
    assert httpx.get(f"{shoal.url}/v1/models").json()["data"][0]["id"] == MODEL
    assert "vllm:num_requests_running" in httpx.get(f"{shoal.url}/metrics").text
    assert len(shoal.status()["replicas"]) == 2
    answer = httpx.post(f"{shoal.url}/v1/completions", json=body(1, 3), headers={"X-Request-Id": "my-id-7"})
    assert answer.headers.get_list("x-request-id") == ["my-id-7"]


def test_scenario_b_two_hundred_requests_in_three_seconds(shoal: ShoalProcess) -> None:
    """Queued never passes the cap (the replica itself keeps the maximum); the rest get 503; what was accepted finishes
    right.
    """

    async def flood() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=shoal.url, timeout=120, limits=limits) as client:
            loop = asyncio.get_running_loop()
            started = loop.time()

            async def one(number: int) -> httpx.Response:
                done = loop.create_future()
                loop.call_at(started + 3.0 * number / 200, done.set_result, None)
                await done
                return await post(client, number, 40 + number % 50)

            return list(await asyncio.gather(*(one(number) for number in range(200))))

    answers = asyncio.run(flood())
    codes = Counter(answer.status_code for answer in answers)
    assert set(codes) == {200, 503}, codes
    for number, answer in enumerate(answers):
        if answer.status_code == 503:
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "queue_full"
        else:
            assert answer.json()["choices"][0]["token_ids"] == expected(number, 40 + number % 50)
    wait_until(lambda: is_at_baseline(shoal), 10, "pools at baseline")
    for replica in shoal.status()["replicas"]:
        assert replica["counters"]["max_queued"] == CAP, "the cap was passed, or never reached"


def is_at_baseline(shoal: ShoalProcess) -> bool:
    return all(
        (r["queued"], r["returning"], r["running"], r["kv_blocks_free"]) == (0, 0, 0, r["kv_blocks"])
        for r in shoal.status()["replicas"]
    )


def test_a_client_that_leaves_frees_its_blocks(shoal: ShoalProcess) -> None:
    for number in range(10):
        with httpx.stream("POST", f"{shoal.url}/v1/completions", json=body(number, 4000, stream=True)) as answer:
            assert answer.status_code == 200
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
    wait_until(lambda: is_at_baseline(shoal), 10, "pools at baseline after ten clients left")


def test_kill_9_of_a_replica_costs_its_streams_a_pause(shoal: ShoalProcess) -> None:
    """Its requests continue on the other replica with the same tokens; the other's do not notice; Serve replaces the
    dead one.
    """
    wait_until(lambda: len(shoal.status()["replicas"]) == 2 and len(shoal.pids("Replica")) == 2, 30, "two replicas")
    victim, *_ = shoal.pids("Replica")
    health: list[int] = []

    async def run() -> list[list[int]]:
        async with httpx.AsyncClient(base_url=shoal.url, timeout=120) as client:
            begun: asyncio.Queue[int] = asyncio.Queue()

            async def one(number: int) -> list[int]:
                tokens: list[int] = []
                async with client.stream("POST", "/v1/completions", json=body(number, 150, stream=True)) as answer:
                    assert answer.status_code == 200
                    async for line in answer.aiter_lines():
                        tokens += tokens_of(line)
                        begun.put_nowait(number)
                return tokens

            tasks = [asyncio.create_task(one(number)) for number in range(10)]
            seen: set[int] = set()
            while len(seen) < 10:
                seen.add(await begun.get())
            os.kill(victim, signal.SIGKILL)
            health.extend([(await client.get("/health")).status_code for _ in range(20)])
            return list(await asyncio.gather(*tasks))

    outputs = asyncio.run(run())
    assert outputs == [expected(number, 150) for number in range(10)]
    assert set(health) == {200}, "one replica was up all the time"
    wait_until(lambda: len(shoal.pids("Replica")) == 2, 30, "Serve's replacement")
    assert victim not in shoal.pids("Replica")
    wait_until(
        lambda: sum(r["state"] == "up" for r in shoal.status()["replicas"]) == 2, 30, "the new replica in the view"
    )
    wait_until(lambda: is_at_baseline(shoal), 10, "pools at baseline")


def test_health_is_503_while_nobody_can_serve_and_the_open_stream_goes_on_afterwards() -> None:
    with ShoalProcess("--replicas", "1") as shoal, httpx.Client(base_url=shoal.url, timeout=60) as client:
        (victim,) = shoal.pids("Replica")
        request = client.build_request("POST", "/v1/completions", json=body(7, 200, stream=True))
        stream = client.send(request, stream=True)
        lines = stream.iter_lines()
        tokens = tokens_of(next(lines))
        os.kill(victim, signal.SIGSTOP)  # alive, but silent
        try:
            wait_until(lambda: shoal.health() == 503, 10, "health noticing the silence")
            refused = httpx.post(f"{shoal.url}/v1/completions", json=body(1, 3), timeout=10)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] in ("no_replica", "queue_full")
        finally:
            os.kill(victim, signal.SIGCONT)
        wait_until(lambda: shoal.health() == 200, 30, "health after the pause")
        answer = httpx.post(f"{shoal.url}/v1/completions", json=body(1, 3), timeout=30)
        assert answer.json()["choices"][0]["token_ids"] == expected(1, 3)
        for line in lines:
            tokens += tokens_of(line)
        assert tokens == expected(7, 200)
        stream.close()


def tokens_of(line: str) -> list[int]:
    """Token ids of one server-sent event; none of an empty line and of [DONE]."""
    if not line.startswith("data: {"):
        return []
    chunk = json.loads(line[6:])
    assert "error" not in chunk, chunk
    return list(chunk["choices"][0]["token_ids"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_open_streams_end_and_then_ends_everything(number: signal.Signals) -> None:
    with ShoalProcess("--replicas", "2") as shoal, httpx.Client(base_url=shoal.url, timeout=60) as client:
        assert len(shoal.family) > 5
        streams = []
        for i in range(4):
            request = client.build_request("POST", "/v1/completions", json=body(i, 300, stream=True))
            lines = client.send(request, stream=True).iter_lines()
            streams.append((lines, tokens_of(next(lines))))
        shoal.process.send_signal(number)
        wait_until(lambda: client.get("/health").status_code != 200, 5, "the routers have heard of it")
        late = client.post("/v1/completions", json=body(9, 2))  # not a 404 of a proxy whose routes are gone
        assert (late.status_code, late.json()["error"]["code"]) == (503, "no_replica")
        assert int(late.headers["retry-after"]) > 0
        for i, (lines, tokens) in enumerate(streams):
            rest = list(lines)
            for line in rest:
                tokens += tokens_of(line)
            assert tokens == expected(i, 300)
            assert "data: [DONE]" in rest
        assert shoal.process.wait(60) == 0
        assert shoal.stop(number) == 0
        assert shoal.survivors() == []


def test_a_port_in_use_is_said_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = ShoalProcess("--port", str(taken.getsockname()[1]))
        _, errors = process.process.communicate(timeout=30)
    assert process.process.returncode == 2
    assert "cannot listen there" in errors
