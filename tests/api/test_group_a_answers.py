"""Group A: the shape of answers, usage, logprobs and headers. Named by case."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.api.calls import CHAT, COMPLETIONS, answer, chat, chunks_of, complete, error_of, pieces_of, text_of
from tests.api.harness import FAKE_MODEL, ApiUnderTest
from tests.api.wire import Wire, parse_events

#: more than two blocks of 16 tokens
LONG_PROMPT = (
    "The sky is blue because the air scatters short waves of light more than long ones, and so the light that reaches "
    "us from all sides, away from the sun, is made of the short waves, which our eyes and our brains call blue."
)


@pytest.mark.parametrize("options", ["absent", None, {}, {"include_usage": False}])
def test_a04_usage_is_in_no_chunk_unless_asked_for(fake: ApiUnderTest, options: Any) -> None:
    more = {} if options == "absent" else {"stream_options": options}
    response = chat(fake, max_tokens=5, stream=True, **more)
    chunks = chunks_of(response)
    assert response.text.rstrip("\n").rpartition("\n")[2] == "data: [DONE]"
    assert all(chunk.get("usage") is None for chunk in chunks)
    assert all(chunk["choices"] for chunk in chunks)


def test_a04_usage_comes_once_and_last_when_asked_for(fake: ApiUnderTest) -> None:
    *chunks, last = chunks_of(chat(fake, max_tokens=5, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert all(chunk.get("usage") is None and chunk["choices"] for chunk in chunks)
    assert last["choices"] == []
    usage = last["usage"]
    assert usage["completion_tokens"] == 5
    assert usage["prompt_tokens"] == answer(chat(fake, max_tokens=1))["usage"]["prompt_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5


@pytest.mark.parametrize("more", [{}, {"stream": False}])
def test_a04_stream_options_without_a_stream_are_refused(fake: ApiUnderTest, more: dict[str, bool]) -> None:
    """Our choice: refused, as OpenAI does, not ignored."""
    error_of(chat(fake, max_tokens=5, stream_options={"include_usage": True}, **more), 400, "stream_options")


@pytest.mark.slow
@pytest.mark.model
def test_a06_batches_and_token_ids_are_prompts(real: ApiUnderTest) -> None:
    def tokens(text: str) -> int:
        return int(real.http.post("/tokenize", json={"prompt": text}).json()["count"])

    body = answer(complete(real, prompt=["A b c", "D e f"], n=2, max_tokens=4))
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in body["choices"]]
    alone = [text_of(complete(real, prompt=prompt, max_tokens=4)) for prompt in ("A b c", "D e f")]
    assert texts == [alone[0], alone[0], alone[1], alone[1]], "0 and 1 belong to the first prompt"
    assert body["usage"]["prompt_tokens"] == tokens("A b c") + tokens("D e f")
    assert body["usage"]["completion_tokens"] == 16

    body = answer(complete(real, prompt=[504, 1528, 314], max_tokens=4))
    assert len(body["choices"]) == 1
    assert body["usage"]["prompt_tokens"] == 3
    body = answer(complete(real, prompt=[[504, 1528], [314]], max_tokens=4))
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("prompt", [[], [[]], ["x", [1, 2]]])
def test_a06_shapes_that_are_no_prompt_are_refused(fake: ApiUnderTest, prompt: Any) -> None:
    """They are refused before any replica is chosen, so no policy of placement ever sees them."""
    error_of(complete(fake, prompt=prompt, max_tokens=4), 400, "prompt")
    assert fake.http.get("/health").status_code == 200
    assert answer(complete(fake, max_tokens=4))["usage"]["completion_tokens"] == 4


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize(
    ("asked", "num_top"),
    [
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 2}, 2),
    ],
)
def test_a07_chat_logprobs(real: ApiUnderTest, asked: dict[str, Any], num_top: int) -> None:
    choice = answer(chat(real, "Count to five", max_tokens=3, **asked))["choices"][0]
    entries = choice["logprobs"]["content"]
    assert len(entries) == 3
    assert "".join(entry["token"] for entry in entries) == choice["message"]["content"]
    for entry in entries:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert entry["bytes"] is None or bytes(entry["bytes"]).decode() == entry["token"]
        assert -100 < entry["logprob"] <= 0
        assert len(entry["top_logprobs"]) == num_top
        if num_top:
            first, second = entry["top_logprobs"]
            assert first["logprob"] >= second["logprob"]
            assert (first["token"], first["logprob"]) == (entry["token"], entry["logprob"])
    chunks = chunks_of(chat(real, "Count to five", max_tokens=3, **asked, stream=True))
    found = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for part in found if part for entry in part["content"]] == entries


@pytest.mark.model
@pytest.mark.parametrize("asked", [{"logprobs": False, "top_logprobs": 0}, {"logprobs": None, "top_logprobs": None}])
def test_a07_no_logprobs_where_none_are_asked_for(real: ApiUnderTest, asked: dict[str, Any]) -> None:
    assert answer(chat(real, max_tokens=3, **asked))["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("asked", [{"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}])
def test_a07_top_logprobs_alone_or_too_many_are_refused(fake: ApiUnderTest, asked: dict[str, Any]) -> None:
    error_of(chat(fake, max_tokens=3, **asked), 400, "top_logprobs")


@pytest.fixture(scope="session")
def reference(model_folder: Path) -> Any:
    """The model as transformers computes it, in float32."""
    from benchmarks.hf_reference import Reference

    return Reference(model_folder)


def expected_logprobs(reference: Any, token_ids: list[int]) -> list[float]:
    """log p of each token but the first, from one forward pass over all of them."""
    rows = reference.logits(token_ids).log_softmax(-1)
    return [float(rows[position, token_id]) for position, token_id in enumerate(token_ids[1:])]


@pytest.mark.model
@pytest.mark.slow
def test_a09_a_prompt_is_scored(real: ApiUnderTest, reference: Any) -> None:
    prompt = "The sky is blue"
    scoring = {"prompt": prompt, "echo": True, "logprobs": 1, "return_token_ids": True}
    body = answer(complete(real, **scoring, max_tokens=0))
    choice, num_prompt = body["choices"][0], body["usage"]["prompt_tokens"]
    assert choice["text"] == prompt
    assert body["usage"]["completion_tokens"] == 0
    assert choice["finish_reason"] == "length"
    scores = choice["logprobs"]["token_logprobs"]
    assert len(scores) == len(choice["logprobs"]["tokens"]) == num_prompt == len(choice["prompt_token_ids"])
    assert "".join(choice["logprobs"]["tokens"]) == prompt
    assert scores[0] is None
    assert all(math.isfinite(score) and score < 0 for score in scores[1:])
    assert scores[1:] == pytest.approx(expected_logprobs(reference, choice["prompt_token_ids"]), abs=1e-3)

    one = answer(complete(real, **scoring, max_tokens=1))
    choice = one["choices"][0]
    more = choice["logprobs"]["token_logprobs"]
    assert len(more) == num_prompt + 1
    assert one["usage"]["completion_tokens"] == 1
    assert more[1:-1] == pytest.approx(scores[1:], abs=1e-5)
    ids = choice["prompt_token_ids"] + choice["token_ids"]
    assert more[1:] == pytest.approx(expected_logprobs(reference, ids), abs=1e-3)


def test_a09_no_output_and_no_echo_is_refused(fake: ApiUnderTest) -> None:
    """Our choice: there would be nothing to answer."""
    error_of(complete(fake, max_tokens=0), 400, "max_tokens")
    error_of(chat(fake, max_tokens=0), 400, "max_tokens")


@pytest.mark.model
@pytest.mark.slow
def test_a10_prompt_logprobs_are_the_same_with_a_warm_cache(real: ApiUnderTest, reference: Any) -> None:
    scoring = {"prompt": LONG_PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1, "return_token_ids": True}
    bodies = [answer(complete(real, **scoring)) for _ in range(2)]
    plain = answer(complete(real, prompt=LONG_PROMPT, max_tokens=4))
    bodies.append(answer(complete(real, **scoring)))
    num_prompt = bodies[0]["usage"]["prompt_tokens"]
    assert num_prompt >= 40
    scores = [body["choices"][0]["logprobs"]["token_logprobs"] for body in bodies]
    assert [len(each) for each in scores] == [num_prompt] * 3
    expected = expected_logprobs(reference, bodies[0]["choices"][0]["prompt_token_ids"])
    for each in scores:
        assert each[0] is None
        assert each[1:] == pytest.approx(expected, abs=1e-3)
    # a request that scores nothing finds the blocks that the scoring ones computed
    assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
    assert text_of(complete(real, prompt=LONG_PROMPT, max_tokens=4)) == plain["choices"][0]["text"]


def test_a34_headers_of_a_whole_answer_and_of_a_stream(fake: ApiUnderTest) -> None:
    with Wire(fake.port) as wire:
        for path in (CHAT, COMPLETIONS):
            body = {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
            wire.post(path, {**body, "max_tokens": 3})
            reply = wire.reply()
            assert reply.header("content-type") == ["application/json"]
            assert reply.header("content-length") == [str(len(reply.body))]
            for name in ("date", "server", "x-request-id"):
                assert len(reply.header(name)) == 1, name

            wire.post(path, {**body, "max_tokens": 3, "stream": True})
            reply = wire.reply()
            assert reply.header("content-type") == ["text/event-stream; charset=utf-8"]
            assert reply.header("content-length") == reply.header("content-encoding") == []
            assert reply.header("cache-control") == ["no-cache"]
            for name in ("date", "server", "x-request-id"):
                assert len(reply.header(name)) == 1, name
            assert parse_events(reply.body)[-1] == "[DONE]"


def test_a34_the_clients_request_id_comes_back_on_answers_and_errors(fake: ApiUnderTest) -> None:
    for path in ("/health", "/v1/models", "/v1/nothing", COMPLETIONS):
        given = fake.http.request("POST" if path == COMPLETIONS else "GET", path, headers={"x-request-id": "mine-1"})
        assert given.headers.get_list("x-request-id") == ["mine-1"]
    ids = {fake.http.get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3


def check_common(chunks: list[dict[str, Any]], kind: str) -> None:
    for key in ("id", "created", "model"):
        assert len({chunk[key] for chunk in chunks}) == 1, key
    assert chunks[0]["model"] == FAKE_MODEL
    assert {chunk["object"] for chunk in chunks} == {kind}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all(chunk["choices"][0]["index"] == 0 for chunk in chunks)


def test_a37_chunks_of_a_chat(fake: ApiUnderTest) -> None:
    response = chat(fake, max_tokens=5, stream=True, ignore_eos=True)
    chunks = chunks_of(response)  # "data: <json>\n\n" each, [DONE] at the end
    check_common(chunks, "chat.completion.chunk")
    assert chunks[0]["id"].startswith("chatcmpl-")
    first, *between, last = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert first["role"] == "assistant"
    assert not first.get("content")
    assert all(delta.get("content") and "role" not in delta for delta in between)
    assert set(last) <= {"content"}
    assert "".join(pieces_of(chunks)) == text_of(chat(fake, max_tokens=5, ignore_eos=True))


def test_a37_chunks_of_a_completion(fake: ApiUnderTest) -> None:
    chunks = chunks_of(complete(fake, max_tokens=5, stream=True, ignore_eos=True))
    check_common(chunks, "text_completion")
    assert chunks[0]["id"].startswith("cmpl-")
    assert all(isinstance(chunk["choices"][0]["text"], str) for chunk in chunks)
    assert "".join(pieces_of(chunks)) == text_of(complete(fake, max_tokens=5, ignore_eos=True))
