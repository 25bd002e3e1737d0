"""Deadlines, shedding and priorities through HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest

from router.dispatcher import DispatcherConfig
from tests.api.calls import chat, complete, error_of
from tests.api.harness import ApiUnderTest, fake_api


@pytest.fixture
def busy() -> Iterator[ApiUnderTest]:
    """One request is in a step that does not end, so everybody else waits: two in the queue, the others held for
    long.
    """
    with fake_api(
        is_open=False,
        cap=2,
        max_num_seqs=1,
        dispatcher=DispatcherConfig(admission_wait_s=60.0),
    ) as api:
        core = api.replicas[0].engine.core
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(complete, api, prompt="first", max_tokens=2)
            api.until(lambda: len(core.scheduler.running) == 1)
            yield api
            api.replicas[0].runner.open()
            assert first.result().status_code == 200


def test_a_bad_deadline_is_refused_with_its_name(fake: ApiUnderTest) -> None:
    for value in ("soon", "0", "-3", "nan", "inf", "86400001", ""):
        response = fake.http.post(
            "/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"X-Request-Deadline-Ms": value}
        )
        assert "X-Request-Deadline-Ms" in error_of(response, 400, "X-Request-Deadline-Ms")
    for value in (0, -1, "soon", 86_400_001, True):  # type: ignore[assignment]
        error_of(complete(fake, prompt="x", deadline_ms=value), 400, "deadline_ms")
        error_of(chat(fake, "x", deadline_ms=value), 400, "deadline_ms")


@pytest.mark.parametrize("form", ["header", "field", "both"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_has_not_begun_in_time_is_a_504(busy: ApiUnderTest, form: str, stream: bool) -> None:
    body: dict[str, object] = {"prompt": "second", "max_tokens": 3, "stream": stream}
    headers = {}
    if form != "field":
        headers["X-Request-Deadline-Ms"] = "30" if form == "header" else "60000"
    if form != "header":
        body["deadline_ms"] = 30
    response = busy.http.post("/v1/completions", json=body, headers=headers)
    error_of(response, 504, None, "deadline_exceeded")
    assert busy.peek(lambda: busy.replicas[0].engine.core.scheduler.num_queued) == 0


def test_a_held_request_ends_at_its_deadline_though_it_could_be_held_for_long(busy: ApiUnderTest) -> None:
    core = busy.replicas[0].engine.core
    with ThreadPoolExecutor(2) as pool:
        queued = [pool.submit(complete, busy, prompt="queued", max_tokens=1) for _ in range(2)]
        busy.until(lambda: core.scheduler.num_queued == 2)
        response = complete(busy, prompt="held", max_tokens=1, deadline_ms=40)
        error_of(response, 504, None, "deadline_exceeded")
        assert busy.peek(lambda: busy.backend.dispatcher.num_held) == 0
        busy.replicas[0].runner.open()
        assert [one.result().status_code for one in queued] == [200, 200]


def test_a_deadline_that_is_kept_changes_nothing(fake: ApiUnderTest) -> None:
    assert complete(fake, prompt="x", max_tokens=3, deadline_ms=60_000).status_code == 200


def test_an_urgent_request_takes_a_place_in_the_queue_and_the_shed_one_is_told() -> None:
    with fake_api(
        is_open=False,
        cap=1,
        max_num_seqs=1,
        dispatcher=DispatcherConfig(admission_wait_s=0.05, priority_ageing_s=1e6),
        scheduler={"policy": "priority", "priority_ageing_s": 1e6, "max_preemptions": 0},
        policy="priority",
    ) as api:
        gate, core = api.replicas[0].runner, api.replicas[0].engine.core
        with ThreadPoolExecutor(4) as pool:
            running = pool.submit(complete, api, prompt="runs", max_tokens=2, priority=5)
            api.until(lambda: len(core.scheduler.running) == 1)
            waiting: Future[httpx.Response] = pool.submit(complete, api, prompt="waits", max_tokens=2, priority=5)
            api.until(lambda: core.scheduler.num_queued == 1)
            api.until(lambda: next(iter(api.backend.dispatcher.views.values())).load.last_queued is not None)
            equal = complete(api, prompt="as meek", max_tokens=2, priority=5)
            error_of(equal, 503, None, "queue_full")
            urgent = pool.submit(complete, api, prompt="urgent", max_tokens=2, priority=0)
            shed = waiting.result()
            error_of(shed, 503, None, "shed")
            assert int(shed.headers["retry-after"]) >= 1
            gate.open()
            assert urgent.result().status_code == running.result().status_code == 200
        assert api.metric("vllm:admission_rejections_total", reason="shed") == 1
