"""ASYNC. `shoal status`: what one router knows of the replicas, as a table."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Collection, Mapping
from typing import Any

from replica.errors import ConfigError, ShoalError


class NotFoundError(ShoalError):
    """The server answered 404: what was asked for is not there, or switched off."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Ours never redirects, and a key must not follow one to another host."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def fetch_status(host: str, port: int, api_key: str | None = None) -> dict[str, Any]:
    """Ask the router behind `host:port`. Raises ShoalError with a sentence when there is none."""
    return fetch_json(host, port, "/status", api_key, needs=("router_id", "replicas"))


def fetch_json(
    host: str, port: int, path: str, api_key: str | None = None, needs: Collection[str] = ()
) -> dict[str, Any]:
    """GET `path`, an object with at least the keys `needs`. Raises ShoalError with a sentence, the server's own if it
    has one, or ConfigError for what cannot be asked.
    """
    if not 1 <= port <= 65535:
        raise ConfigError(f"--port: {port} is not a port; allowed are 1 to 65535")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError("--api-key: it has characters that no header can carry; allowed are printable ASCII ones")
    url = f"http://{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{port}{path}"
    request_headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        request = urllib.request.Request(url, headers=request_headers)
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=10) as response:
            told = json.load(response)
    except urllib.error.HTTPError as error:
        kind = NotFoundError if error.code == 404 else ShoalError
        hint = "" if error.code != 401 else " (--api-key KEY sends one)"
        raise kind(f"{url} answered {error.code} {_sentence(error)}{hint}") from None
    except (OSError, ValueError, http.client.HTTPException, RecursionError) as error:
        raise ShoalError(f"nothing of ours answers at {url}: {_reason(error)}") from None
    if not isinstance(told, dict) or not all(key in told for key in needs):
        raise ShoalError(f"nothing of ours answers at {url}: what came is JSON, but not what a router of Shoal says")
    return told


def _sentence(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException, RecursionError):
        return str(error.reason)


def _reason(error: Exception) -> str:
    """Some have no text, some have that of a program."""
    if isinstance(error, urllib.error.URLError):
        return str(error.reason)
    if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError, RecursionError)):
        return "what came is no JSON"
    if isinstance(error, http.client.HTTPException):
        return f"what came is no HTTP ({type(error).__name__})"
    return str(error) or type(error).__name__


def format_status(status: Mapping[str, Any]) -> str:
    """A table for people; one line a replica."""
    lines = [
        (
            f"router {status['router_id'][:8]}: {status['requests']} requests, {status['held']} held; "
            f"configuration {status.get('config', '-')}{_who_differs(status)}"
        ),
        (
            f"{'replica':<12} {'role':<7} {'state':<9} {'queued/cap':>10} {'returning':>9} {'running':>7} "
            f"{'oldest':>7} {'KV used':>8} {'unfilled':>8} {'hit rate':>8} {'preempted':>9} {'step':>8} {'between':>8} "
            f"{'sched':>6}"
        ),
    ]
    for replica in status["replicas"]:
        counters = replica["counters"]
        blocks = replica["kv_blocks"]
        used = f"{100 * (1 - replica['kv_blocks_free'] / blocks):.0f} %" if blocks else "-"
        queries = counters.get("prefix_cache_queries", 0)
        hit_rate = f"{100 * counters.get('prefix_cache_hits', 0) / queries:.0f} %" if queries else "-"
        lines.append(
            f"{replica['replica_id'][:12]:<12} {replica.get('role', '-'):<7} {replica['state']:<9} "
            f"{replica['queued']:>6}/{replica['queue_cap']:<3} "
            f"{replica['returning']:>9} {replica['running']:>7} {replica['oldest_wait_s']:>5.1f} s {used:>8} "
            f"{100 * replica['kv_fragmentation']:>6.0f} % {hit_rate:>8} {counters.get('preemptions', 0):>9.0f} "
            f"{_steps(replica)}"
        )
        if counters.get("ranks"):
            lines.append(f"{'':<12} {_ranks(counters)}")
        if counters.get("tier_slots_host"):
            lines.append(f"{'':<12} {_tiers(counters)}")
        if "self-test FAILED" in replica.get("description", ""):
            lines.append(
                f"{'':<12} its invariance self-test FAILED: an answer may depend on the requests beside it "
                '(docs/models.md, "When the self-test fails")'
            )
    lines += [_kv_node(node) for node in status.get("kv_nodes", ())]
    if not status["replicas"]:
        lines.append("no replica is up")
    return "\n".join(lines)


def _ranks(counters: Mapping[str, float]) -> str:
    losses = sum(number for name, number in counters.items() if name.startswith("rank_losses_"))
    text = f"ranks {counters['ranks_alive']:.0f} of {counters['ranks']:.0f}, {losses:.0f} lost so far"
    if restarts := counters.get("group_restarts", 0):
        text += f", mended {restarts:.0f} times, the last time in {counters['last_mending_s']:.1f} s"
    return text


def _kv_node(node: Mapping[str, Any]) -> str:
    """What the router was told of a node's tiers, and by whom."""
    left_out = f", and {node['left_out']} more that it does not remember" if node["left_out"] else ""
    return (
        f"KV of node {node['node'][:12]}, as this router knows it: {node['host']} blocks in memory, {node['disk']} on "
        f"disk{left_out}; told by {node['told_by'][:12]}, read by {node['replicas']} replica(s)"
    )


def _tiers(counters: Mapping[str, float]) -> str:
    """Of the node, told by this replica."""
    parts = []
    for tier in ("host", "disk"):
        if slots := counters.get(f"tier_slots_{tier}", 0):
            blocks, hits = counters.get(f"tier_blocks_{tier}", 0), counters.get(f"tier_given_{tier}", 0)
            parts.append(f"{tier} {blocks:.0f} of {slots:.0f} blocks ({100 * blocks / slots:.0f} %), {hits:.0f} hits")
    if peers := counters.get("tier_peers", 0):
        parts.append(f"{peers:.0f} other nodes, {counters.get('tier_given_remote', 0):.0f} hits")
    asked = counters.get("tier_asked", 0)
    if stranded := counters.get("tier_stranded", 0):
        parts.append(f"{stranded:.0f} STRANDED")
    return f"KV tiers of its node: {'; '.join(parts)}; {asked:.0f} blocks asked for"


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
