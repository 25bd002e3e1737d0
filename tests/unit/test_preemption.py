"""Who is put back, how often, and that nothing is lost by it."""

from __future__ import annotations

import pytest

from replica.block_manager import BlockManager
from replica.config import SchedulerConfig
from replica.messages import FinishReason, RequestId, RouterId, SamplingParams
from replica.order import make_policy
from replica.preemption import VictimChoice
from replica.running_set import RunningSet
from replica.sequence import Sequence
from tests.unit.engine_harness import Harness, reference

BLOCK = 4


class Running:
    """Sequences that run, admitted in the order of `add`."""

    def __init__(self, num_blocks: int = 100, **scheduler: object) -> None:
        self.config = SchedulerConfig.model_validate(scheduler)
        self.policy = make_policy(self.config)
        self.blocks = BlockManager(num_blocks, BLOCK)
        self.set = RunningSet(BLOCK, is_caching=True)
        self.choice = VictimChoice(self.config, self.policy, self.blocks)
        self.count = 0

    def make(self, prompt: list[int], arrival: float, priority: int = 0, max_tokens: int = 100) -> Sequence:
        self.count += 1
        sequence = Sequence(
            seq_id=self.count,
            request_id=RequestId(str(self.count)),
            index=0,
            router_id=RouterId("r"),
            prompt_token_ids=prompt,
            output_token_ids=[],
            sampling=SamplingParams(max_tokens),
            order_key=(0.0, priority, arrival),
            root=b"",
            max_total_tokens=len(prompt) + max_tokens,
            now=0.0,
        )
        sequence.queue_key = self.policy.key(sequence.order_key, sequence.max_total_tokens, sequence.seq_id)
        return sequence

    def add(self, prompt: list[int], arrival: float = 0.0, priority: int = 0, **rest: int) -> Sequence:
        sequence = self.make(prompt, arrival, priority, **rest)
        assert self.blocks.admit(sequence)
        self.set.add(sequence)
        sequence.num_computed_tokens = sequence.num_tokens
        self.blocks.commit(sequence)
        return sequence


def test_fcfs_puts_back_the_one_admitted_last() -> None:
    r = Running()
    first, _, last = (r.add([i] * 8, arrival=9.0 - i) for i in range(3))
    assert r.choice.for_blocks(first, r.set) is last
    assert r.choice.for_blocks(last, r.set) is last


@pytest.mark.parametrize("policy", ["priority", "sjf"])
def test_other_policies_put_back_the_one_with_the_largest_key(policy: str) -> None:
    r = Running(policy=policy)
    first = r.add([1] * 8, arrival=1.0)
    worst = r.add([2] * 8, arrival=2.0, priority=5, max_tokens=50_000)
    r.add([3] * 8, arrival=3.0)
    assert r.choice.for_blocks(first, r.set) is worst


def test_whoever_was_put_back_often_is_protected_while_anybody_is_not() -> None:
    r = Running(max_preemptions=2)
    first, second, last = (r.add([i] * 8) for i in range(3))
    last.num_preemptions = 2
    assert r.choice.for_blocks(first, r.set) is second
    second.num_preemptions = 2
    assert r.choice.for_blocks(second, r.set) is first
    first.num_preemptions = 2
    assert r.choice.for_blocks(first, r.set) is last, "all are protected: as if nobody were"


def test_by_cost_the_one_with_least_to_compute_again_goes() -> None:
    r = Running(preemption_victim="cost")
    big = r.add([1] * 40)
    small = r.add([2] * 8)
    r.add([3] * 20)
    assert r.choice.for_blocks(big, r.set) is small


def test_by_cost_blocks_that_others_hold_as_well_cost_nothing() -> None:
    r = Running(preemption_victim="cost")
    prompt = list(range(40))
    all_shared = r.add(prompt)
    sharing = r.add([*prompt, 50, 51])
    small = r.add([2] * 8)
    assert [r.blocks.num_held_alone(s) for s in (all_shared, sharing, small)] == [0, 1, 2]
    # none to compute again, but no block to gain either; two; eight
    assert r.choice.for_blocks(small, r.set) is sharing


def test_by_cost_one_that_is_nearly_finished_is_left_alone() -> None:
    r = Running(preemption_victim="cost")
    big = r.add([1] * 40)
    r.add([2] * 8, max_tokens=BLOCK)
    other = r.add([3] * 20, max_tokens=BLOCK + 1)
    assert r.choice.for_blocks(big, r.set) is other


def test_by_cost_nobody_who_outranks_the_needy_one_goes() -> None:
    r = Running(preemption_victim="cost", policy="priority")
    r.add([1] * 8, arrival=5.0, priority=0)
    needy = r.add([2] * 40, arrival=5.0, priority=1)
    assert r.choice.for_blocks(needy, r.set) is needy


def test_by_cost_if_nobody_is_left_the_policy_decides() -> None:
    r = Running(preemption_victim="cost", max_preemptions=1)
    first, last = r.add([1] * 8), r.add([2] * 40)
    first.num_preemptions = last.num_preemptions = 1
    assert r.choice.for_blocks(first, r.set) is last


@pytest.mark.parametrize("victim", ["policy", "cost"])
@pytest.mark.parametrize("policy", ["fcfs", "priority", "sjf"])
@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_pool_that_is_far_too_small_changes_no_token(policy: str, victim: str, most: int) -> None:
    h = Harness(num_blocks=12, policy=policy, preemption_victim=victim, max_preemptions=most, max_num_seqs=6)
    for number in range(8):
        h.submit(f"q{number}", [number] * 9, 24, arrival=float(number), priority=number % 3)
    h.run(5000)
    assert h.core.scheduler.counters.preemptions > 0
    for number in range(8):
        assert h.tokens[f"q{number}"] == reference([number] * 9, 24)


@pytest.mark.parametrize("at", range(1, 24))
def test_a_preemption_at_any_position_changes_no_token(at: int) -> None:
    """C-06 at every position: an urgent request takes the only place when `at` tokens are there."""
    h = Harness(max_num_seqs=1, policy="priority", caching=at % 2 == 0)
    h.submit("patient", [5] * 7, 24, priority=5)
    while len(h.tokens.get("patient", [])) < at:
        h.step()
    h.submit("urgent", [6] * 3, 2, priority=0)
    h.step()
    assert h.running() == ["urgent"]
    h.run()
    assert h.tokens == {"patient": reference([5] * 7, 24), "urgent": reference([6] * 3, 2)}
    assert h.core.scheduler.counters.displaced == 1


def test_an_urgent_one_takes_the_place_of_the_least_urgent() -> None:
    h = Harness(max_num_seqs=3, policy="priority", priority_ageing_s=1000)
    for name, priority in (("a", 2), ("c", 3), ("b", 2)):
        h.submit(name, [ord(name)] * 4, 30, priority=priority)
    h.step()
    h.submit("urgent", [1] * 4, 3, priority=1)
    h.submit("another", [2] * 4, 3, priority=1)
    h.step()
    assert h.running() == ["a", "b", "urgent"], "one a step"
    h.step()
    assert h.running() == ["a", "urgent", "another"], "of equals the later one goes"
    h.run()
    assert {name: h.tokens[name] for name in "abc"} == {name: reference([ord(name)] * 4, 30) for name in "abc"}


def test_nobody_is_displaced_by_an_equal_or_under_another_policy_or_after_long_waiting() -> None:
    for policy, priority, arrival in (("priority", 5, 2.0), ("fcfs", 0, 2.0), ("sjf", 0, 2.0), ("priority", 4, 900.0)):
        h = Harness(max_num_seqs=1, policy=policy, priority_ageing_s=60)
        h.submit("runs", [1] * 4, 30, priority=5, arrival=1.0)
        h.step()
        h.submit("waits", [2] * 4, 3, priority=priority, arrival=arrival)
        h.step()
        assert h.running() == ["runs"], policy


def test_one_sequence_is_displaced_so_often_and_no_more() -> None:
    h = Harness(max_num_seqs=1, policy="priority", priority_ageing_s=1e6, max_preemptions=2)
    h.submit("patient", [5] * 4, 60, priority=5)
    h.step()
    for number in range(5):
        h.submit(f"urgent {number}", [number] * 4, 2)
        while f"urgent {number}" not in h.ends and "patient" not in h.running():
            h.step()
        h.step()
        h.step()
    h.run()
    assert h.core.scheduler.counters.preemptions == 2
    assert h.tokens["patient"] == reference([5] * 4, 60)


def test_an_urgent_one_takes_blocks_as_well_as_places_but_only_if_that_is_enough() -> None:
    def crowd(prompt_tokens: int) -> Harness:
        h = Harness(num_blocks=12, policy="priority", priority_ageing_s=1000, caching=False)
        h.submit("steady", [1] * 15, 12, priority=0)
        h.submit("first", [2] * 11, 12, priority=5)
        h.submit("second", [3] * 11, 12, priority=5)
        h.step()
        h.submit("urgent", [4] * prompt_tokens, 2, priority=1)
        h.step()
        return h

    assert crowd(10).running() == ["steady", "first", "urgent"]
    assert crowd(28).running() == ["steady", "urgent"], "both had to go"
    assert crowd(40).running() == ["steady", "first", "second"], "even both would not be enough"


def test_nobody_is_displaced_for_one_whose_lane_is_full() -> None:
    h = Harness(
        policy="priority",
        max_num_seqs=2,
        long_prefill_token_threshold=4,
        max_long_partial_prefills=1,
        num_blocks=200,
    )
    h.submit("long", [1] * 100, 2, priority=0)
    h.submit("runs", [2] * 2, 50, priority=5)
    h.step()
    h.submit("urgent", [3] * 40, 2, priority=1)
    h.step()
    assert h.running() == ["long", "runs"]
    assert h.core.scheduler.counters.displaced == 0
    h.run()
    assert set(h.ends.values()) == {FinishReason.LENGTH}


def test_the_lane_may_be_that_of_the_one_who_goes() -> None:
    h = Harness(
        policy="priority",
        max_num_seqs=1,
        long_prefill_token_threshold=4,
        max_long_partial_prefills=1,
        num_blocks=200,
    )
    h.submit("patient", [1] * 100, 2, priority=5)
    h.step()
    h.submit("urgent", [3] * 40, 2, priority=1)
    h.step()
    assert h.running() == ["urgent"]
    h.run()
    assert h.tokens == {"patient": reference([1] * 100, 2), "urgent": reference([3] * 40, 2)}
