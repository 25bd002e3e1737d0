"""Group A: what is refused, how fast, and what that costs the others. Named by case."""

from __future__ import annotations

import logging
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from router.dispatcher import DispatcherConfig
from tests.api.calls import (
    CHAT,
    COMPLETIONS,
    answer,
    chat,
    complete,
    cpu_timed,
    error_of,
    resident_mib,
    text_of,
    timed,
    watched_health,
    watched_loop,
)
from tests.api.harness import CONTEXT, ApiUnderTest, fake_api
from tests.api.wire import Wire


@pytest.mark.model
@pytest.mark.parametrize("stream", [False, True])
def test_a12_a_prompt_longer_than_the_context(
    real: ApiUnderTest, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    content = "word " * 9000
    caplog.clear()
    response, took = timed(lambda: chat(real, content, max_tokens=10, stream=stream))
    message = error_of(response, 400, "messages", "context_length_exceeded")
    count = max(map(int, re.findall(r"\d{4,}", message)))
    assert 9000 <= count < 9200, message
    assert str(CONTEXT) in message
    assert took < 3
    assert response.headers["content-type"] == "application/json", "an event stream had begun"
    records = [record for record in caplog.records if record.name.split(".")[0] in ("router", "replica", "uvicorn")]
    assert len(records) <= 1
    assert all(record.exc_info is None for record in records)
    assert answer(chat(real, "Say hi", max_tokens=3))["usage"]["completion_tokens"] == 3


def test_a15_an_unknown_model_is_not_found(fake: ApiUnderTest) -> None:
    def work() -> tuple[float, ...]:
        return tuple(fake.counter(name) for name in ("admitted", "refused", "max_queued", "prompt_tokens"))

    before = work()
    for stream in (False, True):
        response = chat(fake, model="no-such-model", max_tokens=3, stream=stream)
        assert "no-such-model" in error_of(response, 404, "model", "model_not_found")
        error_of(complete(fake, model="no-such-model", max_tokens=3, stream=stream), 404, "model", "model_not_found")
    error_of(fake.http.get("/v1/models/no-such-model"), 404, "model", "model_not_found")
    assert "/v1/nothing" in error_of(fake.http.post("/v1/nothing", json={}), 404)
    assert work() == before, "a replica was asked"
    assert fake.http.get("/v1/models/alias").json()["id"] == "alias"


def test_a15_the_official_client_raises_not_found(fake: ApiUnderTest) -> None:
    with openai.OpenAI(base_url=f"{fake.url}/v1", api_key="none", max_retries=0) as client:
        for stream in (False, True):
            with pytest.raises(openai.NotFoundError, match="no-such-model"):
                client.chat.completions.create(
                    model="no-such-model", messages=[{"role": "user", "content": "x"}], stream=stream
                )
        with pytest.raises(openai.NotFoundError, match="no-such-model"):
            client.models.retrieve("no-such-model")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"true", b"null", b'"hi"', b'{"messages":"hi"}', b'{"messages":[1]}', b'{"messages":[]}'],
    ids=["empty", "brace", "list", "true", "null", "text", "messages-text", "messages-number", "messages-none"],
)
def test_a16_a_malformed_body_is_told_without_a_replica(alone: ApiUnderTest, body: bytes) -> None:
    response, took = timed(
        lambda: alone.http.post(CHAT, content=body, headers={"content-type": "application/json"}),
    )
    error_of(response, 400)
    assert took < 1
    assert not re.search(r"\d", response.headers["server"]), "a version is told"


@pytest.fixture(scope="module")
def alone() -> Any:
    """A router without a replica."""
    with fake_api(num_replicas=0, dispatcher=DispatcherConfig(admission_wait_s=0.0)) as api:
        yield api


def test_a16_without_a_replica_a_good_request_is_503(alone: ApiUnderTest) -> None:
    """So the answers above really needed none."""
    response = chat(alone, max_tokens=3)
    error_of(response, 503, code="no_replica")
    assert int(response.headers["retry-after"]) >= 1
    assert alone.http.get("/health").status_code == 503


@pytest.mark.slow
@pytest.mark.model
def test_a27_ids_that_are_no_token_are_refused_and_write_nowhere(real: ApiUnderTest) -> None:
    good = [{"prompt": prompt, "max_tokens": 40} for prompt in ("Count: one two three", "The capital of France is")]
    alone = [text_of(complete(real, **body)) for body in good]
    engine = real.replicas[0].engine
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(complete, real, **body) for body in good]
        real.until(lambda: len(engine.core.scheduler.running) == 2)
        for token_id in (49152, -1, 9999999999999):
            message = error_of(complete(real, prompt=[token_id], max_tokens=2), 400, "prompt")
            assert "out of vocabulary" in message
        for token_id in (60000, -5):
            message = error_of(complete(real, stop_token_ids=[token_id], max_tokens=2), 400, "stop_token_ids")
            assert "out of vocabulary" in message
        assert [text_of(future.result()) for future in running] == alone
    assert real.replicas[0].engine is engine
    real.peek(engine.check_health)


def test_a28_huge_counts_and_lists_are_refused_before_anything_is_allocated(fake: ApiUnderTest) -> None:
    many = [f"word {number}" for number in range(50_000)]
    bodies: list[tuple[dict[str, Any], str]] = [
        ({"n": 100_000}, "n"),
        ({"n": 1 << 62}, "n"),
        ({"best_of": 100_000}, "best_of"),
        ({"prompt": many}, "prompt"),
        ({"stop": many}, "stop"),
        ({"bad_words": many}, "bad_words"),
        ({"stop_token_ids": [1] * 50_000}, "stop_token_ids"),
        ({"prompt": ["x"] * 1000, "n": 100}, "n"),
        ({"max_tokens": 1 << 62}, "max_tokens"),
    ]
    complete(fake, prompt=["x"] * 50_000, max_tokens=1)  # the first large body makes the threads
    before, highest = resident_mib(), 0.0
    with watched_loop(fake) as seconds:
        for body, param in bodies:
            response, took = cpu_timed(lambda body=body: complete(fake, **{"max_tokens": 1, **body}))  # type: ignore[misc]
            error_of(response, 400, param)
            assert took < 1, f"{param} took {took} s of CPU"
            highest = max(highest, resident_mib())
    assert highest - before < 100
    assert 0 < max(seconds) < 0.5, "others waited for it"


@pytest.mark.slow
def test_a40_a_huge_body_holds_nobody_up() -> None:
    huge = b'{"messages":[{"role":"user","content":"' + b"word " * (4 << 20) + b'"}],"max_tokens":1}'
    assert len(huge) > 20 << 20
    with fake_api(step_s=0.02) as api:
        stream_gaps: list[float] = []
        ended = threading.Event()

        def stream() -> None:
            with Wire(api.port) as wire:
                wire.post(COMPLETIONS, {"prompt": "x", "max_tokens": 50, "ignore_eos": True, "stream": True})
                wire.head()
                data = b"data"
                while data:
                    data, took = timed(wire.chunk)
                    stream_gaps.append(took)
            ended.set()

        def post(body: bytes) -> Any:
            return timed(lambda: api.http.post(CHAT, content=body, headers={"content-type": "application/json"}))

        # the longest body that is read: refused for its length in tokens, before it is tokenized
        longest = huge[: (8 << 20) - 40] + b'"}],"max_tokens":1}'
        post(huge)  # warm: what stays after the first time is no growth
        post(longest)
        before = resident_mib()
        with watched_health(api) as seconds:
            reader = threading.Thread(target=stream)
            reader.start()
            api.until(lambda: api.backend.load() == 1)
            for _ in range(3):
                response, took = post(huge)
                error_of(response, 413, code="request_too_large")
                assert took < 10
            assert not ended.is_set(), "the stream was over before the bodies were"
            response, took = post(longest)
            error_of(response, 400, "messages", "context_length_exceeded")
            assert took < 10
            reader.join(30)
        assert len(stream_gaps) > 40
        assert max(stream_gaps) < 2
        assert sorted(seconds)[int(len(seconds) * 0.99)] < 1
        del response  # it keeps the body that was sent
        # the server's side of the last request may still be ending; bodies that stayed would be 68 MiB, one (of 20) may
        # be an allocator's: seen in one of six whole runs, and never with this file alone
        api.until(lambda: resident_mib() - before < 40)


def test_a_refusal_is_no_error_of_ours(fake: ApiUnderTest, caplog: pytest.LogCaptureFixture) -> None:
    """None of the refusals leaves a line in the log at warning or above."""
    chat(fake, model="no-such-model")
    complete(fake, prompt=[])
    fake.http.post("/v1/nothing")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
