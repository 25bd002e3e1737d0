"""What a replica loads from and stores to the KVConnector of its node; the cases of group F that concern it."""

from __future__ import annotations

import pytest

from replica.block_hash import chain_hashes, root_hash
from replica.copy_line import CopyJob
from replica.kv_messages import Acquire, LostSlots, Reserved
from replica.kv_transfer import TransferLimits
from replica.messages import FinishReason, PreemptionCause
from replica.preemption import keeps
from tests.unit.engine_harness import reference
from tests.unit.tier_harness import FakeConnector, TierHarness

PROMPT = list(range(100, 142))  # 10 full blocks of 4, and a half
OTHER = list(range(500, 560))


def ends_right(h: TierHarness, prompts: dict[str, list[int]], num_tokens: int = 8) -> None:
    for name, prompt in prompts.items():
        assert h.tokens[name] == reference(prompt, num_tokens), name
        assert h.ends[name] is FinishReason.LENGTH


def fill(h: TierHarness, prompt: list[int] = PROMPT, name: str = "first") -> None:
    """Its KV is in the tier; the pool forgets it, if it is small."""
    h.submit(name, prompt)
    h.run()
    ends_right(h, {name: prompt})


def test_what_one_replica_computed_another_one_loads() -> None:
    connector = FakeConnector(64, 32)
    first, second = TierHarness(connector), TierHarness(connector, name="b")
    fill(first)
    assert first.counter("blocks_stored") == 12  # prompt and output; the last token is not computed
    second.submit("again", PROMPT)
    second.run()
    ends_right(second, {"again": PROMPT})
    assert second.counter("blocks_loaded") == 10
    assert second.core.scheduler.counters.cached_prompt_tokens == 40
    assert second.core.scheduler.counters.scheduled_tokens == 2 + 7
    assert connector.is_at_baseline
    assert second.core.blocks.num_free == 64


def test_answers_go_on_in_the_tier() -> None:
    """A second turn finds the first answer, which nobody sent as a prompt before."""
    h = TierHarness()
    fill(h)
    h.core.blocks.clear_cache()
    turn = PROMPT + reference(PROMPT, 8) + [3, 4, 5]
    h.submit("second", turn)
    h.run()
    ends_right(h, {"second": turn})
    assert h.counter("blocks_loaded") == 12


def test_without_a_connector_nothing_is_pinned_or_asked() -> None:
    h = TierHarness()
    h.kv.gone()
    fill(h)
    assert h.counter("blocks_stored") == h.counter("loads") == 0
    assert h.kv.take_messages() == []


def test_what_nobody_has_is_not_asked_for() -> None:
    h = TierHarness()
    h.submit("cold", PROMPT)
    h.is_quiet = True
    plan = h.plan()
    assert plan is not None
    assert plan.num_tokens == 32, "it did not wait"
    assert not any(isinstance(m, Acquire) for m in h.kv.take_messages())


def test_a_loading_sequence_is_in_no_step_and_hits_are_not_visible_before() -> None:
    h = TierHarness()
    fill(h)
    h.core.blocks.clear_cache()
    h.runner.copies.most = 2
    h.submit("x", PROMPT)
    for number in range(5):
        plan = h.plan()
        assert plan is not None
        assert plan.seq_ids == []
        assert plan.waits_for_copies
        assert bool(plan.loads) == (number == 0)
        assert h.core.blocks.stats().num_cached == 0
        h.finish(plan)
    assert h.core.blocks.stats().num_cached == 10
    h.run()
    ends_right(h, {"x": PROMPT})


@pytest.mark.parametrize("moment", ["asked", "leased", "loading"])
def test_an_abort_at_any_moment_leaves_nothing(moment: str) -> None:
    h = TierHarness()
    fill(h)
    h.core.blocks.clear_cache()
    h.is_quiet = True
    h.runner.copies.most = 3
    h.submit("x", PROMPT)
    assert h.plan() is None
    if moment != "asked":
        h.hear_connector()
    if moment == "loading":
        plan = h.plan()
        assert plan is not None
        h.finish(plan)
    h.core.abort("r", "x", h.now)  # type: ignore[arg-type]
    h.core.validate()
    assert h.core.num_unfinished == 0
    if moment == "loading":
        assert h.core.blocks.num_free == 64 - 10, "what is being written is not used again"
    h.is_quiet = False
    h.hear_connector()
    h.run()
    assert h.core.blocks.num_free == 64
    assert h.connector.is_at_baseline
    assert h.connector.num_released == 1
    fill(h, name="after")


@pytest.mark.parametrize("how", ["void", "gone", "unmapped", "frozen", "late", "reset"])
def test_whatever_becomes_of_a_load_the_tokens_are_the_same(how: str) -> None:
    h = TierHarness(limits=TransferLimits(1, 0.5))
    fill(h)
    h.core.blocks.clear_cache()
    h.runner.copies.most = 3
    h.is_quiet = True
    h.submit("x", PROMPT)
    assert h.plan() is None
    if how == "late":
        h.now += 0.5
        h.core.end_overdue(h.now)
        h.is_quiet = False
        h.run()  # the answer comes now
        assert h.counter("failed_loads") == 1
    else:
        if how == "unmapped":
            h.connector.is_closed = True
            h.runner.copies._arena = h.runner.copies._place = None
        h.hear_connector()
        plan = h.plan()
        assert plan is not None
        assert len(plan.loads) == 10
        h.finish(plan)
        if how == "void":
            for message in h.connector.void("a", 0):
                h.kv.receive(message, h.now)
        elif how == "gone":
            h.kv.gone()
        elif how == "frozen":
            h.connector.leave("a")
            h.connector.evict(100)
            h.now += 8.0
        elif how == "reset":
            h.core.reset_prefix_cache()
        h.run()
    ends_right(h, {"x": PROMPT})
    loaded = h.counter("blocks_loaded")
    assert loaded == (10 if how == "gone" else 0), "whoever mapped the arena of a dead connector may finish"
    assert h.core.blocks.num_free == 64
    h.core.validate()


def test_a_failed_step_tells_its_copies_again() -> None:
    h = TierHarness()
    fill(h)
    h.core.blocks.clear_cache()
    for has_read in (False, True):
        h.submit(f"x{has_read}", PROMPT)
        plan = h.plan()
        assert plan is not None
        assert plan.loads
        if has_read:
            h.runner.copies.take(plan)
        h.hear(h.core.fail_step(h.now))
        again = h.plan()
        assert again is not None
        assert (again.first_copy, again.loads) == (plan.first_copy, plan.loads)
        h.finish(again)
        h.run()
        ends_right(h, {f"x{has_read}": PROMPT})
        h.core.reset_prefix_cache()
        h.hear_connector()
        fill(h, name=f"again{has_read}")
        h.core.blocks.clear_cache()


def test_lost_ranks_give_everything_back_when_they_are_there_again() -> None:
    h = TierHarness()
    fill(h)
    h.core.blocks.clear_cache()
    h.runner.copies.most = 3
    h.submit("x", PROMPT)
    h.submit("y", OTHER)
    for _ in range(2):
        plan = h.plan()
        assert plan is not None
        h.finish(plan)
    assert h.plan() is not None
    h.core.pause()
    h.hear(h.core.lose_runner(h.now))
    h.core.validate()
    assert h.core.blocks.num_free == 64
    assert h.kv.take_messages() == [], "a rank may still write"
    h.runner.begin_anew()
    h.core.resume()
    h.hear_connector()
    assert h.connector.is_at_baseline
    h.runner.copies.most = None
    h.submit("z", PROMPT)
    h.run()
    ends_right(h, {"z": PROMPT})
    assert h.counter("blocks_loaded") == 10


def test_f_01_a_full_tier_is_no_trouble_and_works_again_later() -> None:
    h = TierHarness(num_slots=4, num_blocks=200)
    fill(h, OTHER[:18])
    assert len(h.connector.sealed) == 4
    h.connector.leases["somebody", 0] = list(h.connector.sealed.values())  # a slow load
    for number in range(20):
        h.submit(f"p{number}", [number] * 100)
    h.run()
    ends_right(h, {f"p{number}": [number] * 100 for number in range(20)})
    assert h.counter("blocks_refused") >= 20
    stored = h.counter("blocks_stored")
    h.connector.end_lease("somebody", 0)
    fill(h, list(range(700, 730)), "later")
    assert h.counter("blocks_stored") > stored


def test_f_03_two_prompts_whose_prefixes_are_loaded_cannot_block_each_other() -> None:
    connector = FakeConnector(256, 128)
    a0, b0 = [i % 900 + 20 for i in range(800)], [i % 700 + 200 for i in range(800)]
    filler = TierHarness(connector, num_blocks=256, block_size=16, name="filler", max_num_batched_tokens=256)
    for name, prompt in (("a0", a0), ("b0", b0)):
        fill(filler, prompt, name)
    h = TierHarness(connector, num_blocks=128, block_size=16, max_num_batched_tokens=256)
    a1, b1 = a0 + [i + 3 for i in range(800)], b0 + [i + 5 for i in range(400)]
    h.submit("a1", a1)
    h.submit("b1", b1)
    idle = 0
    while (plan := h.plan()) is not None:
        scheduler = h.core.scheduler
        idle = idle + 1 if not scheduler.running and scheduler.num_waiting == 2 else 0
        assert idle <= 1, "blocks are free, and nobody runs"
        h.finish(plan)
    ends_right(h, {"a1": a1, "b1": b1})
    assert h.counter("blocks_loaded") == 100


def test_f_12_what_was_cleared_does_not_come_back() -> None:
    h = TierHarness(num_blocks=64)
    h.runner.copies.most = 1
    h.submit("x", PROMPT, max_tokens=1)
    for _ in range(3):
        plan = h.plan()
        assert plan is not None
        h.finish(plan)
    assert h.connector.reserved, "a store is on its way"
    assert h.ends == {"x": FinishReason.LENGTH}
    h.core.reset_prefix_cache()
    h.runner.copies.most = None
    h.run()
    assert h.connector.sealed == {}
    assert h.connector.is_at_baseline
    assert h.core.blocks.num_free == 64


def test_an_answer_for_nobody_and_a_second_one_change_nothing() -> None:
    h = TierHarness()
    fill(h)
    for message in (Reserved(0, [1, 2, 3]), Reserved(77, [1]), LostSlots(5)):
        h.kv.receive(message, h.now)
        h.core.validate()
    assert h.plan() is None


def test_stores_pin_a_bounded_share_and_give_way() -> None:
    """A connector that never answers: prompts that need the whole pool still run."""
    h = TierHarness(num_blocks=16, limits=TransferLimits(1, 1e9, 0.25))
    h.is_quiet = True
    prompts = {str(n): [n * 10 + i for i in range(50)] for n in range(1, 4)}
    for name, prompt in prompts.items():
        h.submit(name, prompt)
    h.run()
    ends_right(h, prompts)
    assert h.core.blocks.num_free >= 12


@pytest.mark.parametrize("most", [None, 1])
@pytest.mark.parametrize("mode", ["recompute", "offload", "auto"])
def test_a_pool_that_is_far_too_small_changes_no_token(mode: str, most: int | None) -> None:
    h = TierHarness(num_blocks=12, preemption_mode=mode, max_num_seqs=6, max_preemptions=100)
    h.runner.copies.most = most
    prompts = {str(n): [n * 10 + i for i in range(9)] for n in range(1, 7)}
    for name, prompt in prompts.items():
        h.submit(name, prompt, max_tokens=24)
    h.run()
    ends_right(h, prompts, 24)
    assert h.core.scheduler.counters.preemptions > 3
    assert h.core.blocks.num_free == 12
    assert h.connector.is_at_baseline
    assert h.counter("swapped") == 0
    if mode == "offload":
        assert h.counter("offloads") == h.core.scheduler.counters.preemptions
        assert h.core.scheduler.counters.recomputed_tokens <= 3 * h.counter("offloads"), (
            "the unfilled block of each, at most"
        )


@pytest.mark.parametrize("position", range(1, 12))
def test_put_back_at_every_position_by_offload(position: int) -> None:
    h = TierHarness(preemption_mode="offload")
    h.submit("x", PROMPT, max_tokens=14)
    while "x" not in h.tokens or len(h.tokens["x"]) < position:
        h.step()
    sequence = h.sequence("x")
    h.core.scheduler.preempt(sequence, PreemptionCause.BLOCKS, h.now, sequence)
    h.core.blocks.clear_cache()  # as if others had taken its blocks
    h.run()
    ends_right(h, {"x": PROMPT}, 14)
    assert h.core.scheduler.counters.recomputed_tokens <= 3


def test_what_the_pool_loses_between_question_and_admission_is_leased_too() -> None:
    """Blocks behind a gap would be worth nothing."""
    h = TierHarness(num_blocks=14)
    fill(h)
    h.is_quiet = True
    kept = h.core.blocks._hash.copy()
    h.core.blocks.clear_cache()
    for block_id, block_hash in enumerate(kept[:14]):  # the first two are in the pool
        if block_hash is not None and block_hash in chain(h, 2):
            h.core.blocks._hash[block_id], h.core.blocks._cached[block_hash] = block_hash, block_id
    h.submit("x", PROMPT)
    assert h.plan() is None
    (message,) = h.kv.take_messages()
    assert isinstance(message, Acquire)
    assert len(message.hashes) == 10
    h.core.blocks.clear_cache()  # gone, meanwhile
    h.kv.receive(h.connector.handle("a", message)[0], h.now)
    h.is_quiet = False
    h.run()
    ends_right(h, {"x": PROMPT})
    assert h.counter("blocks_loaded") == 10


def chain(h: TierHarness, count: int) -> list[bytes]:
    root = root_hash(h.core.info.model_fingerprint, "")
    return chain_hashes(root, PROMPT[: 4 * count], 4)


@pytest.mark.parametrize(
    ("copy_s", "is_stored", "is_kept"),
    [(1.0, True, True), (3.9, True, True), (4.1, True, False), (1.9, False, True), (2.1, False, False)],
)
def test_auto_keeps_what_is_faster_copied_than_computed(copy_s: float, is_stored: bool, is_kept: bool) -> None:
    """A second a token, 4 tokens a block: a copy may take 4 seconds, and half of that where each block has to go both
    ways.
    """
    h = TierHarness()
    if not is_stored:
        h.kv.gone()
    h.submit("x", PROMPT, max_tokens=30)
    while h.sequence("x").num_output_tokens < 6:
        h.step()
    if not is_stored:
        h.kv.connected(h.connector.place("a"), 1e9, h.now)
    transfer = h.core.scheduler._transfer
    assert transfer is not None
    transfer.pace.token_s, transfer.pace.copy_s = lambda: 1.0, copy_s
    assert keeps(h.sequence("x"), h.core.blocks, transfer) is is_kept


def test_auto_counts_the_copies_that_are_waiting() -> None:
    h = TierHarness()
    h.submit("x", PROMPT, max_tokens=30)
    while h.sequence("x").num_output_tokens < 2:
        h.step()
    transfer = h.core.scheduler._transfer
    assert transfer is not None
    transfer.pace.token_s, transfer.pace.copy_s = lambda: 1.0, 2.0
    assert keeps(h.sequence("x"), h.core.blocks, transfer)
    transfer._line.add(CopyJob([(0, 0)] * 40, False, None))
    assert not keeps(h.sequence("x"), h.core.blocks, transfer)
