"""Steps that wait are joined, and nothing of them is lost."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from replica.messages import (
    FinishReason,
    GenerateRequest,
    RequestId,
    SamplingParams,
    SequenceInput,
    SequenceOutput,
    Stages,
    TokenLogprobs,
)
from router.backend import TokenEvent
from router.event_buffer import MAX_JOINED, EventBuffer, join
from router.live_stream import LiveStream


def step(number: int, indices: list[int], **more: Any) -> list[TokenEvent]:
    logprobs = [TokenLogprobs(-float(number), 1)]
    return [TokenEvent(index, [number * 10 + index], logprobs=logprobs, **more) for index in indices]


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True), max_size=20),
    st.lists(st.booleans(), min_size=20, max_size=20),
)
def test_every_token_comes_out_once_and_in_order(steps: list[list[int]], reads: list[bool]) -> None:
    buffer = EventBuffer()
    seen: list[TokenEvent] = []
    for number, (indices, reads_now) in enumerate(zip(steps, reads, strict=False)):
        buffer.push(step(number, indices))
        while reads_now and buffer:
            seen += buffer.pop()
    while buffer:
        seen += buffer.pop()
    for index in range(4):
        mine = [event for event in seen if event.index == index]
        assert [token for event in mine for token in event.token_ids] == [
            number * 10 + index for number, indices in enumerate(steps) if index in indices
        ]
        assert [-entry.logprob for event in mine for entry in event.logprobs] == [
            number for number, indices in enumerate(steps) if index in indices
        ]


def test_reader_that_keeps_up_sees_each_step_as_it_came() -> None:
    buffer = EventBuffer()
    for number in range(3):
        events = step(number, [0, 1])
        buffer.push(events)
        assert buffer.pop() is events


def test_what_comes_first_and_last_is_kept() -> None:
    buffer = EventBuffer()
    prompt = [TokenLogprobs(-1.0, 1)]
    buffer.push([TokenEvent(0, [1], None, None, 32, [], prompt, Stages(1.0))])
    buffer.push([TokenEvent(0, [2])])
    assert join(buffer.pop()[0], TokenEvent(0, [9])).stages == Stages(1.0)
    buffer.push([TokenEvent(0, [1], None, None, 32, [], prompt, Stages(1.0))])
    buffer.push([TokenEvent(0, [2])])
    buffer.push([TokenEvent(0, [7], FinishReason.STOP, 7, 0, [], [], Stages(1.0, 2.0, 3.0, 1))])
    assert buffer.pop() == [TokenEvent(0, [1, 2, 7], FinishReason.STOP, 7, 32, [], prompt, Stages(1.0, 2.0, 3.0, 1))]
    assert not buffer


def test_one_list_is_never_long() -> None:
    buffer = EventBuffer()
    for number in range(10 * MAX_JOINED):
        buffer.push(step(number, [0]))
    assert len(buffer) == 10
    top = TokenLogprobs(-1.0, 1, [1] * 20, [-1.0] * 20)
    buffer = EventBuffer()
    for _ in range(1000):
        buffer.push([TokenEvent(0, [1], logprobs=[top])])
    assert max(len(buffer.pop()[0].token_ids) for _ in range(len(buffer))) <= MAX_JOINED / 21 + 1


def test_live_stream_joins_what_its_reader_has_not_taken() -> None:
    async def run() -> None:
        request = GenerateRequest(RequestId("r"), [SequenceInput(0, [1], SamplingParams(max_tokens=9))])
        stream = LiveStream(request, lambda request_id, indices: None, lambda request_id: None)
        for token_id in range(8):
            stream.push([SequenceOutput(RequestId("r"), 0, [token_id])])
        stream.push([SequenceOutput(RequestId("r"), 0, [8], FinishReason.LENGTH)])
        lists = [events async for events in stream]
        assert [event.token_ids for events in lists for event in events] == [list(range(9))]
        assert lists[0][0].finish_reason is FinishReason.LENGTH

    asyncio.run(run())
