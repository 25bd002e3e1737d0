"""ASYNC. Prometheus text for what replicas tell: vLLM's names where vLLM has the figure, `shoal_` for ours. What each
means: `docs/metrics.md`.

Counters come from the replicas, so every router exports the same ones; only the router's own carry a router label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from replica.messages import STEP_SECOND_BOUNDS, STEP_SEQUENCE_BOUNDS, STEP_TOKEN_BOUNDS, ReplicaId, ReplicaLoad
from router import audit
from router.breakdown import PARTS
from router.dispatcher import Dispatcher
from router.tier_metrics import TIER_BY_LABEL, TIER_COUNTERS, TIER_GAUGES

#: what each replica told Serve of itself when it came up
Metadata = Mapping[ReplicaId, Mapping[str, str]]

_NUM_PROMPT_TOKENS, _NUM_CACHED = "prompt_tokens", "cached_prompt_tokens"


def _waiting(load: ReplicaLoad) -> int:
    return load.num_queued + load.num_returning


def _deferred(load: ReplicaLoad) -> float:
    """Waiting for something else than room: a grammar that is being compiled."""
    return load.counters.get("waiting_for_grammar", 0)


def _num_losses(cause: str, load: ReplicaLoad) -> float:
    return load.counters.get(f"rank_losses_{cause}", 0)


def _num_leaks(what: str, load: ReplicaLoad) -> float:
    return load.counters.get(f"leaks_{what}", 0)


#: metric name, help text, how to read it from a load
_GAUGES: tuple[tuple[str, str, Callable[[ReplicaLoad], float]], ...] = (
    ("vllm:num_requests_running", "Sequences in the running batch.", lambda load: load.num_running),
    ("vllm:num_requests_waiting", "Sequences queued or returning at the replica.", _waiting),
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
    ("shoal_queue_permits", "Places reserved for requests that routers hold.", lambda load: load.num_permits),
    ("shoal_queued_prompt_tokens", "Prompt tokens of waiting sequences.", lambda load: load.num_queued_prompt_tokens),
    ("shoal_uncomputed_tokens", "Known tokens without KV.", lambda load: load.num_uncomputed_tokens),
    ("shoal_free_kv_blocks", "Blocks that nobody references.", lambda load: load.num_free_blocks),
    (
        "shoal_kv_internal_fragmentation",
        "Slots of the running sequences' blocks without a token over all slots of referenced blocks.",
        lambda load: load.kv_fragmentation,
    ),
    (
        "shoal_oldest_wait_seconds",
        "How long the one that waits longest has been waiting.",
        lambda load: load.oldest_wait_s,
    ),
    (
        "shoal_config_number",
        "Names the configuration in force at a replica: equal numbers, equal live values.",
        lambda load: load.counters.get("config_number", 0),
    ),
    (
        "shoal_prompt_token_limit",
        "Tokens that prompts could have in the last step beside streams.",
        lambda load: load.counters.get("prompt_token_limit", 0),
    ),
    (
        "shoal_kv_swapped_sequences",
        "Preempted sequences that wait, their KV kept by the KV connector.",
        lambda load: load.counters.get("kv_swapped", 0),
    ),
    (
        "shoal_kv_connected",
        "1: the replica is connected to a KV connector.",
        lambda load: load.counters.get("kv_connected", 0),
    ),
    ("shoal_ranks", "Worker ranks of a replica; 0: it has none.", lambda load: load.counters.get("ranks", 0)),
    ("shoal_ranks_alive", "Of these, those that are there.", lambda load: load.counters.get("ranks_alive", 0)),
    (
        "shoal_last_mending_seconds",
        "How long the ranks took to be whole again the last time; 0: never.",
        lambda load: load.counters.get("last_mending_s", 0),
    ),
)
#: what `replica/audit.py` looks for
_LEAKS = ("blocks", "requests", "routers", "permits", "grammars", "queue")
_LOSS_CAUSES = ("gone", "stopped", "silent", "hung", "failed")
#: metric name, help text, key in `ReplicaLoad.counters`
_COUNTERS = (
    ("vllm:num_preemptions", "Running sequences put back to waiting.", "preemptions"),
    ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", "prefix_cache_queries"),
    ("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", "prefix_cache_hits"),
    ("vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache.", _NUM_CACHED),
    ("shoal_recomputed_tokens", "Tokens computed again after a preemption.", "recomputed_tokens"),
    ("vllm:spec_decode_num_draft_tokens", "Tokens guessed ahead and computed.", "drafted_tokens"),
    ("vllm:spec_decode_num_accepted_tokens", "Guessed tokens that came true.", "accepted_tokens"),
    ("shoal_displaced_sequences", "Preemptions that made way for a more urgent sequence.", "displaced"),
    ("shoal_model_seconds", "The model runner worked.", "model_s"),
    ("shoal_scheduler_seconds", "Planning steps and taking in results.", "scheduler_s"),
    ("shoal_between_steps_seconds", "There was work, and the runner waited for the next step.", "between_steps_s"),
    ("shoal_evictions", "Cached blocks reused for other content.", "evictions"),
    ("shoal_prefix_cache_resets", "Times the prefix cache was emptied on request.", "prefix_cache_resets"),
    ("shoal_engine_prompt_tokens", "Prompt tokens of scheduled sequences.", _NUM_PROMPT_TOKENS),
    ("shoal_engine_generation_tokens", "Tokens sampled.", "generation_tokens"),
    ("shoal_group_restarts", "Times the ranks of a replica were made whole again.", "group_restarts"),
    ("shoal_kv_loads", "Sequences whose KV was loaded from the KV connector.", "kv_loads"),
    ("shoal_kv_failed_loads", "Loads that came to nothing or to less: computed instead.", "kv_failed_loads"),
    ("shoal_kv_blocks_loaded", "Blocks copied from the connector's arena into the pool.", "kv_blocks_loaded"),
    ("shoal_kv_blocks_stored", "Blocks copied from the pool into the connector's arena.", "kv_blocks_stored"),
    ("shoal_kv_blocks_refused", "Blocks offered to the connector that it did not want.", "kv_blocks_refused"),
    ("shoal_kv_load_wait_seconds", "Sequences waited for the connector's answer.", "kv_load_wait_s"),
    ("shoal_kv_offloads", "Preempted sequences whose KV was kept by the connector.", "kv_offloads"),
    ("shoal_kv_stalls", "Times that a sequence stayed out of a step until a copy gave a block back.", "kv_stalls"),
    ("shoal_refused_submissions", "Submissions the replica refused.", "refused"),
)
#: metric name, kind, help text, label and how to read the value of each of its values
_BY_LABEL: tuple[
    tuple[
        str,
        type[GaugeMetricFamily] | type[CounterMetricFamily],
        str,
        str,
        tuple[tuple[str, Callable[[ReplicaLoad], float]], ...],
    ],
    ...,
] = (
    (
        "vllm:num_requests_waiting_by_reason",
        GaugeMetricFamily,
        "Waiting sequences: for room, or deferred until a grammar is compiled.",
        "reason",
        (("capacity", lambda load: _waiting(load) - _deferred(load)), ("deferred", _deferred)),
    ),
    (
        "vllm:prompt_tokens_by_source",
        CounterMetricFamily,
        "Prompt tokens of scheduled sequences, computed or found in the prefix cache.",
        "source",
        (
            (
                "local_compute",
                lambda load: load.counters.get(_NUM_PROMPT_TOKENS, 0) - load.counters.get(_NUM_CACHED, 0),
            ),
            ("local_cache_hit", lambda load: load.counters.get(_NUM_CACHED, 0)),
        ),
    ),
    (
        "shoal_rank_losses",
        CounterMetricFamily,
        "Ranks that were lost.",
        "cause",
        tuple((cause, partial(_num_losses, cause)) for cause in _LOSS_CAUSES),
    ),
    (
        "shoal_leaks",
        CounterMetricFamily,
        "Lost in the books of a replica.",
        "what",
        tuple((what, partial(_num_leaks, what)) for what in _LEAKS),
    ),
)

#: metric name, help text, bounds, how to read the counts from a load, key of the sum in `ReplicaLoad.counters`
_HISTOGRAMS: tuple[tuple[str, str, tuple[float, ...], Callable[[ReplicaLoad], list[int]], str], ...] = (
    (
        "vllm:iteration_tokens_total",
        "Tokens in a step, prompt and decode.",
        STEP_TOKEN_BOUNDS,
        lambda load: load.step_token_counts,
        "scheduled_tokens",
    ),
    (
        "shoal_step_sequences",
        "Sequences in a step.",
        STEP_SEQUENCE_BOUNDS,
        lambda load: load.step_sequence_counts,
        "scheduled_sequences",
    ),
    (
        "shoal_step_seconds",
        "How long the runner worked on a step.",
        STEP_SECOND_BOUNDS,
        lambda load: load.step_second_counts,
        "model_s",
    ),
)


class RouterFigures(NamedTuple):
    """What a router tells of itself beside its dispatcher's. `leaks`: by what (`router/audit.py`)."""

    router_id: str
    config_number: int = 0
    leaks: Mapping[str, int] = {}
    #: of requests that ended well, by part
    part_seconds: Mapping[str, float] = {}


class _Collector(Collector):
    def __init__(self, dispatcher: Dispatcher, metadata: Metadata, model_name: str, own: RouterFigures) -> None:
        self._dispatcher = dispatcher
        self._metadata = metadata
        self._model_name = model_name
        self._own = own

    def collect(self) -> Iterator[Metric]:
        labels = ["model_name", "engine"]
        loads = [([self._model_name, str(view.replica_id)], view.load) for view in self._dispatcher.all_views.values()]
        for name, text, read in (*_GAUGES, *TIER_GAUGES):
            gauge = GaugeMetricFamily(name, text, labels=labels)
            for values, load in loads:
                gauge.add_metric(values, read(load))
            yield gauge
        for name, text, key in (*_COUNTERS, *TIER_COUNTERS):
            counter = CounterMetricFamily(name, text, labels=labels)
            for values, load in loads:
                counter.add_metric(values, load.counters.get(key, 0))
            yield counter
        for name, kind, text, label, parts in (*_BY_LABEL, *TIER_BY_LABEL):
            family = kind(name, text, labels=[*labels, label])
            for values, load in loads:
                for value, read in parts:
                    family.add_metric([*values, value], read(load))
            yield family
        for name, text, bounds, read_counts, total in _HISTOGRAMS:
            histogram = HistogramMetricFamily(name, text, labels=labels)
            for values, load in loads:
                counts = read_counts(load) or [0] * (len(bounds) + 1)
                histogram.add_metric(values, _buckets(bounds, counts), load.counters.get(total, 0))
            yield histogram
        yield self._cache_config()
        for name, text, figure in (
            ("shoal_held_requests", "Requests this router holds.", self._dispatcher.num_held),
            ("shoal_router_config_number", "Names the configuration in force at this router.", self._own.config_number),
        ):
            own = GaugeMetricFamily(name, text, labels=["model_name", "router"])
            own.add_metric([self._model_name, self._own.router_id], figure)
            yield own
        leaks = CounterMetricFamily(
            "shoal_router_leaks", "Lost in the books of this router.", labels=["model_name", "router", "what"]
        )
        for what in audit.WHAT:
            leaks.add_metric([self._model_name, self._own.router_id, what], self._own.leaks.get(what, 0))
        yield leaks
        yield self._by_name(
            "shoal_request_part_seconds",
            "Where the time of requests that ended well went; transfer_hidden lies beside the others.",
            "part",
            {part: self._own.part_seconds.get(part, 0.0) for part in (*PARTS, "transfer_hidden")},
        )
        desk = getattr(self._dispatcher, "desk", None)
        figures = {} if desk is None else desk.counters
        yield self._by_name("shoal_hand_overs", "Where prompts were computed, and what failed.", "what", figures)

    def _by_name(self, name: str, text: str, label: str, figures: Mapping[str, float]) -> Metric:
        counter = CounterMetricFamily(name, text, labels=["model_name", "router", label])
        for value, figure in figures.items():
            counter.add_metric([self._model_name, self._own.router_id, value], figure)
        return counter

    def _cache_config(self) -> Metric:
        names = ("block_size", "num_gpu_blocks", "kv_cache_size_tokens", "enable_prefix_caching")
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Always 1; the labels describe the KV cache of a replica.",
            labels=["model_name", "engine", *names],
        )
        for view in self._dispatcher.all_views.values():
            told = self._metadata.get(view.replica_id, {})
            block_size = told.get("block_size", "")
            num_blocks = view.load.num_blocks
            num_tokens = str(num_blocks * int(block_size)) if block_size else ""
            values = [block_size, str(num_blocks), num_tokens, told.get("enable_prefix_caching", "")]
            info.add_metric([self._model_name, str(view.replica_id), *values], 1)
        return info


def _buckets(bounds: tuple[float, ...], counts: list[int]) -> list[tuple[str, float]]:
    names = [*(str(float(bound)) for bound in bounds), "+Inf"]
    return list(zip(names, map(float, accumulate(counts)), strict=True))


def render_metrics(dispatcher: Dispatcher, metadata: Metadata, model_name: str, own: RouterFigures) -> bytes:
    """Prometheus text format."""
    registry = CollectorRegistry()
    registry.register(_Collector(dispatcher, metadata, model_name, own))
    return generate_latest(registry)
