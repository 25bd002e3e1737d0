"""Ranks as plain child processes: the worker group without Ray, for measurements and tests of what lies between a
replica and its ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from replica.arena_client import open_arena
from replica.fake_runner import CostModel, FakeModelRunner
from replica.kv_messages import ArenaPlace
from replica.rank_link import Endpoint
from replica.rank_loop import Meeting, NoMeeting, Rank, RankRunner
from replica.step import RunnerInfo, StepPlan, StepResult

ROOT = Path(__file__).resolve().parents[1]
_INFO = RunnerInfo(64, 16, 4096, 1000, (2,), "null")


class NullRunner:
    """Computes nothing: every sequence of a plan gets token 7. What is left is the way there and back."""

    info = _INFO
    held_bytes = (0, 0)

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult(plan.step, plan.seq_ids, [7] * len(plan.seq_ids))

    def adopt(self, result: StepResult) -> None:
        """Nothing to remember."""

    def tell_copies(self, tell: Callable[[int, int], None]) -> None:
        """It copies nothing."""

    def begin_anew(self) -> None:
        """Nothing to forget."""

    def prepare_grammar(self, grammar: str) -> None:
        """Nothing to compile."""

    def close(self) -> None:
        """Nothing to free."""


class RankProcess:
    """One rank; `replica.rank_seat.Launched`."""

    def __init__(self, kind: str, rank: int, size: int, endpoint: Endpoint, node: str) -> None:
        order = msgspec.json.encode([kind, rank, size, endpoint, node]).decode()
        self.process = subprocess.Popen([sys.executable, "-m", "benchmarks.rank_processes", order], cwd=ROOT)
        self._callback: Callable[[str], None] = lambda how: None
        self._loop = asyncio.get_running_loop()
        # a thread each: the loop's pool has six on two cores, and each would be taken for as long as a rank lives
        threading.Thread(target=self._watch, daemon=True).start()

    def on_end(self, callback: Callable[[str], None]) -> None:
        self._callback = callback

    def _watch(self) -> None:
        self.process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
            self._loop.call_soon_threadsafe(lambda: self._callback("is gone: its process ended"))

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)


class Processes:
    """A `Launcher` that remembers who it started. `node`: another name than the group's, and they come by TCP."""

    def __init__(self, size: int, kind: str = "null", node: str = "here") -> None:
        self._size, self._kind, self._node = size, kind, node
        self.started: dict[int, RankProcess] = {}

    def __call__(self, rank: int, endpoint: Endpoint) -> RankProcess:
        launched = self.started[rank] = RankProcess(self._kind, rank, self._size, endpoint, self._node)
        return launched

    def cpu_s(self) -> float:
        """User and system time of all that live."""
        ticks = 0
        for launched in self.started.values():
            fields = Path(f"/proc/{launched.process.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


class FileArena:
    """An arena in a file that `socket_path` names, of slots of `block_bytes`; a missing one cannot be mapped."""

    def __init__(self, place: ArenaPlace, member: str) -> None:
        self.array = np.memmap(place.socket_path, np.uint8, "r+").reshape(-1, place.space.block_bytes)

    def close(self) -> None:
        """The mapping goes with its last view."""


def _make_runner(kind: str, rank: int, size: int) -> RankRunner:
    if kind in ("tier", "node"):  # an arena in a file, or that of a KVConnector
        cost, opens = CostModel(0, 0, 0, 0), FileArena if kind == "tier" else open_arena
        return FakeModelRunner(num_blocks=64, cost=cost, rank=rank, num_ranks=size, open_arena=opens)
    if kind == "fake":
        return FakeModelRunner(num_blocks=64, cost=CostModel(0, 0, 0, 0))
    if kind == "deaf":  # never comes back from a step
        return _Deaf()
    return NullRunner()


class _Deaf(NullRunner):
    def execute(self, plan: StepPlan) -> StepResult:
        time.sleep(3600)
        return super().execute(plan)


def main() -> None:
    kind, rank, size, endpoint, node = msgspec.json.decode(sys.argv[1], type=tuple[str, int, int, Endpoint, str])

    def make(meeting: Meeting, is_first: bool) -> RankRunner:
        return _make_runner(kind, rank, size)

    Rank(rank, size, endpoint, node, NoMeeting, make, lambda: os._exit(1)).run()


if __name__ == "__main__":
    main()
