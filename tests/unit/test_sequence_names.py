"""Columns of plain tokens, read back at the router."""

from __future__ import annotations

from collections.abc import Sequence

from replica import messages as m
from router.sequence_names import SequenceNames

HERE, THERE = m.ReplicaId("here"), m.ReplicaId("there")
Q, P = m.RequestId("q"), m.RequestId("p")


def first(request_id: m.RequestId, index: int, seq_id: int, num_cached: int = 0) -> m.SequenceOutput:
    return m.SequenceOutput(request_id, index, [1], num_cached_tokens=num_cached, seq_id=seq_id)


def step(outputs: list[m.SequenceOutput], seq_ids: Sequence[int] = (), token_ids: Sequence[int] = ()) -> m.StepOutput:
    return m.StepOutput("i", m.ReplicaLoad(), outputs, seq_ids=list(seq_ids), token_ids=list(token_ids))


def test_a_plain_token_reads_like_a_record_of_its_own() -> None:
    names = SequenceNames()
    told = [first(Q, 1, 70, num_cached=16), first(P, 0, 71)]
    assert names.expand(HERE, step(told), {Q, P}) == told
    ended = m.SequenceOutput(P, 0, [9], m.FinishReason.STOP)
    assert names.expand(HERE, step([ended], seq_ids=[71, 70], token_ids=[5, 6]), {Q, P}) == [
        ended,
        m.SequenceOutput(P, 0, [5]),
        m.SequenceOutput(Q, 1, [6], num_cached_tokens=16),
    ]


def test_numbers_are_those_of_one_replica() -> None:
    names = SequenceNames()
    names.expand(HERE, step([first(Q, 0, 3)]), {Q})
    names.expand(THERE, step([first(P, 0, 3)]), {P})
    assert names.expand(HERE, step([], seq_ids=[3], token_ids=[5]), {Q, P})[0].request_id == Q
    names.forget_replica(HERE)
    assert names.expand(HERE, step([], seq_ids=[3], token_ids=[5]), {Q, P}) == []
    assert names.expand(THERE, step([], seq_ids=[3], token_ids=[5]), {Q, P})[0].request_id == P
    names.forget(Q)


def test_nothing_is_kept_for_requests_that_are_over() -> None:
    names = SequenceNames()
    names.expand(HERE, step([first(Q, 0, 3), first(Q, 1, 4), first(P, 0, 5)]), {Q})
    assert len(names) == 2, "p ended here before its first token came"
    names.forget(Q)
    names.forget(Q)
    assert len(names) == 0
    assert names.expand(HERE, step([], seq_ids=[3, 4, 5], token_ids=[1, 2, 3]), set()) == []
    ended = m.SequenceOutput(Q, 0, [1], m.FinishReason.LENGTH, seq_id=9)
    assert names.expand(HERE, step([ended]), {Q}) == [ended]
    assert len(names) == 0, "a sequence of one token needs no name"
