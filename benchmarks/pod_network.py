"""Pods without Kubernetes: each a network, mount and process namespace of its own on a bridge. So every pod has its own
address, the ports of the manifest, its own /dev/shm and /tmp/ray, and a process 1 that gets the signals.

Only inside `entered()`, a namespace of its own: nothing of it is seen from outside, and everything ends with it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import servers
from benchmarks.pod_plans import HEAD, REDIS, PodPlan

_NET = "10.77.0"
_INSIDE = "SHOAL_PODS_INSIDE"
#: run by a pod's shell when its interface is there: $1 address, $2 folder, $3 GiB of /dev/shm, $4 the container's line
_POD = """
read -r _
ip link set lo up && ip address add "$1/24" dev eth0 && ip link set eth0 up || exit 1
ip route add default via "${1%.*}.1" # leads nowhere, and is how Ray finds its own address
mkdir -p "$2/ray" /tmp/ray
mount --bind "$2/ray" /tmp/ray && mount -t tmpfs -o "size=$3" tmpfs /dev/shm && mount --bind "$2/../hosts" /etc/hosts
mount --bind "$2/../resolv.conf" /etc/resolv.conf
exec /bin/bash -c -- "$4"
"""
_NAMESPACES = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


def why_not() -> str:
    """Why no pods can be made here; empty if they can."""
    missing = [name for name in ("unshare", "nsenter", "ip", "mount") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)}: not installed"
    probe = ["sh", "-c", "ip link add name br0 type bridge && ip link add name v0 type veth peer name v1"]
    done = subprocess.run(_unshare() + probe, capture_output=True, text=True, check=False, timeout=20)
    return "" if done.returncode == 0 else f"no namespaces: {done.stderr.strip()[-200:]}"


def _unshare() -> list[str]:
    return ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), *_NAMESPACES]


def is_inside() -> bool:
    """Whether this process is where `enter` begins again."""
    return os.environ.get(_INSIDE) == "1"


def enter(module: str, arguments: list[str]) -> None:
    """Begin again inside namespaces of our own, unless that is where we are. Does not return in the first case."""
    if not is_inside():
        command = [*_unshare(), sys.executable, "-m", module, *arguments]
        os.execvpe(command[0], command, {**os.environ, _INSIDE: "1"})


class Pod:
    """One that runs. `address` is its own."""

    def __init__(self, name: str, plan: PodPlan, address: str, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.name, self.plan, self.address, self.folder, self._process = name, plan, address, folder, process
        self.is_terminating = False

    @property
    def first_pid(self) -> int:
        """Its process 1, as seen from here."""
        pid = self._process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def is_ready(self) -> bool:
        """What the readiness probe of its container says, run as the kubelet does."""
        command = ["nsenter", f"--target={self.first_pid}", "--net", "--mount", "--pid", "--", *self.plan.ready]
        env = {**_clean(os.environ), **self.plan.env}
        return subprocess.run(command, env=env, capture_output=True, check=False, cwd=servers.ROOT).returncode == 0

    def terminate(self) -> float:
        """As the kubelet ends a pod: preStop, SIGTERM, and SIGKILL when the grace period is over. Seconds it took.
        Raises TimeoutError for a SIGKILL.
        """
        self.is_terminating = True
        started = time.monotonic()
        pid = self.first_pid
        time.sleep(self.plan.pre_stop_s)  # which counts as part of the grace period
        os.kill(pid, signal.SIGTERM)
        try:
            self._process.wait(max(0.0, started + self.plan.grace_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            raise TimeoutError(f"{self.name} had not ended after {self.plan.grace_s:g} s") from None
        return time.monotonic() - started

    def kill(self) -> None:
        """SIGKILL to process 1: the kernel does the same to everything in the pod."""
        self.is_terminating = True
        os.kill(self.first_pid, signal.SIGKILL)
        self._process.wait()


class PodNetwork:
    """The bridge, the names and who is on it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 1
        self.pods: list[Pod] = []
        self.here = f"{_NET}.1"
        self._names = {"localhost": "127.0.0.1", REDIS: self.here}
        self._write_names()
        # nobody is there, and says so at once: gRPC also asks for names that stand in /etc/hosts
        (folder / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        for command in (
            "ip link set lo up",
            "ip link add name br0 type bridge",
            f"ip address add {self.here}/24 dev br0",
            "ip link set br0 up",
        ):
            subprocess.run(shlex.split(command), check=True)

    def start(self, plan: PodPlan, env: dict[str, str]) -> Pod:
        """A new pod with an address that none had before. `env` is laid over that of the plan."""
        self._count += 1
        name, address = f"{plan.group}-{self._count}", f"{_NET}.{self._count}"
        if plan.is_head:
            self._names[HEAD] = address
            self._write_names()
        folder = self._folder / name
        folder.mkdir()
        plan = _with_env(plan, env)
        size = f"{int(plan.shm_gib * 1024)}m"
        command = ["unshare", *_NAMESPACES, "bash", "-c", _POD, name, address, str(folder), size, plan.start]
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                command,
                env={**_clean(os.environ), **plan.env},
                cwd=servers.ROOT,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        link = f"v{self._count}"
        while os.readlink(f"/proc/{process.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            time.sleep(0.005)
        for line in (
            f"ip link add name {link} type veth peer name eth0 netns {process.pid}",
            f"ip link set {link} master br0 up",
        ):
            subprocess.run(shlex.split(line), check=True)
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()
        pod = Pod(name, plan, address, folder, process)
        self.pods.append(pod)
        return pod

    @property
    def head(self) -> Pod:
        return next(pod for pod in reversed(self.pods) if pod.plan.is_head)

    def workers(self, group: str = "") -> list[Pod]:
        """That run and are not told to end."""
        return [
            pod
            for pod in self.pods
            if not pod.plan.is_head and pod.is_running and not pod.is_terminating and group in ("", pod.plan.group)
        ]

    def _write_names(self) -> None:
        """In place: pods have the file itself mounted."""
        text = "".join(f"{address} {name}\n" for name, address in self._names.items())
        (self._folder / "hosts").write_text(text)


def _with_env(plan: PodPlan, env: dict[str, str]) -> PodPlan:
    return PodPlan(plan.group, plan.start, plan.env | env, plan.ready, plan.pre_stop_s, plan.grace_s, plan.shm_gib)


def _clean(environ: os._Environ[str]) -> dict[str, str]:
    """Without what only this process is told; `ray` and `python` are those of its environment, as in an image."""
    mine = ("RAY_", "SHOAL_CLUSTER_TOKEN", _INSIDE)
    kept = {key: value for key, value in environ.items() if not key.startswith(mine)}
    return {**kept, "PATH": os.pathsep.join((str(Path(sys.executable).parent), kept.get("PATH", os.defpath)))}
