"""Blocks flow from P to D while P computes: the real cores on both sides, a fake runner, no faults."""

from __future__ import annotations

import msgspec
import pytest

from replica.fake_runner import FakeModelRunner, expected_output
from replica.kv_messages import FromConnector, Hello, KVPeer, KVSpace, Reserve, Unwelcome
from replica.messages import FinishReason, PreemptionCause, SamplingParams
from replica.step import OpenArena
from tests.unit.pd_world import PDPair

BLOCK = 4
VOCAB = 1000
SPACE = KVSpace("fake", BLOCK, 8 * BLOCK, 1, "")


def _sampling(max_tokens: int = 6) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


def _runner(open_arena: OpenArena, num_blocks: int = 64) -> FakeModelRunner:
    return FakeModelRunner(
        num_blocks=num_blocks, block_size=BLOCK, vocab_size=VOCAB, eos_token_ids=(7,), open_arena=open_arena
    )


def _pair(num_blocks: int = 64, **settings: object) -> PDPair:
    return PDPair(lambda open_arena: _runner(open_arena, num_blocks), SPACE, **settings)  # type: ignore[arg-type]


def _expected(prompt: list[int], num_tokens: int = 6) -> list[int]:
    return expected_output(prompt, num_tokens, vocab_size=VOCAB, eos=frozenset({7}))


@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("chunk", [4, 7, 16, 64])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 31, 32, 33, 50])
def test_d_computes_only_its_last_block(num_nodes: int, chunk: int, length: int) -> None:
    pair, prompt = _pair(num_nodes=num_nodes, chunk=chunk), list(range(100, 100 + length))
    pair.submit("q", prompt, _sampling())
    pair.run()
    assert pair.tokens["q"] == _expected(prompt)
    assert pair.ends == {"q": FinishReason.LENGTH}
    loaded = pair.d.kv.counters()["kv_blocks_loaded"]
    is_remote = length > BLOCK
    assert loaded == (length // BLOCK if is_remote else 0)
    computed = pair.d.core.scheduler.counters.scheduled_tokens
    assert computed == (length + 5 - BLOCK * loaded if is_remote else length + 5)
    if num_nodes == 2:
        assert pair.nodes[1].num_fetched == loaded
    pair.check_baseline()


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_blocks_come_while_p_computes(num_nodes: int) -> None:
    pair, prompt = _pair(num_nodes=num_nodes, chunk=8), list(range(100, 148))
    pair.submit("q", prompt, _sampling())
    pair.step(pair.d)
    pair.carry()
    pair.prefill("q")
    loaded = []
    while not pair.firsts:
        pair.now += 0.01
        pair.step(pair.p)
        pair.carry()
        pair.step(pair.d)
        pair.carry()
        loaded.append(pair.d.kv.counters()["kv_blocks_loaded"])
    assert loaded == [0, 0, 2, 4, 6, 8]  # two steps behind: an offer goes with one plan, its copy with the next
    pair.run()
    assert pair.tokens["q"] == _expected(prompt)
    pair.check_baseline()


@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("num_here", [16, 20])
def test_e_10_only_what_d_lacks_moves(num_nodes: int, num_here: int) -> None:
    pair, prompt = _pair(num_nodes=num_nodes), list(range(100, 132))
    pair.submit("q", prompt, _sampling())
    pair.run()
    assert pair.d.kv.counters()["kv_blocks_loaded"] == 8
    pair.submit("again", prompt, _sampling())
    pair.run()
    assert not pair.seats["again"].is_waiting
    assert pair.d.kv.counters()["kv_blocks_loaded"] == 8
    pair.submit("part", [*prompt[:num_here], *range(200, 216)], _sampling())
    pair.run()
    assert pair.seats["part"].num_cached_tokens == num_here
    assert pair.d.kv.counters()["kv_blocks_loaded"] == 8 + 4
    for name, asked in (("q", prompt), ("again", prompt), ("part", [*prompt[:num_here], *range(200, 216)])):
        assert pair.tokens[name] == _expected(asked)
    pair.check_baseline()


def test_a_long_prompt_is_not_starved_by_the_share_of_background_stores() -> None:
    pair = _pair(num_blocks=1100, num_slots=4400, chunk=512)
    prompt = [i % 900 + 50 for i in range(4000)]
    pair.submit("q", prompt, _sampling())
    pair.run()
    assert pair.tokens["q"] == _expected(prompt)
    assert pair.d.kv.counters()["kv_blocks_loaded"] == 1000
    pair.check_baseline()


def test_an_arena_that_is_too_small_ends_the_wait() -> None:
    """D may lease half of it, and knows that no more will come: it does not wait until its time is over."""
    for num_nodes in (1, 2):
        pair, prompt = (
            _pair(num_nodes=num_nodes, num_slots=(64 if num_nodes == 2 else 8, 8), chunk=8),
            list(range(100, 140)),
        )
        pair.submit("q", prompt, _sampling())
        pair.run()
        assert pair.now < 1.0
        assert pair.tokens["q"] == _expected(prompt)
        assert 0 < pair.d.kv.counters()["kv_blocks_loaded"] <= 4
        pair.check_baseline()


def test_e_04_blocks_that_never_come_are_computed_at_the_deadline() -> None:
    pair, prompt = _pair(num_nodes=2), list(range(100, 140))
    pair.nodes[1].news.clear()
    pair.submit("q", prompt, _sampling(), load_within_s=3.0)
    pair.step(pair.d)
    pair.go_on("q", _expected(prompt)[:1])
    pair.tokens["q"] = _expected(prompt)[:1]
    pair.begun.add("q")
    pair.pass_time(2.9)
    pair.carry()
    assert not pair.step(pair.d)
    pair.pass_time(0.2)
    pair.run()
    assert pair.tokens["q"] == _expected(prompt)
    assert pair.d.kv.counters()["kv_failed_loads"] == 1
    pair.check_baseline()


def test_a_prompt_of_whole_blocks_that_d_goes_on_with_alone() -> None:
    """All of it was loaded, and P never said a token: the last block is computed again for the first one."""
    pair, prompt = _pair(), list(range(100, 132))
    pair.submit("q", prompt, _sampling())
    pair.step(pair.d)
    pair.prefill("q")
    for _ in range(8):
        pair.carry()
        pair.step(pair.p)
        pair.step(pair.d)
    assert pair.d.kv.counters()["kv_blocks_loaded"] == 8
    pair.firsts.clear()
    pair.tokens["q"] = []
    pair.go_on("q", [])
    pair.run()
    assert pair.tokens["q"] == _expected(prompt)
    pair.check_baseline()


@pytest.mark.parametrize("is_continued", [False, True])
def test_what_is_being_written_is_not_computed_before_the_copy_is_over(is_continued: bool) -> None:
    """Its time is over, or it is told to compute, while a copy is under way."""
    pair, prompt = _pair(), list(range(100, 132))
    pair.submit("q", prompt, _sampling())
    pair.step(pair.d)
    pair.prefill("q")
    pair.d.runner.copies.most = 0  # type: ignore[attr-defined]
    for _ in range(8):
        pair.carry()
        pair.step(pair.p)
        pair.step(pair.d)
    pair.firsts.clear()
    first = _expected(prompt)[:1]
    if is_continued:
        pair.go_on("q", first)
        pair.pass_time(4.0)
        pair.d.kv.tick(pair.now)
    else:
        pair.tokens["q"], first = [], []
        pair.go_on("q", [])
    num_computed = pair.d.core.scheduler.counters.scheduled_tokens
    for _ in range(5):
        pair.step(pair.d)
        pair.carry()
    assert pair.d.core.scheduler.counters.scheduled_tokens == num_computed
    pair.d.runner.copies.most = None  # type: ignore[attr-defined]
    pair.run()
    assert pair.tokens["q"] == _expected(prompt)
    pair.check_baseline()


def test_e_03_a_client_that_leaves_between_both_leaves_nothing() -> None:
    pair = _pair(num_nodes=2)
    for number in range(50):
        name, prompt = f"q{number}", list(range(100 + number, 140 + number))
        pair.submit(name, prompt, _sampling())
        for _ in range(number % 7):
            pair.carry()
            pair.step(pair.d)
            if name in pair.seats and name not in pair.begun:
                pair.prefill(name)
            pair.step(pair.p)
        pair.abort(name)
        pair.seats.clear()
        pair.firsts.clear()
    pair.run()
    pair.check_baseline()
    assert not pair.ends


@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("steps_before", [0, 3])
def test_e_01_p_dies_before_or_in_the_middle_of_the_pull(num_nodes: int, steps_before: int) -> None:
    pair, prompt, other = _pair(num_nodes=num_nodes, chunk=8), list(range(100, 148)), list(range(300, 308))
    pair.submit_local(pair.d, "running", other, _sampling(30))
    pair.submit("q", prompt, _sampling())
    pair.step(pair.d)
    pair.prefill("q")
    for _ in range(steps_before):
        pair.carry()
        pair.step(pair.p)
        pair.step(pair.d)
    pair.p.die()
    pair.p = pair.replica("p", pair.nodes[0], _runner)
    pair.go_on("q", [])
    pair.run()
    assert pair.tokens["q"] == _expected(prompt)
    assert pair.tokens["running"] == _expected(other, 30)
    pair.submit("next", [5, *prompt], _sampling())
    pair.run()
    assert pair.tokens["next"] == _expected([5, *prompt])
    assert pair.p.core.scheduler.counters.prompt_tokens == 49, "the new P is not used"
    pair.check_baseline()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_fingerprint", "other"),
        ("block_size", 8),
        ("block_bytes", 64),
        ("layout", "x"),
        ("tensor_parallel_size", 3),
    ],
)
def test_e_06_what_does_not_fit_is_refused_with_field_and_both_values(field: str, value: object) -> None:
    pair = _pair()
    space, told = msgspec.structs.replace(SPACE, **{field: value}), list[FromConnector | None]()
    pair.nodes[0].join(Hello(KVPeer("other", "1"), "engine", space), told.append)
    assert isinstance(told[0], Unwelcome)
    assert f"{field} is {value!r} at your side and {getattr(SPACE, field)!r} here" in told[0].message


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("length", [1, 5, 15, 16, 17])
def test_e_09_a_prompt_of_less_than_a_block_waits_for_nothing(block: int, length: int) -> None:
    space = KVSpace("fake", block, 8 * block, 1, "")

    def runner(open_arena: OpenArena) -> FakeModelRunner:
        return FakeModelRunner(num_blocks=16, block_size=block, vocab_size=VOCAB, open_arena=open_arena)

    pair, prompt = PDPair(runner, space), list(range(100, 100 + length))
    pair.submit("q", prompt, _sampling())
    pair.run()
    assert pair.seats["q"].is_waiting == (length > block)
    assert pair.tokens["q"] == expected_output(prompt, 6, vocab_size=VOCAB, eos=frozenset({2}))
    assert pair.now < 0.5
    pair.check_baseline()


def test_e_12_a_connector_that_was_restarted_is_heard_again() -> None:
    pair = _pair(num_nodes=2)
    for number in range(3):
        prompt = list(range(100 + 50 * number, 140 + 50 * number))
        pair.submit(f"q{number}", prompt, _sampling())
        pair.run()
        assert pair.tokens[f"q{number}"] == _expected(prompt)
        assert pair.d.kv.counters()["kv_blocks_loaded"] == 10 * (number + 1)
        giver, taker = pair.nodes
        giver.die()
        pair.p.ranks = []
        pair.p.disconnect()
        taker.hears(giver)
        giver.hears(taker)
        pair.p.connect()
    pair.check_baseline()


def test_e_15_who_is_put_back_at_p_is_computed_again_and_then_handed_over() -> None:
    pair, prompts = _pair(num_blocks=24, chunk=8), [list(range(s, s + 40)) for s in (100, 300)]
    for number, prompt in enumerate(prompts):
        pair.submit(f"q{number}", prompt, _sampling())
        pair.carry()
        pair.step(pair.d)
        pair.prefill(f"q{number}")
        for _ in range(5):
            pair.carry()
            pair.step(pair.p)
            if victims := [s for s in pair.p.core.scheduler.running if not s.in_step]:
                pair.p.core.scheduler.preempt(victims[0], PreemptionCause.BLOCKS, pair.now, by=victims[0])
            for message in pair.p.kv.take_messages():
                assert not isinstance(message, Reserve) or message.hashes, "a reservation of nothing"
                pair.p.down.append(message)
    pair.run()
    assert pair.p.core.scheduler.counters.preemptions > 0
    for number, prompt in enumerate(prompts):
        assert pair.tokens[f"q{number}"] == _expected(prompt)
    assert pair.d.kv.counters()["kv_blocks_loaded"] == 20
    pair.check_baseline()


def test_every_message_twice_changes_nothing() -> None:
    pair, prompt = _pair(num_nodes=2, chunk=8), list(range(100, 140))
    receive = pair.d.kv.receive

    def twice(message: FromConnector, now: float) -> None:
        receive(message, now)
        receive(message, now)

    pair.d.kv.receive = twice  # type: ignore[method-assign]
    pair.submit("q", prompt, _sampling())
    pair.run()
    assert pair.tokens["q"] == _expected(prompt)
    assert pair.d.kv.counters()["kv_blocks_loaded"] == 10
    pair.check_baseline()


def test_a_lease_that_was_lost_while_copies_were_under_way_is_not_believed() -> None:
    """D stood still for most of its lease, and others may have written where it reads."""
    pair, prompt = _pair(chunk=8), list(range(100, 140))
    pair.submit("q", prompt, _sampling())
    pair.step(pair.d)
    pair.prefill("q")
    pair.d.runner.copies.most = 0  # type: ignore[attr-defined]
    for _ in range(9):
        pair.carry()
        pair.step(pair.p)
        pair.step(pair.d)
    pair.nodes[0].slots[:] = 0xCD
    pair.pass_time(7.0)
    pair.d.runner.copies.most = None  # type: ignore[attr-defined]
    pair.run()
    assert pair.tokens["q"] == _expected(prompt)
    assert pair.d.kv.counters()["kv_blocks_loaded"] == 0
    pair.check_baseline()
