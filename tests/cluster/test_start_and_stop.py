"""`shoal serve` ends in a sentence, soon, and after everything that it started: whatever happens and whenever."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from cluster.process_sweep import command_line, descendants, start_time
from tests.cluster.shoal_process import ShoalProcess, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_ctrl_c_while_ray_starts_is_a_clean_stop_at_once() -> None:
    shoal = ShoalProcess()
    process = shoal.process
    assert process.stderr is not None
    assert process.stderr.readline() == "shoal: starting Ray\n"
    wait_until(lambda: any("raylet" in command_line(pid) for pid in descendants(process.pid)), 30, "Ray's processes")
    family = {pid: start_time(pid) for pid in descendants(process.pid)}
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=8)
    assert (process.returncode, said) == (0, "shoal: stopped before it was ready\n")
    assert [pid for pid, began in family.items() if start_time(pid) == began] == []


def test_a_signal_to_every_process_ends_within_seconds() -> None:
    """As a service manager does; Ray then needs 10 s and more, and answers nobody."""
    with ShoalProcess() as shoal:
        for pid in [shoal.process.pid, *descendants(shoal.process.pid)]:
            os.kill(pid, signal.SIGTERM)
        assert shoal.process.wait(20) in (0, 128 + signal.SIGTERM)
        shoal.stop()


def test_the_end_of_ray_is_the_end_with_a_sentence_and_the_rest_in_a_log() -> None:
    with ShoalProcess() as shoal:
        (gcs,) = [pid for pid in descendants(shoal.process.pid) if "gcs_server" in command_line(pid).split()[0]]
        os.kill(gcs, signal.SIGKILL)
        assert shoal.process.wait(20) == 1
        shoal.stop()
    assert shoal.lines[-1].startswith("shoal: Ray's gcs_server ended (exit code -9)")
    assert Path(shoal.lines[-1].split()[-1]).is_file()


def test_what_memory_cannot_hold_is_refused_before_ray_starts() -> None:
    shoal = ShoalProcess("--set", "kv_cache.kv_cache_gib=100000", fake=False)
    _, said = shoal.process.communicate(timeout=60)
    assert shoal.process.returncode == 2
    assert "100000.0 for KV (kv_cache.kv_cache_gib=100000 each); available are" in said
    assert "starting Ray" not in said
