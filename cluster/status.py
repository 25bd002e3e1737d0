"""ASYNC. `shoal status`: what one router knows of the replicas, as a table."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from replica.errors import ShoalError


def fetch_status(host: str, port: int, api_key: str | None = None) -> dict[str, Any]:
    """Ask the router behind `host:port`. Raises ShoalError with a sentence when there is none."""
    return fetch_json(host, port, "/status", api_key)


def fetch_json(host: str, port: int, path: str, api_key: str | None = None) -> dict[str, Any]:
    """GET `path`. Raises ShoalError with a sentence, the server's own if it has one."""
    url = f"http://{host}:{port}{path}"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            told: dict[str, Any] = json.load(response)
            return told
    except urllib.error.HTTPError as error:
        raise ShoalError(f"{url} answered {error.code} {_sentence(error)}") from None
    except (OSError, ValueError) as error:
        raise ShoalError(f"nothing of ours answers at {url}: {error}") from None


def _sentence(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return str(error.reason)


def format_status(status: Mapping[str, Any]) -> str:
    """A table for people; one line a replica."""
    lines = [
        (
            f"router {status['router_id'][:8]}: {status['requests']} requests, {status['held']} held; "
            f"configuration {status.get('config', '-')}{_who_differs(status)}"
        ),
        (
            f"{'replica':<12} {'state':<9} {'queued/cap':>10} {'returning':>9} {'running':>7} {'oldest':>7} "
            f"{'KV used':>8} {'unfilled':>8} {'hit rate':>8} {'preempted':>9} {'step':>8} {'between':>8} {'sched':>6}"
        ),
    ]
    for replica in status["replicas"]:
        counters = replica["counters"]
        blocks = replica["kv_blocks"]
        used = f"{100 * (1 - replica['kv_blocks_free'] / blocks):.0f} %" if blocks else "-"
        queries = counters.get("prefix_cache_queries", 0)
        hit_rate = f"{100 * counters.get('prefix_cache_hits', 0) / queries:.0f} %" if queries else "-"
        lines.append(
            f"{replica['replica_id'][:12]:<12} {replica['state']:<9} {replica['queued']:>6}/{replica['queue_cap']:<3} "
            f"{replica['returning']:>9} {replica['running']:>7} {replica['oldest_wait_s']:>5.1f} s {used:>8} "
            f"{100 * replica['kv_fragmentation']:>6.0f} % {hit_rate:>8} {counters.get('preemptions', 0):>9.0f} "
            f"{_steps(replica)}"
        )
    if not status["replicas"]:
        lines.append("no replica is up")
    return "\n".join(lines)


def _steps(replica: Mapping[str, Any]) -> str:
    """Means since the start: the runner's time for a step, what passes between two, the scheduler's share of both."""
    counters, num_steps = replica["counters"], replica["step"]
    model_s, between_s = counters.get("model_s", 0.0), counters.get("between_steps_s", 0.0)
    if not num_steps or not model_s:
        return f"{'-':>8} {'-':>8} {'-':>6}"
    share = 100 * counters.get("scheduler_s", 0.0) / (model_s + between_s)
    return f"{1000 * model_s / num_steps:>5.1f} ms {1000 * between_s / num_steps:>5.2f} ms {share:>4.1f} %"


def _who_differs(status: Mapping[str, Any]) -> str:
    """Replicas with other live values than this router; for a moment after `shoal set` there may be some."""
    others = [r for r in status["replicas"] if r.get("config") != status.get("config")]
    return "".join(f", but {r['config']} at {r['replica_id'][:12]}" for r in others)
