"""Who joins the running ones: passing a head that does not fit, and lanes for long prompts."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from cluster.config import load
from replica.config import SchedulerConfig
from replica.errors import ConfigError
from replica.messages import FinishReason
from replica.prefill_lanes import PrefillLanes
from tests.unit.engine_harness import Harness, reference


def crowded(**knobs: Any) -> Harness:
    """Ten blocks: seven are taken for a while, and the head wants six."""
    h = Harness(num_blocks=10, max_num_seqs=20, **knobs)
    h.submit("holder", [1] * 20, 8, arrival=0.0)
    h.step()
    h.submit("head", [2] * 24, 1, arrival=1.0)
    return h


def test_small_ones_pass_a_head_that_does_not_fit_so_many_times_and_no_more() -> None:
    h = crowded(max_head_passes=3)
    for number in range(6):
        h.submit(f"small {number}", [10 + number] * 2, 1, arrival=2.0 + number)
    h.step()
    assert sorted(h.ends) == ["small 0", "small 1", "small 2"]
    h.step()
    assert h.names(h.core.scheduler.queued)[0] == "head"
    assert len(h.ends) == 3, "three have passed it: now freed blocks are for the head"
    while "head" not in h.ends:
        assert not {"small 3", "small 4", "small 5"} & h.ends.keys()
        h.step()
    h.run()
    assert len(h.ends) == 8
    assert h.tokens["head"] == reference([2] * 24, 1)


def test_nobody_is_passed_where_that_is_switched_off() -> None:
    for name in ("admission_look_past", "max_head_passes"):
        h = crowded(**{name: 0})
        h.submit("small", [3] * 2, 1, arrival=2.0)
        h.step()
        assert h.names(h.core.scheduler.queued) == ["head", "small"]


def test_no_more_are_left_behind_in_a_step_than_allowed() -> None:
    for look_past, passes in ((2, False), (3, True)):
        h = crowded(admission_look_past=look_past)
        for number in range(2):
            h.submit(f"big {number}", [5 + number] * 24, 1, arrival=2.0 + number)
        h.submit("small", [3] * 2, 1, arrival=9.0)
        h.step()
        assert ("small" in h.ends) is passes
        h.run()
        assert len(h.ends) == 5


def test_a_sequence_behind_the_head_is_protected_as_well() -> None:
    """Each counts its own passes: the second one is not passed for ever while heads come and go."""
    h = crowded(max_head_passes=2)
    h.submit("second", [6] * 24, 1, arrival=1.5)
    for number in range(4):
        h.submit(f"small {number}", [10 + number] * 2, 1, arrival=2.0 + number)
    h.step()
    assert [h.sequence(name).num_passes for name in ("head", "second")] == [2, 2]
    order = []
    while h.core.num_unfinished:
        h.step()
        order += [name for name in h.ends if name not in order]
    assert order.index("second") < order.index("small 2")


def test_a_long_prompt_beside_one_short_one_leaves_it_half_of_the_step() -> None:
    """Also where the threshold is not below the budget, which alone would give the long one whole steps."""
    for threshold in (8, 64):
        h = Harness(
            max_num_batched_tokens=16,
            long_prefill_token_threshold=threshold,
            max_long_partial_prefills=1,
            num_blocks=200,
        )
        h.submit("long", list(range(200)))
        h.step()
        h.submit("short", [1, 2, 3, 4, 5])
        assert h.step() == {"long": 8, "short": 5}
        h.run()
        assert h.tokens == {"long": reference(list(range(200)), 8), "short": reference([1, 2, 3, 4, 5], 8)}


def test_two_long_prompts_share_that_half() -> None:
    h = Harness(max_num_batched_tokens=16, long_prefill_token_threshold=6, max_long_partial_prefills=2, num_blocks=200)
    h.submit("one", [1] * 100)
    h.submit("two", [2] * 100)
    h.step()
    h.submit("short", [3] * 6)
    assert h.step() == {"one": 6, "two": 2, "short": 6}


def test_a_short_prompt_in_the_middle_counts_as_well_as_one_that_waits() -> None:
    h = Harness(max_num_batched_tokens=8, long_prefill_token_threshold=8, max_long_partial_prefills=1, num_blocks=200)
    h.submit("long", [1] * 100)
    h.step()
    h.submit("short", [2] * 8)
    assert [h.step() for _ in range(2)] == [{"long": 4, "short": 4}] * 2


def test_a_long_prompt_that_is_alone_gets_all_that_the_threshold_allows() -> None:
    h = Harness(max_num_batched_tokens=16, long_prefill_token_threshold=64, max_long_partial_prefills=1, num_blocks=200)
    h.submit("long", list(range(200)))
    assert h.step() == {"long": 16}


def test_long_prompts_wait_for_their_lane_and_short_ones_pass_them() -> None:
    h = Harness(max_num_batched_tokens=32, long_prefill_token_threshold=8, max_long_partial_prefills=1, num_blocks=200)
    for number in range(5):
        h.submit(f"long {number}", [number] * 40, 2, arrival=float(number))
    h.submit("short", [9, 9, 9], 2, arrival=9.0)
    assert h.step() == {"long 0": 8, "short": 3}
    assert [h.sequence(f"long {number}").num_passes for number in (1, 2)] == [0, 0], "lanes are not about blocks"
    started = ["long 0"]
    while h.core.num_unfinished:
        under_way = [s for s in h.core.scheduler.running if s.num_uncomputed_tokens > 8]
        assert len(under_way) <= 1
        h.step()
        started += [n for n in h.running() if n.startswith("long") and n not in started]
    assert started == [f"long {number}" for number in range(5)]
    assert len(h.ends) == 6


def test_the_last_piece_of_a_long_prompt_is_not_long_any_more() -> None:
    h = Harness(max_num_batched_tokens=32, long_prefill_token_threshold=8, max_long_partial_prefills=1, num_blocks=200)
    h.submit("first", [1] * 20, 2)
    h.submit("second", [2] * 20, 2)
    assert [h.step() for _ in range(3)] == [{"first": 8}, {"first": 8}, {"first": 4, "second": 8}]


def test_a_prompt_that_is_mostly_cached_is_not_long() -> None:
    h = Harness(max_num_batched_tokens=32, long_prefill_token_threshold=8, max_long_partial_prefills=1, num_blocks=200)
    prompt = list(range(40))
    h.submit("before", prompt, 1)
    h.run()
    h.submit("long", [5] * 40)
    h.submit("again", [*prompt, 1])
    assert h.step() == {"long": 8, "again": 1 + 40 % 4}


def test_so_many_prompts_are_left_unfinished_and_no_more() -> None:
    h = Harness(max_num_batched_tokens=24, long_prefill_token_threshold=8, max_partial_prefills=2, num_blocks=200)
    for number in range(3):
        h.submit(f"q{number}", [number] * 30)
    h.submit("whole", [7] * 8)
    assert h.step() == {"q0": 8, "q1": 8, "whole": 8}, "one that is finished in this step needs no place"


def test_limits_that_do_nothing_are_refused() -> None:
    with pytest.raises(ValidationError, match="no prompt is long"):
        SchedulerConfig(max_long_partial_prefills=1)
    with pytest.raises(ConfigError, match=r"max_long_partial_prefills is 1.*set both or none"):
        load({"scheduler": {"max_long_partial_prefills": 1}})


def test_lanes_are_wide_open_by_default() -> None:
    lanes = PrefillLanes(0)
    assert lanes.is_open
    lanes.enter(1_000_000, 5)
    assert lanes.has_place(1_000_000, 1)
    assert lanes.chunk(1_000_000, 256) == 256


@pytest.mark.parametrize("policy", ["fcfs", "priority", "sjf"])
def test_without_chunks_lanes_do_not_exist(policy: str) -> None:
    h = Harness(
        policy=policy,
        enable_chunked_prefill=False,
        long_prefill_token_threshold=4,
        max_long_partial_prefills=1,
        max_partial_prefills=1,
        max_num_batched_tokens=10,
    )
    h.submit("a", [1] * 40, 3)
    h.submit("b", [2] * 30, 3)
    h.run()
    assert h.ends == {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH}
