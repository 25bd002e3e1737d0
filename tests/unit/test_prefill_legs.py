"""What a prefill replica is asked for."""

from __future__ import annotations

import pytest

from replica.messages import GenerateRequest, KVSink, ReplicaId, RequestId, SamplingParams, SequenceInput
from router.instructions import DispatchPrefill
from router.prefill_legs import leg_of

SHARED, OTHER = [1, 2, 3], [4, 5, 6]


@pytest.mark.parametrize(("prompts", "num_cached"), [([SHARED, SHARED], 32), ([SHARED, OTHER], 0)], ids=["n", "list"])
def test_what_d_has_of_its_prompt_is_not_sent_and_of_other_prompts_nothing_is_known(
    prompts: list[list[int]], num_cached: int
) -> None:
    sequences = [SequenceInput(i, prompt, SamplingParams(9)) for i, prompt in enumerate(prompts)]
    order = DispatchPrefill(RequestId("r"), ReplicaId("p"), RequestId("h~1"), "h", [1], num_cached_tokens=32)
    leg = leg_of(GenerateRequest(RequestId("r"), sequences), order)
    assert leg.kv_sink == KVSink("h", num_cached)
    assert [(one.index, one.sampling.max_tokens) for one in leg.sequences] == [(1, 1)]
    assert leg.request_id == "h~1"
