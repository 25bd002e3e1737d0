"""GET /debug/requests through engines, data plane and HTTP: living requests say what they wait for, ended ones why they
took long.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from cluster.why import format_living, format_request, why
from replica.errors import ShoalError
from router.dispatcher import DispatcherConfig
from router.info_endpoints import EXPLAIN_TIMEOUT_S
from tests.api.harness import ApiUnderTest, fake_api

BODY = {"model": "fake", "prompt": "one two three", "max_tokens": 4, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def api() -> Iterator[ApiUnderTest]:
    with fake_api(admin_endpoints=True) as found:
        yield found


def asked(api: ApiUnderTest, path: str = "") -> httpx.Response:
    return api.http.get(f"/debug/requests{path}")


class Client(threading.Thread):
    """One request on a thread of its own."""

    def __init__(self, api: ApiUnderTest, **changes: Any) -> None:
        super().__init__()
        self._api, self._body = api, BODY | changes
        self.start()

    def run(self) -> None:
        with self._api.client() as client:
            self.answer = client.post("/v1/completions", json=self._body)

    def response_id(self) -> str:
        self.join(30)
        assert self.answer.status_code == 200, self.answer.text
        return str(self.answer.json()["id"])


@pytest.fixture
def gated() -> Iterator[ApiUnderTest]:
    """One at a time, and steps wait for the runner's gate."""
    with fake_api(is_open=False, max_num_seqs=1, admin_endpoints=True) as found:
        yield found


def test_from_waiting_to_an_answer(gated: ApiUnderTest) -> None:
    api = gated
    replica = api.replicas[0]
    clients = [Client(api)]
    api.until(lambda: len(replica.engine.core.scheduler.running) == 1)
    clients.append(Client(api))
    api.until(lambda: replica.engine.core.scheduler.num_queued == 1)
    told = asked(api).json()
    first, second = told["requests"]
    assert (first["state"], second["state"]) == ("prefill", "queued")
    assert second["waits_for"] == "the next step"
    assert told["router_id"] == second["router_id"] == "router-0"
    assert [line["request_id"] for line in asked(api, "?limit=1").json()["requests"]] == [first["request_id"]]
    living = asked(api, f"/{second['request_id']}").json()
    assert [event["what"] for event in living["events"]] == ["arrived", "submitted", "placed", "accepted"]
    assert (living["outcome"], living["state"], living["waits_for"]) == (None, "queued", "the next step")
    assert living["sequences"][0]["num_ahead"] == 0
    replica.runner.open()
    assert {client.response_id() for client in clients} == {first["request_id"], second["request_id"]}
    ended = asked(api, f"/{second['request_id']}").json()
    assert ended["events"][-1]["what"] == "last byte"
    assert (ended["state"], ended["outcome"]) == ("ended", "finished")
    (sequence,) = ended["sequences"]
    assert sum(sequence["stages_s"].values()) == pytest.approx(sequence["total_s"], abs=1e-6)
    assert sequence["waits_s"].keys() == {"seats"}
    assert (sequence["output_tokens"], sequence["finish_reason"]) == (4, "length")
    assert api.peek(lambda: api.backend.dispatcher.journal.num_living) == 0
    assert asked(api).json()["requests"] == []


def test_a_stop_string_and_a_refusal_are_ends_like_others(api: ApiUnderTest) -> None:
    whole = Client(api, max_tokens=12)
    whole.response_id()
    text = whole.answer.json()["choices"][0]["text"]
    stopped = Client(api, max_tokens=12, stop=[text[3:5]]).response_id()
    api.until(lambda: not api.replicas[0].engine.core.num_unfinished)
    told = asked(api, f"/{stopped}").json()
    assert (told["outcome"], told["sequences"][0]["finish_reason"]) == ("finished", "abort")
    assert "last byte" in [event["what"] for event in told["events"]]


def test_the_command_line_reads_it(api: ApiUnderTest) -> None:
    name = Client(api).response_id()
    assert name in format_request(why("127.0.0.1", api.port, name))
    assert "no request is unfinished" in format_living(why("127.0.0.1", api.port, None))
    with pytest.raises(ShoalError, match="404 Neither this router nor a replica knows 'nobody'"):
        why("127.0.0.1", api.port, "nobody")


MINE = "mine /?#%2F&"  # whatever header a client may send


def test_a_refusal_a_deadline_and_an_answer_are_found_under_the_clients_header(gated: ApiUnderTest) -> None:
    api = gated
    first = Client(api)
    api.until(lambda: len(api.replicas[0].engine.core.scheduler.running) == 1)
    with api.client(headers={"x-request-id": MINE}) as client:
        late = client.post("/v1/completions", json=BODY | {"deadline_ms": 20})
        assert (late.status_code, late.headers.get_list("x-request-id")) == (504, [MINE])
        told = why("127.0.0.1", api.port, MINE)
        assert (told["x_request_id"], told["state"], told["outcome"]) == (MINE, "ended", "refused")
        assert (told["events"][-1]["what"], told["events"][-1]["code"]) == ("answered 504", "deadline_exceeded")
        assert told["sequences"][0]["finish_reason"] == "deadline", "it waited at a replica"
        wide = client.post("/v1/completions", json=BODY | {"n": 65})
        assert wide.json()["error"]["code"] == "too_many_sequences"
        newest = why("127.0.0.1", api.port, MINE)
        assert newest["same_x_request_id"] == [told["request_id"]]
        assert newest["events"][-1]["what"] == "answered 400"
        assert f"X-Request-Id {MINE}" in format_request(newest)
        assert why("127.0.0.1", api.port, told["request_id"])["request_id"] == told["request_id"]
        api.replicas[0].runner.open()
        first.response_id()
        answer = client.post("/v1/completions", json=BODY).json()
        assert why("127.0.0.1", api.port, MINE)["request_id"] == answer["id"]
    assert api.peek(lambda: api.backend.journal.num_living) == 0


def test_a_refusal_at_a_full_queue_is_found_under_the_header_that_was_made() -> None:
    held = DispatcherConfig(admission_wait_s=0.0)
    with fake_api(is_open=False, max_num_seqs=1, cap=1, dispatcher=held, admin_endpoints=True) as api:
        (view,) = api.backend.dispatcher.views.values()
        clients = [Client(api)]
        api.until(lambda: (view.load.num_running, view.load.num_queued) == (1, 0))  # the router has heard of it
        clients.append(Client(api))
        api.until(lambda: api.replicas[0].engine.core.scheduler.num_queued == 1)
        refused = api.http.post("/v1/completions", json=BODY)
        assert refused.status_code == 503
        told = why("127.0.0.1", api.port, refused.headers["x-request-id"])
        assert (told["outcome"], told["events"][-1]["code"]) == ("refused", "queue_full")
        listed = asked(api, "?limit=1").json()
        assert (len(listed["requests"]), listed["num_requests"]) == (1, 2)
        assert "the oldest 1 of 2 unfinished requests" in format_living(why("127.0.0.1", api.port, None, limit=1))
        api.replicas[0].runner.open()
        for client in clients:
            client.response_id()


@pytest.mark.parametrize("path", ["/", "/%00", "/..", "/%C3%BC", "/" + "x" * 5000, "/a/b"])
def test_odd_ids_are_not_found(api: ApiUnderTest, path: str) -> None:
    response = asked(api, path)
    assert response.status_code == 404
    assert len(response.json()["error"]["message"]) < 400


def test_a_silent_replica_costs_a_second_and_is_named() -> None:
    with fake_api(admin_endpoints=True, num_replicas=2) as api:
        engine = api.replicas[1].engine
        handle = engine.handle
        engine.handle = lambda link, message: None  # type: ignore[method-assign]
        response = asked(api)
        assert response.status_code == 200
        assert response.json()["silent_replicas"] == ["replica-1"]
        assert response.elapsed.total_seconds() >= EXPLAIN_TIMEOUT_S
        engine.handle = handle  # type: ignore[method-assign]
        assert asked(api).json()["silent_replicas"] == []


def test_an_unknown_parameter_is_named(api: ApiUnderTest) -> None:
    response = asked(api, "?lim=3")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "lim")


@pytest.mark.parametrize("limit", ["0", "1001", "-1", "x", "", "99999999999"])
def test_limits_are_checked(api: ApiUnderTest, limit: str) -> None:
    response = asked(api, f"?limit={limit}")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "limit"


def test_it_is_off_unless_it_was_asked_for() -> None:
    with fake_api() as api:
        for path in ("", "/x"):
            response = asked(api, path)
            assert response.status_code == 404
            assert "http.admin_endpoints" in response.json()["error"]["message"]
