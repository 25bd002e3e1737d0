"""POST /reset_prefix_cache: guarded, bounded, and true when it says so."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import httpx
import pytest

from cluster.config import load
from replica.errors import DeadlineExceededError, NoReplicaError, ShoalError
from replica.messages import ReplicaId, ResetPrefixCache
from router.app_settings import AppSettings
from router.cache_reset import CacheResets
from tests.unit.http_fakes import Edge, assert_error, settings

A, B, C = ReplicaId("a"), ReplicaId("b"), ReplicaId("c")
PATH = "/reset_prefix_cache"


def reset(edge: Edge, query: str = "", **headers: str) -> httpx.Response:
    return edge.request("POST", PATH + query, headers=headers)


# ---- over HTTP ----


def test_it_is_off_unless_the_configuration_says_so() -> None:
    assert AppSettings(served_model_names=("m",), max_model_len=8, vocab_size=8).admin_endpoints is False
    assert load(None).http.admin_endpoints is False
    assert "http.admin_endpoints" in assert_error(reset(Edge()), 404, code="not_found")


def test_it_says_how_many_replicas_forgot() -> None:
    response = reset(Edge(admin_endpoints=True))
    assert (response.status_code, response.json()) == (200, {"reset": 2})


@pytest.mark.parametrize("is_on", [True, False])
def test_it_is_never_open_where_there_are_keys(is_on: bool) -> None:
    edge = Edge(admin_endpoints=is_on, api_keys=("k",))
    assert_error(reset(edge), 401, code="invalid_api_key")
    assert reset(edge, authorization="Bearer k").status_code == (200 if is_on else 404)


def test_only_post() -> None:
    assert_error(Edge(admin_endpoints=True).get(PATH), 405)


def test_vllms_switches_are_refused_and_not_ignored() -> None:
    edge = Edge(admin_endpoints=True)
    for name in ("reset_running_requests", "reset_external"):
        assert "'true'" in assert_error(reset(edge, f"?{name}=true"), 400, name)
        assert reset(edge, f"?{name}=False").status_code == 200


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (NoReplicaError("no replica is up", 2.0), 503, "no_replica"),
        (DeadlineExceededError("1 of 2 replicas ...; no answer from: b"), 504, "deadline_exceeded"),
    ],
)
def test_what_can_go_wrong(error: ShoalError, status: int, code: str) -> None:
    edge = Edge(admin_endpoints=True)
    edge.backend.refusal = error
    assert str(error)[1:] in assert_error(reset(edge), status, code=code)


def test_the_setting_reaches_the_application() -> None:
    assert settings(admin_endpoints=load({"http": {"admin_endpoints": True}}).http.admin_endpoints).admin_endpoints


# ---- waiting for the replicas ----


class Asked:
    """Takes what is sent and plays the replicas."""

    def __init__(self) -> None:
        self.sent: list[tuple[ReplicaId, str]] = []
        self.resets = CacheResets(self._send)

    def _send(self, replica_id: ReplicaId, message: ResetPrefixCache) -> None:
        self.sent.append((replica_id, message.reset_id))

    def answer(self, *replica_ids: ReplicaId) -> None:
        for replica_id, reset_id in self.sent:
            if replica_id in replica_ids:
                self.resets.answered(replica_id, reset_id)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def test_all_are_asked_and_all_must_answer() -> None:
    async def scenario() -> None:
        asked = Asked()
        task = asyncio.create_task(asked.resets.run([A, B, C], 60))
        await asyncio.sleep(0)
        assert {replica_id for replica_id, _ in asked.sent} == {A, B, C}
        asked.answer(A, B)
        asked.answer(A)
        asked.resets.answered(C, "an older question")
        await asyncio.sleep(0)
        assert not task.done()
        asked.answer(C)
        assert await task == 3

    run(scenario())


def test_who_does_not_answer_in_time_is_named() -> None:
    async def scenario() -> None:
        asked = Asked()
        task = asyncio.create_task(asked.resets.run([C, A, B], 0.001))
        await asyncio.sleep(0)
        asked.answer(B)
        with pytest.raises(DeadlineExceededError, match=r"1 of 3 .* within 0\.001 s; no answer from: a, c$"):
            await task
        asked.answer(A, C)  # too late, and harmless

    run(scenario())


def test_the_cache_of_a_replica_that_left_is_gone_with_it() -> None:
    async def scenario() -> None:
        asked = Asked()
        task = asyncio.create_task(asked.resets.run([A, B], 60))
        await asyncio.sleep(0)
        asked.answer(A)
        asked.resets.gone(B)
        assert await task == 2

    run(scenario())


def test_without_a_replica_nothing_is_reset() -> None:
    async def scenario() -> None:
        with pytest.raises(NoReplicaError):
            await Asked().resets.run([], 60)

    run(scenario())
