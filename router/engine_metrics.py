"""ASYNC. Prometheus text for what replicas tell: vLLM's names where vLLM has the figure, `shoal_` for ours.

Counters come from the replicas, so every router exports the same ones; only the router's own carry a router label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from replica.messages import ReplicaLoad
from router.dispatcher import Dispatcher

#: metric name, help text, how to read it from a load
_GAUGES: tuple[tuple[str, str, Callable[[ReplicaLoad], float]], ...] = (
    ("vllm:num_requests_running", "Sequences in the running batch.", lambda load: load.num_running),
    (
        "vllm:num_requests_waiting",
        "Sequences queued or returning at the replica.",
        lambda load: load.num_queued + load.num_returning,
    ),
    (
        "vllm:kv_cache_usage_perc",
        "Referenced KV blocks over all blocks, 0 to 1; cached-but-free blocks are not usage.",
        lambda load: 1 - load.num_free_blocks / load.num_blocks if load.num_blocks else 0.0,
    ),
    (
        "shoal_num_sequences_queued",
        "Accepted and never scheduled: what the queue cap bounds.",
        lambda load: load.num_queued,
    ),
    (
        "shoal_num_sequences_returning",
        "Preempted, resumed or moved in; not under the cap.",
        lambda load: load.num_returning,
    ),
    ("shoal_queue_cap", "max_queued_requests_per_replica.", lambda load: load.queue_cap),
    ("shoal_queued_prompt_tokens", "Prompt tokens of waiting sequences.", lambda load: load.num_queued_prompt_tokens),
    ("shoal_uncomputed_tokens", "Known tokens without KV.", lambda load: load.num_uncomputed_tokens),
)
#: metric name, help text, key in `ReplicaLoad.counters`
_COUNTERS = (
    ("vllm:num_preemptions", "Running sequences put back to waiting.", "preemptions"),
    ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", "prefix_cache_queries"),
    ("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", "prefix_cache_hits"),
    ("shoal_recomputed_tokens", "Tokens computed again after a preemption.", "recomputed_tokens"),
    ("shoal_evictions", "Cached blocks reused for other content.", "evictions"),
    ("shoal_engine_prompt_tokens", "Prompt tokens of scheduled sequences.", "prompt_tokens"),
    ("shoal_engine_generation_tokens", "Tokens sampled.", "generation_tokens"),
    ("shoal_refused_submissions", "Submissions the replica refused.", "refused"),
)


class _Collector(Collector):
    def __init__(self, dispatcher: Dispatcher, model_name: str, router_id: str) -> None:
        self._dispatcher = dispatcher
        self._model_name = model_name
        self._router_id = router_id

    def collect(self) -> Iterator[Metric]:
        labels = ["model_name", "engine"]
        loads: list[tuple[list[str], ReplicaLoad]] = [
            ([self._model_name, view.replica_id], view.load) for view in self._dispatcher.views.values()
        ]
        for name, text, read in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=labels)
            for values, load in loads:
                gauge.add_metric(values, read(load))
            yield gauge
        for name, text, key in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=labels)
            for values, load in loads:
                counter.add_metric(values, load.counters.get(key, 0))
            yield counter
        held = GaugeMetricFamily("shoal_held_requests", "Requests this router holds.", labels=["model_name", "router"])
        held.add_metric([self._model_name, self._router_id], self._dispatcher.num_held)
        yield held


def render_metrics(dispatcher: Dispatcher, model_name: str, router_id: str) -> bytes:
    """Prometheus text format."""
    registry = CollectorRegistry()
    registry.register(_Collector(dispatcher, model_name, router_id))
    return generate_latest(registry)
