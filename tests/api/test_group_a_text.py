"""Group A: what the text is, whole and in pieces. Named by case."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from router.tokenizer import Tokenizer
from tests.api.calls import CHAT, PROMPT, answer, chat, chunks_of, complete, error_of, pieces_of, text_of
from tests.api.harness import ApiUnderTest, real_api

#: characters of two to four bytes, Hangul, a letter with a mark, a family of four joined code points
MANY_BYTES = "a🦙b 삼겹살 ď 👩‍👩‍👧"


def not_token_aligned(texts: list[str], length: int) -> str:
    """`length` characters that start and end inside words and inside tokens; `texts[k]` is the text of k tokens."""
    whole = texts[-1]
    borders = {len(text) for text in texts}
    for start in range(len(whole) // 3, len(whole) - length - 1):
        end = start + length
        inside = whole[start - 1 : start + 1].isalpha() and whole[end - 1 : end + 1].isalpha()
        if inside and start not in borders and end not in borders and whole.find(whole[start:end]) == start:
            return whole[start:end]
    raise AssertionError(f"no such place in {whole!r}")


@pytest.mark.slow
@pytest.mark.model
def test_a01_a_stop_string_over_token_borders_shows_nothing_of_itself(real: ApiUnderTest) -> None:
    whole = answer(complete(real, prompt=PROMPT, max_tokens=40, return_token_ids=True))["choices"][0]
    ids = whole["token_ids"][: -1 if whole["finish_reason"] == "stop" else None]  # the eos has no text
    prefixes = [real.http.post("/detokenize", json={"tokens": ids[:k]}).json()["prompt"] for k in range(len(ids) + 1)]
    assert prefixes[-1] == whole["text"]
    stop = not_token_aligned(prefixes, 8)
    expected = whole["text"][: whole["text"].find(stop)]
    completed_by = next(k for k, text in enumerate(prefixes) if stop in text)

    generated = real.counter("generation_tokens")
    body = {"prompt": PROMPT, "max_tokens": 40, "stop": [stop]}
    plain = answer(complete(real, **body))
    assert plain["choices"][0]["text"] == expected
    assert plain["choices"][0]["finish_reason"] == "stop"
    assert plain["choices"][0]["stop_reason"] == stop
    assert plain["usage"]["completion_tokens"] <= completed_by
    real.until(real.is_idle)
    # the step that was under way may give one more token; the rest of the 40 was never computed
    assert real.counter("generation_tokens") - generated <= completed_by + 2

    chunks = chunks_of(complete(real, **body, stream=True, stream_options={"include_usage": True}))
    shown = ""
    for piece in pieces_of(chunks):
        shown += piece
        assert expected.startswith(shown)
    assert shown == expected
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["usage"]["completion_tokens"] <= completed_by


@pytest.mark.slow
@pytest.mark.model
def test_a19_characters_split_over_tokens_come_whole(real: ApiUnderTest, model_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(model_folder)
    ids = tokenizer.encode(MANY_BYTES)
    assert len(ids) > len(MANY_BYTES), "no character is split"
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push(token_id) for token_id in ids] + [detokenizer.flush()]
    assert "".join(pieces) == MANY_BYTES
    assert all("\ufffd" not in piece for piece in pieces)

    # through HTTP: the prompt echoed, and the model made to write the same characters itself
    echoed = {"prompt": MANY_BYTES, "echo": True, "max_tokens": 1}
    whole = text_of(complete(real, **echoed))
    assert whole.startswith(MANY_BYTES)
    assert "".join(pieces_of(chunks_of(complete(real, **echoed, stream=True)))) == whole

    forced: dict[str, Any] = {"max_tokens": 100, "structured_outputs": {"choice": [MANY_BYTES]}}
    assert text_of(chat(real, "Say it", **forced)) == MANY_BYTES
    chunks = chunks_of(chat(real, "Say it", **forced, stream=True, stream_options={"include_usage": True}))
    streamed = pieces_of(chunks[:-1])
    assert "".join(streamed) == MANY_BYTES
    assert all("\ufffd" not in piece for piece in streamed)
    first, *between, last = chunks[:-1]
    assert all(piece for piece in pieces_of(between)), "a chunk without content was sent"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert last["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["usage"]["completion_tokens"] > len(streamed), "no token was held back"


@pytest.mark.model
@pytest.mark.parametrize("stream", [False, True])
def test_a18_a_lone_surrogate_is_refused_and_a_pair_is_a_character(real: ApiUnderTest, stream: bool) -> None:
    def say(escaped: bytes) -> Any:
        body = b'{"messages":[{"role":"user","content":"%s"}],"temperature":0,"max_tokens":3,"stream":%s}'
        data = body % (escaped, b"true" if stream else b"false")
        return real.http.post(CHAT, content=data, headers={"content-type": "application/json"})

    message = error_of(say(rb"\ud800"), 400)
    assert "surrogate" in message
    error_of(say(rb"\udc00\ud800"), 400)  # a pair the wrong way round
    response = say(rb"ok \ud83d\ude00")
    if stream:
        assert pieces_of(chunks_of(response))
    else:
        assert text_of(response) == text_of(chat(real, "ok 😀", max_tokens=3))


@pytest.mark.model
@pytest.mark.slow
def test_a30_greedy_alone_batched_and_in_chunks_is_the_same(real: ApiUnderTest, model_folder: Path) -> None:
    text = " ".join(
        f"In chapter {number} the travellers cross the river and count their coins." for number in range(12)
    )
    tokens = real.http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    prompts = [tokens[offset : offset + length] for offset, length in enumerate((3, 9, 16, 17, 33, 64, 90, 120))]
    assert [len(prompt) for prompt in prompts] == [3, 9, 16, 17, 33, 64, 90, 120]

    def run(api: ApiUnderTest, prompt: list[int], **more: Any) -> list[int]:
        body = answer(complete(api, prompt=prompt, max_tokens=32, ignore_eos=True, return_token_ids=True, **more))
        return list(body["choices"][0]["token_ids"])

    def run_together(api: ApiUnderTest, **more: Any) -> list[list[int]]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: run(api, prompt, **more), prompts))

    alone = [run(real, prompt) for prompt in prompts]
    assert all(len(ids) == 32 for ids in alone)
    # our kernels do not depend on who else is in the step, so there is no exception for near ties
    assert run_together(real) == alone
    with real_api(model_folder, budget=16, num_blocks=128) as in_chunks:  # and top_p and seed mean nothing to greedy
        assert run_together(in_chunks, top_p=0.1, seed=7) == alone
