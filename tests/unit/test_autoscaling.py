"""How many replicas: from what they tell; and Serve's hook and default policy as they are in Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.scaling_rival import ServeDefaultPolicy, ServeSettings
from cluster.autoscaling import AutoscalingConfig, ScalingPolicy, demand
from cluster.config import load
from cluster.serve_policy import ServePolicy, figures_of, serve_options
from cluster.simulation.sim_scaling import Seen
from replica.errors import ConfigError
from replica.messages import ReplicaLoad
from replica.scaling_figures import NAMES, ScalingFigures

CONFIG = AutoscalingConfig(max_replicas=6, tpot_target_ms=100, cool_down_s=60)
#: a step is 20 ms and 2 for each stream: 40 of them take 100 ms
LINE = {"step_base_s": 0.02, "step_decode_s": 0.002, "step_prompt_token_s": 0.0005}
IDLE = dict.fromkeys(NAMES, 0.0) | LINE


def busy(streams: float, **more: float) -> dict[str, float]:
    return IDLE | {"running": streams} | more


def test_demand_is_one_where_the_target_is_just_met() -> None:
    assert demand(busy(40), CONFIG) == pytest.approx(1.0)
    assert demand(busy(0, prompt_tokens_per_s=1600), CONFIG) == pytest.approx(1.0)
    assert demand(busy(20, prompt_tokens_per_s=800), CONFIG) == pytest.approx(1.0)


def test_demand_does_not_depend_on_how_many_share_the_work() -> None:
    """Ten streams at 40 ms a step say 250 tokens/s; at 100 ms as many tokens take 25 streams."""
    one = demand(busy(40, decode_tokens_per_s=400), CONFIG)
    four = 4 * demand(busy(2.5, decode_tokens_per_s=100), CONFIG)
    assert one == pytest.approx(four)


def test_a_queue_counts_by_its_drain_forecast_or_its_tokens() -> None:
    assert demand(busy(0, waiting=3, drain_s=10), CONFIG) == pytest.approx(2.0)
    assert demand(busy(0, waiting=3, uncomputed_tokens=20_000), CONFIG) == pytest.approx(2.0)
    # a prompt that is being computed is no queue
    assert demand(busy(0, waiting=0, uncomputed_tokens=20_000), CONFIG) == 0.0


def test_a_target_below_the_base_of_a_step_is_not_divided_by_nothing() -> None:
    assert 0 < demand(busy(10, step_base_s=0.5), CONFIG) < 1


def test_more_at_once_where_there_is_not_enough_and_never_above_the_most() -> None:
    policy = ScalingPolicy(CONFIG, fewest=1)
    assert policy.decide([busy(41)], 1, 0.0) == 2
    assert policy.decide([busy(40), busy(120)], 2, 1.0) == 5
    assert policy.decide([busy(400)], 1, 2.0) == 6


def test_a_load_that_is_only_above_the_target_has_to_last() -> None:
    policy = ScalingPolicy(CONFIG, fewest=1)
    loads = [36] * 8 + [30] + [36] * 11  # a pause of a second begins it anew
    assert [policy.decide([busy(streams)], 1, float(now)) for now, streams in enumerate(loads)] == [1] * 19 + [2]


def test_kv_alone_is_a_reason() -> None:
    policy = ScalingPolicy(CONFIG, fewest=1)
    assert policy.decide([busy(1, kv_use=0.9)], 1, 0.0) == 1
    assert policy.decide([busy(1, kv_use=0.9)], 1, 10.0) == 2
    assert policy.decide([busy(1, kv_use=0.96)], 1, 11.0) == 2


def test_fewer_only_after_the_cool_down_and_to_the_most_that_was_needed() -> None:
    policy = ScalingPolicy(CONFIG, fewest=1)
    assert policy.decide([busy(20)] * 4, 4, 0.0) == 4
    for now in range(1, 60):
        streams = 9 if now == 30 else 2  # a moment in which two were needed
        assert policy.decide([busy(streams)] * 4, 4, float(now)) == 4
    assert policy.decide([busy(2)] * 4, 4, 61.0) == 2
    assert policy.decide([busy(2)] * 2, 2, 80.0) == 2
    assert policy.decide([busy(2)] * 2, 2, 91.0) == 1
    assert policy.decide([busy(0)], 1, 1000.0) == 1


def test_the_margin_keeps_what_is_just_not_needed() -> None:
    """Two are enough for a load of 1.5 (target 0.8), and three stay: with a quarter less room two would not be."""
    policy = ScalingPolicy(CONFIG, fewest=1)
    figures = [busy(40 * 1.5 / 3)] * 3
    assert [policy.decide(figures, 3, float(now)) for now in (0, 100, 200)] == [3, 3, 3]
    assert policy.decide(figures[:2], 2, 300.0) == 2


def test_the_warm_minimum_and_a_silent_cluster() -> None:
    policy = ScalingPolicy(CONFIG, fewest=2)
    assert policy.decide([IDLE], 1, 0.0) == 2
    assert policy.decide([], 4, 0.0) == 4, "nobody told anything: nothing changes"
    assert policy.decide([], 9, 0.0) == 6


def test_figures_of_a_replica() -> None:
    figures = ScalingFigures()
    load_ = ReplicaLoad(num_queued=4, drain_rate=2.0, num_running=3, num_blocks=10, num_free_blocks=4)
    told = figures.take(load_, (0.02, 0.002, 0.0005), 10.0)
    assert set(told) == set(NAMES)
    assert (told["drain_s"], told["kv_use"], told["decode_tokens_per_s"]) == (2.0, 0.6, 0.0)
    later = ReplicaLoad(counters={"generation_tokens": 50.0, "scheduled_tokens": 250.0})
    told = figures.take(later, (0.0, 0.0, 0.0), 12.0)
    assert (told["decode_tokens_per_s"], told["prompt_tokens_per_s"]) == (25.0, 100.0)
    told = figures.take(later, (0.0, 0.0, 0.0), 1000.0)
    assert told["decode_tokens_per_s"] < 0.01


def test_what_serve_carries_and_how_it_asks() -> None:
    def series(value: float) -> list[Any]:
        return [SimpleNamespace(value=0.0), SimpleNamespace(value=value)]

    raw = {name: {"a": series(busy(40)[name]), "b": series(busy(120)[name])} for name in NAMES}
    raw["running"]["c"] = series(500.0)  # told only a part
    raw["running_requests"] = {"a": series(0.0)}  # Serve's own
    assert sorted(f["running"] for f in figures_of(raw)) == [40, 120]
    assert figures_of({}) == []
    policy = ServePolicy(fewest=1, settings=CONFIG.model_dump(mode="json"))
    context = SimpleNamespace(raw_metrics=raw, target_num_replicas=2, current_time=0.0)
    assert policy(context) == (5, {})


def test_serve_takes_our_options() -> None:
    from ray.serve.config import AutoscalingConfig as OfServe

    assert serve_options(load({"replicas": {"both": 3}})) == {"num_replicas": 3}
    options = serve_options(load({"replicas": {"both": 2}, "autoscaling": {"max_replicas": 5}}))
    made = OfServe.model_validate(options["autoscaling_config"])
    assert (made.min_replicas, made.max_replicas, made.initial_replicas) == (2, 5, None)
    policy = made.policy.get_policy()(**made.policy.policy_kwargs)
    assert policy._policy.most == 5


def test_the_most_is_not_below_the_fewest() -> None:
    with pytest.raises(
        ConfigError, match=r"max_replicas is 2 and replicas\.both, the fewest, is 3; allowed: at least 3"
    ):
        load({"replicas": {"both": 3}, "autoscaling": {"max_replicas": 2}})
    assert load({"autoscaling": {"max_replicas": 4}}).most_replicas == 4


@pytest.mark.parametrize(
    "ongoing", [[0, 0, 40, 40, 40, 40, 8, 8, 8, 8, 8, 8], [30, 2, 30, 2, 30, 2, 30, 2, 30, 2, 2, 2]]
)
def test_the_rival_decides_as_ray_does(ongoing: list[int]) -> None:
    """Its delays and its arithmetic against Ray's own functions, at the same instants."""
    from ray.serve import autoscaling_policy as of_ray
    from ray.serve.config import AutoscalingConfig as OfServe

    theirs = OfServe(min_replicas=1, max_replicas=100, upscale_delay_s=30, downscale_delay_s=40)
    ours = ServeDefaultPolicy(ServeSettings(downscale_delay_s=40, look_back_period_s=1, metrics_interval_s=1), 1, 100)
    state: dict[str, Any] = {}
    target = mine = 4
    for number, count in enumerate(ongoing):
        now = 10.0 * number
        context: Any = SimpleNamespace(current_num_replicas=target, target_num_replicas=target, config=theirs,
                                       total_num_requests=float(count))  # fmt: skip
        raw, _ = of_ray._core_replica_queue_length_policy(context)
        scaled = of_ray._apply_scaling_factors(raw, target, theirs)
        target, state = of_ray._apply_delay_logic(max(0, scaled), target, theirs, state, now)
        target = min(100, max(1, target))
        mine = ours.wanted(Seen([], count, mine, mine), now)
        assert mine == target, number
