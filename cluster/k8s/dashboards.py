"""PURE. Dashboards for Grafana, as the chart carries them. Each panel says what to do when its figure is high.

Every router tells its own figures and those of all replicas, and a scrape through a proxy reaches any router. So each
query takes `max by` the one a figure is of, before anything is summed up.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

_OURS = '{release="$release"}'
_RATE = "[$__rate_interval]"
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3


class Panel(msgspec.Struct, frozen=True):
    """`queries`: legend -> PromQL. `high`: what to do when the figure is high, in a sentence."""

    title: str
    unit: str
    queries: dict[str, str]
    high: str


def _of_replicas(metric: str, *labels: str, over: str = "{engine}") -> dict[str, str]:
    by = ", ".join(("engine", *labels))
    return {_legend(over): f"max by ({by}) ({metric}{_OURS})"}


def _rate_of_replicas(metric: str, *labels: str, over: str = "{engine}") -> dict[str, str]:
    by = ", ".join(("engine", *labels))
    return {_legend(over): f"max by ({by}) (rate({metric}{_OURS}{_RATE}))"}


def _rate_of_routers(metric: str, *labels: str, over: str = "all") -> dict[str, str]:
    inner, outer = ", ".join(("router", *labels)), ", ".join(labels)
    summed = f"sum by ({outer})" if outer else "sum"
    return {_legend(over): f"{summed} (max by ({inner}) (rate({metric}{_OURS}{_RATE})))"}


def _percentiles(metric: str) -> dict[str, str]:
    buckets = f"sum by (le) (max by (router, le) (rate({metric}_bucket{_OURS}{_RATE})))"
    return {f"p{100 * q:g}": f"histogram_quantile({q:g}, {buckets})" for q in (0.5, 0.9, 0.99)}


def _share(part: str, whole: str) -> dict[str, str]:
    over, under = (f"max by (engine) (rate({name}{_OURS}{_RATE}))" for name in (part, whole))
    return {_legend("{engine}"): f"{over} / {under}"}


def _legend(text: str) -> str:
    """`{engine}` is Grafana's `{{engine}}`."""
    return text.replace("{", "{{").replace("}", "}}")


#: row -> its panels
ROWS: dict[str, list[Panel]] = {
    "What clients see": [
        Panel(
            "Time to first token", "s", _percentiles("vllm:time_to_first_token_seconds"),
            "Look at the oldest wait and at queued sequences: with a queue add replicas; without one prompts are long.",
        ),
        Panel(
            "Time between tokens", "s", _percentiles("vllm:inter_token_latency_seconds"),
            "Lower scheduler.max_num_batched_tokens or set scheduler.tpot_target_ms: prompts take a share of steps.",
        ),
        Panel(
            "Whole requests", "s", _percentiles("vllm:e2e_request_latency_seconds"),
            "Compare with the tokens of an answer: long answers are no fault; else look at the two panels before.",
        ),
        Panel(
            "Output tokens", "short", _rate_of_routers("vllm:generation_tokens_total"),
            "This is what is earned; when it stays level while the queue grows, the replicas are full: add some.",
        ),
        Panel(
            "Refused requests", "reqps",
            _rate_of_routers("vllm:admission_rejections_total", "reason", over="{reason}"),
            "queue_full asks for replicas, tenant_* for other limits of a tenant, no_replica for a look at the pods.",
        ),
        Panel(
            "Answers", "reqps", _rate_of_routers("http_requests_total", "status", over="{status}"),
            "Many 5xx other than 503: read the router's log; many 4xx: one client does something wrong.",
        ),
    ],
    "Queue and steps": [
        Panel(
            "Oldest wait", "s", _of_replicas("shoal_oldest_wait_seconds"),
            "Add replicas, or ask `shoal why` what the oldest one waits for.",
        ),
        Panel(
            "Sequences that wait", "short", _of_replicas("vllm:num_requests_waiting"),
            "When KV use is high as well, memory is short; when it is low, raise scheduler.max_num_seqs.",
        ),
        Panel(
            "Sequences that run", "short", _of_replicas("vllm:num_requests_running"),
            "High is good; uneven between replicas for minutes, compare router.policy.",
        ),
        Panel(
            "Held by routers", "short",
            {_legend("{router}"): f"max by (router) (max_over_time(shoal_held_requests{_OURS}[1m]))"},
            "All queues are at their cap: add replicas, or raise router.max_queued_requests_per_replica.",
        ),
        Panel(
            "Share of time between steps", "percentunit",
            _share("shoal_between_steps_seconds_total", "shoal_model_seconds_total"),
            "The model waits for its scheduler: give the replica's pod more CPUs.",
        ),
        Panel(
            "Preemptions", "ops", _rate_of_replicas("vllm:num_preemptions_total"),
            "KV memory is short: lower scheduler.max_num_seqs, or give a host tier and preemption_mode auto.",
        ),
    ],
    "KV cache": [
        Panel(
            "KV in use", "percentunit", _of_replicas("vllm:kv_cache_usage_perc"),
            "Above 0.9 sequences are put back: raise kv_cache.kv_cache_gib or add replicas.",
        ),
        Panel(
            "Prefix hits", "percentunit", _share("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
            "High is good; low with prompts that repeat, compare router.policy and the size of the cache.",
        ),
        Panel(
            "Hits of the node's tiers", "ops",
            _rate_of_replicas("shoal_kv_tier_hits_total", "tier", over="{engine} {tier}"),
            "Many from disk or remote and a long wait for loads: raise kv_cache.host_tier_gib.",
        ),
        Panel(
            "Wait for a load", "s",
            _share("shoal_kv_load_wait_seconds_total", "shoal_kv_loads_total"),
            "Disk or the network is slower than computing again: see docs/kv_connector.md, and lower disk_tier_gib.",
        ),
        Panel(
            "Loads that failed", "ops", _rate_of_replicas("shoal_kv_failed_loads_total"),
            "Look at shoal_kv_tier_failures: corrupt is a disk that breaks, late a node that has too much to do.",
        ),
        Panel(
            "Blocks that belong to nobody", "short", _of_replicas("shoal_kv_blocks_stranded"),
            "Above 0 is a mistake of ours: keep the log of the node's connector and tell us.",
        ),
    ],
    "Health": [
        Panel(
            "Ranks that are missing", "short",
            {_legend("{engine}"): f"max by (engine) (shoal_ranks{_OURS}) - max by (engine) (shoal_ranks_alive{_OURS})"},
            "A replica is being mended; for more than five minutes, look at its pods and at the device.",
        ),
        Panel(
            "Leaks", "short", _of_replicas("shoal_leaks_total", "what", over="{engine} {what}"),
            "Above 0 is a mistake of ours: keep the replica's log and tell us.",
        ),
        Panel(
            "Configurations in force", "short",
            {"different ones": f'count(count_values("number", shoal_config_number{_OURS}))'},
            "More than one for minutes: `shoal get` says which replica refused a change.",
        ),
    ],
}  # fmt: skip


def dashboard() -> dict[str, Any]:
    """JSON model of Grafana 10 and later."""
    return {
        "uid": "shoal",
        "title": "Shoal",
        "tags": ["shoal"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_variable("source", "datasource", "prometheus"), _release()]},
        "panels": list(_placed()),
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


def _variable(name: str, kind: str, query: str) -> dict[str, Any]:
    return {"name": name, "type": kind, "query": query, "label": name}


def _release() -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    variable = _variable("release", "query", "label_values(shoal_queue_cap, release)")
    return variable | {"datasource": source, "refresh": 2}


def _placed() -> Iterator[dict[str, Any]]:
    """Rows below each other, three panels beside each other."""
    number = y = 0
    for row, panels in ROWS.items():
        number += 1
        yield {"id": number, "type": "row", "title": row, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}, "panels": []}
        y += 1
        for index, panel in enumerate(panels):
            number += 1
            place = {"x": index % _COLUMNS * _WIDTH, "y": y + index // _COLUMNS * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            yield _panel(panel, number, place)
        y += -(-len(panels) // _COLUMNS) * _HEIGHT


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    targets = [
        {"refId": chr(ord("A") + index), "expr": expr, "legendFormat": legend, "datasource": source}
        for index, (legend, expr) in enumerate(panel.queries.items())
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": f"When it is high: {panel.high}",
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }
