"""An error can be looked up: by the id in the log, and by the `X-Request-Id` that its answer carries."""

from __future__ import annotations

import pytest

from replica.errors import (
    DeadlineExceededError,
    EngineError,
    NeverFitsError,
    NoReplicaError,
    QueueFullError,
    ReplicaLostError,
    ShedError,
    ShoalError,
)
from router.backend import TokenEvent
from router.journal import Entry
from tests.unit.http_fakes import Edge, assert_error

MINE = {"x-request-id": "mine"}
BODY = {"prompt": "The sky", "max_tokens": 2}
ERRORS = [
    (QueueFullError("full", 2.0), 503, "refused"),
    (NoReplicaError("nobody", 2.0), 503, "refused"),
    (ShedError("shed", 2.0), 503, "refused"),
    (DeadlineExceededError("late"), 504, "refused"),
    (NeverFitsError("too long", None), 400, "refused"),
    (ReplicaLostError("lost"), 502, "failed"),
    (EngineError("broken"), 500, "failed"),
    (RuntimeError("secret"), 500, "failed"),
]


def only(edge: Edge, header_id: str = "mine") -> Entry:
    (entry,) = edge.backend.journal.under(header_id)
    assert edge.backend.journal.num_living == 0, "it has ended"
    return entry


def whats(entry: Entry) -> list[str]:
    return [event.what for event in entry.events]


@pytest.mark.parametrize("is_at_the_door", [True, False])
@pytest.mark.parametrize(("error", "status", "outcome"), ERRORS)
def test_every_error_is_kept_and_logged_with_both_ids(
    error: ShoalError, status: int, outcome: str, is_at_the_door: bool, caplog: pytest.LogCaptureFixture
) -> None:
    edge = Edge()
    if is_at_the_door:
        edge.backend.full = error
    else:
        edge.backend.refusal = error
    response = edge.request("POST", "/v1/completions", json=BODY, headers=MINE)
    assert_error(response, status)
    assert response.headers.get_list("x-request-id") == ["mine"]
    entry = only(edge)
    assert (entry.outcome, whats(entry)) == (outcome, ["arrived", f"answered {status}"])
    assert entry.request_id.startswith("cmpl-")
    assert entry.events[-1].detail["why"] == response.json()["error"]["message"]
    if status in (400, 503):
        assert caplog.records == [], "refusals are no news"
    else:
        (record,) = caplog.records
        assert f"request {entry.request_id}, X-Request-Id mine" in record.getMessage()


def test_without_a_header_of_the_client_the_one_that_was_made_finds_it() -> None:
    edge = Edge()
    edge.backend.full = QueueFullError("full", 2.0)
    entry = only(edge, edge.chat().headers["x-request-id"])
    assert entry.request_id.startswith("chatcmpl-")


def test_the_id_of_an_answer_is_that_of_its_entry() -> None:
    edge = Edge()
    response = edge.request("POST", "/v1/completions", json=BODY, headers=MINE)
    entry = only(edge)
    assert (entry.request_id, entry.outcome) == (response.json()["id"], "finished")
    assert whats(entry) == ["arrived", "first byte", "last byte"]
    nothing = {"prompt": "The sky", "max_tokens": 0, "echo": True}
    edge.request("POST", "/v1/completions", json=nothing, headers={"x-request-id": "echo"})
    assert only(edge, "echo").outcome == "finished", "no replica has seen it"


def test_an_answer_that_breaks_off_is_kept_as_failed() -> None:
    edge = Edge()
    edge.backend.error = ReplicaLostError("lost")
    edge.backend.make_steps = lambda request: [[TokenEvent(0, [300])]]
    edge.request("POST", "/v1/completions", json={**BODY, "stream": True}, headers=MINE)
    entry = only(edge)
    assert entry.outcome == "failed"
    assert whats(entry)[-1] == "broken off in the middle of the answer"


@pytest.mark.parametrize("body", [{"prompt": 7}, {"prompt": "x", "max_token": 1}])
def test_a_wrong_field_is_not_kept(body: dict[str, object]) -> None:
    edge = Edge()
    assert_error(edge.request("POST", "/v1/completions", json=body, headers=MINE), 400)
    assert edge.backend.journal.under("mine") == []


def test_what_fails_before_its_fields_are_read_is_kept_if_it_is_not_its_own_fault() -> None:
    edge = Edge(max_pending_body_bytes=100, on_loop_max_bytes=200)
    assert_error(
        edge.request("POST", "/v1/completions", json={"prompt": "x" * 900}, headers=MINE), 503, code="router_busy"
    )
    assert whats(only(edge)) == ["arrived", "answered 503"]


def test_errors_of_other_endpoints_are_logged_with_the_header(caplog: pytest.LogCaptureFixture) -> None:
    edge = Edge(admin_endpoints=True)
    edge.backend.refusal = DeadlineExceededError("replica-1 did not answer")
    assert_error(edge.request("POST", "/reset_prefix_cache", headers=MINE), 504)
    assert caplog.messages == ["request mine failed with 504: replica-1 did not answer"]


@pytest.mark.parametrize("prompt", ["hello " * 9000, [5] * 9000])
def test_a_prompt_that_never_fits_is_kept_however_it_is_found(prompt: object) -> None:
    """Token ids are counted before anything else; a text is only known to be too long when it is tokenized."""
    edge = Edge()
    response = edge.request("POST", "/v1/completions", json={"prompt": prompt, "max_tokens": 2}, headers=MINE)
    assert_error(response, 400)
    assert whats(only(edge)) == ["arrived", "answered 400"]
