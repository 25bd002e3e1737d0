"""Group A: what breaks after the first byte, and connections that idle. Named by case."""

from __future__ import annotations

import inspect
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from replica.messages import CHANNEL_OPTIONS
from replica.service import _OPTIONS as SERVICE_OPTIONS
from router.dispatcher import DispatcherConfig
from tests.api.calls import CHAT, COMPLETIONS, complete, error_of
from tests.api.harness import KEEP_ALIVE_S, ApiUnderTest, fake_api
from tests.api.wire import ConnectionEndedError, Wire, parse_events

#: nobody takes over: the error comes at once instead of after 20 s of waiting for a replacement
NO_WAIT = DispatcherConfig(admission_wait_s=0.0, resume_wait_s=0.0)


def break_replica(api: ApiUnderTest, how: str) -> None:
    """From now on the replica computes nothing: each step fails, or its streams are cut as by kill -9."""
    replica = api.replicas[0]
    if how == "step":
        replica.runner.num_failures = 1000
    else:
        api.run(replica.die())
    replica.runner.open()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["step", "kill"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a31_a_failure_after_the_first_chunk_is_told_in_the_stream(how: str, path: str) -> None:
    given: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    with fake_api(is_open=False, dispatcher=NO_WAIT) as api, Wire(api.port) as wire:
        api.replicas[0].runner.gate.release(5)
        wire.post(path, {**given, "max_tokens": 200, "ignore_eos": True, "stream": True})
        status, _ = wire.head()
        assert status == 200
        chunks = wire.events(5)
        break_replica(api, how)
        data = b""
        while piece := wire.chunk():  # ends with the last chunk: nothing follows the error
            data += piece
        *more, last = parse_events(data)
        chunks += more
        assert set(last) == {"error"}, "the field is data:, and its value holds the error and nothing else"
        assert set(last["error"]) == {"message", "type", "param", "code"}
        assert last["error"]["message"]
        assert last["error"]["type"] == "server_error"
        reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        assert reasons == [None] * len(reasons), "a failure must not look like an end"
        assert b"[DONE]" not in data
        api.check_idle()
        assert api.metric("vllm:request_success_total", finished_reason="error") == 1


@pytest.mark.slow
def test_a31_the_official_client_raises() -> None:
    with (
        fake_api(is_open=False, dispatcher=NO_WAIT) as api,
        openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client,
    ):
        api.replicas[0].runner.gate.release(5)
        stream = client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "x"}],
            max_tokens=200,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        chunks = iter(stream)
        for _ in range(5):
            next(chunks)
        break_replica(api, "step")
        with pytest.raises(openai.APIError) as caught:
            list(chunks)
        assert not isinstance(caught.value, openai.APIConnectionError)
        assert caught.value.message


@pytest.mark.slow
def test_a31_a_failure_before_the_first_chunk_is_a_plain_error() -> None:
    with fake_api(is_open=False, dispatcher=NO_WAIT) as api, Wire(api.port) as wire:
        wire.post(COMPLETIONS, {"prompt": "x", "max_tokens": 200, "stream": True})
        api.until(lambda: api.replicas[0].runner.plans)
        break_replica(api, "step")
        reply = wire.reply()
        assert 500 <= reply.status < 600
        assert reply.header("content-type") == ["application/json"]
        assert set(reply.json()) == {"error"}


def test_a33_one_connection_is_used_again_and_again(fake: ApiUnderTest) -> None:
    """The cases' idle of 6, 20 and 60 s is not waited for: what ends an idle connection is one timer, and it is asked
    when it would have struck.
    """
    with Wire(fake.port) as wire:
        for _ in range(20):
            wire.post(COMPLETIONS, {"prompt": "x", "max_tokens": 2})
            reply = wire.reply()
            assert reply.status == 200
            assert "close" not in reply.header("connection")
            assert wire.is_open()
            assert fake.peek(lambda: seconds_to_live(fake)) > 75


def seconds_to_live(api: ApiUnderTest) -> float:
    """The least time, in seconds, after which the server will close a connection that is idle now."""
    timers = [
        getattr(connection, "timeout_keep_alive_task", None) for connection in api.server.server_state.connections
    ]
    left = [timer.when() - api._loop.time() for timer in timers if timer is not None]
    assert left, "no connection is idle"
    return min(left)


def test_a33_shoal_serve_keeps_idle_connections_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `shoal serve` asks of Serve's proxy is what this tier's server has."""
    import ray.serve

    from cluster import serve
    from cluster.config import ClusterConfig

    class StopHere(Exception):
        pass

    given: dict[str, Any] = {}

    def start(**options: Any) -> None:
        given.update(options)
        raise StopHere

    monkeypatch.setattr(ray.serve, "start", start)
    with pytest.raises(StopHere):
        serve._deploy(ClusterConfig(), "127.0.0.1", 8000)
    assert given["http_options"].keep_alive_timeout_s == KEEP_ALIVE_S >= 75


def test_a33_a_router_gives_its_link_up_before_the_replica_does() -> None:
    """The only pool inside is the gRPC stream of each router: kept alive by pings that the replica's side allows."""
    client, server = dict(CHANNEL_OPTIONS), dict(SERVICE_OPTIONS)
    assert client["grpc.keepalive_permit_without_calls"] == 1
    assert client["grpc.keepalive_time_ms"] <= 10_000, "an idle link must not look dead to what lies between"
    assert server["grpc.http2.min_ping_interval_without_data_ms"] <= client["grpc.keepalive_time_ms"]
    assert server["grpc.http2.max_pings_without_data"] == 0
    assert not any("max_connection_idle" in name or "max_connection_age" in name for name in server)


def test_a33_a_closed_connection_ends_only_itself(fake: ApiUnderTest) -> None:
    with Wire(fake.port) as one, Wire(fake.port) as other:
        one.send(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert one.reply().status == 200
        with pytest.raises(ConnectionEndedError):
            one.head()
        other.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert other.reply().status == 200
        assert other.is_open()


def test_this_tier_asks_the_server_that_it_means() -> None:
    """`seconds_to_live` reads a name of uvicorn's; were it gone, the test above would say so."""
    from uvicorn.protocols.http import h11_impl

    assert "timeout_keep_alive_task" in inspect.getsource(h11_impl)


def test_a_mistake_of_ours_with_one_request_ends_this_one_and_cuts_no_link(caplog: pytest.LogCaptureFixture) -> None:
    """A request whose stream was gone from the books made each message of both replicas cut their links."""
    with fake_api(is_open=False, max_num_seqs=1, cap=1, dispatcher=DispatcherConfig(admission_wait_s=60.0)) as api:
        replica, backend = api.replicas[0], api.backend
        with ThreadPoolExecutor(3) as pool:
            runs = pool.submit(complete, api, prompt="runs", max_tokens=3)
            api.until(lambda: len(replica.engine.core.scheduler.running) == 1)
            waits = pool.submit(complete, api, prompt="waits", max_tokens=3)
            api.until(lambda: replica.engine.core.scheduler.num_queued == 1)
            held = pool.submit(complete, api, prompt="held", max_tokens=3)
            api.until(lambda: backend.dispatcher.num_held == 1)
            streams = list(backend._streams.values())
            links = [client._outbox for client in backend._clients.values()]

            def break_two() -> None:
                def fails(*_: object) -> None:
                    raise RuntimeError("on purpose")

                streams[0].push = fails  # type: ignore[method-assign,assignment]
                streams[2].to_submit = fails  # type: ignore[method-assign,assignment]

            api.peek(break_two)
            replica.runner.open()
            error_of(runs.result(), 500, None, "internal_error")
            error_of(held.result(), 500, None, "internal_error")
            assert waits.result().status_code == 200
        assert [client._outbox for client in backend._clients.values()] == links, "a link was opened anew"
    assert caplog.text.count("could not be carried on") == 2
