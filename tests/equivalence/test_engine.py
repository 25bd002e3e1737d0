"""Our own ways of computing give the same bits: a slice of what `make claims ONLY=line.equal FULL=1` measures in
full.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.equality import WAYS, Item, Trace, Way, differences, make_items, make_ruled_items, run_way
from cluster import model_store
from replica.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from replica.messages import SamplingParams
from replica.model_runner import TorchModelRunner

pytestmark = [pytest.mark.model, pytest.mark.slow]

ITEMS = make_items(12, 16)
#: penalties, bias, bans, minimum lengths, logprobs, grammars
RULED_ITEMS = make_ruled_items(12, 12)


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def runners(request: pytest.FixtureRequest) -> Iterator[list[TorchModelRunner]]:
    folder = Path(model_store.resolve("smollm2-135m-instruct"))
    config = EngineConfig(
        model=ModelConfig(dtype=request.param),
        cache=CacheConfig(num_blocks=700),
        parallel=ParallelConfig(num_threads=2),
    )
    runners = [TorchModelRunner(config, folder) for _ in range(2)]
    yield runners
    for runner in runners:
        runner.close()


@pytest.fixture(scope="module")
def reference(runners: list[TorchModelRunner]) -> list[Trace]:
    traces, _ = run_way(WAYS[0], ITEMS, runners)
    return traces


@pytest.mark.parametrize("way", WAYS[1:], ids=lambda way: way.name)
def test_logits_are_bit_equal_and_tokens_equal(
    way: Way, runners: list[TorchModelRunner], reference: list[Trace]
) -> None:
    traces, tally = run_way(way, ITEMS, runners, [trace.tokens for trace in reference])
    assert differences(reference, traces, way) == []
    if way.num_blocks == 0 or way.urgent_every or way.puts_back:
        assert tally.preemptions >= 3, "too few to mean anything"
    if "guessed" in way.name:
        assert tally.accepted_tokens >= 3, "too few to mean anything"


@pytest.fixture(scope="module")
def ruled_reference(runners: list[TorchModelRunner]) -> list[Trace]:
    traces, _ = run_way(WAYS[0], RULED_ITEMS, runners)
    return traces


#: the others are in `make claims ONLY=api.equal`
RULED_WAYS = [way for way in WAYS[1:] if way.name in ("batched", "preempted again and again", "resumed half-way")]


@pytest.mark.parametrize("way", RULED_WAYS, ids=lambda way: way.name)
def test_rules_do_not_depend_on_the_way_either(
    way: Way, runners: list[TorchModelRunner], ruled_reference: list[Trace]
) -> None:
    traces, _ = run_way(way, RULED_ITEMS, runners, [trace.tokens for trace in ruled_reference])
    assert differences(ruled_reference, traces, way) == []


def test_rules_do_something(runners: list[TorchModelRunner], ruled_reference: list[Trace]) -> None:
    """Else the test above would compare nothing: the same requests without their rules give other tokens."""
    plain = [
        Item(item.prompt, SamplingParams(12, item.sampling.temperature, seed=item.sampling.seed, ignore_eos=True))
        for item in RULED_ITEMS
    ]
    traces, _ = run_way(WAYS[1], plain, runners[:1])
    changed = [a.tokens != b.tokens for a, b in zip(traces, ruled_reference, strict=True)]
    assert sum(changed) >= 8, changed


def test_the_self_test_passes_on_this_device(runners: list[TorchModelRunner]) -> None:
    assert runners[0].is_invariant is True
    assert "invariance self-test passed" in runners[0].info.description


def test_a_single_flipped_bit_would_show(reference: list[Trace]) -> None:
    broken = [Trace(list(t.tokens), list(t.logits)) for t in reference]
    broken[3].logits[7] = bytes(32)
    assert differences(reference, broken, WAYS[1]) == ["batched: request 3: logits differ from output position 7 on"]
