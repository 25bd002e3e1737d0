"""The HTTP application over a fake backend: shapes, refusals, stop strings, errors inside a stream."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from replica.errors import EngineError, NeverFitsError, NoReplicaError, QueueFullError, ReplicaLostError
from replica.messages import FinishReason, GenerateRequest
from router.backend import TokenEvent
from tests.unit.http_fakes import EOS, Edge, FakeBackend, assert_error, events, one_token_steps, small_tokenizer

TEXT = " one two three"


def joined(chunks: list[Any], key: str = "text") -> str:
    choices = [choice for chunk in chunks if isinstance(chunk, dict) for choice in chunk["choices"]]
    return "".join(choice[key] if key == "text" else choice["delta"].get("content", "") for choice in choices)


def drive(edge: Edge, body: dict[str, Any], path: str = "/v1/completions") -> list[Any]:
    """The raw ASGI messages of one request."""
    sent: list[Any] = []
    incoming = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def run() -> None:
        never = asyncio.Event()

        async def receive() -> Any:
            if not incoming:
                await never.wait()
            return incoming.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"", "root_path": ""}
        await edge.app(scope, receive, send)

    asyncio.run(run())
    return sent


def test_chat_answer() -> None:
    edge = Edge()
    response = edge.chat(max_tokens=100)
    body = response.json()
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert int(response.headers["content-length"]) == len(response.content)
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", "m")
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("stop", None, None)
    num_prompt = len(edge.backend.requests[0].sequences[0].prompt_token_ids)
    num_output = len(edge.backend.token_ids) + 1  # the eos counts
    assert body["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert edge.backend.requests[0].request_id == body["id"]
    assert edge.backend.streams[0].num_aborts == 0


def test_completion_answer_cut_by_length() -> None:
    body = Edge().complete(max_tokens=2, model="alias").json()
    assert (body["object"], body["model"]) == ("text_completion", "alias")
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 2


def test_prompts_times_n_in_order() -> None:
    def steps(request: GenerateRequest) -> list[list[TokenEvent]]:
        texts = {sequence.index: small_tokenizer().encode(f"{sequence.index}") for sequence in request.sequences}
        return [[TokenEvent(index, ids, FinishReason.LENGTH)] for index, ids in reversed(texts.items())]

    edge = Edge()
    edge.backend.make_steps = steps
    body = edge.complete(prompt=["one", "two three"], n=2, max_tokens=4).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(i, str(i)) for i in range(4)]
    prompts = [small_tokenizer().encode(text) for text in ("one", "two three")]
    assert body["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert edge.backend.admissions == [1, 4], "before anything is parsed, and when it is known what is asked for"


@pytest.mark.parametrize("path", ["chat", "complete"])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, "absent"])
def test_stream_without_usage(path: str, options: Any) -> None:
    more = {} if options == "absent" else {"stream_options": options}
    chunks = events(getattr(Edge(), path)(stream=True, max_tokens=5, **more))
    assert chunks[-1] == "[DONE]"
    assert not any("usage" in chunk for chunk in chunks[:-1])
    assert all(chunk["choices"] for chunk in chunks[:-1])


def test_stream_with_usage_has_one_more_chunk() -> None:
    chunks = events(Edge().chat(stream=True, max_tokens=3, stream_options={"include_usage": True}))
    *rest, last, done = chunks
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 3
    assert not any("usage" in chunk for chunk in rest)
    assert rest[-1]["choices"][0]["finish_reason"] == "length"


def test_stream_with_running_usage() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(Edge().chat(stream=True, max_tokens=3, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 3


def test_chat_stream_shape() -> None:
    response = Edge().chat(stream=True, max_tokens=3)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert "content-length" not in response.headers
    chunks = events(response)[:-1]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for key in ("id", "created", "model"):
        assert len({chunk[key] for chunk in chunks}) == 1
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert all(chunk["choices"][0]["delta"].get("content") for chunk in chunks[1:-1])


def test_finish_chunk_without_text_has_an_empty_delta() -> None:
    last = events(Edge().chat(stream=True))[-2]["choices"][0]
    assert (last["delta"], last["finish_reason"], last["stop_reason"]) == ({}, "stop", None)


def test_completion_stream_shape() -> None:
    chunks = events(Edge().complete(stream=True, max_tokens=5))[:-1]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert joined(chunks) == Edge().complete(max_tokens=5).json()["choices"][0]["text"]


def test_several_choices_of_a_step_share_one_write() -> None:
    edge = Edge()
    sent = drive(edge, {"prompt": "x", "n": 3, "stream": True, "max_tokens": 4})
    writes = [message["body"] for message in sent if message["type"] == "http.response.body"]
    assert len(writes) == 5  # four steps (the last with [DONE]), one end
    assert all(write.count(b"data: {") == 3 for write in writes[:4])


def test_text_held_for_a_multi_byte_character_is_never_sent_in_halves() -> None:
    text = "a🦙b 삼겹살 👩‍👩‍👧"
    backend = FakeBackend(text)
    response = Edge(backend).chat(stream=True)
    assert "\ufffd" not in response.text
    assert joined(events(response)[:-1], "delta") == text
    assert Edge(FakeBackend(text)).chat().json()["choices"][0]["message"]["content"] == text


@pytest.mark.parametrize("stop", [[TEXT[4:9]], "two", ["zzz", " th"], ["e two", "one two"]])
@pytest.mark.parametrize("stream", [True, False])
def test_stop_string_over_token_borders(stop: Any, stream: bool) -> None:
    stops = [stop] if isinstance(stop, str) else stop
    ends = {s: TEXT.find(s) + len(s) for s in stops if s in TEXT}
    found = min(ends, key=lambda s: ends[s])
    expected = TEXT[: TEXT.find(found)]
    edge = Edge()
    response = edge.complete(
        stop=stop, stream=stream, max_tokens=40, stream_options={"include_usage": True} if stream else None
    )
    if stream:
        chunks = events(response)
        text, usage, last = joined(chunks), chunks[-2]["usage"], chunks[-3]["choices"][0]
        for count in range(len(chunks)):
            assert expected.startswith(joined(chunks[:count]))
    else:
        body = response.json()
        text, usage, last = body["choices"][0]["text"], body["usage"], body["choices"][0]
    assert text == expected
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", found)
    # generation ended at the token that completed the stop string
    ids, needed = edge.backend.token_ids, 0
    while found not in small_tokenizer().decode(ids[:needed]):
        needed += 1
    assert usage["completion_tokens"] == needed
    assert edge.backend.streams[0].finished == [0]
    assert edge.backend.streams[0].num_given == needed


def test_tokens_of_the_same_step_after_a_stop_string_are_dropped() -> None:
    edge = Edge()
    edge.backend.make_steps = lambda request: [[TokenEvent(0, [*edge.backend.token_ids, EOS], FinishReason.STOP)]]
    body = edge.complete(stop="two", max_tokens=40, return_token_ids=True).json()
    assert body["choices"][0]["text"] == " one "
    assert len(body["choices"][0]["token_ids"]) == body["usage"]["completion_tokens"] < len(edge.backend.token_ids)
    assert edge.backend.streams[0].finished == []  # the replica had ended it already


def test_stop_string_is_passed_over_before_min_tokens() -> None:
    count = len(small_tokenizer().encode(TEXT))
    early = Edge().complete(stop=" one", max_tokens=40, min_tokens=count).json()["choices"][0]
    assert (early["text"], early["stop_reason"]) == (TEXT, None)
    assert Edge().complete(stop=" one", max_tokens=40).json()["choices"][0]["text"] == ""


def test_stop_string_counts_from_the_first_token_after_min_tokens() -> None:
    """As for eos: `min_tokens` tokens that do not end the choice come first, so the one that may is the next."""
    ids = small_tokenizer().encode(TEXT)
    needed = next(count for count in range(len(ids)) if " two" in small_tokenizer().decode(ids[:count]))
    for min_tokens, text in ((needed - 1, " one"), (needed, TEXT)):
        answer = Edge().complete(stop=" two", max_tokens=40, min_tokens=min_tokens).json()
        assert answer["choices"][0]["text"] == text


def test_usage_counts_each_prompt_and_its_cached_tokens_once() -> None:
    edge = Edge()
    usage = edge.complete(prompt=["one", "two three"], n=3).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 8}  # the fake says 4 for each sequence
    assert usage["prompt_tokens"] == edge.backend.requests[0].num_prompt_tokens / 3


def test_include_stop_str_in_output() -> None:
    answer = Edge().complete(stop="two", include_stop_str_in_output=True, max_tokens=40).json()["choices"][0]
    assert (answer["text"], answer["stop_reason"]) == (" one two", "two")


def test_stop_of_one_choice_leaves_the_others_running() -> None:
    def steps(request: GenerateRequest) -> list[list[TokenEvent]]:
        first, second = request.sequences
        ids = small_tokenizer().encode
        mine = one_token_steps([first], ids(" one two three"), True)
        others = one_token_steps([second], ids(" five six seven"), True)
        length = max(len(mine), len(others))
        return [
            [event for part in (mine, others) for step in part[position : position + 1] for event in step]
            for position in range(length)
        ]

    edge = Edge()
    edge.backend.make_steps = steps
    body = edge.complete(n=2, stop=" tw", max_tokens=40).json()
    assert [(choice["text"], choice["stop_reason"]) for choice in body["choices"]] == [
        (" one", " tw"),
        (" five six seven", None),
    ]
    assert edge.backend.streams[0].finished == [0]
    assert edge.backend.streams[0].num_aborts == 0


def test_stop_token_is_counted_and_not_shown() -> None:
    ids = small_tokenizer().encode(" one two")
    edge = Edge()
    edge.backend.make_steps = lambda request: [[TokenEvent(0, ids, FinishReason.STOP, ids[-1])]]
    choice = edge.complete(stop_token_ids=[ids[-1]]).json()["choices"][0]
    assert choice["text"] == small_tokenizer().decode(ids[:-1])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[-1])
    shown = edge.complete(stop_token_ids=[ids[-1]], include_stop_str_in_output=True).json()
    assert shown["choices"][0]["text"] == " one two"
    assert shown["usage"]["completion_tokens"] == len(ids)


def test_special_tokens_are_shown_only_on_demand() -> None:
    edge = Edge()
    edge.backend.make_steps = lambda request: [[TokenEvent(0, [1, *edge.backend.token_ids], FinishReason.LENGTH)]]
    assert edge.complete().json()["choices"][0]["text"] == TEXT
    assert edge.complete(skip_special_tokens=False).json()["choices"][0]["text"] == "<|im_start|>" + TEXT


@pytest.mark.parametrize("stream", [True, False])
def test_echo(stream: bool) -> None:
    response = Edge().complete(prompt=["The sky", "one"], echo=True, stream=stream, max_tokens=40)
    choices = (
        [choice for chunk in events(response)[:-1] for choice in chunk["choices"]]
        if stream
        else response.json()["choices"]
    )
    texts = ["".join(choice["text"] for choice in choices if choice["index"] == index) for index in (0, 1)]
    assert texts == ["The sky" + TEXT, "one" + TEXT]


@pytest.mark.parametrize("stream", [True, False])
def test_echo_of_the_prompt_alone_needs_no_replica(stream: bool) -> None:
    edge = Edge()
    response = edge.complete(echo=True, max_tokens=0, stream=stream)
    choice = (events(response)[0] if stream else response.json())["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("The sky", "length")
    assert edge.backend.requests == []


def test_token_ids_on_demand() -> None:
    edge = Edge(FakeBackend("a🦙b"))
    body = edge.complete(return_token_ids=True, max_tokens=40).json()["choices"][0]
    assert body["token_ids"] == [*edge.backend.token_ids, EOS]
    assert body["prompt_token_ids"] == small_tokenizer().encode("The sky")
    chunks = events(edge.complete(return_token_ids=True, max_tokens=40, stream=True))[:-1]
    assert [token_id for chunk in chunks for token_id in chunk["choices"][0]["token_ids"]] == body["token_ids"]
    assert [("prompt_token_ids" in chunk["choices"][0]) for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    chat = edge.chat(return_token_ids=True).json()
    assert chat["prompt_token_ids"] == edge.backend.requests[-1].sequences[0].prompt_token_ids
    assert "token_ids" not in edge.complete().json()["choices"][0]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("full_when", ["full", "refusal"])
def test_refusal_is_503_before_any_byte(stream: bool, full_when: str) -> None:
    edge = Edge()
    setattr(edge.backend, full_when, QueueFullError("All queues are full.", 2.3))
    response = edge.chat(stream=stream)
    assert_error(response, 503, code="queue_full")
    assert response.headers["retry-after"] == "3"
    assert (edge.backend.requests == []) == (full_when == "full")
    assert 'vllm:admission_rejections_total{reason="queue_full",router=""} 1.0' in edge.get("/metrics").text


def test_other_refusals() -> None:
    edge = Edge()
    edge.backend.refusal = NoReplicaError("No replica is up.")
    assert_error(edge.chat(), 503, code="no_replica")
    edge.backend.refusal = NeverFitsError("9000 tokens, pool 8192", "prompt")
    assert_error(edge.chat(), 400, "prompt", "context_length_exceeded")


@pytest.mark.parametrize("stream", [True, False])
def test_failure_before_the_first_token_is_a_status(stream: bool) -> None:
    edge = Edge()
    edge.backend.make_steps = lambda request: []
    edge.backend.error = ReplicaLostError("The replica died.")
    assert assert_error(edge.chat(stream=stream), 502, code="replica_lost") == "The replica died."
    assert edge.backend.streams[0].num_aborts == 1


@pytest.mark.parametrize(
    "error", [ReplicaLostError("The replica died."), EngineError("step failed"), ZeroDivisionError("secret")]
)
def test_failure_after_the_first_token_is_the_last_event(error: Exception) -> None:
    edge = Edge()
    edge.backend.make_steps = lambda request: one_token_steps(request.sequences, edge.backend.token_ids, False)[:2]
    edge.backend.error = error
    response = edge.chat(stream=True, max_tokens=200)
    chunks = events(response)
    assert response.status_code == 200
    assert set(chunks[-1]["error"]) == {"message", "type", "param", "code"}
    assert "[DONE]" not in response.text
    assert "secret" not in response.text
    assert not any(chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1])
    assert edge.backend.streams[0].num_aborts == 1
    assert 'finished_reason="error",model_name="m",router=""} 1.0' in edge.get("/metrics").text


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_sequence_given_up_by_a_replica_is_an_error(reason: FinishReason) -> None:
    edge = Edge()
    edge.backend.make_steps = lambda request: [[TokenEvent(0, edge.backend.token_ids)], [TokenEvent(0, [], reason)]]
    assert_error(edge.chat(), 500, code="engine_error")
    assert "error" in events(edge.chat(stream=True))[-1]


def test_sequence_that_cannot_go_on_as_it_was_asked_for_is_a_400() -> None:
    edge = Edge()
    edge.backend.make_steps = lambda request: [[TokenEvent(0, [], FinishReason.INVALID)]]
    assert_error(edge.chat(), 400)
    assert_error(edge.chat(stream=True), 400)


def test_a_sequence_without_numbers_is_a_500_of_its_own() -> None:
    edge = Edge()
    steps = [[TokenEvent(0, edge.backend.token_ids)], [TokenEvent(0, [], FinishReason.NOT_FINITE)]]
    edge.backend.make_steps = lambda request: steps
    assert_error(edge.chat(), 500, code="not_finite")
    assert events(edge.chat(stream=True))[-1]["error"]["code"] == "not_finite"


@pytest.mark.parametrize("stream", [True, False])
def test_stream_that_just_ends_is_an_error_and_no_short_text(stream: bool) -> None:
    edge = Edge()
    edge.backend.make_steps = lambda request: [[TokenEvent(0, edge.backend.token_ids)]]
    response = edge.chat(stream=stream)
    if stream:
        assert events(response)[-1]["error"]["code"] == "engine_error"
    else:
        assert_error(response, 500, code="engine_error")


@pytest.mark.parametrize("stream", [True, False])
def test_prompt_that_does_not_fit_is_a_plain_400(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    edge = Edge()
    message = assert_error(
        edge.chat(messages=[{"role": "user", "content": "1" * 9000}], stream=stream),
        400,
        "messages",
        "context_length_exceeded",
    )
    assert "256" in message
    assert edge.backend.requests == []
    assert caplog.records == []
    assert edge.chat().status_code == 200


@pytest.mark.parametrize("body", [b'{"prompt": ', b'{"prompt": "Hello", "max_tokens": -1}', b'{"prompt": "Hello"}'])
def test_in_a_flood_nothing_is_parsed_for_a_refusal(body: bytes) -> None:
    edge = Edge()
    edge.backend.full = QueueFullError("full", 7.2)
    headers = {"content-type": "application/json"}
    response = edge.request("POST", "/v1/completions", content=body, headers=headers)
    assert_error(response, 503, None, "queue_full")
    assert response.headers["retry-after"] == "8"
    assert edge.backend.admissions == [1]
    assert (
        edge.request("POST", "/v1/completions", content=body, headers={"content-type": "text/plain"}).status_code == 415
    )


@pytest.mark.parametrize("stream", [True, False])
def test_unknown_model_is_404_and_touches_no_replica(stream: bool) -> None:
    edge = Edge()
    assert_error(edge.chat(model="no-such-model", stream=stream), 404, "model", "model_not_found")
    assert_error(edge.get("/v1/models/no-such-model"), 404, "model", "model_not_found")
    assert edge.backend.requests == []
    assert edge.backend.admissions == [1], "only what any request is asked first"


def test_unknown_routes_and_methods() -> None:
    edge = Edge()
    assert_error(edge.request("POST", "/v1/nothing", json={}), 404, code="not_found")
    response = edge.get("/v1/chat/completions")
    assert_error(response, 405, code="method_not_allowed")
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"true", b"null", b'"hi"', b'{"messages":[1]}', b'{"messages":[]}', b"\xff\xfe"]
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_malformed_body(path: str, body: bytes) -> None:
    assert_error(Edge().request("POST", path, content=body), 400)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_body_over_the_limit_is_413_before_it_is_parsed(path: str) -> None:
    edge = Edge(max_body_bytes=1024)

    async def pieces() -> Any:
        for _ in range(3):
            yield b"{" * 512

    assert_error(edge.request("POST", path, content=b"{" * 2000), 413, code="request_too_large")
    assert_error(edge.request("POST", path, content=pieces()), 413, code="request_too_large")
    assert_error(edge.request("POST", path, content=b"{" * 1024), 400)


def test_long_body_is_computed_in_a_thread_with_the_same_answer() -> None:
    body = {"max_tokens": 5, "temperature": 0}
    assert Edge(on_loop_max_bytes=0).complete(**body).json()["choices"] == Edge().complete(**body).json()["choices"]
    assert_error(Edge(on_loop_max_bytes=0).complete(n=0), 400, "n")


def test_models() -> None:
    edge = Edge()
    body = edge.get("/v1/models").json()
    assert (body["object"], [card["id"] for card in body["data"]]) == ("list", ["m", "alias"])
    assert edge.get("/v1/models/alias").json()["max_model_len"] == 256
    slashed = Edge(served_model_names=("org/name",))
    assert slashed.get("/v1/models/org/name").json()["id"] == "org/name"


def test_health_is_what_the_backend_says() -> None:
    edge = Edge()
    assert edge.get("/health").status_code == 200
    edge.backend.is_ok = False
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        response = edge.request(method, path)
        assert (response.status_code, response.json()) == (503, {"ok": False, "replicas": 0})


def test_small_endpoints() -> None:
    edge = Edge(version="1.2.3")
    assert edge.get("/version").json() == {"version": "1.2.3"}
    assert edge.get("/load").json() == {"server_load": 7}
    tokens = edge.request("POST", "/tokenize", json={"prompt": "one two", "return_token_strs": True}).json()
    assert tokens["tokens"] == small_tokenizer().encode("one two")
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert edge.request("POST", "/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "one two"}
    assert_error(edge.request("POST", "/detokenize", json={"tokens": [10**9]}), 400, "tokens")
    chat = edge.request("POST", "/tokenize", json={"messages": [{"role": "user", "content": "Say"}]}).json()
    edge.chat()
    assert chat["tokens"] == edge.backend.requests[0].sequences[0].prompt_token_ids


def test_api_keys() -> None:
    edge = Edge(api_keys=("key-1", "key-2"))
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "key-1"}, {"authorization": "Bearer "}):
        response = edge.get("/v1/models", headers=headers)
        assert_error(response, 401, code="invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
    for key in ("key-1", "key-2"):
        assert edge.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200
    assert_error(edge.request("POST", "/tokenize", json={"prompt": "x"}), 401)
    for path in ("/health", "/metrics", "/version", "/ping", "/load"):
        assert edge.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/v1/nothing", "/health"])
def test_request_id_is_echoed_or_made(path: str) -> None:
    edge = Edge()
    assert edge.get(path, headers={"x-request-id": "abc-1"}).headers.get_list("x-request-id") == ["abc-1"]
    made = [edge.get(path, headers={"x-request-id": bad}).headers["x-request-id"] for bad in ("", "x" * 129, "a\tb")]
    made.append(edge.get(path).headers["x-request-id"])
    assert len(set(made)) == 4
    assert all(len(value) == 32 for value in made)
    assert "x-request-id" not in Edge(set_request_id_header=False).get(path).headers


def test_cors() -> None:
    preflight = {
        "origin": "http://page",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    edge = Edge(api_keys=("k",))
    response = edge.request("OPTIONS", "/v1/chat/completions", headers=preflight)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-origin" in edge.get("/v1/models", headers={"origin": "http://page"}).headers
    closed = Edge(cors_allow_origins=())
    assert "access-control-allow-origin" not in closed.get("/v1/models", headers={"origin": "http://page"}).headers


def sample(text: str, name: str) -> float:
    return next(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


def test_metrics() -> None:
    edge = Edge()
    num = len(edge.backend.token_ids) + 1
    for stream in (True, False):
        edge.chat(stream=stream)
    edge.complete(max_tokens=1)
    text = edge.get("/metrics").text
    assert "replica_thing 1" in text
    label = '{model_name="m",router=""}'
    assert sample(text, f"vllm:generation_tokens_total{label}") == 2 * num + 1
    assert sample(text, f"vllm:prompt_tokens_total{label}") == sum(r.num_prompt_tokens for r in edge.backend.requests)
    assert sample(text, f"vllm:time_to_first_token_seconds_count{label}") == 3
    assert sample(text, f"vllm:inter_token_latency_seconds_count{label}") == 2 * (num - 1)
    assert sample(text, f"vllm:e2e_request_latency_seconds_count{label}") == 3
    assert sample(text, 'vllm:request_success_total{finished_reason="stop",model_name="m",router=""}') == 2
    assert sample(text, 'vllm:request_success_total{finished_reason="length",model_name="m",router=""}') == 1
    assert sample(text, 'http_requests_total{handler="/v1/chat/completions",method="POST",router="",status="200"}') == 2


def test_metric_labels_are_few_whatever_clients_ask_for() -> None:
    edge = Edge()
    for path in ("/a", "/b", "/c"):
        edge.get(path)
    lines = [line for line in edge.get("/metrics").text.splitlines() if line.startswith("http_requests_total")]
    assert lines == ['http_requests_total{handler="other",method="GET",router="",status="404"} 3.0']
