"""A request counts for its tenant from the door to its end, whichever end it is, and no longer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from replica.errors import EngineError, QueueFullError
from router.tenant_desk import TenantDesk
from router.tenants import Tenant, digest_of, hashed
from tests.unit.asgi import post_scope
from tests.unit.http_fakes import Edge, FakeBackend
from tests.unit.test_http_app_clients import Client, stuck_after


def failing(**fields: Any) -> Callable[[], FakeBackend]:
    def make() -> FakeBackend:
        backend = FakeBackend()
        for name, value in fields.items():
            setattr(backend, name, value)
        return backend

    return make


BACKENDS = {
    "fine": FakeBackend,
    "fails": failing(error=EngineError("broken")),
    "refuses": failing(refusal=QueueFullError("full", 3)),
    "is full": failing(full=QueueFullError("full", 3)),
}


def limited(backend: FakeBackend, **limits: Any) -> tuple[Edge, TenantDesk]:
    edge = Edge(backend)
    desk: TenantDesk = edge.app.state.edge.tenants
    desk.exchange([Tenant("default", **limits)], 0.0)
    return edge, desk


def running(desk: TenantDesk) -> int:
    return desk.figures()["default"].num_running


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("body", [{}, {"stream": True}, {"prompt": "x " * 300}, {"n": 0}])
def test_the_place_is_free_before_the_client_can_know_that_it_ended(kind: str, body: dict[str, Any]) -> None:
    """Else a client that asks again at once would be refused because of its own last request."""
    edge, desk = limited(BACKENDS[kind](), max_concurrent_requests=1)
    seen: list[int] = []

    class Watching(Client):
        async def _send(self, message: Any) -> None:
            is_last = message["type"] == "http.response.body" and (
                not message.get("more_body") or b"[DONE]" in message.get("body", b"")
            )
            if is_last:
                seen.append(running(desk))
            await super()._send(message)

    async def run() -> None:
        for _ in range(2):
            client = Watching(edge, body)
            await asyncio.wait_for(client.task, 5)
            assert client.sent[0]["status"] != 429

    asyncio.run(run())
    assert len(seen) >= 2
    assert set(seen) == {0}


@pytest.mark.parametrize("kind", [*BACKENDS, "is stuck"])
@pytest.mark.parametrize("stream", [False, True])
def test_clients_leave_at_every_moment_and_no_place_is_lost(kind: str, stream: bool) -> None:
    backend = stuck_after(1) if kind == "is stuck" else BACKENDS[kind]()
    edge, desk = limited(backend, max_concurrent_requests=1)
    most = 0

    async def run() -> None:
        nonlocal most
        for num_turns in range(30):
            client = Client(edge, {"stream": stream, "max_tokens": 100})
            for _ in range(num_turns):
                await asyncio.sleep(0)
                most = max(most, running(desk))
            client.leave()
            await asyncio.wait_for(client.task, 5)
            assert running(desk) == 0, num_turns

    asyncio.run(run())
    assert most == (kind == "is stuck")  # the others end in the turn in which they begin
    used = desk.figures()["default"]
    assert used.num_requests + used.refusals.get("queue_full", 0) > 10
    assert "tenant_concurrency" not in used.refusals


def test_what_is_refused_after_it_was_charged_is_given_back() -> None:
    edge, desk = limited(BACKENDS["refuses"](), tokens_per_minute=4)

    async def run() -> list[int]:
        clients = []
        for _ in range(3):
            clients.append(Client(edge, {"prompt": "a b"}))
            await asyncio.wait_for(clients[-1].task, 5)
        return [client.sent[0]["status"] for client in clients]

    assert asyncio.run(run()) == [503, 503, 503]
    assert desk.figures()["default"].refusals == {"queue_full": 3}


def test_a_replica_is_told_whose_request_it_is() -> None:
    edge, _ = limited(FakeBackend(), weight=2.5)
    assert edge.complete().status_code == 200
    (request,) = edge.backend.requests
    assert (request.tenant, request.tenant_weight) == ("default", 2.5)


def test_a_tenant_that_is_removed_while_the_body_comes_is_401() -> None:
    """Its key was good when the head came."""
    backend = FakeBackend()
    edge = Edge(backend, api_keys=("operator",))
    desk: TenantDesk = edge.app.state.edge.tenants
    desk.exchange([Tenant("gone", frozenset([digest_of(hashed("k"))]))], 0.0)
    body_may_come = asyncio.Event()
    asked_for = asyncio.Event()
    sent: list[Any] = []
    told: list[bool] = []

    async def receive() -> Any:
        asked_for.set()
        await body_may_come.wait()
        if told:
            await asyncio.Event().wait()  # the client stays
        told.append(True)
        return {"type": "http.request", "body": b'{"prompt": "x"}', "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        scope = post_scope("/v1/completions", (b"authorization", b"Bearer k"))
        task = asyncio.create_task(edge.app(scope, receive, send))
        await asked_for.wait()
        desk.exchange([], 1.0)
        body_may_come.set()
        await asyncio.wait_for(task, 5)

    asyncio.run(run())
    assert sent[0]["status"] == 401
    assert backend.requests == []
