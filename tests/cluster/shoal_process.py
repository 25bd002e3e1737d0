"""`shoal serve` as a user starts it: a child process on a free loopback port, ended by its own pid, with nothing left
behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import httpx

from benchmarks.servers import free_port
from cluster.process_sweep import descendants, serve_replicas, start_time

ROOT = Path(__file__).resolve().parents[2]


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Ask 50 times a second; the answer decides, never the clock, unless `timeout_s` is over."""
    pause = threading.Event()
    for _ in range(int(timeout_s * 50)):
        if condition():
            return
        pause.wait(0.02)
    raise AssertionError(f"not within {timeout_s} s: {what}")


class ShoalProcess:
    """Use as a context manager. `lines` is everything it said."""

    def __init__(self, *args: str, env: dict[str, str] | None = None, fake: bool = True) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.lines: list[str] = []
        command = [sys.executable, "-m", "cluster.cli", "serve", "--port", str(self.port), *args]
        if fake:
            command += ["--runner", "fake"]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> ShoalProcess:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if "ready after" in line:
                break
        else:
            self.process.wait(timeout=60)
            self.process.stderr.close()
            raise AssertionError("shoal serve ended before it was ready:\n" + "".join(self.lines))
        self._reader = threading.Thread(target=lambda: self.lines.extend(self.process.stderr or ()), daemon=True)
        self._reader.start()
        self.family = {pid: start_time(pid) for pid in descendants(self.process.pid)}
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """Send a signal, wait for the end, and see that no descendant survived. Returns the exit code."""
        if self.process.poll() is None:
            self.family |= {pid: start_time(pid) for pid in descendants(self.process.pid)}
            self.process.send_signal(number)
        code = self.process.wait(timeout=60)
        self._reader.join(timeout=10)
        assert self.process.stderr is not None
        self.process.stderr.close()
        assert self.survivors() == [], "shoal serve ends after everything that it started"
        foreign = [line for line in self.lines if not line.startswith("shoal: ")]
        assert foreign == [], "what Ray says belongs into its log"
        return code

    def survivors(self) -> list[int]:
        """Descendants that still run (zombies do not count)."""
        return [
            pid
            for pid, began in self.family.items()
            if began is not None and start_time(pid) == began and not _is_zombie(pid)
        ]

    def pids(self, deployment: str) -> list[int]:
        """Serve replicas of one of our deployments: `Replica` or `Router`."""
        return serve_replicas(self.process.pid, deployment)

    def status(self) -> dict:
        return dict(httpx.get(f"{self.url}/status", timeout=10).json())

    def health(self) -> int:
        return httpx.get(f"{self.url}/health", timeout=10).status_code


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False
