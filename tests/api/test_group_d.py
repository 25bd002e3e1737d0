"""Group D: overload, death and health as a client sees them. Named by case."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import replica.engine
from router.dispatcher import DispatcherConfig
from tests.api.calls import CHAT, COMPLETIONS, answer, chat, complete, error_of, watched_health
from tests.api.harness import ApiUnderTest, fake_api, real_api
from tests.api.test_deadlines import knows
from tests.api.wire import Wire, parse_events
from tests.cluster.harness import ReplicaUnderTest


def the_one_that_works(api: ApiUnderTest) -> ReplicaUnderTest:
    (found,) = api.peek(lambda: [each for each in api.replicas if each.engine.core.num_unfinished])
    return found


@pytest.mark.slow
def test_d06_a_replica_that_is_dead_when_it_is_chosen_costs_no_request() -> None:
    """40 requests beside each other from the moment of the kill; the case's four a second would only be easier."""
    with fake_api(num_replicas=2) as api:
        bodies = [{"prompt": f"number {number}", "max_tokens": 4} for number in range(40)]
        expected = [answer(complete(api, **body))["choices"] for body in bodies]
        with ThreadPoolExecutor(8) as pool:
            death = api.start(api.replicas[0].die())
            answers = [pool.submit(complete, api, **body) for body in bodies]
            assert [answer(each.result())["choices"] for each in answers] == expected
        death.result(10)
        api.until(lambda: api.backend.health().detail["replicas_up"] == 1, timeout_s=5)


def test_d06_a_hiccup_removes_no_replica_for_good() -> None:
    with fake_api() as api:
        for _ in range(3):
            hiccup(api)
            assert complete(api, max_tokens=3).status_code == 200


def hiccup(api: ApiUnderTest) -> None:
    """The stream between router and replica breaks, and is there again."""
    engine = api.replicas[0].engine
    (link,) = api.peek(lambda: list(engine._links.values()))
    api.peek(lambda: engine.disconnect(link))
    api.until(lambda: engine._links and link not in engine._links.values())


def stream_of(api: ApiUnderTest, body: dict[str, Any], num_events: int) -> list[Any]:
    """The events of a stream whose replica is killed after `num_events` of them; 0: it is not."""
    path = CHAT if "messages" in body else COMPLETIONS
    with Wire(api.port, timeout_s=60) as wire:
        wire.post(path, {**body, "stream": True, "stream_options": {"include_usage": True}})
        assert wire.head()[0] == 200
        events = wire.events(num_events)
        if num_events:
            api.run(the_one_that_works(api).die())
        data = b""
        while piece := wire.chunk():
            data += piece
        return events + parse_events(data)


def what_a_client_has(events: list[Any]) -> tuple[dict[int, str], dict[int, str], Any]:
    """Texts, finish reasons, usage."""
    *chunks, done = events
    assert done == "[DONE]", done
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content")
            texts[choice["index"]] = texts.get(choice["index"], "") + (text or "")
            if choice["finish_reason"] is not None:
                assert choice["index"] not in reasons
                reasons[choice["index"]] = choice["finish_reason"]
    usage = dict(chunks[-1]["usage"])
    usage.pop("prompt_tokens_details", None)  # what was cached may differ
    return texts, reasons, usage


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [{"temperature": 0}, {"temperature": 0.9, "seed": 5}, {"n": 2, "temperature": 0.9, "seed": 5}],
    ids=["greedy", "seed", "n"],
)
def test_d07_a_stream_whose_replica_dies_goes_on_with_the_same_tokens(more: dict[str, Any]) -> None:
    """The choice is to continue: sampling is a function of seed and position."""
    body = {"prompt": "Count", "max_tokens": 200, "ignore_eos": True, **more}
    with fake_api(num_replicas=2, step_s=0.002) as api:
        undisturbed = what_a_client_has(stream_of(api, body, 0))
        assert what_a_client_has(stream_of(api, body, 50)) == undisturbed
        assert undisturbed[2]["completion_tokens"] == 200 * int(more.get("n", 1))


@pytest.mark.slow
@pytest.mark.model
def test_d07_so_does_one_with_a_schema(model_folder: Path) -> None:
    words = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 40, "maxItems": 40}
    body = {
        "messages": [{"role": "user", "content": "Colours"}],
        "temperature": 0,
        "max_tokens": 400,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": words}},
    }
    with real_api(model_folder, num_replicas=2) as api:
        undisturbed = what_a_client_has(stream_of(api, body, 0))
        assert undisturbed[1] == {0: "stop"}
        assert what_a_client_has(stream_of(api, body, 50)) == undisturbed


def test_d09_without_a_replica_a_known_model_is_503_and_an_unknown_one_404() -> None:
    with fake_api(num_replicas=0, dispatcher=DispatcherConfig(admission_wait_s=0.0)) as api:
        models = api.http.get("/v1/models")
        for response in (chat(api), complete(api), models, api.http.get("/v1/models/fake")):
            error_of(response, 503, None, "no_replica")
            assert int(response.headers["retry-after"]) >= 1
        for response in (chat(api, model="x"), complete(api, model="x"), api.http.get("/v1/models/x")):
            error_of(response, 404, "model", "model_not_found")


def test_d10_twenty_at_once_where_six_have_room() -> None:
    """503 always: 429 is for limits of a tenant. Nobody whose request is running has to end before the refusals."""
    wait = DispatcherConfig(admission_wait_s=0.15)
    with fake_api(is_open=False, cap=4, max_num_seqs=2, dispatcher=wait) as api:
        core, failures = api.replicas[0].engine.core, api.peek(lambda: api.backend._clients.copy())
        with ThreadPoolExecutor(20) as pool:
            answers = [pool.submit(complete, api, prompt=f"number {n}", max_tokens=2) for n in range(20)]
            api.until(lambda: core.scheduler.num_queued == 4)
            api.replicas[0].runner.gate.release(1)  # the step of whoever came first: the next one has a second place
            api.until(lambda: core.num_unfinished == 6)
            api.until(lambda: sum(each.done() for each in answers) == 14)
            for refused in [each.result() for each in answers if each.done()]:
                error_of(refused, 503, None, "queue_full")
                assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert api.peek(lambda: core.num_unfinished) == 6
            with openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client:
                with pytest.raises(openai.InternalServerError) as caught:
                    client.completions.create(model="fake", prompt="x")
                assert client._should_retry(caught.value.response)
            assert api.backend.health().ok, "a refusal is no failure"
            assert api.peek(lambda: api.backend._clients) == failures
            api.replicas[0].runner.open()
            assert sorted(each.result().status_code for each in answers) == [200] * 6 + [503] * 14


def test_d10_the_client_that_comes_again_by_itself_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        fake_api(is_open=False, cap=1, max_num_seqs=1, dispatcher=DispatcherConfig(admission_wait_s=0.0)) as api,
        openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=2) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        core = api.replicas[0].engine.core
        first = pool.submit(complete, api, max_tokens=1)
        api.until(lambda: len(core.scheduler.running) == 1)
        knows(api, 0)
        second = pool.submit(complete, api, max_tokens=1)
        api.until(lambda: core.scheduler.num_queued == 1)
        waits: list[float] = []

        def come_again(seconds: float) -> None:
            """Instead of the client's sleep."""
            waits.append(seconds)
            api.replicas[0].runner.open()
            assert first.result().status_code == second.result().status_code == 200

        monkeypatch.setattr("openai._base_client.time.sleep", come_again)
        assert client.completions.create(model="fake", prompt="x", max_tokens=1).choices
        assert len(waits) == 1
        assert 1 <= waits[0] <= 60


def test_d10_a_refusal_by_one_replica_is_tried_on_the_other_first() -> None:
    with fake_api(num_replicas=2, is_open=False, cap=1, max_num_seqs=1) as api, ThreadPoolExecutor(5) as pool:
        answers = []
        for number in range(1, 5):  # two that run, two that wait
            answers.append(pool.submit(complete, api, max_tokens=2))
            api.until(partial(has_settled, api, number))
        assert [r.engine.core.scheduler.num_queued for r in api.replicas] == [1, 1]
        for each in api.replicas:
            each.runner.open()
        assert all(each.result().status_code == 200 for each in answers)


def has_settled(api: ApiUnderTest, num_sequences: int) -> bool:
    """So many are there, and one runs wherever there is one; the router knows."""
    cores = [each.engine.core for each in api.replicas]
    views = api.backend.dispatcher.views.values()
    return (
        sum(core.num_unfinished for core in cores) == num_sequences
        and all(len(core.scheduler.running) or not core.num_unfinished for core in cores)
        and sum(view.load.num_running + view.load.num_queued for view in views) == num_sequences
    )


@pytest.mark.slow
def test_d12_health_is_good_while_it_is_overloaded() -> None:
    with (
        fake_api(is_open=False, cap=300, max_num_seqs=1) as api,
        ThreadPoolExecutor(200) as pool,
        api.client(limits=httpx.Limits(max_connections=None)) as client,
        watched_health(api) as seconds,
    ):
        core = api.replicas[0].engine.core
        body = {"prompt": "x", "max_tokens": 1}
        answers = [pool.submit(client.post, COMPLETIONS, json=body) for _ in range(200)]
        api.until(lambda: core.scheduler.num_queued >= 199, timeout_s=30)
        api.peek(api.replicas[0].engine.check_health)
        api.until(lambda: len(seconds) > 100, timeout_s=30)
        api.replicas[0].runner.open()
        assert all(each.result().status_code == 200 for each in answers)
        assert sorted(seconds)[int(len(seconds) * 0.99)] < 1


@pytest.mark.slow
def test_d12_health_turns_bad_with_a_reason_while_a_step_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """After `STALLED_STEP_S` the replica falls silent, 3 s later nothing is placed there, and /health says so."""
    assert replica.engine.STALLED_STEP_S <= 30
    monkeypatch.setattr(replica.engine, "STALLED_STEP_S", 0.1)
    monkeypatch.setattr(replica.engine, "MAX_STEP_S", 0.2)
    with fake_api(is_open=False) as api, ThreadPoolExecutor(1) as pool:
        hangs = pool.submit(complete, api, max_tokens=1)
        api.until(lambda: api.replicas[0].runner.plans)
        api.until(lambda: not api.backend.health().ok)
        health = api.http.get("/health")
        assert health.status_code == 503
        assert "1 silent" in health.json()["reason"]
        with pytest.raises(Exception, match="a step has been running for"):
            api.peek(api.replicas[0].engine.check_health)  # by which Serve replaces it
        api.replicas[0].runner.open()
        api.until(lambda: api.backend.health().ok)
        assert hangs.result().status_code == 200


@pytest.mark.slow
def test_d13_a_hundred_and_fifty_slow_streams_all_begin() -> None:
    """No pool of connections inside: one stream carries all of a router's sequences."""
    with fake_api(is_open=False, cap=256, max_num_seqs=256) as api:
        core = api.replicas[0].engine.core

        begun: asyncio.Queue[int] = asyncio.Queue()

        async def stream(client: httpx.AsyncClient) -> None:
            body = {"prompt": "x", "max_tokens": 50, "ignore_eos": True, "stream": True}
            async with client.stream("POST", COMPLETIONS, json=body) as response:
                chunks = response.aiter_bytes()
                await anext(chunks)
                begun.put_nowait(response.status_code)
                async for _ in chunks:
                    pass

        async def all_of_them() -> None:
            """The first chunk of each comes while all others are there as well."""
            async with api.async_client(limits=httpx.Limits(max_connections=None)) as client:
                tasks = [asyncio.create_task(stream(client)) for _ in range(150)]
                await asyncio.to_thread(api.until, lambda: core.num_unfinished == 150)
                api.replicas[0].runner.gate.release(10)  # prompts of all, and some tokens of each
                assert [await begun.get() for _ in range(150)] == [200] * 150
                assert core.num_unfinished == 150
                api.replicas[0].runner.open()
                await asyncio.gather(*tasks)

        asyncio.run(all_of_them())


def test_d18_two_clients_with_one_request_id_do_not_meet(fake: ApiUnderTest) -> None:
    headers = {"X-Request-Id": "the-same"}
    alone = [answer(complete(fake, prompt=prompt, max_tokens=60))["choices"][0]["text"] for prompt in ("one", "two")]
    with fake_api(is_open=False) as api, ThreadPoolExecutor(2) as pool:

        def ask(prompt: str) -> httpx.Response:
            body = {"prompt": prompt, "max_tokens": 60, "temperature": 0}
            with api.client() as client:
                return client.post(COMPLETIONS, json=body, headers=headers)

        answers = [pool.submit(ask, prompt) for prompt in ("one", "two")]
        with Wire(api.port) as leaves:
            leaves.send(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: the-same\r\nContent-Length: 15\r\n\r\n"
                b'{"prompt": "x"}'
            )
            api.until(lambda: api.replicas[0].engine.core.num_unfinished == 3)
        api.until(lambda: api.backend.load() == 2)
        api.replicas[0].runner.open()
        for each, text in zip(answers, alone, strict=True):
            assert each.result().headers["x-request-id"] == "the-same"
            assert answer(each.result())["choices"][0]["text"] == text
        assert len({each.result().json()["id"] for each in answers}) == 2
