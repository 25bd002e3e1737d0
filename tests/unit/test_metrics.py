"""Exported metrics: names and kinds are those of the glossary, values those of what happened."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from replica.group_figures import GroupFigures
from replica.group_health import LossCause
from replica.messages import STEP_TOKEN_BOUNDS, ReplicaId, ReplicaLoad, Stages
from router import engine_metrics
from router.dispatcher import Dispatcher, DispatcherConfig
from router.engine_metrics import RouterFigures, render_metrics
from router.http_metrics import HttpMetrics
from router.placement import least_tokens
from router.replica_view import ReplicaView
from router.tenant_desk import TenantDesk
from router.tenants import Tenant

LOAD = ReplicaLoad(
    num_queued=3,
    num_returning=2,
    num_running=4,
    num_free_blocks=25,
    num_blocks=100,
    queue_cap=64,
    counters={
        "prompt_tokens": 100,
        "cached_prompt_tokens": 32,
        "scheduled_tokens": 77.0,
        "waiting_for_grammar": 1,
        "prefix_cache_resets": 2,
    },
    step_token_counts=[5, 2, *[0] * (len(STEP_TOKEN_BOUNDS) - 2), 1],
)


def families(text: bytes) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text.decode())}


def value(family: Metric, suffix: str = "", **labels: str) -> float:
    """The one sample of this name and these labels."""
    found = [
        sample.value
        for sample in family.samples
        if sample.name == family.name + suffix and labels.items() <= sample.labels.items()
    ]
    assert len(found) == 1, (family.name, labels, found)
    return float(found[0])


def edge_metrics() -> HttpMetrics:
    """One request of two sequences answered, one aborted, one refused."""
    metrics = HttpMetrics("vllm:", "r")
    metrics.watch_body_bytes(lambda: 17)
    tenants = TenantDesk([Tenant("t")])
    metrics.watch_tenants(tenants)
    tenants.refused("t", "queue_full")
    record = metrics.start("m", 1.0)
    record.accepted(30, 8, 2)
    for index, now_s in ((0, 2.0), (1, 2.0), (0, 2.5), (0, 3.0)):
        record.tokens(index, 1, now_s)
    record.stages(0, Stages(0.25, 0.5, 1.0, 3))
    record.stages(1, Stages(0.75, 0.125))
    record.complete([3, 1], [30, 14])
    record.end("length")
    gone = metrics.start("m", 1.0)
    gone.tokens(0, 1, 9.0)
    gone.end("abort")
    gone.end("error")
    metrics.start("m", 1.0).refuse("queue_full")
    metrics.answered("/v1/models", "GET", 200)
    return metrics


def engine_text(told: dict[str, str] | None = None, **counters: float) -> bytes:
    dispatcher = Dispatcher(DispatcherConfig(), least_tokens)
    dispatcher.add_replica(ReplicaView(ReplicaId("a"), "address", "a"))
    load = msgspec.structs.replace(LOAD, counters=LOAD.counters | counters)
    dispatcher.on_load(ReplicaId("a"), load, 1.0)
    return render_metrics(dispatcher, {ReplicaId("a"): told or {}}, "m", RouterFigures("r"))


def glossary(root: Path) -> dict[str, str]:
    """Name -> kind, from the tables of docs/metrics.md."""
    rows = re.findall(r"^\| `([\w:]+)` \| (\w+) \|", (root / "docs" / "metrics.md").read_text(), flags=re.MULTILINE)
    assert len(rows) == len(dict(rows)), "a name stands there twice"
    return dict(rows)


def test_the_glossary_has_every_exported_name_and_no_other(repo_root: Path) -> None:
    exported = families(edge_metrics().text()) | families(engine_text())
    assert {name: family.type for name, family in exported.items()} == glossary(repo_root)


def test_every_metric_has_a_help_text() -> None:
    exported = families(edge_metrics().text()) | families(engine_text())
    assert [name for name, family in exported.items() if not family.documentation] == []


def test_what_is_absent_is_named(repo_root: Path) -> None:
    absent = (repo_root / "docs" / "metrics.md").read_text().partition("## Not here")[2]
    for what in ("LoRA", "mm_cache", "sleep", "nixl", "spec_decode"):
        assert what in absent


@pytest.mark.parametrize(
    ("name", "count", "total"),
    [
        ("time_to_first_token_seconds", 2, 1.0 + 8.0),
        ("inter_token_latency_seconds", 2, 1.0),
        ("request_time_per_output_token_seconds", 0, 0.0),  # two sequences: undefined
        ("e2e_request_latency_seconds", 1, 2.0),
        ("request_queue_time_seconds", 2, 1.0),
        ("request_prefill_time_seconds", 2, 0.625),
        ("request_decode_time_seconds", 2, 1.0 + 0.0),
        ("request_inference_time_seconds", 2, 1.5 + 0.125),
        ("request_num_preemptions", 1, 3),
        ("request_generation_tokens", 2, 4 + 1),
        ("request_max_num_generation_tokens", 1, 3),
        ("request_prefill_kv_computed_tokens", 2, 44),
        ("request_prompt_tokens", 1, 30),
        ("request_params_max_tokens", 1, 8),
        ("request_params_n", 1, 2),
    ],
)
def test_histograms_of_the_edge(name: str, count: int, total: float) -> None:
    family = families(edge_metrics().text())["vllm:" + name]
    assert value(family, "_count", model_name="m", router="r") == count
    assert value(family, "_sum", model_name="m", router="r") == pytest.approx(total)
    assert value(family, "_bucket", le="+Inf") == count


def test_counters_of_the_edge_and_that_a_request_ends_once() -> None:
    found = families(edge_metrics().text())
    assert value(found["vllm:generation_tokens"], "_total", model_name="m") == 5
    assert value(found["vllm:prompt_tokens"], "_total", model_name="m") == 30
    ended = {sample.labels["finished_reason"]: sample.value for sample in found["vllm:request_success"].samples}
    assert ended == {"length": 1.0, "abort": 1.0}
    assert value(found["vllm:admission_rejections"], "_total", reason="queue_full") == 1
    assert value(found["shoal_pending_body_bytes"], router="r") == 17


def test_zero_gaps_of_tokens_that_come_together_are_counted() -> None:
    metrics = HttpMetrics("vllm:")
    record = metrics.start("m", 0.0)
    record.tokens(0, 3, 1.0)
    record.tokens(0, 2, 1.5)
    record.tokens(0, 0, 9.0)
    family = families(metrics.text())["vllm:inter_token_latency_seconds"]
    assert (value(family, "_count"), value(family, "_sum")) == (4, 0.5)
    assert value(family, "_bucket", le="0.001") == 3


def test_losses_of_ranks_by_every_cause_there_is() -> None:
    assert {cause.value for cause in LossCause} == set(engine_metrics._LOSS_CAUSES)
    figures = GroupFigures(3)
    figures.alive(2)
    figures.lost(LossCause.GONE)
    figures.lost(LossCause.GONE)
    figures.lost(LossCause.HUNG)
    figures.mended(2.5)
    found = families(engine_text({}, **figures.counters))
    losses = found["shoal_rank_losses"]
    assert [value(losses, "_total", cause=c) for c in engine_metrics._LOSS_CAUSES] == [2, 0, 0, 1, 0]
    names = ("shoal_ranks", "shoal_ranks_alive", "shoal_last_mending_seconds")
    assert [value(found[name]) for name in names] == [3, 2, 2.5]
    assert value(found["shoal_group_restarts"], "_total") == 1


def test_figures_of_a_replica() -> None:
    found = families(engine_text({"block_size": "16", "enable_prefix_caching": "True"}))
    assert value(found["vllm:num_requests_waiting"], engine="a") == 5
    waiting = found["vllm:num_requests_waiting_by_reason"]
    assert [value(waiting, reason=reason) for reason in ("capacity", "deferred")] == [4, 1]
    sources = found["vllm:prompt_tokens_by_source"]
    assert [value(sources, "_total", source=s) for s in ("local_compute", "local_cache_hit")] == [68, 32]
    assert value(found["vllm:prompt_tokens_cached"], "_total") == 32
    assert value(found["vllm:kv_cache_usage_perc"]) == 0.75
    assert value(found["shoal_prefix_cache_resets"], "_total") == 2
    (info,) = found["vllm:cache_config_info"].samples
    assert info.value == 1
    assert info.labels == {
        "model_name": "m",
        "engine": "a",
        "block_size": "16",
        "num_gpu_blocks": "100",
        "kv_cache_size_tokens": "1600",
        "enable_prefix_caching": "True",
    }


def test_tokens_of_steps() -> None:
    family = families(engine_text())["vllm:iteration_tokens_total"]
    assert [value(family, "_bucket", le=le) for le in ("1.0", "8.0", "16.0", "16384.0", "+Inf")] == [5, 7, 7, 7, 8]
    assert (value(family, "_count"), value(family, "_sum")) == (8, 77)


def test_a_replica_that_has_said_nothing_yet_has_empty_metrics() -> None:
    dispatcher = Dispatcher(DispatcherConfig(), least_tokens)
    dispatcher.add_replica(ReplicaView(ReplicaId("a"), "address", "a"))
    found = families(render_metrics(dispatcher, {}, "m", RouterFigures("r")))
    assert value(found["vllm:iteration_tokens_total"], "_count") == 0
    assert value(found["vllm:kv_cache_usage_perc"]) == 0
    assert found["vllm:cache_config_info"].samples[0].labels["block_size"] == ""
