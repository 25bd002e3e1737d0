"""Frames in shared memory: in order, never overwritten unread, and a close wakes whoever waits."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from replica.messages import SamplingParams, TokenLogprobs
from replica.step import NewSequence, StepPlan, StepResult
from replica.step_channel import (
    HAS_SHARED_MEMORY,
    NUM_SLOTS,
    SLOT_BYTES,
    ChannelClosed,
    FrameReader,
    FrameWriter,
    Pulse,
    decode_step,
    encode_step,
)

pytestmark = pytest.mark.skipif(not HAS_SHARED_MEMORY, reason="needs Linux and its futex on a known machine")


@pytest.fixture
def writer() -> Iterator[FrameWriter]:
    made = FrameWriter(2)
    yield made
    made.release()


@pytest.fixture
def readers(writer: FrameWriter) -> list[FrameReader]:
    return [FrameReader(os.dup(writer.descriptor), index) for index in range(2)]


def test_every_reader_gets_every_frame_in_order(writer: FrameWriter, readers: list[FrameReader]) -> None:
    for turn in range(3 * NUM_SLOTS):
        frame = bytes([turn]) * (turn * 1000)
        assert writer.publish(frame)
        assert [reader.next() for reader in readers] == [frame, frame]


def test_a_slot_that_somebody_has_not_read_is_not_given_again(writer: FrameWriter, readers: list[FrameReader]) -> None:
    for turn in range(NUM_SLOTS):
        assert writer.has_room
        writer.publish(bytes([turn]))
    assert [readers[0].next() for _ in range(NUM_SLOTS)] == [bytes([turn]) for turn in range(NUM_SLOTS)]
    assert not writer.has_room
    with pytest.raises(AssertionError, match="has not read"):
        writer.publish(b"too early")
    readers[1].next()
    assert writer.has_room


def test_who_is_excused_holds_up_nobody(writer: FrameWriter, readers: list[FrameReader]) -> None:
    writer.excuse(1)
    for _ in range(3 * NUM_SLOTS):
        writer.publish(b"x")
        readers[0].next()
    assert writer.has_room


def test_a_frame_that_is_too_long_is_told_and_the_next_one_fits(
    writer: FrameWriter, readers: list[FrameReader]
) -> None:
    assert not writer.publish(b"x" * SLOT_BYTES)
    assert writer.publish(b"y")
    for reader in readers:
        assert reader.next() is None
        assert reader.next() == b"y"


def test_a_sleeping_reader_is_woken_by_a_frame_and_by_the_end(writer: FrameWriter, readers: list[FrameReader]) -> None:
    got: list[object] = []

    def read() -> None:
        try:
            while True:
                got.append(readers[0].next())
        except ChannelClosed:
            got.append("closed")

    thread = threading.Thread(target=read)
    thread.start()
    writer.publish(b"a")
    writer.publish(b"b")
    while len(got) < 2:
        os.sched_yield()
    writer.close()
    thread.join(10)
    assert got == [b"a", b"b", "closed"]
    with pytest.raises(ChannelClosed):
        readers[1].next()  # who comes late has nothing to do with old frames


def test_a_damaged_frame_is_never_taken_for_a_good_one(writer: FrameWriter, readers: list[FrameReader]) -> None:
    writer.publish(b"good")
    writer._memory[4096 + 12] ^= 1
    with pytest.raises(ChannelClosed, match="damaged"):
        readers[0].next()


def test_a_step_carries_what_rank_0_chose_and_leaves_out_what_only_routers_want() -> None:
    plan = StepPlan(3, [1], [4], [1], [NewSequence(1, [1, 2], 2, [0], SamplingParams(4))], {1: [7]}, [9], {1: [5]})
    told = StepResult(2, [1], [8], 0.1, more={1: [3]}, failed={2: "no"})
    full = StepResult(2, [1], [8], 0.1, {1: TokenLogprobs(-1.0, 1)}, {1: [TokenLogprobs(-2.0, 2)]}, {2: "no"}, {1: [3]})
    assert decode_step(encode_step(plan, None)) == (plan, None)
    assert decode_step(encode_step(plan, full)) == (plan, told)
    # a step without a token has to be told as well: a rank counts on it
    assert decode_step(encode_step(plan, StepResult(2, [], []))) == (plan, StepResult(2, [], []))


def test_signs_of_life_are_seen_through_another_mapping() -> None:
    ours = Pulse(3)
    theirs = Pulse(3, os.dup(ours.descriptor))
    theirs.reset(2)
    theirs.begin_step(2)
    theirs.set_in_collective(2, True)
    assert ours.steps(2) == (1, 0)
    assert ours.is_waiting_for_peers(2)
    theirs.end_step(2)
    theirs.beat(2)
    assert ours.steps(2) == (1, 1)
    assert ours.silent_s(2) < 5 < ours.silent_s(0)
    ours.reset(2)
    assert theirs.steps(2) == (0, 0)
    ours.release()
