"""ASYNC. What the KVConnector of a node counts, as metrics. One replica of each node tells it; the others have 0 there,
so that a sum over replicas is right.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from replica.messages import ReplicaLoad

Read = Callable[[ReplicaLoad], float]


def _read(key: str, load: ReplicaLoad) -> float:
    return load.counters.get(key, 0)


def _parts(pattern: str, *names: str) -> tuple[tuple[str, Read], ...]:
    """A value for each name, read from the counter that `pattern` says."""
    return tuple((name, partial(_read, pattern.format(name))) for name in names)


#: metric name, help text, how to read it
TIER_GAUGES: tuple[tuple[str, str, Read], ...] = (
    (
        "shoal_kv_blocks_stranded",
        "Slots of the arena that belong to nobody, or to a job without an answer for a minute: always 0.",
        partial(_read, "tier_stranded"),
    ),
    ("shoal_kv_tier_leased", "Blocks of the arena under a lease, each lease counted.", partial(_read, "tier_leased")),
    ("shoal_kv_tier_holders", "Replicas and connectors that have the arena mapped.", partial(_read, "tier_holders")),
    ("shoal_kv_tier_peers", "Connectors of other nodes that are heard.", partial(_read, "tier_peers")),
    ("shoal_kv_tier_disk_waiting", "Blocks on their way to disk.", partial(_read, "tier_disk_waiting")),
)
#: metric name, help text, key in `ReplicaLoad.counters`
TIER_COUNTERS = (
    ("shoal_kv_tier_lookups", "Blocks that were asked for.", "tier_asked"),
    ("shoal_kv_tier_stored", "Blocks stored in the arena.", "tier_stored"),
)
#: as in `engine_metrics.py`
TIER_BY_LABEL: tuple[
    tuple[str, type[GaugeMetricFamily] | type[CounterMetricFamily], str, str, tuple[tuple[str, Read], ...]], ...
] = (
    (
        "shoal_kv_tier_slots",
        GaugeMetricFamily,
        "Blocks that a tier has room for; disk 0: there is none, or it could not be had.",
        "tier",
        _parts("tier_slots_{}", "host", "disk"),
    ),
    (
        "shoal_kv_tier_blocks",
        GaugeMetricFamily,
        "Blocks that can be found in a tier.",
        "tier",
        _parts("tier_blocks_{}", "host", "disk"),
    ),
    (
        "shoal_kv_tier_slots_in_use",
        GaugeMetricFamily,
        "Slots of the arena that hold no block yet, or none any more.",
        "state",
        _parts("tier_{}", "reserved", "staging", "quarantined"),
    ),
    (
        "shoal_kv_tier_hits",
        CounterMetricFamily,
        "Blocks that were leased, by where they were found.",
        "tier",
        _parts("tier_given_{}", "host", "disk", "remote"),
    ),
    (
        "shoal_kv_tier_evictions",
        CounterMetricFamily,
        "Blocks given up for others.",
        "tier",
        _parts("tier_evictions_{}", "host", "disk"),
    ),
    (
        "shoal_kv_tier_stored_bytes",
        CounterMetricFamily,
        "Bytes written into a tier.",
        "tier",
        _parts("tier_stored_bytes_{}", "host", "disk"),
    ),
    (
        "shoal_kv_tier_loaded_bytes",
        CounterMetricFamily,
        "Bytes read from a tier, or from another node.",
        "tier",
        _parts("tier_loaded_bytes_{}", "host", "disk", "remote"),
    ),
    (
        "shoal_kv_tier_refused",
        CounterMetricFamily,
        "Blocks that were offered and got no slot.",
        "reason",
        _parts("tier_{}", "known", "not_reused", "no_room"),
    ),
    (
        "shoal_kv_tier_failures",
        CounterMetricFamily,
        "Blocks or leases that were not had in time, or not whole.",
        "what",
        _parts("tier_{}", "late", "corrupt", "not_fetched", "not_written", "disk_failures"),
    ),
)
