"""CPU seconds of a process tree, split into the model's threads and everything else."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from cluster.process_sweep import command_line, descendants

_TICKS = os.sysconf("SC_CLK_TCK")


class CpuTime(msgspec.Struct, frozen=True):
    """Seconds since the processes started. `model_s`: threads named shoal-runner, OpenMP's included."""

    model_s: float
    other_s: float
    by_process: dict[str, float]

    def since(self, earlier: CpuTime) -> CpuTime:
        return CpuTime(
            self.model_s - earlier.model_s,
            self.other_s - earlier.other_s,
            {name: value - earlier.by_process.get(name, 0.0) for name, value in self.by_process.items()},
        )


def cpu_time(root_pid: int) -> CpuTime:
    """Of `root_pid` and all its descendants."""
    model, other = 0.0, 0.0
    by_process: dict[str, float] = {}
    for pid in [root_pid, *descendants(root_pid)]:
        for name, seconds in _threads(pid):
            if name == "shoal-runner":
                model += seconds
            else:
                other += seconds
                process = _process_name(pid)
                by_process[process] = by_process.get(process, 0.0) + seconds
    return CpuTime(model, other, by_process)


def _threads(pid: int) -> list[tuple[str, float]]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            text = (task / "stat").read_text()
        except OSError:
            continue
        head, _, tail = text.rpartition(")")
        fields = tail.split()
        found.append((head.partition("(")[2], (int(fields[11]) + int(fields[12])) / _TICKS))
    return found


def _process_name(pid: int) -> str:
    words = command_line(pid).split()
    return words[0].rpartition("/")[2] if words else "gone"
