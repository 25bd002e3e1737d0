"""Every socket on which a process of a running cluster listens stands in the table of k8s/README.md, and on one machine
nothing but Serve's own gRPC is open beyond loopback.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.two_nodes import two_nodes
from cluster.process_sweep import command_line, descendants, kv_connectors
from tests.cluster.shoal_process import ShoalProcess, wait_until
from tests.cluster.test_kv_live import arguments, total

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

#: what a process is called -> rows of the table that may be its sockets: words of the column `What`, and how many
#: sockets at most
_ROWS = {
    "gcs_server": {"GCS": 1},
    "monitor.py": {"metrics of the autoscaler": 1},
    "dashboard.py": {"metrics of the dashboard": 1, "dashboard, jobs": 1},
    "raylet/raylet": {"raylet": 1, "object manager": 1},
    "DashboardAgent": {"dashboard agent": 1, "its gRPC": 1, "metrics": 1},
    "RuntimeEnvAgent": {"runtime environments": 1},
    "ProxyActor": {"HTTP API": 1, "workers": 1},
    "ServeController": {"workers": 1},
    "ServeReplica:shoal:Replica": {"gRPC data plane": 1, "workers": 1, "Serve's internal gRPC": 1},
    "ServeReplica:shoal:Router": {"workers": 1, "Serve's internal gRPC": 1},
    "cluster.cli serve": {"workers": 1},
    "KVConnector": {"KV of other nodes": 1, "workers": 1},
}
_OPEN_TO_ALL = {"ServeReplica:shoal:Replica", "ServeReplica:shoal:Router"}


def listening() -> dict[str, tuple[bool, int]]:
    """inode -> (whether on loopback alone, port)."""
    found = {}
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            parts = line.split()
            if parts[3] == "0A":
                address, port = parts[1].split(":")
                is_loopback = address.endswith("7F") or address == "00000000000000000000000001000000"
                found[parts[9]] = (is_loopback, int(port, 16))
    return found


def sockets_of(pids: list[int]) -> Iterator[tuple[str, bool, int]]:
    """(command line, whether on loopback alone, port) of each listening socket, once."""
    known = listening()
    for pid in pids:
        for link in Path("/proc", str(pid), "fd").iterdir():
            try:
                target = os.readlink(link)
            except FileNotFoundError:
                continue
            if target.startswith("socket:[") and (place := known.pop(target[8:-1], None)) is not None:
                yield command_line(pid), *place


def column_what(repo_root: Path) -> str:
    page = (repo_root / "k8s" / "README.md").read_text()
    table = re.search(r"^## What listens where$(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    assert table is not None
    return " | ".join(row.split("|")[3] for row in table[1].splitlines() if row.startswith("| ") and "---" not in row)


def test_what_listens_is_in_the_table(repo_root: Path) -> None:
    what = column_what(repo_root)
    with ShoalProcess() as shoal:
        found = list(sockets_of([shoal.process.pid, *descendants(shoal.process.pid)]))
        assert shoal.port in {port for _, _, port in found}
    assert len(found) >= 15, "a look that finds nothing proves nothing"
    counts: dict[str, int] = {}
    for command, is_loopback, port in found:
        names = [name for name in _ROWS if name in command]
        assert len(names) == 1, f"a process that is not in the table listens on {port}: {command[:200]}"
        counts[names[0]] = counts.get(names[0], 0) + 1
        assert is_loopback or names[0] in _OPEN_TO_ALL, f"{command[:200]} listens on {port} beyond loopback"
    for name, count in counts.items():
        assert count <= sum(_ROWS[name].values()), f"{name} listens {count} times; the table knows {_ROWS[name]}"
    missing = {row for rows in _ROWS.values() for row in rows if row not in what}
    assert not missing, f"not in the table: {missing}"


def test_a_connector_listens_for_other_nodes_on_one_port(repo_root: Path) -> None:
    """What P/D hands over goes this way or through the data plane: no other process has a socket for it."""
    assert all(row in column_what(repo_root) for row in _ROWS["KVConnector"])
    with (
        two_nodes(3) as nodes,
        ShoalProcess(*arguments(num_cpus_per_replica=2), env=nodes.env) as shoal,
    ):
        wait_until(lambda: total(shoal, "tier_peers") == 2, 60, "each hears the other")
        connectors = kv_connectors(nodes.process.pid)
        assert len(connectors) == 2
        for pid in connectors:
            found = list(sockets_of([pid]))
            assert all(is_loopback for _, is_loopback, _ in found), "the nodes' addresses are loopback here"
            assert 1 <= len(found) <= sum(_ROWS["KVConnector"].values())
        others = [pid for pid in descendants(nodes.process.pid) if pid not in connectors]
        for command, _, port in sockets_of(others):
            assert any(name in command for name in _ROWS), f"{command[:200]} listens on {port}"
