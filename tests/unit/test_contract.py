"""Messages, hashes and reports: what routers and replicas have agreed on."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import pytest

from replica import messages as m
from replica.block_hash import chain_hashes, root_hash
from replica.report_schedule import ReportSchedule

SAMPLING = m.SamplingParams(
    7,
    0.5,
    3,
    0.9,
    2**63 - 1,
    1,
    True,
    (5, 6),
    0.1,
    1.2,
    0.3,
    -0.4,
    {5: -100.0, 9: 1.5},
    (1, 2),
    ((1,), (2, 3)),
    0,
    20,
    "g",
)
LOGPROBS = [m.TokenLogprobs(-0.5, 2, [7, 9], [-0.25, -0.5])]
REQUEST = m.GenerateRequest(m.RequestId("r"), [m.SequenceInput(0, [1, 2], SAMPLING, [3])], (1.0, -2, 3.5), "salt", 9.0)
LOAD = m.ReplicaLoad(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1.5, {"x": 1.0})
MESSAGES: list[Any] = [
    m.Submit(REQUEST, 4),
    m.Abort(m.RequestId("r"), [0, 2]),
    m.Abort(m.RequestId("r")),
    m.SubmitReply(m.RequestId("r"), 4, LOAD, m.RefusalReason.QUEUE_FULL, "why"),
    m.StepOutput(
        "i", LOAD, [m.SequenceOutput(m.RequestId("r"), 1, [9], m.FinishReason.STOP, 9, 16)], [m.KVEvent([b"a"])]
    ),
    m.StepOutput(
        "i",
        LOAD,
        [
            m.SequenceOutput(
                m.RequestId("r"),
                0,
                [9],
                m.FinishReason.INVALID,
                logprobs=LOGPROBS,
                prompt_logprobs=LOGPROBS,
                stages=m.Stages(0.5, 0.25, None, 2),
                message="why",
            )
        ],
    ),
    m.Draining(3.5),
    m.ResetPrefixCache("x"),
    m.ResetDone("x"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_survive_the_wire_and_pickle(message: m.DownMessage | m.UpMessage) -> None:
    data = m.encode(message)
    decode = m.decode_down if isinstance(message, m.Submit | m.Abort | m.ResetPrefixCache) else m.decode_up
    assert decode(data) == message
    assert pickle.loads(pickle.dumps(message)) == message


def test_a_message_of_the_other_direction_or_garbage_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        m.decode_up(m.encode(MESSAGES[0]))
    with pytest.raises(msgspec.DecodeError):
        m.decode_down(b"\xc1")
    with pytest.raises(msgspec.DecodeError):
        m.decode_down(msgspec.msgpack.encode({"type": "submit", "request": [1]}))


def test_hashes_are_the_same_in_every_process_and_release() -> None:
    """A change of these constants makes every stored cache and every mixed-version cluster disagree."""
    root = root_hash("model", "salt", "adapter")
    assert root.hex() == "3cd3e0ee4a8a84fd5d871d723f2c88cf"
    assert chain_hashes(root, list(range(8)), 4)[-1].hex() == "a979c82a4d63e97b6b00bfd20c248571"
    assert chain_hashes(root, list(range(8)), 4) == chain_hashes(root, list(range(9)), 4)


def test_a_chain_can_be_extended_block_by_block() -> None:
    root, tokens = root_hash("m"), list(range(64))
    whole = chain_hashes(root, tokens, 16)
    parent, parts = root, []
    for start in range(0, 64, 16):
        parts += chain_hashes(parent, tokens[start : start + 16], 16)
        parent = parts[-1]
    assert parts == whole
    assert len(set(whole)) == 4
    assert chain_hashes(root, tokens[:15], 16) == []


def test_everything_that_must_not_share_has_another_root() -> None:
    roots = {
        root_hash("m"),
        root_hash("n"),
        root_hash("m", "s"),
        root_hash("m", "", "s"),
        root_hash("m", "ss"),
        root_hash("ms"),
    }
    assert len(roots) == 6


def test_reports_go_with_tokens_after_refusals_and_now_and_then() -> None:
    a, b, c = m.RouterId("a"), m.RouterId("b"), m.RouterId("c")
    reports = ReportSchedule(interval_s=0.05)
    for router_id in (a, b, c):
        reports.sent(router_id, 1.0)
    reports.refused(b)
    assert reports.due(1.01, {a: []}) == [a, b]
    reports.sent(b, 1.01)
    assert reports.due(1.02, {}) == []
    assert reports.due(1.055, {}) == [a, c]
    reports.forget(a)
    assert reports.due(9.0, {}) == [b, c]
