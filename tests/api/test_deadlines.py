"""Deadlines, shedding and priorities through HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager

import httpx
import pytest

from replica.messages import ReplicaId
from router.dispatcher import DispatcherConfig
from tests.api.calls import chat, complete, error_of
from tests.api.harness import ApiUnderTest, fake_api
from tests.api.wire import Wire


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


def one_place_each(num_replicas: int, admission_wait_s: float) -> AbstractContextManager[ApiUnderTest]:
    """At each replica one sequence runs, in a step that does not end, and one more may wait; by priority, and nobody
    who runs is put back.
    """
    ageing_s = 1e6
    return fake_api(
        num_replicas=num_replicas,
        is_open=False,
        cap=1,
        max_num_seqs=1,
        dispatcher=DispatcherConfig(admission_wait_s=admission_wait_s, priority_ageing_s=ageing_s),
        scheduler={"policy": "priority", "priority_ageing_s": ageing_s, "max_preemptions": 0},
        policy="priority",
    )


def knows(api: ApiUnderTest, num_queued: int) -> None:
    """Wait until the router has heard that so many are queued. A replica that is in a long step tells it late."""
    views = api.backend.dispatcher.views.values()
    api.until(lambda: sum(view.load.num_queued + view.unanswered_sequences for view in views) == num_queued)


def test_a_bad_deadline_is_refused_with_its_name(fake: ApiUnderTest) -> None:
    for value in ("soon", "0", "-3", "nan", "inf", "86400001", "", "1_000", "1,5"):
        response = fake.http.post(
            "/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"X-Request-Deadline-Ms": value}
        )
        assert "X-Request-Deadline-Ms" in error_of(response, 400, "X-Request-Deadline-Ms")
    for value in (0, -1, "soon", 86_400_001, True):  # type: ignore[assignment]
        error_of(complete(fake, prompt="x", deadline_ms=value), 400, "deadline_ms")
        error_of(chat(fake, "x", deadline_ms=value), 400, "deadline_ms")


def test_blanks_around_a_header_reach_nobody(fake: ApiUnderTest) -> None:
    """As they stand on the wire: not every HTTP server takes them away."""
    body = b'{"prompt": "x", "max_tokens": 1}'
    for value in ("60000 ", "   60000", "\t6e4 \t"):
        with Wire(fake.port) as wire:
            head = f"X-Request-Deadline-Ms:{value}\r\nContent-Type: application/json \r\nContent-Length: {len(body)} "
            wire.send(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode() + body)
            assert wire.reply().status == 200, value


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
    with one_place_each(num_replicas=1, admission_wait_s=0.05) as api:
        gate, core = api.replicas[0].runner, api.replicas[0].engine.core
        with ThreadPoolExecutor(4) as pool:
            running = pool.submit(complete, api, prompt="runs", max_tokens=2, priority=5)
            api.until(lambda: len(core.scheduler.running) == 1)
            knows(api, 0)
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


def test_a_body_that_comes_too_slowly_for_its_deadline_is_a_504(fake: ApiUnderTest) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\nX-Request-Deadline-Ms: 40\r\n\r\n"
    with Wire(fake.port) as wire:
        wire.send(head.encode() + b'{"prompt":')
        reply = wire.reply()
    assert (reply.status, reply.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert reply.header("connection") == ["close"]


def test_a_shed_request_is_taken_by_another_replica_and_if_none_has_room_told_503() -> None:
    """Two replicas with one place each. An urgent request takes the first place, and whoever had it goes on elsewhere
    while there is room; the second urgent one leaves no room for one of them.
    """
    with one_place_each(num_replicas=2, admission_wait_s=0.05) as api:
        cores = [replica.engine.core for replica in api.replicas]
        with ThreadPoolExecutor(8) as pool:
            running = []
            for _ in range(2):
                running.append(pool.submit(complete, api, prompt="runs", max_tokens=2, priority=5))
                api.until(lambda: sum(len(core.scheduler.running) for core in cores) == len(running))
                knows(api, 0)
            meek = []
            for number in range(2):
                meek.append(pool.submit(complete, api, prompt="waits", max_tokens=2, priority=5))
                knows(api, number + 1)
            urgent = pool.submit(complete, api, prompt="urgent", max_tokens=2, priority=0)
            api.until(lambda: any(one.done() for one in meek))
            (shed,) = [one for one in meek if one.done()]
            error_of(shed.result(), 503, None, "shed")
            assert int(shed.result().headers["retry-after"]) >= 1
            for replica in api.replicas:
                replica.runner.open()
            left = [one for one in meek if one is not shed]
            assert {one.result().status_code for one in [*running, *left, urgent]} == {200}


def test_a_shed_request_goes_on_at_the_replica_that_has_room() -> None:
    """The urgent request knows only of the full replica: the other one comes up when it has been let in."""
    with one_place_each(num_replicas=2, admission_wait_s=60.0) as api:
        one, other = api.replicas
        view = api.backend.dispatcher.views[ReplicaId(other.name)]
        api.peek(lambda: setattr(view, "is_draining", True))
        with ThreadPoolExecutor(4) as pool:
            running = pool.submit(complete, api, prompt="runs", max_tokens=2, priority=5)
            api.until(lambda: len(one.engine.core.scheduler.running) == 1)
            knows(api, 0)
            meek = pool.submit(complete, api, prompt="waits", max_tokens=2, priority=5)
            knows(api, 1)
            urgent = pool.submit(complete, api, prompt="urgent", max_tokens=2, priority=0)
            api.until(lambda: api.backend.dispatcher.num_held == 1)
            assert not meek.done(), "it is held, with nothing said to the client"
            api.peek(lambda: setattr(view, "is_draining", False))
            other.runner.open()
            assert meek.result().status_code == 200
            assert not running.done()
            one.runner.open()
            assert running.result().status_code == urgent.result().status_code == 200
