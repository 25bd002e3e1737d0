"""Servers under measurement as child processes on loopback: ours, and rivals from an environment that `PEERS` names.

`PEERS` is a folder as `peers/setup_peers.sh` of the reference material makes it: `venv/` with vLLM for CPU, `smollm2/`
with the same weights that we serve, as a Hugging Face folder.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parents[1]


#: vLLM for CPU that asks nobody and tells nobody
VLLM_ENV = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_TARGET_DEVICE": "cpu",
}


class Server:
    """A child process that answers HTTP on `url`. Use as a context manager."""

    def __init__(self, name: str, command: list[str], env: dict[str, str], port: int, model: str, log: Path) -> None:
        self.name = name
        self.model = model
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._command = command
        self._env = env
        self._log = log

    def __enter__(self) -> Server:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._log.open("w")
        self.process = subprocess.Popen(
            self._command, cwd=ROOT, env=self._env, stdout=self._file, stderr=subprocess.STDOUT, start_new_session=True
        )
        # a benchmark that is itself told to stop must not leave servers behind
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            self._wait()
        except BaseException:  # __exit__ is not called when __enter__ raises
            self.__exit__()
            raise
        return self

    def _wait(self) -> None:
        pause = threading.Event()
        for _ in range(3000):
            if self._answers():
                return
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with {self.process.returncode}; see {self._log}")
            pause.wait(0.1)
        raise TimeoutError(f"{self.name} did not answer within five minutes; see {self._log}")

    def __exit__(self, *exception: object) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._file.close()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def free_port() -> int:
    """A loopback port to listen on, soon, in another process.

    Below those that the kernel hands out (32768 and above on Linux) and above those of Ray's workers (10002 to 19999):
    a port from `bind(0)` is free now, but a server needs seconds to get there, and until then any of the hundred
    connections of a starting Ray may be given it.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 32768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def shoal(log_dir: Path, *args: str, env: Mapping[str, str] = MappingProxyType({})) -> Server:
    """Our cluster with the default model; `args` as for `shoal serve`. `env`: beside what we have."""
    port = free_port()
    command = [sys.executable, "-m", "cluster.cli", "serve", "--port", str(port), *args]
    return Server("shoal", command, {**os.environ, **env}, port, "smollm2-135m-instruct", log_dir / "shoal.log")


def vllm(log_dir: Path, *args: str) -> Server | None:
    """vLLM for CPU with its best known settings for this machine, or None without `PEERS`."""
    peers = os.environ.get("PEERS")
    if not peers:
        return None
    port, model = free_port(), str(Path(peers) / "smollm2")
    cores = len(os.sched_getaffinity(0))
    preload = [f"{peers}/venv/lib/libiomp5.so"]
    tcmalloc = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")
    if tcmalloc.exists():
        preload.insert(0, str(tcmalloc))
    env = {
        **os.environ,
        **VLLM_ENV,
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{cores - 1}",
        "LD_PRELOAD": ":".join(preload),
        "PATH": f"{peers}/venv/bin:{os.environ['PATH']}",
    }
    command = ["vllm", "serve", model, "--served-model-name", model, "--dtype", "bfloat16", "--max-model-len", "2048"]
    command += ["--host", "127.0.0.1", "--port", str(port), *args]
    return Server("vllm", command, env, port, model, log_dir / "vllm.log")
