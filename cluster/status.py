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
    url = f"http://{host}:{port}/status"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            status: dict[str, Any] = json.load(response)
            return status
    except urllib.error.HTTPError as error:
        raise ShoalError(f"{url} answered {error.code} {error.reason}") from None
    except (OSError, ValueError) as error:
        raise ShoalError(f"nothing of ours answers at {url}: {error}") from None


def format_status(status: Mapping[str, Any]) -> str:
    """A table for people; one line a replica."""
    lines = [
        f"router {status['router_id'][:8]}: {status['requests']} requests, {status['held']} held",
        (
            f"{'replica':<12} {'state':<9} {'queued/cap':>10} {'returning':>9} {'running':>7} "
            f"{'KV used':>8} {'hit rate':>8} {'preempted':>9}"
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
            f"{replica['returning']:>9} {replica['running']:>7} {used:>8} {hit_rate:>8} "
            f"{counters.get('preemptions', 0):>9.0f}"
        )
    if not status["replicas"]:
        lines.append("no replica is up")
    return "\n".join(lines)
