"""A Ray of two nodes on this machine, the second of which can be drained, and `shoal serve` on both."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

#: Prints its address and the second node's id; drains that node when it is told a deadline in seconds, sends its raylet
#: SIGTERM when it is told "term"; ends with its input. The second node has two CPUs.
_NODES = """
import sys, time
import ray
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

small = {"include_dashboard": False, "object_store_memory": 100 << 20}
nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": int(sys.argv[1]), **small})
host = {"node_ip_address": sys.argv[2]} if sys.argv[2] else {}
second = nodes.add_node(num_cpus=2, object_store_memory=100 << 20, **host)
print(nodes.address, second.node_id, flush=True)
for line in sys.stdin:
    if line == "term\\n":
        nodes.remove_node(second, allow_graceful=True)
        print(True, flush=True)
        continue
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline = int(1000 * (time.time() + float(line)))
    gcs = GcsClient(address=nodes.address)
    print(*gcs.drain_node(second.node_id, reason, "to be taken away", deadline), flush=True)
nodes.shutdown()
"""
# Ray makes up a token for a cluster that a program starts; sharing it is Ray's business and not what is measured here
ENV = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "disabled"}


class TwoNodes(msgspec.Struct, frozen=True):
    process: subprocess.Popen[str]
    address: str
    second: str

    @property
    def env(self) -> dict[str, str]:
        """For `shoal` commands."""
        return {"RAY_ADDRESS": self.address, **ENV}

    def drain(self, deadline_s: float) -> None:
        """Ray is told that the second node goes in so many seconds."""
        self._say(str(deadline_s))

    def terminate(self) -> None:
        """SIGTERM to the second node's raylet, which ends with all of its processes and drains nothing."""
        self._say("term")

    def _say(self, word: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer.startswith("True"), f"Ray does not do it: {answer}"


@contextmanager
def two_nodes(first_cpus: int, second_host: str | None = None) -> Iterator[TwoNodes]:
    """`first_cpus`: of the first node. `second_host`: a loopback address of its own for the second one."""
    process = subprocess.Popen(
        [sys.executable, "-c", _NODES, str(first_cpus), second_host or ""],
        env={**os.environ, **ENV},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        address, second = process.stdout.readline().split()
        yield TwoNodes(process, address, second)
    finally:
        process.communicate(timeout=60)
