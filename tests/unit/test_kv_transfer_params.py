"""vLLM's `kv_transfer_params`, as a proxy between two servers uses them."""

from __future__ import annotations

from typing import Any

import pytest

from replica.messages import KVSink
from tests.unit.http_fakes import Edge, assert_error


def test_what_the_first_answer_says_the_second_request_carries() -> None:
    first = Edge()
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_host": None}
    answer = first.complete(max_tokens=1, kv_transfer_params=asked)
    assert answer.status_code == 200
    (request,) = first.backend.requests
    assert request.kv_sink == KVSink(request.request_id)
    told = answer.json()["kv_transfer_params"]
    assert (told["do_remote_prefill"], told["do_remote_decode"]) == (True, False)
    assert (told["remote_engine_id"], told["remote_host"], told["remote_port"]) == ("replica-0", "127.0.0.1", 7001)
    assert told["remote_num_tokens"] == answer.json()["usage"]["prompt_tokens"]
    second = Edge()
    answer = second.chat(max_tokens=3, kv_transfer_params=told)
    assert answer.status_code == 200
    assert "kv_transfer_params" not in answer.json()
    assert second.backend.requests[0].kv_sink is None


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ("x", "kv_transfer_params is 'x'; allowed: an object, or null."),
        ({"do_remote_decode": 1}, "kv_transfer_params.do_remote_decode is 1; allowed: true or false."),
        (
            {"remote_port": 65536},
            "kv_transfer_params.remote_port is 65536; allowed: an integer from 0 to 65535, or null.",
        ),
        ({"remote_block_ids": [[1], "2"]}, "allowed: a list of integers, or of lists of integers, or null."),
        ({"tp_size": -1}, "kv_transfer_params.tp_size is -1; allowed: an integer of at least 0, or null."),
        ({"do_remote_decode": True, "do_remote_prefill": True}, "allowed: one of them."),
    ],
)
def test_what_cannot_be_is_named(params: Any, sentence: str) -> None:
    told = assert_error(Edge().complete(kv_transfer_params=params), 400, "kv_transfer_params")
    assert told.endswith(sentence)


def test_a_stream_has_no_place_for_the_answer() -> None:
    told = assert_error(
        Edge().complete(stream=True, kv_transfer_params={"do_remote_decode": True}), 400, "kv_transfer_params"
    )
    assert told.endswith("allowed: stream false.")
