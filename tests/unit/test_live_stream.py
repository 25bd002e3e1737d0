"""A stream at the router: what it asks of the next replica when it moves."""

from __future__ import annotations

import msgspec

from replica.messages import FinishReason, GenerateRequest, RequestId, SamplingParams, SequenceInput, SequenceOutput
from router.live_stream import LiveStream

SAMPLING = SamplingParams(max_tokens=4, num_prompt_logprobs=1)
REQUEST = GenerateRequest(RequestId("q"), [SequenceInput(index, [1, 2, 3], SAMPLING) for index in range(2)])


def nothing(*_: object) -> None:
    """Nobody listens."""


def test_logprobs_of_a_prompt_that_were_told_are_not_asked_for_again() -> None:
    stream = LiveStream(REQUEST, nothing, nothing)
    assert stream.to_submit(is_returning=False) is REQUEST
    stream.push([SequenceOutput(REQUEST.request_id, 0, [5])])
    asked = stream.to_submit(is_returning=True)
    assert asked.is_returning
    first, second = asked.sequences
    assert first == msgspec.structs.replace(
        REQUEST.sequences[0],
        output_token_ids=[5],
        sampling=msgspec.structs.replace(SAMPLING, num_prompt_logprobs=None),
    )
    assert second == REQUEST.sequences[1]


def test_a_sequence_that_ended_is_neither_wanted_nor_asked_for() -> None:
    stream = LiveStream(REQUEST, nothing, nothing)
    stream.push([SequenceOutput(REQUEST.request_id, 0, [5], FinishReason.LENGTH)])
    assert [stream.wants(index) for index in (0, 1)] == [False, True]
    assert [sequence.index for sequence in stream.to_submit(is_returning=True).sequences] == [1]
    stream.finish(1)
    assert stream.is_finished
