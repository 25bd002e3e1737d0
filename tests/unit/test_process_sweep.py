"""What a killed `shoal serve` leaves behind is ended by the next one, and nothing else is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.process_sweep import descendants, record_children, start_time, sweep_orphans


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for its standard input to close."""
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def write(folder: Path, driver: list[int | None], children: list[list[int | None]]) -> None:
    (folder / "1.json").write_text(json.dumps({"driver": driver, "children": children}))


def test_children_are_found_and_recorded(tmp_path: Path, child: subprocess.Popen[bytes]) -> None:
    assert child.pid in descendants(os.getpid())
    record_children({}, tmp_path)
    (record,) = tmp_path.glob("*.json")
    assert [child.pid, start_time(child.pid)] in json.loads(record.read_text())["children"]


def test_orphans_of_a_dead_driver_are_ended(tmp_path: Path, child: subprocess.Popen[bytes]) -> None:
    write(tmp_path, [child.pid, -1], [[child.pid, start_time(child.pid)]])
    assert sweep_orphans(tmp_path) == ["ended 1 processes that an earlier run left behind"]
    assert child.wait(10) == -9
    assert list(tmp_path.iterdir()) == []


def test_a_living_drivers_children_are_left_alone(tmp_path: Path, child: subprocess.Popen[bytes]) -> None:
    me = os.getpid()
    write(tmp_path, [me, start_time(me)], [[child.pid, start_time(child.pid)]])
    assert sweep_orphans(tmp_path) == []
    assert child.poll() is None


def test_a_reused_pid_is_not_mistaken_for_an_orphan(tmp_path: Path, child: subprocess.Popen[bytes]) -> None:
    write(tmp_path, [child.pid, -1], [[child.pid, -7], [child.pid, None]])
    assert sweep_orphans(tmp_path) == []
    assert child.poll() is None


def test_a_broken_record_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text("{")
    assert sweep_orphans(tmp_path) == []
    assert list(tmp_path.iterdir()) == []
