"""ASYNC. After a SIGKILL of `shoal serve` some of Ray's processes stay for more than a minute; the next start ends
them.

The driver writes down its descendants (pid and start time, so that a reused pid is never mistaken); whoever starts next
ends those whose driver is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path

from replica.cache_folder import cache_folder


def run_folder() -> Path:
    """Where drivers of this machine, since it booted, write their lists: a shared home must not mix up pids."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return cache_folder() / "run" / (boot.read_text().strip() if boot.exists() else "this-machine")


def record_children(facts: Mapping[str, object], folder: Path | None = None) -> None:
    """Write the descendants of this process down, and whatever else others shall find."""
    folder = folder or run_folder()
    folder.mkdir(parents=True, exist_ok=True)
    me = os.getpid()
    children = [[pid, start_time(pid)] for pid in descendants(me)]
    record = {"driver": [me, start_time(me)], "children": children, "facts": dict(facts)}
    path = folder / f"{me}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record))
    temporary.rename(path)


def running_drivers(folder: Path | None = None) -> list[dict[str, object]]:
    """What the drivers of this machine that are alive said of themselves."""
    found = []
    for path in sorted((folder or run_folder()).glob("*.json")):
        try:
            record = json.loads(path.read_text())
            (driver, started), facts = record["driver"], dict(record["facts"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # half written, or of an older version
        if started is not None and start_time(driver) == started:
            found.append(facts)
    return found


def sweep_orphans(folder: Path | None = None) -> list[str]:
    """End what dead drivers left. Returns one line per driver that left something."""
    lines = []
    for path in sorted((folder or run_folder()).glob("*.json")):
        try:
            record = json.loads(path.read_text())
            (driver, started), children = record["driver"], record["children"]
        except (OSError, ValueError, KeyError, TypeError):
            path.unlink(missing_ok=True)
            continue
        if start_time(driver) == started:
            continue  # that cluster is alive
        orphans = [pid for pid, began in children if began is not None and start_time(pid) == began]
        kill_all(orphans)
        if orphans:
            lines.append(f"ended {len(orphans)} processes that an earlier run left behind")
        path.unlink(missing_ok=True)
    return lines


def kill_all(pids: Iterable[int]) -> None:
    """At once. Who is gone already is fine."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def start_time(pid: int) -> int | None:
    """Clock ticks between boot and the start of `pid`; None if there is no such process."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, parents before children."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        children = parents.get(todo.pop(0), [])
        found += children
        todo += children
    return found


def parent(pid: int) -> int | None:
    """Its pid; None if there is no such process."""
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def command_line(pid: int) -> str:
    """Arguments of `pid` joined by spaces; empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def serve_replicas(root: int, deployment: str) -> list[int]:
    """Pids below `root` of the processes that Serve runs for one of our deployments: `Router`, or one of
    `role_config.DEPLOYMENTS`.
    """
    return [pid for pid in descendants(root) if f"ray::ServeReplica:shoal:{deployment}" in command_line(pid)]


def rank_workers(root: int) -> list[int]:
    """Pids below `root` of the ranks of all replicas."""
    return [pid for pid in descendants(root) if "ray::Worker.run" in command_line(pid)]


def kv_connectors(root: int) -> list[int]:
    """Pids below `root` of the KV connectors."""
    return [pid for pid in descendants(root) if "ray::KVConnector" in command_line(pid)]


def _stat(pid: int) -> list[str]:
    """Fields of /proc/pid/stat after the command, state first; empty if the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()
