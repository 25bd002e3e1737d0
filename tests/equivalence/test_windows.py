"""Blocks that a window has passed are given back while a sequence runs: the bits stay, in a pool far smaller than the
prompts, and nothing is read that was given back.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from benchmarks.equality import Item, Trace, Way, differences, run_way
from benchmarks.family_check import make_runner
from benchmarks.hf_reference import TOLERANCE, Reference
from replica.attention_window import Window
from replica.config import CacheConfig, DType, EngineConfig, ModelConfig, ParallelConfig
from replica.messages import SamplingParams
from replica.model_runner import TorchModelRunner
from replica.step import StepPlan, StepResult

FolderOf = Callable[[str], Path]
WINDOW = 24
BLOCK = 16
#: blocks; the longest prompt below is 18 windows, and more than four times as long
POOL = 6


def make_items() -> list[Item]:
    """Prompts of 1 to 18 windows, three of them with a common beginning; every second one is sampled."""
    rng = random.Random(3)
    shared = [rng.randrange(256) for _ in range(200)]
    items = []
    for number, length in enumerate([440, 30, 200, 313, 17, 260]):
        own = [rng.randrange(256) for _ in range(length)]
        prompt = shared + own[:50] if number in (2, 3, 5) else own
        sampling = SamplingParams(30, temperature=0.9 * (number % 2), seed=number, ignore_eos=True)
        items.append(Item(prompt, sampling))
    return items


ITEMS = make_items()
WAYS = (
    Way("one by one", max_num_seqs=1, token_budget=16),
    Way("batched, 40-token chunks", token_budget=40),
    Way("prefix cache", token_budget=24, prefix_caching=True, warm=True),
    Way("put back after every token", token_budget=32, puts_back=True, prefix_caching=True),
    Way("guessed ahead", token_budget=32, knobs={"num_speculative_tokens": 5, "speculative_ngram": 3}),
    Way(
        "guessed ahead, shortest first, victims by cost",
        token_budget=40,
        prefix_caching=True,
        knobs={
            "num_speculative_tokens": 3, "speculative_ngram": 3, "policy": "sjf", "preemption_victim": "cost",
            "long_prefill_token_threshold": 16,
        },
    ),
)  # fmt: skip


class PoisoningRunner(TorchModelRunner):
    """Before each step, blocks that no token sees any more turn to NaN. NaN times the weight 0 of what a mask hides is
    NaN, so one look at such a block shows in the logits. For ways without a prefix cache, which finds blocks again.
    """

    def __init__(self, folder: Path, dtype: DType) -> None:
        self._tables: dict[int, list[int]] = {}
        self._seen_from: dict[int, int] = {}
        self.is_poisoning = False
        self.num_poisoned = 0
        config = EngineConfig(
            model=ModelConfig(dtype=dtype),
            cache=CacheConfig(block_size=BLOCK, num_blocks=200),
            parallel=ParallelConfig(num_threads=1),
        )
        super().__init__(config, folder, self_test=False)

    def execute(self, plan: StepPlan) -> StepResult:
        if self.is_poisoning:
            self._poison(plan)
        return super().execute(plan)

    @torch.inference_mode()
    def begin(self, is_poisoning: bool) -> None:
        """Another way, over clean memory."""
        self._decoder.pool.zero_()  # type: ignore[attr-defined]
        self.is_poisoning, self.num_poisoned = is_poisoning, 0

    @torch.inference_mode()
    def _poison(self, plan: StepPlan) -> None:
        for seq_id in plan.dropped:
            self._tables.pop(seq_id, None)
        given: list[int] = []
        for new in plan.new:
            self._tables[new.seq_id], self._seen_from[new.seq_id] = list(new.block_ids), 0
            given += new.block_ids
        for seq_id, block_ids in plan.new_block_ids.items():
            self._tables[seq_id] += block_ids
            given += block_ids
        for seq_id, num_computed in zip(plan.seq_ids, plan.num_computed, strict=True):
            self._seen_from[seq_id] = max(0, num_computed - WINDOW + 1) // BLOCK
        seen = {block_id for seq_id, table in self._tables.items() for block_id in table[self._seen_from[seq_id] :]}
        pool = self._decoder.pool  # type: ignore[attr-defined]
        pool[given] = 0
        others = [block_id for block_id in range(len(pool)) if block_id not in seen]
        pool[others] = torch.nan
        self.num_poisoned += len(others)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runner(request: pytest.FixtureRequest, tiny_folder: FolderOf) -> PoisoningRunner:
    return PoisoningRunner(tiny_folder("mistral"), request.param)


Reckoned = tuple[list[Item], list[Trace]]


def run_whole(runner: PoisoningRunner, items: list[Item]) -> list[Trace]:
    """Each alone and whole, with all of its blocks: as if there were no window to give anything back for."""
    info, runner.info = runner.info, msgspec.structs.replace(runner.info, window=None)
    assert info.window == WINDOW
    traces, _ = run_way(Way("all blocks kept", max_num_seqs=1), items, [runner])
    runner.info = info
    return traces


@pytest.fixture(scope="module")
def reference(runner: PoisoningRunner) -> Reckoned:
    """The items, one more whose answer stands in its prompt so that guesses come true, and what they give."""
    traces = run_whole(runner, ITEMS)
    # three layers see 3 x 23 tokens back and no farther, so behind the same hundred tokens stands the same answer
    begin, answer = ITEMS[0].prompt[-100:], traces[0].tokens
    echo = Item(begin + answer + ITEMS[3].prompt[:60] + begin, ITEMS[0].sampling)
    return [*ITEMS, echo], traces + run_whole(runner, [echo])


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_bits_stay_in_a_pool_smaller_than_the_prompts(way: Way, runner: PoisoningRunner, reference: Reckoned) -> None:
    items, expected = reference
    assert max(len(item.prompt) for item in items) > 3 * POOL * BLOCK
    runner.begin(is_poisoning=not way.prefix_caching)
    small = msgspec.structs.replace(way, num_blocks=POOL)
    traces, tally = run_way(small, items, [runner])
    assert differences(expected, traces, way) == []
    if runner.is_poisoning:
        assert runner.num_poisoned > 1000, "too few to mean anything"
    if "guessed" in way.name:
        assert tally.accepted_tokens >= 3, "too few to mean anything"


def test_each_token_is_hugging_faces_choice_in_a_pool_of_a_few_windows(
    runner: PoisoningRunner, tiny_folder: FolderOf
) -> None:
    if runner.info.description.split(", ")[1] != "float32":
        pytest.skip("transformers is compared in float32")
    greedy = [item for item in ITEMS if item.sampling.temperature == 0]
    runner.begin(is_poisoning=True)
    traces, _ = run_way(Way("small", num_blocks=POOL, token_budget=40), greedy, [runner])
    judge = Reference(tiny_folder("mistral")).judge
    gaps = [judge(item.prompt, trace.tokens).worst_gap for item, trace in zip(greedy, traces, strict=True)]
    assert max(gaps) <= TOLERANCE


def test_one_look_at_what_was_given_back_would_show(
    runner: PoisoningRunner, reference: Reckoned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same comparison with blocks given back one token too early has to fail."""

    def too_early(self: Window, num_computed: int) -> int:
        return max(0, num_computed - WINDOW + 1 + BLOCK) // BLOCK

    runner.begin(is_poisoning=False)
    monkeypatch.setattr(runner, "_window", None)  # whose store would refuse the plan
    monkeypatch.setattr(runner, "_store", runner._new_store())
    monkeypatch.setattr(Window, "num_passed", too_early)
    way = Way("too early", num_blocks=POOL, token_budget=40)
    traces, _ = run_way(way, ITEMS, [runner])
    assert differences(reference[1][: len(ITEMS)], traces, way) != []


def test_models_with_a_layer_that_sees_everything_keep_their_blocks(tiny_folder: FolderOf) -> None:
    found = {name: make_runner(tiny_folder(name)).info.window for name in ("mistral", "mixtral", "qwen2", "gemma3")}
    assert found == {"mistral": WINDOW, "mixtral": WINDOW, "qwen2": None, "gemma3": None}
    assert make_runner(tiny_folder("mistral"), max_model_len=WINDOW).info.window is None, "nothing is ever passed"
