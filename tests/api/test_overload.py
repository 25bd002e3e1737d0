"""Every row of docs/overload.md that one process can show, through real HTTP."""

from __future__ import annotations

import ast
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import httpx
import pytest

import replica.engine
from cluster.config import load
from router.dispatcher import DispatcherConfig
from router.tenants import hashed
from tests.api.calls import COMPLETIONS, answer, complete, error_of
from tests.api.harness import ApiUnderTest, fake_api
from tests.api.overload_table import ROOT, check, check_events, rows
from tests.api.test_deadlines import one_place_each
from tests.api.test_tenants import CONFIG, Client, asked, desk_of, wait_for_running
from tests.api.wire import Wire, parse_events

#: of requests that are held: long, and no time at all
LONG, SHORT = DispatcherConfig(admission_wait_s=60.0), DispatcherConfig(admission_wait_s=0.05)
#: nobody takes over, so the answer comes at once instead of after 30 s
ALONE = DispatcherConfig(admission_wait_s=0.0, resume_wait_s=0.0)
STREAM = {"prompt": "x", "max_tokens": 40, "ignore_eos": True, "temperature": 0, "stream": True}


class Crowd:
    """Requests beside each other, each from a thread."""

    def __init__(self, api: ApiUnderTest, pool: ThreadPoolExecutor) -> None:
        self._api, self._pool = api, pool
        self.all: list[Future[httpx.Response]] = []

    def send(self, **body: Any) -> Future[httpx.Response]:
        self.all.append(self._pool.submit(complete, self._api, **{"max_tokens": 2, **body}))
        return self.all[-1]

    def send_running(self, **body: Any) -> Future[httpx.Response]:
        """Returns when it is in the only place of a batch."""
        core = self._api.replicas[0].engine.core
        sent = self.send(**body)
        self._api.until(lambda: len(core.scheduler.running) == 1)
        return sent

    def send_queued(self, num_queued: int, **body: Any) -> Future[httpx.Response]:
        """Returns when so many are queued, and the router has heard of it."""
        core = self._api.replicas[0].engine.core
        sent = self.send(**body)
        self._api.until(lambda: core.scheduler.num_queued == num_queued)
        views = self._api.backend.dispatcher.views.values()
        self._api.until(lambda: sum(view.load.num_queued for view in views) == num_queued)
        return sent

    def send_held(self, **body: Any) -> Future[httpx.Response]:
        """Returns when it is the only one that is held."""
        sent = self.send(**body)
        self._api.until(lambda: self._api.backend.dispatcher.num_held == 1)
        return sent


@contextmanager
def crowd(api: ApiUnderTest) -> Iterator[Crowd]:
    """At the end the runner may go on, and all that were not refused are served."""
    with ThreadPoolExecutor(8) as pool:
        them = Crowd(api, pool)
        yield them
        for each in api.replicas:
            each.runner.open()
        assert all(one.result().status_code in (200, 503, 504) for one in them.all)


@contextmanager
def one_at_a_time(dispatcher: DispatcherConfig, cap: int = 1, **more: Any) -> Iterator[tuple[ApiUnderTest, Crowd]]:
    """One request is in a step that does not end."""
    with fake_api(is_open=False, cap=cap, max_num_seqs=1, dispatcher=dispatcher, **more) as api, crowd(api) as them:
        them.send_running(prompt="runs")
        yield api, them


@cache
def functions_of(path: str) -> dict[str, str]:
    """Name -> source of each function of a file, decorators included."""
    return {
        node.name: "".join(ast.unparse(part) for part in [*node.decorator_list, node]).replace("'", '"')
        for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_each_row_names_a_test_that_checks_it() -> None:
    table = rows()
    assert len(table) > 40
    for row in table.values():
        path, _, name = row.test.partition("::")
        functions = functions_of(path)
        assert name in functions, f"{row.name}: there is no {row.test}"
        if path == "tests/api/test_overload.py":
            assert f'"{row.name}"' in functions[name], f"{row.test} says nothing of {row.name}"


def test_full() -> None:
    with one_at_a_time(SHORT) as (api, them):
        them.send_queued(1)
        check("queue-full", complete(api, max_tokens=2))
        check("queue-full", complete(api, max_tokens=2, stream=True))
    with one_at_a_time(DispatcherConfig(admission_wait_s=60.0, max_held_requests=1)) as (api, them):
        them.send_queued(1)
        them.send_held()
        check("held-full", complete(api, max_tokens=2))


@pytest.mark.parametrize("how", ["none-there", "draining", "mending", "stopping"])
def test_no_replica(how: str) -> None:
    with fake_api(num_replicas=int(how != "none-there"), dispatcher=SHORT) as api:
        for each in api.replicas:
            if how == "mending":
                api.peek(each.engine.core.pause)
                api.peek(each.engine._send_load)
            else:
                api.run(each.engine.drain(0.0))
        if how == "stopping":
            api.start(api.backend.stop(0.0))
        api.until(lambda: not api.backend.health().ok)
        message = check(how, complete(api, max_tokens=2))
        assert ("the server stops" in message.lower()) == (how == "stopping")
        check("models", api.http.get("/v1/models"))
        check("models", api.http.get("/v1/models/fake"))
        error_of(api.http.get("/v1/models/other"), 404, "model", "model_not_found")
        if how == "stopping":  # nothing is read any more
            error_of(complete(api, model="other"), 503, None, "no_replica")
        else:
            error_of(complete(api, model="other"), 404, "model", "model_not_found")


def test_the_router_stops() -> None:
    with fake_api(num_replicas=0, dispatcher=LONG) as api, crowd(api) as them:
        held = them.send_held()
        api.run(api.backend.close())
        check("router-stops", held.result())
    with fake_api(dispatcher=SHORT) as api:
        api.run(api.backend.close())
        check("router-stops", complete(api))
    with fake_api(is_open=False) as api, Wire(api.port) as wire:
        api.replicas[0].runner.gate.release(3)
        wire.post(COMPLETIONS, STREAM)
        assert wire.head()[0] == 200
        events = wire.events(3)
        api.run(api.backend.close())
        check_events("on-router-stops", events + rest(wire))
        api.replicas[0].runner.open()


def rest(wire: Wire) -> list[Any]:
    """The events of a stream until its end."""
    data = b""
    while piece := wire.chunk():
        data += piece
    return parse_events(data)


def test_shed() -> None:
    with one_place_each(num_replicas=1, admission_wait_s=0.05) as api, crowd(api) as them:
        them.send_running(priority=5)
        meek = them.send_queued(1, priority=5)
        them.send(priority=0)
        check("shed-urgent", meek.result())


def test_shed_while_held() -> None:
    ageing_s = 1e6
    dispatcher = DispatcherConfig(admission_wait_s=60.0, max_held_requests=1, priority_ageing_s=ageing_s)
    scheduler = {"policy": "priority", "priority_ageing_s": ageing_s, "max_preemptions": 0}
    with one_at_a_time(dispatcher, scheduler=scheduler, policy="priority") as (_, them):
        them.send_queued(1, priority=0)
        meek = them.send_held(priority=5)
        them.send(priority=1)
        check("shed-held", meek.result())


def test_shed_for_tokens() -> None:
    with one_at_a_time(SHORT, cap=8, scheduler={"shed_above_queued_tokens": 30}) as (api, them):
        them.send_queued(1, prompt=[1] * 20)
        check("shed-tokens", complete(api, prompt=[2] * 20, max_tokens=2))


def test_shed_for_a_tenant() -> None:
    config = load({"tenants": {"named": {name: {"keys": [hashed(name)]} for name in ("many", "few")}}})
    wait = DispatcherConfig(admission_wait_s=0.5)
    with fake_api(tenants=desk_of(config), is_open=False, cap=2, max_num_seqs=1, dispatcher=wait) as api:
        core = api.replicas[0].engine.core
        with ThreadPoolExecutor(4) as pool:
            many = [pool.submit(asked, api, "many")]
            api.until(lambda: len(core.scheduler.running) == 1)
            for number in (1, 2):
                many.append(pool.submit(asked, api, "many"))
                api.until(partial(is_queued, api, number))
            few = pool.submit(asked, api, "few")
            api.until(lambda: any(one.done() for one in many))
            (shed,) = [one for one in many if one.done()]
            check("shed-tenant", shed.result())
            api.replicas[0].runner.open()
            assert few.result().status_code == 200


def is_queued(api: ApiUnderTest, number: int) -> bool:
    return api.replicas[0].engine.core.scheduler.num_queued == number


def test_router_busy() -> None:
    with fake_api(max_pending_body_bytes=0) as api:
        check("router-busy", complete(api, prompt="x" * 10_000, max_tokens=1))
        assert complete(api, max_tokens=1).status_code == 200


def test_tenants() -> None:
    with fake_api(tenants=desk_of(CONFIG), is_open=False, scheduler={"policy": "priority"}, policy="priority") as api:
        first = Client(api, "k-small")
        wait_for_running(api, "small", 1)
        check("tenant-concurrency", asked(api, "k-small"))
        api.replicas[0].runner.open()
        first.join(30)
        assert first.status == 200
        assert asked(api, "k-metered").status_code == 200
        answer_of_metered = asked(api, "k-metered")
        assert int(answer_of_metered.headers["retry-after"]) > 60, "its own debt: 429 may be later than 60 s"
        check("tenant-tokens", answer_of_metered)
        check("priority-range", asked(api, "k-urgent", priority=4))
        check("unknown-key", asked(api, "nobody"))


def test_deadline_invalid(fake: ApiUnderTest) -> None:
    headers = {"X-Request-Deadline-Ms": "soon"}
    check("deadline-invalid", fake.http.post(COMPLETIONS, json={"prompt": "x"}, headers=headers))
    check("deadline-invalid", complete(fake, deadline_ms=0))


def test_deadline_before_a_replica(fake: ApiUnderTest) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\nX-Request-Deadline-Ms: 40\r\n\r\n"
    with Wire(fake.port) as wire:
        wire.send(head.encode() + b'{"prompt":')
        check("deadline-body", wire.reply())
    check("deadline-read", complete(fake, deadline_ms=0.001))


def test_deadline_while_it_waits() -> None:
    with one_at_a_time(LONG) as (api, them):
        check("deadline-queued", complete(api, max_tokens=2, deadline_ms=50))
        them.send_queued(1)
        check("deadline-held", complete(api, max_tokens=2, deadline_ms=50))
        assert api.peek(lambda: api.backend.dispatcher.num_held) == 0


def test_deadline_while_it_runs() -> None:
    with fake_api(is_open=False) as api, crowd(api) as them:
        late = time.time() + 0.3
        runs = them.send_running(deadline_ms=300)
        api.until(lambda: time.time() > late + 0.05)
        api.replicas[0].runner.open()
        check("deadline-begun", runs.result())


def test_what_can_never_be() -> None:
    with fake_api(cap=2, num_blocks=4) as api:
        assert "64" in check("never-fits", complete(api, prompt=[5] * 100))
        assert "8192" in check("never-fits", complete(api, prompt=[5] * 9000))
        check("too-many-sequences", complete(api, n=3))
        check("grammar", complete(api, response_format={"type": "json_object"}))  # the fake runner has none
        check("grammar", complete(api, structured_outputs={"regex": "("}))


def test_a_grammar_that_takes_for_ever_ends_its_request_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given back as by a loss, three times; the router's own check has bounds, so this needs a very busy machine."""
    monkeypatch.setattr(replica.engine, "GRAMMAR_S", 0.05)
    for_ever = threading.Event()
    with fake_api() as api:
        monkeypatch.setattr(api.replicas[0].runner, "prepare_grammar", lambda grammar: for_ever.wait(20))
        check("lost-too-often", complete(api, response_format={"type": "json_object"}))
        assert complete(api, max_tokens=2).status_code == 200
        for_ever.set()


def test_not_finite() -> None:
    with fake_api(is_open=False) as api:
        runner = api.replicas[0].runner
        runner.not_finite = True
        runner.gate.release(1)
        check("not-finite", complete(api))
        with Wire(api.port) as wire:
            runner.gate.release(4)
            wire.post(COMPLETIONS, STREAM)
            assert wire.head()[0] == 200
            events = wire.events(2)
            runner.not_finite = True
            runner.open()
            check_events("on-not-finite", events + rest(wire))


def test_a_step_fails(fake: ApiUnderTest) -> None:
    undisturbed = answer(complete(fake, max_tokens=5))["choices"]
    fake.replicas[0].runner.num_failures = 1
    again = complete(fake, max_tokens=5)
    check("step-failed", again)
    assert answer(again)["choices"] == undisturbed


def test_lost() -> None:
    with fake_api(num_replicas=2, is_open=False) as api, crowd(api) as them:
        sent = them.send()
        api.until(lambda: any(each.runner.plans for each in api.replicas))
        (dying,) = [each for each in api.replicas if each.runner.plans]
        api.run(dying.die())
        for each in api.replicas:
            each.runner.open()
        check("lost", sent.result())
    with fake_api(is_open=False, dispatcher=ALONE) as api, crowd(api) as them:
        sent = them.send_running()
        api.run(api.replicas[0].die())
        check("lost-alone", sent.result())


@pytest.mark.parametrize("name", ["lost-too-often", "on-lost-too-often"])
def test_lost_too_often(name: str) -> None:
    num_steps = 3 if name == "on-lost-too-often" else 0
    with fake_api(is_open=False) as api, Wire(api.port) as wire:
        runner = api.replicas[0].runner
        for _ in range(num_steps):
            runner.gate.release()
        wire.post(COMPLETIONS, STREAM)
        api.until(lambda: len(runner.plans) == num_steps + 1)
        runner.is_poisoned = True
        runner.open()
        if num_steps:
            assert wire.head()[0] == 200
            message = check_events(name, rest(wire))
        else:
            message = check(name, wire.reply())
        assert "3 replicas died or failed" in message
        assert api.backend.health().ok, "the replica lives"


@pytest.mark.parametrize("name", ["on-lost", "on-lost-alone", "lost-whole"])
def test_lost_after_tokens(name: str) -> None:
    config = DispatcherConfig() if name == "on-lost" else ALONE
    with fake_api(num_replicas=1 + (name == "on-lost"), is_open=False, dispatcher=config) as api:
        for each in api.replicas:
            each.runner.gate.release(3)
        with Wire(api.port) as wire:
            wire.post(COMPLETIONS, {**STREAM, "stream": name != "lost-whole"})
            api.until(lambda: any(len(each.runner.plans) == 4 for each in api.replicas))
            (dying,) = [each for each in api.replicas if len(each.runner.plans) == 4]
            api.until(lambda: all(stream.has_begun for stream in api.backend._streams.values()))
            api.run(dying.die())
            for each in api.replicas:
                each.runner.open()
            if name == "lost-whole":
                check(name, wire.reply())
            else:
                assert wire.head()[0] == 200
                check_events(name, rest(wire))


def test_stop_with_an_open_stream() -> None:
    with fake_api(is_open=False) as api, Wire(api.port) as wire:
        runner = api.replicas[0].runner
        runner.gate.release(3)
        wire.post(COMPLETIONS, STREAM)
        assert wire.head()[0] == 200
        events = wire.events(3)
        api.start(api.backend.stop(0.0))
        engine = api.replicas[0].engine
        drain = api.start(engine.drain(0.0))
        api.until(lambda: any(sequence.abort_reason for sequence in engine.core.scheduler.living()))
        runner.gate.release(1)  # the step that is in its hands
        drain.result(10)
        assert "the server stops" in check_events("on-stop", events + rest(wire))
        runner.open()


def test_the_client_goes() -> None:
    """While it is held, queued and running: `fake_api` sees that nothing of it is left."""
    assert rows()["client-gone"].status == "none"
    with one_at_a_time(LONG) as (api, _):
        core = api.replicas[0].engine.core
        with Wire(api.port) as queued, Wire(api.port) as held:
            queued.post(COMPLETIONS, STREAM)
            api.until(lambda: core.scheduler.num_queued == 1)
            held.post(COMPLETIONS, STREAM)
            api.until(lambda: api.backend.dispatcher.num_held == 1)
        api.until(lambda: core.scheduler.num_queued == api.backend.dispatcher.num_held == 0)
    with fake_api(is_open=False) as api:
        with Wire(api.port) as running:
            api.replicas[0].runner.gate.release(2)
            running.post(COMPLETIONS, STREAM)
            running.head()
            running.events(1)
        api.until(lambda: api.backend.load() == 0)
        api.replicas[0].runner.open()


def test_each_request_is_counted_once_as_ended_or_as_refused() -> None:
    """Queue full, deadline, too many sequences, a client that leaves: what came in is what went out."""
    with one_at_a_time(DispatcherConfig(admission_wait_s=0.3)) as (api, them):
        them.send_queued(1)
        check("queue-full", complete(api, max_tokens=2))
        check("deadline-held", complete(api, max_tokens=2, deadline_ms=50))
        check("too-many-sequences", complete(api, n=3))
        with Wire(api.port) as wire:
            wire.post(COMPLETIONS, STREAM)
            api.until(lambda: api.backend.dispatcher.num_held == 1)
        api.until(lambda: api.backend.dispatcher.num_held == 0)
        api.replicas[0].runner.open()
        assert [one.result().status_code for one in them.all] == [200, 200]
        refused = [
            api.metric("vllm:admission_rejections_total", reason=reason)
            for reason in ("queue_full", "deadline_exceeded", "too_many_sequences")
        ]
        assert refused == [1, 1, 1]
        assert api.metric("vllm:request_success_total", finished_reason="abort") == 1
        assert api.metric("vllm:request_success_total") == 3
        assert api.metric("shoal_tenant_requests_total") == 6
        assert api.metric("shoal_tenant_refusals_total") == 3
