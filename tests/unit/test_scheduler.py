"""Named cases of the scheduler, driven step by step with a fake runner."""

from __future__ import annotations

import msgspec
import pytest

from replica.block_hash import chain_hashes
from replica.fake_runner import expected_output
from replica.messages import (
    FinishReason,
    GenerateRequest,
    RefusalReason,
    RequestId,
    RouterId,
    SamplingParams,
    SequenceInput,
)
from tests.unit.engine_harness import ROUTER, VOCAB, Harness, reference


def test_decodes_come_before_chunks_whatever_was_admitted_first() -> None:
    h = Harness(max_num_batched_tokens=8, long_prefill_token_threshold=4)
    h.submit("long", list(range(40)))
    h.submit("short", [1, 2])
    assert h.step() == {"long": 4, "short": 2}
    # the chunk of `long`, admitted first, may not push the decode of `short` out of the budget
    h.configure(max_num_batched_tokens=4)
    assert h.step() == {"short": 1, "long": 3}


def test_a_long_prompt_is_cut_to_what_the_budget_leaves() -> None:
    h = Harness(max_num_batched_tokens=10)
    h.submit("a", [1, 2, 3])
    h.submit("b", list(range(30)))
    assert h.step() == {"a": 3, "b": 7}
    assert h.step() == {"a": 1, "b": 9}


def test_without_chunks_the_first_prompt_of_a_step_is_computed_whole() -> None:
    h = Harness(max_num_batched_tokens=10, enable_chunked_prefill=False)
    h.submit("a", [1, 2])
    h.submit("b", [3, 4])
    h.submit("c", list(range(30)))
    assert h.step() == {"a": 2, "b": 2}, "c does not fit beside others"
    assert h.step() == {"a": 1, "b": 1, "c": 30}, "but it gets the next step, however long it is"


def test_computed_chunks_of_a_running_prefill_are_shared() -> None:
    """Case C-15, second half: a prefix is found as soon as it was computed, and never before."""
    h = Harness(max_num_batched_tokens=8)
    prompt = list(range(40))
    h.submit("first", prompt)
    h.step()
    h.submit("second", prompt)
    h.configure(max_num_batched_tokens=100)
    h.step()
    (second,) = [s for s in h.core.scheduler.running if s.request_id == "second"]
    assert second.num_cached_tokens == 8
    h.run()
    assert h.tokens["first"] == h.tokens["second"] == reference(prompt, 8)


def test_an_aborted_prefill_leaves_only_what_was_computed() -> None:
    h = Harness(max_num_batched_tokens=8)
    prompt = list(range(40))
    h.submit("gone", prompt)
    for _ in range(3):
        h.step()
    h.core.abort(ROUTER, RequestId("gone"), h.now)
    h.submit("again", prompt)
    h.step()
    (again,) = h.core.scheduler.running
    assert again.num_cached_tokens == 24
    h.run()
    assert h.tokens["again"] == reference(prompt, 8)


def test_preempted_sequences_come_back_before_anything_fresh_and_in_their_order() -> None:
    """Cases C-06 and C-07, strictly in line."""
    h = Harness(num_blocks=10, max_num_seqs=3, admission_look_past=0)
    for name in ("x", "y"):
        h.submit(name, [ord(name)] * 12, 24)
    h.step()
    h.submit("w1", [1] * 12, 4)
    h.submit("w2", [2] * 2, 4)
    while not h.core.scheduler.counters.preemptions:
        h.step()
        assert h.names(h.core.scheduler.queued) in (["w1", "w2"], ["w2"], []) or h.core.scheduler.counters.preemptions
    assert h.names(h.core.scheduler.returning)
    plan_before = h.names(h.core.scheduler.queued)
    while h.core.scheduler.returning:
        h.step()
        if h.core.scheduler.returning:
            assert h.names(h.core.scheduler.queued) == plan_before, "somebody fresh overtook a returning sequence"
    h.run()
    for name in ("x", "y"):
        assert h.tokens[name] == reference([ord(name)] * 12, 24)
    assert h.core.scheduler.counters.recomputed_tokens > 0


def test_the_victim_is_the_one_admitted_last() -> None:
    h = Harness(num_blocks=9, caching=False)
    for name in ("a", "b", "c"):
        h.submit(name, [ord(name)] * 11, 30)
    h.step()
    assert h.names(h.core.scheduler.running) == ["a", "b", "c"]
    while not h.core.scheduler.counters.preemptions:
        h.step()
    assert h.names(h.core.scheduler.running) == ["a", "b"]
    assert h.names(h.core.scheduler.returning) == ["c"]
    h.run()
    assert {name: h.tokens[name] for name in "abc"} == {name: reference([ord(name)] * 11, 25) for name in "abc"}


def test_the_watermark_holds_for_newcomers_beside_others_only() -> None:
    h = Harness(num_blocks=10, watermark=0.3)
    h.submit("alone", [1] * 36, 3)
    h.step()
    assert h.names(h.core.scheduler.running) == ["alone"], "nine of ten blocks, but nobody else runs"
    h.run()
    h.submit("first", [2] * 16, 6)
    h.step()
    h.submit("second", [3] * 13, 2)
    h.step()
    assert h.names(h.core.scheduler.running) == ["first"], "six are free, four are wanted and three have to stay"
    h.submit("third", [4] * 2, 2)
    h.run()
    assert set(h.ends) == {"alone", "first", "second", "third"}


def test_what_does_not_fit_the_pool_is_refused_and_blocks_nobody() -> None:
    """Case C-03."""
    h = Harness(num_blocks=8, block_size=16)
    assert h.submit("big", [1] * 200) is RefusalReason.NEVER_FITS
    assert h.submit("small", [1] * 10) is None
    h.run()
    assert h.ends == {"small": FinishReason.LENGTH}


def test_a_sequence_that_outgrows_the_pool_alone_ends_with_length() -> None:
    """Case C-04."""
    h = Harness(num_blocks=8, block_size=16, max_num_batched_tokens=256)
    h.submit("alone", [1] * 100, 100)
    h.run()
    assert h.ends == {"alone": FinishReason.LENGTH}
    assert len(h.tokens["alone"]) == 28
    assert h.core.scheduler.counters.preemptions == 0


def test_one_at_a_time_in_order_of_arrival() -> None:
    """Case C-13."""
    h = Harness(max_num_seqs=1, max_num_batched_tokens=16)
    order = []
    for number, length in enumerate([5, 100, 17, 40, 6]):
        h.submit(f"q{number}", [number] * length, 3)
    while h.core.has_work:
        plan = h.plan()
        if plan is None:
            break
        assert len(h.core.scheduler.running) <= 1
        order += [f"q{new.token_ids[0]}" for new in plan.new]
        h.finish(plan)
    assert order == [f"q{number}" for number in range(5)]


def test_ends_by_eos_stop_token_and_length() -> None:
    prompt = [3, 1, 4]
    stream = expected_output(prompt, 30, vocab_size=VOCAB)
    h = Harness()
    h.submit("stop-token", prompt, 30, stop_token_ids=(stream[5],), ignore_eos=False)
    h.submit("length", prompt, 4, ignore_eos=False)
    h.run()
    assert h.tokens["stop-token"] == stream[: stream.index(stream[5]) + 1]
    assert h.ends == {"stop-token": FinishReason.STOP, "length": FinishReason.LENGTH}


def first_eos(prompt: list[int], num_tokens: int) -> int | None:
    output = expected_output(prompt, num_tokens, vocab_size=VOCAB)
    return output.index(7) if 7 in output else None


@pytest.mark.parametrize("at", range(1, 6))
def test_eos_ends_unless_ignored(at: int) -> None:
    """Wherever it comes, at a block border (of 4) or not."""
    prompts = ([i % VOCAB, i // VOCAB] for i in range(100 * VOCAB))
    prompt = next(p for p in prompts if first_eos(p, at + 1) == at)
    h = Harness()
    h.submit("ends", prompt, 20, ignore_eos=False)
    h.submit("goes on", prompt, 20, ignore_eos=True)
    h.run()
    assert h.tokens["ends"] == expected_output(prompt, at + 1, vocab_size=VOCAB)
    assert h.ends["ends"] is FinishReason.STOP
    assert h.tokens["goes on"] == reference(prompt, 20)


def test_a_cap_counts_only_what_was_never_scheduled() -> None:
    h = Harness(cap=2, max_num_seqs=1)
    assert [h.submit(f"q{i}", [i], 5) for i in range(3)] == [None, None, RefusalReason.QUEUE_FULL]
    h.step()
    assert h.submit("q3", [3], 5) is None, "one left the queue for the running batch"
    assert h.submit("q4", [4], 5) is RefusalReason.QUEUE_FULL
    h.core.abort(ROUTER, RequestId("q1"), h.now)
    assert h.submit("q4", [4], 5) is None, "an aborted one gives its place back at once"


def test_drain_refuses_and_hands_everything_over_once() -> None:
    h = Harness(max_num_seqs=2)
    for number in range(4):
        h.submit(f"q{number}", [number], 50)
    h.step()
    plan = h.plan()
    assert plan is not None
    h.core.stop_admission()
    assert h.submit("late", [1]) is RefusalReason.DRAINING
    moved = [o.request_id for o in h.told(h.core.hand_over(h.now))]
    assert moved == ["q2", "q3"], "those in the runner's hands leave with the end of the step"
    h.finish(plan)
    assert h.ends == {"q0": FinishReason.MOVED, "q1": FinishReason.MOVED}
    assert h.core.num_unfinished == 0


def test_the_routers_key_decides_and_not_the_order_of_submission() -> None:
    h = Harness(max_num_seqs=1)
    for arrival in (5.0, 3.0, 4.0):
        h.submit(f"at {arrival}", [int(arrival)], 2, arrival=arrival)
    assert h.names(h.core.scheduler.queued) == ["at 3.0", "at 4.0", "at 5.0"]


def test_an_abort_after_a_hand_over_in_the_middle_of_a_step_leaves_nobody_to_tell() -> None:
    """The drain marked it as moved, then its client left: the end of the step may not announce it a second time."""
    h = Harness()
    h.submit("a", [1, 2, 3])
    plan = h.plan()
    assert plan is not None
    assert h.core.hand_over(h.now) == {}
    h.core.abort(ROUTER, RequestId("a"), h.now)
    h.finish(plan)
    assert h.ends == {}
    assert h.core.num_unfinished == 0


def test_a_grammar_that_could_not_be_compiled_for_other_reasons_sends_its_sequences_elsewhere() -> None:
    h = Harness()
    h.submit("a", [1, 2, 3], grammar="g")
    h.submit("b", [1, 2, 3], grammar="g")
    h.core.abort(ROUTER, RequestId("b"), h.now)
    assert h.core.take_wanted_grammars() == ["g"]
    (output,) = h.core.grammar_failed("g", h.now).values()
    assert [(o.request_id, o.finish_reason) for o in output.outputs] == [("a", FinishReason.ERROR)]
    assert h.core.num_unfinished == 0
    h.submit("c", [1, 2, 3], grammar="g")
    assert h.core.take_wanted_grammars() == ["g"], "what failed once is tried again"


def test_ids_that_the_runner_does_not_have_are_refused_and_stop_nobodys_step() -> None:
    h = Harness()
    for name, sampling in (
        ("allowed_token_ids", {"allowed_token_ids": (VOCAB,)}),
        ("logit_bias", {"logit_bias": {-1: 1.0}}),
        ("bad_words", {"bad_words": ((1, VOCAB),)}),
    ):
        request = GenerateRequest(RequestId(name), [SequenceInput(0, [1], SamplingParams(4, **sampling))])  # type: ignore[arg-type]
        reply = h.core.submit(ROUTER, request, 0, h.now)
        assert reply.refusal is not None
        assert name in reply.message


def test_tokens_with_nothing_more_to_say_travel_in_columns() -> None:
    """The first one and the last one are records; so is every one of a sequence that wants logprobs."""
    h = Harness()
    prompt = [3, 1, 4]
    h.submit("plain", prompt, 4)
    h.submit("tells", prompt, 4, num_logprobs=1)
    seen = []
    while (plan := h.plan()) is not None and plan.seq_ids:
        seq_ids = {str(s.request_id): s.seq_id for s in h.core.scheduler.running}
        (output,) = h.core.update(plan, h.runner.execute(plan), h.now).values()
        h.told({ROUTER: output})
        seen.append(
            (
                [(o.request_id, o.new_token_ids, o.seq_id) for o in output.outputs],
                list(zip(output.seq_ids, output.token_ids, strict=True)),
            )
        )
    plain, tells = seq_ids["plain"], seq_ids["tells"]
    a, b, c, d = reference(prompt, 4)
    assert seen == [
        ([("plain", [a], plain), ("tells", [a], tells)], []),
        ([("tells", [b], None)], [(plain, b)]),
        ([("tells", [c], None)], [(plain, c)]),
        ([("plain", [d], None), ("tells", [d], None)], []),
    ]


def test_each_router_hears_of_its_own_sequences_only() -> None:
    h = Harness()
    other = RouterId("other")
    h.submit("mine", [1, 2, 3], 6)
    sampling = SamplingParams(6, temperature=0.0, ignore_eos=True)
    h.core.submit(other, GenerateRequest(RequestId("theirs"), [SequenceInput(0, [4, 5], sampling)]), 0, h.now)
    h.submit("mine too", [6], 6)
    h.finish_quietly()
    ids = {str(s.request_id): s.seq_id for s in h.core.scheduler.running}
    outputs = h.finish_quietly()
    assert outputs[ROUTER].seq_ids == [ids["mine"], ids["mine too"]]
    assert outputs[ROUTER].token_ids == [reference([1, 2, 3], 2)[1], reference([6], 2)[1]]
    assert (outputs[other].seq_ids, outputs[other].token_ids) == ([ids["theirs"]], [reference([4, 5], 2)[1]])


def test_a_sequence_without_numbers_ends_alone_and_shares_nothing() -> None:
    h = Harness()
    prompts = {"a": list(range(10, 18)), "b": list(range(100, 108))}  # two blocks each
    for name, prompt in prompts.items():
        h.submit(name, prompt, 6)
    plan = h.plan()
    assert plan is not None
    result = h.runner.execute(plan)
    bad = msgspec.structs.replace(
        result, seq_ids=result.seq_ids[:1], token_ids=result.token_ids[:1], not_finite=result.seq_ids[1:]
    )
    told = {str(o.request_id): o for o in h.told(h.core.update(plan, bad, h.now))}
    assert (told["b"].finish_reason, told["b"].new_token_ids) == (FinishReason.NOT_FINITE, [])
    assert "NaN or infinity" in told["b"].message
    assert len(told["a"].new_token_ids) == 1
    h.core.validate()
    h.submit("again", prompts["b"], 6)
    h.submit("other", prompts["a"], 6)
    plan = h.plan()
    assert plan is not None
    assert plan.num_computed[1:] == [0, 4]  # behind the decode of "a": nothing of "b" is found, of "a" one block is


def test_a_decode_that_cannot_go_on_ends_alone() -> None:
    h = Harness()
    for name in ("a", "b", "c"):
        h.submit(name, [ord(name)], 6)
    h.step()
    plan = h.plan()
    assert plan is not None
    result = h.runner.execute(plan)
    failed = msgspec.structs.replace(
        result,
        seq_ids=[result.seq_ids[0], result.seq_ids[2]],
        token_ids=[result.token_ids[0], result.token_ids[2]],
        failed={result.seq_ids[1]: "why"},
    )
    told = {str(o.request_id): o for o in h.told(h.core.update(plan, failed, h.now))}
    assert (told["b"].finish_reason, told["b"].message, told["b"].new_token_ids) == (FinishReason.INVALID, "why", [])
    assert [told[name].new_token_ids for name in "ac"] == [[reference([ord(name)], 2)[1]] for name in "ac"]
    assert h.names(h.core.scheduler.running) == ["a", "c"]
    h.core.validate()


def test_an_aborted_decode_gets_no_token_and_its_neighbours_theirs() -> None:
    h = Harness()
    for name in ("a", "b", "c"):
        h.submit(name, [ord(name)], 6)
    h.step()
    plan = h.plan()
    assert plan is not None
    h.core.abort(ROUTER, RequestId("b"), h.now)
    h.finish(plan)
    assert {name: len(tokens) for name, tokens in h.tokens.items()} == {"a": 2, "b": 1, "c": 2}
    assert h.core.scheduler.counters.generation_tokens == 5
    assert h.names(h.core.scheduler.running) == ["a", "c"]


def test_blocks_filled_by_decoding_are_shared_in_the_step_that_computed_them() -> None:
    h = Harness(block_size=4)
    prompt = [5, 6]
    h.submit("first", prompt, 12)
    computed, cached = [], []
    for _ in range(10):
        h.step()
        (first,) = h.core.scheduler.running
        computed.append(first.num_computed_tokens)
        cached.append(h.core.blocks.stats().num_cached)
    assert computed == list(range(2, 12))
    assert cached == [count // 4 for count in computed]


def test_prompts_are_hashed_when_they_come_and_equal_ones_once() -> None:
    h = Harness(block_size=4)
    sampling = SamplingParams(4, temperature=0.0)
    items = [SequenceInput(0, list(range(9)), sampling), SequenceInput(1, list(range(9)), sampling)]
    items.append(SequenceInput(2, list(range(8)), sampling, [8, 9, 10, 11]))
    h.core.submit(ROUTER, GenerateRequest(RequestId("q"), items), 0, h.now)
    queued = list(h.core.scheduler.queued)
    chain = chain_hashes(queued[0].root, list(range(12)), 4)
    assert [s.block_hashes for s in queued] == [chain[:2], chain[:2], chain]
    assert queued[0].block_hashes is not queued[1].block_hashes


def test_token_ids_that_do_not_exist_are_refused() -> None:
    h = Harness()
    for wrong in ([VOCAB], [-1], [1, 1 << 32], [1, -(1 << 40)]):
        assert h.submit("wrong", wrong) is RefusalReason.INVALID
    assert h.submit("right", [0, VOCAB - 1]) is None
