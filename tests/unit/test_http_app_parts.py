"""Answers that are more than text: logprobs, scored prompts, reasoning, tool calls; whole and as a stream, the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.messages import FinishReason, TokenLogprobs
from router.answer import PROMPT_SLICE
from router.app import create_app
from router.backend import TokenEvent
from router.chat_template import ChatTemplate
from router.tokenizer import Tokenizer
from tests.property.lengths import examples
from tests.unit import http_fakes
from tests.unit.http_fakes import (
    EOS,
    TEMPLATE,
    THINKING_TEMPLATE,
    Edge,
    FakeBackend,
    assert_error,
    byte_level_bpe,
    events,
    fake_logprobs,
    small_tokenizer,
)
from tests.unit.openai_shapes import check_chat, check_chunks, check_completion, joined_choice

TEXT = " one two three"
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
    }
]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "é🦙 three"}}\n</tool_call>'
ARGUMENTS = {"at": "é🦙 three"}


def chat_edge(text: str, template: str | None = None, sizes: list[int] | None = None) -> Edge:
    backend = FakeBackend(text)
    backend.sizes = sizes
    return Edge(backend, **({"template": template} if template else {}), max_model_len=8192)


def whole_choice(edge: Edge, path: str, **body: Any) -> dict[str, Any]:
    answer = getattr(edge, path)(**body)
    assert answer.status_code == 200, answer.text
    (check_chat if path == "chat" else check_completion)(answer.json())
    return dict(answer.json()["choices"][0])


def streamed_choice(edge: Edge, path: str, **body: Any) -> dict[str, Any]:
    return joined_choice(check_chunks(events(getattr(edge, path)(stream=True, **body)), path))


# ---- logprobs


def test_chat_logprobs() -> None:
    edge = Edge()
    answer = whole_choice(edge, "chat", logprobs=True, top_logprobs=2)
    ids = [*edge.backend.token_ids, EOS]
    content = answer["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [small_tokenizer().decode([token], False) for token in ids]
    assert [bytes(entry["bytes"]).decode() for entry in content] == [entry["token"] for entry in content]
    for token_id, entry in zip(ids, content, strict=True):
        told = fake_logprobs(token_id, 2)
        assert entry["logprob"] == told.logprob
        assert [top["logprob"] for top in entry["top_logprobs"]] == told.top_logprobs
    assert edge.backend.requests[0].sequences[0].sampling.num_logprobs == 2


@pytest.mark.parametrize("more", [{}, {"top_logprobs": 0}, {"top_logprobs": None}])
@pytest.mark.parametrize("path", ["whole", "stream"])
def test_chat_logprobs_without_alternatives(more: dict[str, Any], path: str) -> None:
    make = whole_choice if path == "whole" else streamed_choice
    content = make(Edge(), "chat", logprobs=True, max_tokens=3, **more)["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[], [], []]


@pytest.mark.parametrize("more", [{}, {"logprobs": False, "top_logprobs": 0}, {"logprobs": None}])
def test_no_logprobs(more: dict[str, Any]) -> None:
    assert whole_choice(Edge(), "chat", **more)["logprobs"] is None
    assert streamed_choice(Edge(), "chat", **more)["logprobs"] is None
    edge = Edge()
    assert whole_choice(edge, "complete")["logprobs"] is None
    assert edge.backend.requests[0].sequences[0].sampling.num_logprobs is None


@pytest.mark.parametrize("num_top", [0, 1, 3])
def test_completion_logprobs(num_top: int) -> None:
    edge = Edge(FakeBackend("a🦙b two"))
    answer = whole_choice(edge, "complete", logprobs=num_top, max_tokens=40)
    logprobs, ids = answer["logprobs"], edge.backend.token_ids
    assert len(logprobs["tokens"]) == len(ids) + 1 == len(logprobs["text_offset"])
    for token_id, token, logprob, top in zip(
        ids, logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=False
    ):
        told = fake_logprobs(token_id, num_top)
        assert logprob == told.logprob
        assert token in top
        assert len(top) <= num_top + 1
        assert set(told.top_logprobs) >= set(top.values()) - {logprob}
    for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        if "\ufffd" not in token and token != "<|im_end|>":
            assert answer["text"][offset:].startswith(token)


def test_infinity_is_no_json() -> None:
    edge = Edge()
    told = TokenLogprobs(float("-inf"), 9, [5, 6], [-0.1, float("-inf")])
    edge.backend.make_steps = lambda request: [[TokenEvent(0, [7], FinishReason.LENGTH)]]
    edge.backend.tell = lambda token_id, num_top: told
    assert whole_choice(edge, "complete", logprobs=2)["logprobs"]["token_logprobs"] == [-9999.0]
    (entry,) = whole_choice(edge, "chat", logprobs=True, top_logprobs=2)["logprobs"]["content"]
    assert (entry["logprob"], entry["top_logprobs"][1]["logprob"]) == (-9999.0, -9999.0)


def test_tokens_as_token_ids() -> None:
    edge = Edge()
    body = {"return_tokens_as_token_ids": True, "max_tokens": 2}
    first = edge.backend.token_ids[0]
    logprobs = whole_choice(edge, "complete", logprobs=1, **body)["logprobs"]
    assert logprobs["tokens"][0] == f"token_id:{first}"
    assert f"token_id:{first}" in logprobs["top_logprobs"][0]
    entry = whole_choice(edge, "chat", logprobs=True, **body)["logprobs"]["content"][0]
    assert entry["token"] == f"token_id:{first}"
    assert bytes(entry["bytes"]).decode() == small_tokenizer().decode([first])


def test_tokens_behind_a_stop_string_have_no_logprobs() -> None:
    for sizes in ([1], [40]):
        edge = chat_edge(TEXT, sizes=sizes)
        body = edge.complete(stop="two", logprobs=0, max_tokens=40, return_token_ids=True).json()
        answer = body["choices"][0]
        assert answer["text"] == " one "
        assert len(answer["logprobs"]["tokens"]) == len(answer["token_ids"]) == body["usage"]["completion_tokens"]
        assert "".join(answer["logprobs"]["tokens"]).endswith("two")


# ---- prompts


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("prompt", ["The sky", "é🦙", [5, 17, 300], "T"])
def test_scoring_a_prompt(max_tokens: int, prompt: Any) -> None:
    edge = Edge()
    answer = edge.complete(prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens).json()
    check_completion(answer)
    choice, usage = answer["choices"][0], answer["usage"]
    ids = small_tokenizer().encode(prompt) if isinstance(prompt, str) else prompt
    text = small_tokenizer().decode(ids)
    output = small_tokenizer().decode(edge.backend.token_ids[:max_tokens])
    assert (choice["text"], choice["finish_reason"]) == (text + output, "length")
    assert (usage["completion_tokens"], usage["prompt_tokens"]) == (max_tokens, len(ids))
    logprobs = choice["logprobs"]
    assert [len(values) for values in logprobs.values()] == [len(ids) + max_tokens] * 4
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    told = [fake_logprobs(token_id, 1).logprob for token_id in ids[1:] + edge.backend.token_ids[:max_tokens]]
    assert logprobs["token_logprobs"][1:] == told
    whole = [small_tokenizer().decode(ids[:count]).rstrip("\ufffd") for count in range(len(ids))]
    assert logprobs["text_offset"][: len(ids)] == [len(before) for before in whole]
    assert logprobs["text_offset"][len(ids) :] == [len(text)] * max_tokens
    assert edge.backend.requests[0].sequences[0].sampling.max_tokens == 1
    text_of_metrics = edge.get("/metrics").text
    assert f'vllm:generation_tokens_total{{model_name="m",router=""}} {float(max_tokens)}' in text_of_metrics


def test_offsets_of_an_echo_with_a_special_token_in_its_text() -> None:
    answer = whole_choice(Edge(), "complete", prompt="<|im_start|>one", echo=True, logprobs=0, max_tokens=1)
    assert answer["text"].startswith("<|im_start|>one")
    assert answer["logprobs"]["text_offset"][:2] == [0, len("<|im_start|>")]


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_scoring_in_a_stream(max_tokens: int) -> None:
    body = {"prompt": ["The sky", "é🦙"], "echo": True, "logprobs": 2, "max_tokens": max_tokens, "n": 2}
    whole = Edge().complete(**body).json()["choices"]
    chunks = check_chunks(events(Edge().complete(stream=True, **body)), "complete")
    for choice in whole:
        streamed = joined_choice(chunks, choice["index"])
        assert {name: streamed[name] for name in choice} == choice


def test_long_prompt_is_written_in_turns_and_whole() -> None:
    ids = [token_id % 300 for token_id in range(3 * PROMPT_SLICE + 5)]
    body = {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 1}
    logprobs = whole_choice(Edge(max_model_len=1000), "complete", prompt_logprobs=0, **body)["logprobs"]
    assert logprobs["token_logprobs"][1:-1] == [fake_logprobs(token_id, 1).logprob for token_id in ids[1:]]
    assert streamed_choice(Edge(max_model_len=1000), "complete", **body)["logprobs"] == logprobs


@pytest.mark.parametrize(("field", "more"), [("prompt_logprobs", {}), ("logprobs", {"echo": True})])
def test_short_request_cannot_ask_for_gigabytes_of_logprobs(field: str, more: dict[str, Any]) -> None:
    edge = Edge(max_model_len=1 << 20)
    body = {"prompt": [1] * 1000, "max_tokens": 1, **more}
    assert_error(edge.complete(n=50, **{field: 20}, **body), 400, field)
    assert edge.backend.requests == []
    assert edge.complete(n=1, **{field: 20}, **body).status_code == 200
    assert edge.complete(n=50, logprobs=20, max_tokens=1).status_code == 200


def test_one_dropped_token_is_ended_at_a_replica_that_goes_on() -> None:
    edge = Edge()
    edge.backend.make_steps = lambda request: [[TokenEvent(0, [5])], [TokenEvent(0, [6])]]
    assert whole_choice(edge, "complete", echo=True, logprobs=0, max_tokens=0)["text"] == "The sky"
    assert edge.backend.streams[0].finished == [0]


def test_prompt_logprobs() -> None:
    edge = Edge()
    body = edge.complete(prompt_logprobs=1, max_tokens=1, prompt=["The sky", "one two"]).json()
    check_completion(body)
    for choice, text in zip(body["choices"], ("The sky", "one two"), strict=True):
        ids = small_tokenizer().encode(text)
        first, *rest = choice["prompt_logprobs"]
        assert first is None
        assert [next(iter(position)) for position in rest] == [str(token_id) for token_id in ids[1:]]
        for token_id, position in zip(ids[1:], rest, strict=True):
            told = fake_logprobs(token_id, 1)
            name = small_tokenizer().decode([token_id])
            assert position[str(token_id)] == {"logprob": told.logprob, "rank": told.rank, "decoded_token": name}
        assert choice["logprobs"] is None
    chat = edge.chat(prompt_logprobs=0, max_tokens=1).json()
    check_chat(chat)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in chat["choices"][0]
    assert "prompt_logprobs" not in edge.chat().json()


def test_two_numbers_of_alternatives() -> None:
    """One request asks the replica once; each field then tells as many as it was asked for."""
    answer = whole_choice(
        Edge(), "complete", prompt_logprobs=3, logprobs=1, echo=True, max_tokens=2, prompt=[40, 41, 42]
    )
    assert [len(position) for position in answer["prompt_logprobs"][1:]] == [4, 3]  # 41 is not among its three
    assert [len(top) for top in answer["logprobs"]["top_logprobs"][1:3]] == [2, 1]


def test_replica_that_tells_too_little_of_a_prompt_is_an_error() -> None:
    edge = Edge()
    edge.backend.tells_prompts = False
    assert_error(edge.complete(prompt_logprobs=0), 500, code="engine_error")


def test_chat_echo() -> None:
    messages = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "zero"}]
    body = {"messages": messages, "echo": True, "add_generation_prompt": False, "continue_final_message": True}
    assert whole_choice(Edge(), "chat", **body)["message"]["content"] == "zero" + TEXT
    assert streamed_choice(Edge(), "chat", **body)["message"]["content"] == "zero" + TEXT


# ---- reasoning and tools


@pytest.mark.parametrize("make", [whole_choice, streamed_choice])
def test_tool_call(make: Any) -> None:
    answer = make(chat_edge(CALL), "chat", tools=TOOLS)
    message = answer["message"]
    (call,) = message["tool_calls"]
    assert (answer["finish_reason"], message["content"], answer["stop_reason"]) == ("tool_calls", None, None)
    assert (call["type"], call["function"]["name"]) == ("function", "look")
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS
    assert call["id"].startswith("call_")


@pytest.mark.parametrize("make", [whole_choice, streamed_choice])
def test_calls_beside_text(make: Any) -> None:
    message = make(chat_edge(f"one {CALL}{CALL}"), "chat", tools=TOOLS)["message"]
    assert message["content"].strip() == "one"
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [ARGUMENTS, ARGUMENTS]
    assert len({call["id"] for call in message["tool_calls"]}) == 2


@pytest.mark.parametrize("make", [whole_choice, streamed_choice])
def test_no_call_no_key(make: Any) -> None:
    answer = make(chat_edge(TEXT), "chat", tools=TOOLS)
    assert answer["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert answer["finish_reason"] == "stop"


@pytest.mark.parametrize("make", [whole_choice, streamed_choice])
def test_named_tool_says_stop(make: Any) -> None:
    choice = {"type": "function", "function": {"name": "look"}}
    answer = make(chat_edge(CALL), "chat", tools=TOOLS, tool_choice=choice)
    assert (answer["finish_reason"], len(answer["message"]["tool_calls"])) == ("stop", 1)


@pytest.mark.parametrize("make", [whole_choice, streamed_choice])
def test_answer_cut_by_length_says_so_whatever_it_called(make: Any) -> None:
    num_tokens = len(small_tokenizer().encode(CALL))
    assert make(chat_edge(CALL), "chat", tools=TOOLS, max_tokens=num_tokens)["finish_reason"] == "length"


@pytest.mark.parametrize("make", [whole_choice, streamed_choice])
def test_call_that_is_cut_stays_as_far_as_it_came(make: Any) -> None:
    answer = make(chat_edge(CALL[:-30]), "chat", tools=TOOLS)
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] in CALL
    assert call["function"]["arguments"] in CALL
    assert not answer["message"]["content"]
    assert answer["finish_reason"] == "stop"


def test_stream_of_a_call() -> None:
    chunks = check_chunks(events(chat_edge(CALL).chat(stream=True, tools=TOOLS)), "chat")
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert len(calls) > 3
    assert [set(call) for call in calls[1:]] == [{"index", "function"}] * (len(calls) - 1)
    assert set(calls[0]) == {"index", "id", "type", "function"}
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]


@pytest.mark.parametrize("make", [whole_choice, streamed_choice])
def test_reasoning(make: Any) -> None:
    answer = make(chat_edge("<think>\none\n</think>\n\ntwo", THINKING_TEMPLATE), "chat")
    message = answer["message"]
    assert (message["reasoning"].strip(), message["content"].strip()) == ("one", "two")


def test_reasoning_tokens_are_counted() -> None:
    edge = chat_edge("<think>one two</think>three", THINKING_TEMPLATE)
    for body in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
        response = edge.chat(**body)
        usage = (events(response)[-2] if body else response.json())["usage"]
        num_thought = len(small_tokenizer().encode("one two</think>"))
        assert usage["completion_tokens_details"] == {"reasoning_tokens": num_thought}
    assert "completion_tokens_details" not in Edge().chat().json()["usage"]


def test_model_that_could_think_and_did_not() -> None:
    message = whole_choice(chat_edge(TEXT, THINKING_TEMPLATE), "chat")["message"]
    assert message == {"role": "assistant", "content": TEXT, "refusal": None, "reasoning": None}


def test_markers_that_are_special_tokens_reach_the_parser() -> None:
    backend = byte_level_bpe(("<tool_call>", "</tool_call>"))
    added = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    codec = Tokenizer(backend, ChatTemplate(TEMPLATE + "{# <tool_call> {{ tools }} #}", added_tokens=added))
    edge = Edge(max_model_len=8192)
    edge.app = create_app(http_fakes.settings(max_model_len=8192), codec, edge.backend)
    edge.backend.token_ids = codec.encode(CALL)
    for make in (whole_choice, streamed_choice):
        assert len(make(edge, "chat", tools=TOOLS)["message"]["tool_calls"]) == 1


def test_stop_string_in_front_of_the_parser() -> None:
    answer = whole_choice(chat_edge(CALL + "three"), "chat", tools=TOOLS, stop="</tool_call>")
    assert (answer["finish_reason"], answer["stop_reason"]) == ("tool_calls", "</tool_call>")


# ---- whole and stream

BODIES: list[tuple[str, dict[str, Any]]] = [
    ("complete", {"logprobs": 2}),
    ("complete", {"logprobs": 0, "stop": ["two", " tw"], "echo": True}),
    ("complete", {"return_token_ids": True}),
    ("chat", {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}),
    ("chat", {"tools": TOOLS, "logprobs": True}),
    ("chat", {"tools": TOOLS, "stop": "two"}),
    ("chat", {}),
    ("complete", {"n": 2, "stop": "three"}),
]
ANSWERS = [TEXT, "a🦙b 삼겹살", f"<think>one\n</think>{CALL}two {CALL}three", f" one {CALL[:30]}"]


@settings(max_examples=examples(150))
@given(
    st.sampled_from(BODIES),
    st.sampled_from(ANSWERS),
    st.sampled_from([None, THINKING_TEMPLATE]),
    st.lists(st.integers(1, 9), max_size=10),
    st.sampled_from([2, 11, 200]),
)
def test_stream_equals_whole_in_any_steps(
    case: tuple[str, dict[str, Any]], text: str, template: str | None, sizes: list[int], max_tokens: int
) -> None:
    path, fields = case
    body = {**fields, "max_tokens": max_tokens}
    whole = whole_choice(chat_edge(text, template), path, **body)
    streamed = streamed_choice(chat_edge(text, template, sizes), path, **body)
    for answer in (whole, streamed):
        message = answer.get("message", {})
        message.pop("reasoning", None) if not message.get("reasoning") else None
        for call in message.get("tool_calls", []):
            call.pop("id")
    names = whole.keys() & {"logprobs", "finish_reason", "stop_reason", "text", "message", "token_ids"}
    assert {name: streamed[name] for name in names} == {name: whole[name] for name in names}
