"""A decode replica and a prompt that somebody else computes: seats, `Continue`, and what is computed after all."""

from __future__ import annotations

import pytest

from cluster.simulation.workloads import engine
from replica.engine_core import EngineCore
from replica.fake_runner import FakeModelRunner, expected_output
from replica.messages import (
    Continue,
    FinishReason,
    GenerateRequest,
    KVSource,
    RequestId,
    RouterId,
    SamplingParams,
    SequenceInput,
)

ROUTER = RouterId("r")
SOURCE = KVSource("h", 10.0, 3.0)
EOS = frozenset({2})


class World:
    def __init__(self, num_blocks: int = 64, has_loader: bool = True, **scheduler: int) -> None:
        self.runner = FakeModelRunner(num_blocks=num_blocks)
        self.core = EngineCore(engine(**scheduler), self.runner.info)
        self.core.scheduler.remote.has_loader = has_loader
        self.now = 0.0
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason] = {}

    def submit(self, name: str, prompt: list[int], max_tokens: int = 5, source: KVSource | None = SOURCE) -> None:
        self.tokens[name] = []
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        request = GenerateRequest(RequestId(name), [SequenceInput(0, prompt, sampling)], kv_source=source)
        assert self.core.submit(ROUTER, request, 0, self.now).refusal is None

    def steps(self) -> None:
        """Until there is nothing to compute."""
        self.take(self.core.take_ended())
        while (plan := self.core.schedule(self.now)) is not None:
            self.now += 0.01
            outputs = self.core.update(plan, self.runner.execute(plan), self.now)
            self.core.validate()
            self.take(outputs)
        self.take(self.core.take_ended())
        self.core.validate()

    def take(self, outputs: object) -> None:
        names = {s.seq_id: s.request_id for s in self.core.scheduler.living()}
        for output in outputs.values():  # type: ignore[attr-defined]
            for item in output.outputs:
                self.tokens[item.request_id] += item.new_token_ids
                if item.finish_reason is not None:
                    self.ends[item.request_id] = item.finish_reason
            for seq_id, token_id in zip(output.seq_ids, output.token_ids, strict=True):
                self.tokens[names[seq_id]].append(token_id)

    def go_on(self, name: str, token_ids: list[int], hand_over: str = "h") -> None:
        self.core.go_on(ROUTER, Continue(name, hand_over, {0: token_ids}), self.now)
        self.core.validate()

    def loaded(self, name: str, num_blocks: int, is_over: bool = True) -> None:
        sequence = next(s for s in self.core.scheduler.living() if s.request_id == name)
        states = self.runner.pool.view("uint64")
        for position, state in enumerate(_states(sequence.token_ids[: num_blocks * 16])):
            states[sequence.block_ids[position // 16], position % 16] = state
        self.core.scheduler.remote.loaded(sequence, num_blocks, is_over)
        self.core.validate()


def _states(token_ids: list[int]) -> list[int]:
    from replica.fake_runner import prefix_state

    return [prefix_state(token_ids[: i + 1]) for i in range(len(token_ids))]


def _expected(prompt: list[int], num_tokens: int = 5) -> list[int]:
    return expected_output(prompt, num_tokens, vocab_size=49152, eos=EOS)


@pytest.mark.parametrize("length", [17, 31, 32, 33, 48, 100])
@pytest.mark.parametrize("share", [0, 0.5, 1])
@pytest.mark.parametrize("is_loaded_first", [False, True])
def test_it_goes_on_with_what_was_loaded(length: int, share: float, is_loaded_first: bool) -> None:
    world, prompt = World(), list(range(length))
    world.submit("q", prompt)
    world.steps()
    (seated,) = [message for _, message in world.core.take_seated()]
    assert seated.is_waiting
    assert world.core.load(0.0).num_awaited_tokens == length
    num_blocks = int(length // 16 * share)
    if is_loaded_first:
        world.loaded("q", num_blocks)
        world.steps()
        assert not world.tokens["q"], "it went on without Continue"
    world.go_on("q", _expected(prompt)[:1])
    if not is_loaded_first:
        world.steps()
        assert not world.tokens["q"], "it went on without its blocks"
        world.loaded("q", num_blocks)
    world.steps()
    assert world.tokens["q"] == _expected(prompt)[1:]
    computed = world.core.scheduler.counters.scheduled_tokens
    assert computed == length + 4 - 16 * num_blocks
    assert world.core.load(0.0).num_awaited_tokens == 0


@pytest.mark.parametrize("length", [1, 5, 15, 16])
def test_a_short_prompt_waits_for_nobody(length: int) -> None:
    world, prompt = World(), list(range(length))
    world.submit("q", prompt)
    world.steps()
    (seated,) = [message for _, message in world.core.take_seated()]
    assert not seated.is_waiting
    assert world.tokens["q"] == _expected(prompt)
    world.go_on("q", [1])  # too late: nothing changes
    assert world.ends == {"q": FinishReason.LENGTH}


def test_a_prefix_that_is_here_is_told() -> None:
    world, prompt = World(), list(range(64))
    world.submit("a", prompt[:32], 1, source=None)
    world.steps()
    world.submit("b", prompt)
    world.steps()
    (seated,) = [message for _, message in world.core.take_seated()]
    assert seated.num_cached_tokens == 32
    assert world.core.load(0.0).num_awaited_tokens == 32


def test_without_tokens_it_computes_all() -> None:
    world, prompt = World(), list(range(100))
    world.submit("q", prompt)
    world.steps()
    world.go_on("q", [], "an earlier hand-over")
    world.steps()
    assert not world.tokens["q"]
    world.go_on("q", [])
    world.steps()
    assert world.tokens["q"] == _expected(prompt)


def test_blocks_that_do_not_come_are_computed() -> None:
    world, prompt = World(), list(range(100))
    world.submit("q", prompt)
    world.steps()
    world.go_on("q", _expected(prompt)[:1])
    assert world.core.next_deadline == pytest.approx(3.0)
    world.now += 3.0
    world.steps()
    assert world.tokens["q"] == _expected(prompt)[1:]


def test_who_is_never_told_to_go_on_is_given_back() -> None:
    world = World()
    world.submit("q", list(range(100)))
    world.steps()
    world.now += 10.0
    world.steps()
    assert world.ends == {"q": FinishReason.MOVED}
    assert world.core.blocks.num_free == 64


def test_a_first_token_at_the_limit_is_the_end() -> None:
    world = World()
    world.submit("q", list(range(40)), max_tokens=1)
    world.steps()
    world.go_on("q", [7])
    world.steps()
    assert world.ends == {"q": FinishReason.LENGTH}
    assert world.tokens["q"] == []


def test_a_full_step_does_not_keep_it_from_its_seat() -> None:
    world = World(max_num_batched_tokens=64)
    world.submit("local", list(range(500)), source=None)
    world.submit("q", list(range(1000, 1100)))
    plan = world.core.schedule(0.0)
    assert plan is not None
    assert plan.num_tokens == 64
    assert [message.request_id for _, message in world.core.take_seated()] == ["q"]


def test_continue_before_the_seat() -> None:
    """Another sequence of the request had a seat, and P answered for both."""
    world, prompt = World(max_num_seqs=1), list(range(100))
    world.submit("first", list(range(200, 240)), 8)
    world.submit("q", prompt)
    world.steps()
    world.go_on("q", _expected(prompt)[:1])
    world.go_on("first", [])
    world.steps()
    assert world.tokens["q"] == _expected(prompt)[1:]


def test_abort_while_it_waits_frees_all() -> None:
    world = World()
    world.submit("q", list(range(100)))
    world.steps()
    world.core.abort(ROUTER, RequestId("q"), world.now)
    world.steps()
    assert world.core.blocks.num_free == 64
    assert not len(world.core.scheduler.remote)
