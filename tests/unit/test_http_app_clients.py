"""Clients that leave, clients that send much, and the official client over a real socket."""

from __future__ import annotations

import asyncio
import gc
import json
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from replica.errors import QueueFullError, ReplicaLostError
from replica.messages import GenerateRequest
from router.app import create_app
from router.backend import GenerationStream
from tests.unit.http_fakes import Edge, FakeBackend, Gate, one_token_steps, settings, small_tokenizer

TEXT = " one two three"


class Client:
    """One ASGI request whose client can leave at a chosen moment."""

    def __init__(self, edge: Edge, body: dict[str, Any], path: str = "/v1/completions") -> None:
        self.sent: list[Any] = []
        self.arrived = asyncio.Event()
        self._left = asyncio.Event()
        if path == "/v1/completions":
            body = {"prompt": "x", **body}
        self._body: bytes | None = json.dumps(body).encode()
        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"", "root_path": ""}
        self.task = asyncio.create_task(edge.app(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        self.arrived.set()

    def leave(self) -> None:
        self._left.set()


def stuck_after(num_steps: int) -> FakeBackend:
    backend = FakeBackend()
    backend.gates = {num_steps: Gate()}
    return backend


@pytest.mark.parametrize("n", [1, 4])
def test_client_that_leaves_a_stream_aborts_it_once(n: int) -> None:
    async def run() -> None:
        edge = Edge(stuck_after(2))
        client = Client(edge, {"stream": True, "n": n, "max_tokens": 100})
        await client.arrived.wait()
        client.leave()
        await asyncio.wait_for(client.task, 5)
        assert edge.backend.streams[0].num_aborts == 1
        assert edge.backend.streams[0].num_given == 2
        assert client.sent[-1].get("more_body") is True  # no clean end was pretended
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_client_that_leaves_before_the_whole_answer_aborts_it() -> None:
    async def run() -> None:
        edge = Edge(stuck_after(1))
        client = Client(edge, {"max_tokens": 100})
        await edge.backend.gates[1].reached.wait()
        client.leave()
        await asyncio.wait_for(client.task, 5)
        assert edge.backend.streams[0].num_aborts == 1
        assert client.sent == []
        text = (await get(edge, "/metrics")).text
        assert 'vllm:request_success_total{finished_reason="abort",model_name="m",router=""} 1.0' in text

    asyncio.run(run())


def test_client_that_leaves_before_a_replica_accepted_cancels_the_wait() -> None:
    class Waiting(FakeBackend):
        was_cancelled = False
        is_waiting = asyncio.Event()

        async def generate(self, request: GenerateRequest) -> GenerationStream:
            self.is_waiting.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.was_cancelled = True
                raise
            raise AssertionError("nobody sets the event")

    async def run() -> None:
        backend = Waiting()
        client = Client(Edge(backend), {"stream": True})
        await backend.is_waiting.wait()
        client.leave()
        await asyncio.wait_for(client.task, 5)
        assert backend.was_cancelled
        assert client.sent == []

    asyncio.run(run())


def test_server_that_cancels_the_request_aborts_it() -> None:
    async def run() -> None:
        edge = Edge(stuck_after(1))
        client = Client(edge, {"stream": True})
        await client.arrived.wait()
        client.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await client.task
        assert edge.backend.streams[0].num_aborts == 1
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_client_that_leaves_during_its_upload_costs_nothing() -> None:
    async def run() -> None:
        edge = Edge()
        client = Client(edge, {})
        client._body = None
        client.leave()
        await asyncio.wait_for(client.task, 5)
        assert (client.sent, edge.backend.requests) == ([], [])

    asyncio.run(run())


def test_many_clients_leave_at_every_moment_and_nothing_stays() -> None:
    async def run() -> None:
        edge = Edge()
        for num_turns in range(40):
            client = Client(edge, {"stream": True, "n": 2, "max_tokens": 100})
            for _ in range(num_turns):
                await asyncio.sleep(0)
            client.leave()
            await asyncio.wait_for(client.task, 5)
        assert len(edge.backend.streams) > 10
        assert all(stream.num_aborts <= 1 for stream in edge.backend.streams)
        unfinished = [s for s in edge.backend.streams if s.num_given < len(s._steps)]
        assert all(stream.num_aborts == 1 for stream in unfinished)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        gc.collect()  # an exception nobody retrieved would be reported here

    asyncio.run(run())


def test_reader_that_takes_nothing_holds_little_and_then_gets_everything() -> None:
    """`Client` keeps what is sent, as Serve's queue does; taking is what pickles it."""

    async def run() -> None:
        text = TEXT * 3000
        edge = Edge(FakeBackend(text), max_model_len=1 << 20)
        client = Client(edge, {"stream": True, "max_tokens": 1 << 19})
        received: list[Any] = []
        most = 0
        while not client.task.done():
            for _ in range(20):
                await asyncio.sleep(0)
            most = max(most, sum(len(message.get("body", b"")) for message in client.sent))
            assert received or edge.backend.streams[0].num_given < 1000
            received += pickle.loads(pickle.dumps(client.sent))
            client.sent.clear()
        received += client.sent
        assert 32 << 10 < most < 66 << 10
        stream = b"".join(message.get("body", b"") for message in received)
        chunks = [json.loads(block[6:]) for block in stream.decode().split("\n\n")[:-2]]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
        assert edge.backend.streams[0].num_aborts == 0

    asyncio.run(run())


def test_reader_that_takes_nothing_and_leaves_aborts_it() -> None:
    async def run() -> None:
        edge = Edge(FakeBackend(TEXT * 3000), max_model_len=1 << 20)
        client = Client(edge, {"stream": True, "max_tokens": 1 << 19})
        for _ in range(20):
            await asyncio.sleep(0)
        assert not client.task.done()
        client.leave()
        await asyncio.wait_for(client.task, 5)
        assert edge.backend.streams[0].num_aborts == 1
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


async def get(edge: Edge, path: str) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(edge.app), base_url="http://edge") as client:
        return await client.get(path)


def test_health_answers_while_a_long_body_is_tokenized() -> None:
    """The body is several MB: its thread must not hold the loop, and the refusal needs no tokenizing."""

    async def run() -> None:
        edge = Edge()
        messages = [{"role": "user", "content": "word " * 20} for _ in range(40_000)]
        client = Client(edge, {"messages": messages}, "/v1/chat/completions")
        num_answers = 0
        while not client.task.done():
            assert (await get(edge, "/health")).status_code == 200
            num_answers += 1
            await asyncio.sleep(0)
        await client.task
        assert client.sent[0]["status"] == 400
        assert b"context" in client.sent[1]["body"]
        assert num_answers >= 5

    asyncio.run(run())


@contextmanager
def served(backend: FakeBackend, **changes: Any) -> Iterator[str]:
    """The application on a loopback port, in a thread; the base URL."""
    app = create_app(settings(**changes), small_tokenizer(), backend)
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", timeout_graceful_shutdown=2)
    )
    started = threading.Event()
    original = server.startup

    async def startup(sockets: Any = None) -> None:
        await original(sockets)
        started.set()

    server.startup = startup  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert started.wait(20)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def test_official_client() -> None:
    backend = FakeBackend("a🦙b 삼겹살" + TEXT)
    with (
        served(backend, api_keys=("k",)) as url,
        openai.OpenAI(base_url=url + "/v1", api_key="k", max_retries=0) as client,
    ):
        messages: list[Any] = [{"role": "user", "content": "Say"}]
        answer = client.chat.completions.create(model="m", messages=messages, stop=" three")
        assert answer.choices[0].message.content == "a🦙b 삼겹살 one two"
        assert answer.choices[0].message.tool_calls is None
        assert answer.choices[0].finish_reason == "stop"
        pieces, usage = [], None
        for chunk in client.chat.completions.create(
            model="m", messages=messages, stream=True, stream_options={"include_usage": True}
        ):
            pieces += [choice.delta.content or "" for choice in chunk.choices]
            usage = chunk.usage or usage
        assert "".join(pieces) == "a🦙b 삼겹살" + TEXT
        assert usage is not None
        assert usage.completion_tokens == len(backend.token_ids) + 1
        text = "".join(
            chunk.choices[0].text
            for chunk in client.completions.create(model="m", prompt="x", stream=True, max_tokens=99)
        )
        assert text == "a🦙b 삼겹살" + TEXT
        assert [model.id for model in client.models.list()] == ["m", "alias"]
        with pytest.raises(openai.NotFoundError, match="no-such-model"):
            client.chat.completions.create(model="no-such-model", messages=messages)
        with pytest.raises(openai.BadRequestError, match="temperature is 9"):
            client.chat.completions.create(model="m", messages=messages, temperature=9)
        backend.refusal = QueueFullError("All queues are full.", 1.5)
        with pytest.raises(openai.InternalServerError) as refused:
            client.chat.completions.create(model="m", messages=messages, stream=True)
        assert refused.value.status_code == 503
        assert refused.value.response.headers["retry-after"] == "2"
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()


def test_official_client_reads_logprobs_and_tool_calls() -> None:
    call = '<tool_call>{"name": "look", "arguments": {"at": "é🦙"}}</tool_call>'
    parameters = {"type": "object", "properties": {"at": {"type": "string"}}}
    tools: list[Any] = [{"type": "function", "function": {"name": "look", "parameters": parameters}}]
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": tools}
    with (
        served(FakeBackend("one " + call), max_model_len=8192) as url,
        openai.OpenAI(base_url=url + "/v1", api_key="k", max_retries=0) as client,
    ):
        whole = client.chat.completions.create(**body, logprobs=True, top_logprobs=2)
        with client.chat.completions.stream(**body, logprobs=True, top_logprobs=2) as stream:
            kinds = {event.type for event in stream}
            streamed = stream.get_final_completion()
        assert kinds >= {"content.delta", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"}
        for answer in (whole, streamed):
            choice = answer.choices[0]
            assert choice.finish_reason == "tool_calls"
            assert (choice.message.content or "").strip() == "one"
            assert choice.message.tool_calls is not None
            (function,) = [entry.function for entry in choice.message.tool_calls if entry.type == "function"]
            assert (function.name, json.loads(function.arguments)) == ("look", {"at": "é🦙"})
            assert choice.logprobs is not None
            assert {len(entry.top_logprobs) for entry in choice.logprobs.content or ()} == {2}
        assert streamed.choices[0].logprobs == whole.choices[0].logprobs


def test_official_client_raises_when_a_stream_breaks() -> None:
    backend = FakeBackend(TEXT)
    backend.make_steps = lambda request: one_token_steps(request.sequences, backend.token_ids, False)[:2]
    backend.error = ReplicaLostError("The replica died.")
    with served(backend) as url, openai.OpenAI(base_url=url + "/v1", api_key="k", max_retries=0) as client:
        chunks = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}], stream=True)
        seen = [next(chunks).choices[0].delta.content for _ in range(3)]
        assert "".join(map(str, seen)) == small_tokenizer().decode(backend.token_ids[:2])
        with pytest.raises(openai.APIError, match="The replica died"):
            next(chunks)


def test_socket_that_closes_aborts_and_one_connection_serves_many_requests() -> None:
    aborted = threading.Event()

    class Watched(FakeBackend):
        async def generate(self, request: GenerateRequest) -> GenerationStream:
            stream = await super().generate(request)
            fake = self.streams[-1]
            fake._gates = {1: Gate()} if request.sequences[0].sampling.min_tokens else {}
            original = fake.abort

            def abort() -> None:
                original()
                aborted.set()

            fake.abort = abort  # type: ignore[method-assign]
            return stream

    backend = Watched()
    with served(backend, max_body_bytes=100_000) as url, httpx.Client(base_url=url) as client:
        for _ in range(3):
            response = client.post("/v1/completions", json={"prompt": "x"})
            assert response.status_code == 200
            assert len(response.headers.get_list("date")) == len(response.headers.get_list("server")) == 1
        assert client.post("/v1/completions", content=b"{" * 3_000_000).status_code == 413
        with client.stream(
            "POST", "/v1/completions", json={"prompt": "x", "stream": True, "min_tokens": 5}
        ) as response:
            assert next(response.iter_raw())
        assert aborted.wait(5)
        assert client.get("/health").status_code == 200
    assert [stream.num_aborts for stream in backend.streams] == [0, 0, 0, 1]
