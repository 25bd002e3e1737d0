"""A stream that loses its replica at any output position ends with the bytes of an undisturbed one. Fake runner: tokens
are a hash of the whole prefix, so one that is lost, doubled or made from another prefix changes all after it.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.dispatcher import DispatcherConfig
from tests.api.fake_text import EOS, fake_tokenizer, fake_vocab_size
from tests.cluster.recovery import (
    CHAT,
    COMPLETIONS,
    Case,
    Reader,
    RecoveryPlane,
    by_choice,
    fake_runner,
    recovery_plane,
    uncached,
    until,
)

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

VOCAB = fake_vocab_size()
PROMPT = {"prompt": "Count: one two three", "max_tokens": 64, "temperature": 0, "ignore_eos": True}
HELLO = {"messages": [{"role": "user", "content": "Say hello"}], "max_tokens": 64, "temperature": 0, "ignore_eos": True}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SEEDED = {"temperature": 0.9, "seed": 11}
CALL = 'The sky. <tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CASES = [
    Case("greedy", COMPLETIONS, PROMPT),
    Case("greedy chat", CHAT, HELLO),
    Case("seeded", COMPLETIONS, {**PROMPT, **SEEDED}),
    Case("seeded chat", CHAT, {**HELLO, **SEEDED}),
    Case("logprobs", COMPLETIONS, {**PROMPT, "logprobs": 3}),
    Case("logprobs of a chat", CHAT, {**HELLO, "logprobs": True, "top_logprobs": 2}),
    Case("echo", COMPLETIONS, {**PROMPT, "echo": True, "logprobs": 1, "return_token_ids": True}),
    Case(
        "min_tokens",
        COMPLETIONS,
        {**PROMPT, "ignore_eos": False, "min_tokens": 40, "allowed_token_ids": [*EOS, 30, 40]},
        41,
    ),
    Case("bad_words", COMPLETIONS, {**PROMPT, "bad_words": ["e", "a", ">", "@"]}),
]


def plane_of(script: str = "", **more: Any) -> Any:
    """A plane over fake runners, which say `script` if there is one."""
    runner = fake_runner(VOCAB, EOS, fake_tokenizer().encode(script) if script else ())
    return recovery_plane(runner, fake_tokenizer(), vocab_size=VOCAB, **more)


def covered(positions: list[list[int]]) -> set[int]:
    return {position for choices in positions for position in choices}


async def check_all_positions(plane: RecoveryPlane, case: Case) -> list[Any]:
    """Streams: the last messages before the cut are lost (in the last position that is the end itself), and the next
    replica is lost as well. Whole answers: one clean cut. Returns what an undisturbed client reads.
    """
    for kind in (case, case.streamed()):
        told, num_tokens = await plane.undisturbed(kind)
        assert num_tokens >= case.num_tokens
        losses: list[dict[str, int]] = [{}] if kind is case else [{"num_lost_steps": 2}, {"again_after": 5}]
        for loss in losses:
            readers, positions = await plane.staggered(kind, num_tokens, **loss)
            assert covered(positions) >= set(range(num_tokens))
            for reader, at in zip(readers, positions, strict=True):
                # of its first attempts, which gave it no token, the next may find something in the cache
                expected, read = (told, reader.told()) if at[0] else (uncached(told), uncached(reader.told()))
                assert read == expected, f"{kind.name}, {loss}: cut after {at} tokens"
    return told


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_every_position_gives_the_bytes_of_an_undisturbed_run(case: Case) -> None:
    async with plane_of() as plane:
        *_, usage, done = await check_all_positions(plane, case)
        assert done == "[DONE]"
        assert usage["usage"]["completion_tokens"] >= case.num_tokens


async def test_logprobs_of_a_prompt_are_told_once() -> None:
    """They come with the first token; whoever is cut before it asks the next replica for them, and nobody else does."""
    async with plane_of() as plane:
        case = Case("prompt logprobs", CHAT, {**HELLO, "prompt_logprobs": 1, "n": 2})
        told, num_tokens = await plane.undisturbed(case)
        readers, positions = await plane.staggered(case, num_tokens, num_lost_steps=1)
        assert covered(positions) >= set(range(num_tokens))
        assert all(reader.told() == told for reader in readers)


async def test_with_guesses_a_step_gives_several_tokens_and_the_text_is_the_same() -> None:
    """How tokens fall into steps depends on guesses, so chunks may differ; what they say together may not."""
    text = "The sky is blue, the sky is blue, the sky is blue, the sky is blue, the sky is blue and the sea is wide."
    async with plane_of(text, num_speculative_tokens=3) as plane:
        case = Case("guesses", COMPLETIONS, {**PROMPT, "ignore_eos": False, "max_tokens": 100})
        (told,), num_tokens = await plane.undisturbed(case)
        assert told["choices"][0]["text"] == text
        readers, positions = await plane.staggered(case, num_tokens - 4, num_lost_steps=1)
        assert len(covered(positions)) > num_tokens / 4
        assert all(reader.told() == [told] for reader in readers)


@pytest.mark.parametrize("include", [False, True], ids=["without", "with"])
async def test_a_stop_string_is_found_wherever_the_cut_falls_into_it(include: bool) -> None:
    text = "Count: one two three four five six seven eight nine ten and write a story about a small boat to the world"
    async with plane_of(text) as plane:
        more = {"ignore_eos": False, "stop": ["small boat to", "small bottle"], "include_stop_str_in_output": include}
        *chunks, usage, _ = await check_all_positions(plane, Case("stop", COMPLETIONS, {**PROMPT, **more}, 10))
        last = chunks[-1]["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", "small boat to")
        said = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert said == text[: text.index("small boat") + (len("small boat to") if include else 0)]
        tokens = fake_tokenizer().encode(text)
        end = next(n for n in range(len(tokens)) if "small boat to" in fake_tokenizer().decode(tokens[:n]))
        assert usage["usage"]["completion_tokens"] == end
        assert fake_tokenizer().decode(tokens[: end - 1]).endswith("small boat"), "the stop string is several tokens"


async def test_a_tool_call_is_told_once_wherever_the_cut_falls_into_it() -> None:
    async with plane_of(CALL) as plane:
        case = Case("tools", CHAT, {**HELLO, "ignore_eos": False, "max_tokens": 200, "tools": [WEATHER]})
        *chunks, _, _ = await check_all_positions(plane, case)
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        calls = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
        assert [call["function"]["name"] for call in calls if "name" in call["function"]] == ["get_weather"]
        assert json.loads("".join(call["function"].get("arguments", "") for call in calls)) == {"city": "Paris"}


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_copies_at_different_positions(is_streamed: bool) -> None:
    """A step has room for one prompt, so copies begin after the first one."""
    async with plane_of(num_batched_tokens=399) as plane:
        case = Case("n=3", COMPLETIONS, {**PROMPT, **SEEDED, "prompt": [5 + n % 200 for n in range(200)], "n": 3})
        kind = case.streamed() if is_streamed else case
        told, num_tokens = await plane.undisturbed(kind)
        readers, positions = await plane.staggered(kind, num_tokens, num_lost_steps=1)
        assert covered(positions) >= set(range(num_tokens))
        assert sum(len(set(choices)) > 1 for choices in positions) > num_tokens / 2
        for reader, at in zip(readers, positions, strict=True):
            assert by_choice(reader.told()) == by_choice(told), f"cut after {at} tokens"


async def test_copies_that_ended_at_stop_strings_are_not_continued() -> None:
    """The router ends a copy, its replica hears of it later or never; the others go on elsewhere."""
    async with plane_of() as plane:
        body = {**PROMPT, "temperature": 0.9, "seed": 31, "n": 3, "stop": ["q", "Z"], "max_tokens": 200}
        case = Case("stop in copies", COMPLETIONS, body).streamed()
        told, num_tokens = await plane.undisturbed(case)
        ends = [n for n, event in enumerate(told) if event != "[DONE]" and any(c["stop_reason"] for c in finals(event))]
        assert len(ends) == 3
        assert ends[0] + 20 < ends[2]
        readers, positions = await plane.staggered(case, num_tokens, num_lost_steps=1)
        assert {len(set(choices)) for choices in positions} == {1, 2}, "a copy had ended in some, in others not"
        for reader, at in zip(readers, positions, strict=True):
            assert by_choice(reader.told()) == by_choice(told), f"cut after {at} tokens"


def finals(event: dict[str, Any]) -> list[dict[str, Any]]:
    """Entries of `choices` that end one."""
    return [choice for choice in event["choices"] if choice["finish_reason"]]


async def test_a_cut_in_the_middle_of_a_prompt() -> None:
    async with plane_of(num_batched_tokens=32) as plane:
        case = Case("prefill", COMPLETIONS, {**PROMPT, "prompt": [5 + n % 200 for n in range(100)]}).streamed()
        told, _ = await plane.undisturbed(case)
        for num_steps in range(4):
            await plane.place_on(plane.replicas[0])
            reader = await plane.add(case)
            for _ in range(num_steps):
                await plane.step(plane.replicas[0])
            assert [len(stream._emitted[0]) for stream in plane.backend._streams.values()] == [0]
            await plane.cut(plane.replicas[0])
            await plane.finish([reader])
            assert reader.told() == told, f"after {num_steps} of 4 pieces"


async def test_usage_counts_prompt_and_cached_tokens_as_the_replica_that_began_told_them() -> None:
    body = {**PROMPT, "prompt": [5 + n % 200 for n in range(40)], "cache_salt": "shared"}
    case = Case("cached", COMPLETIONS, body).streamed()

    def usage(told: list[Any]) -> dict[str, Any]:
        return dict(told[-2]["usage"])

    async with plane_of() as plane:
        cold, _ = await plane.undisturbed(case)
        warm, num_tokens = await plane.undisturbed(case)
        assert usage(cold)["prompt_tokens_details"] == {"cached_tokens": 0}
        assert usage(warm)["prompt_tokens_details"] == {"cached_tokens": 32}
        assert usage(warm)["prompt_tokens"] == 40
        readers, positions = await plane.staggered(case, num_tokens)
        begun = [reader for reader, at in zip(readers, positions, strict=True) if at[0] > 0]
        assert all(reader.told() == warm for reader in begun)
        for reader in readers:  # of those that had not begun, the next replica says it, and there the cache was cold
            assert usage(reader.told()) in (usage(warm), usage(cold))
            assert reader.told()[:-2] == warm[:-2]


async def test_any_number_of_losses_with_a_token_in_between() -> None:
    async with plane_of(dispatcher=DispatcherConfig(admission_wait_s=60.0, max_losses=3)) as plane:
        case = Case("losses", COMPLETIONS, {**PROMPT, **SEEDED}).streamed()
        told, _ = await plane.undisturbed(case)
        await plane.place_on(plane.replicas[0])
        reader = await plane.add(case)
        for number in range(8):
            replica = plane.replicas[number % 2]
            await until(lambda replica=replica: replica.engine.core._requests)
            (stream,) = plane.backend._streams.values()
            while len(stream._emitted[0]) <= number:
                await plane.step(replica)
            await plane.cut(replica)
            await until(lambda: plane.backend.health().detail["replicas_up"] == 2)
        await plane.finish([reader])
        assert reader.told() == told


@pytest.mark.parametrize("num_tokens", [0, 3])
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_three_losses_without_a_token_in_between_are_one_error(is_streamed: bool, num_tokens: int) -> None:
    case = Case("error", CHAT, HELLO)
    async with plane_of(dispatcher=DispatcherConfig(admission_wait_s=60.0, max_losses=3)) as plane:
        first, second = plane.replicas
        await plane.place_on(first)
        reader = await plane.add(case.streamed() if is_streamed else case)
        for _ in range(num_tokens):
            await plane.step(first)
        for replica in (first, second, first):
            await until(lambda replica=replica: replica.engine.core._requests)
            await plane.cut(replica)
            if not reader.task.done():
                await until(lambda: plane.backend.health().detail["replicas_up"] == 2)
        await plane.finish([reader])
        check_error(reader, has_begun=is_streamed and num_tokens > 0)


def check_error(reader: Reader, has_begun: bool) -> None:
    """One error, that says what happened, where this client has to look for it; and nothing after it."""
    assert reader.is_closed
    assert reader.status == (200 if has_begun else 502)
    if has_begun:
        *chunks, body = [json.loads(event.removeprefix(b"data: ")) for event in reader.data.split(b"\n\n")[:-1]]
        assert all("error" not in chunk for chunk in chunks)
        assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
    else:
        body = json.loads(reader.data)
    assert set(body) == {"error"}
    assert body["error"]["code"] == "replica_lost"
    assert "3 replicas died or failed under this request" in body["error"]["message"]
