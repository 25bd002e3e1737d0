"""Group G, the part that needs Ray or a whole `shoal serve`. Named by case; where the others are stands in
tests/api/test_group_g.py.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress

import pytest

from tests.cluster.shoal_process import ROOT, ShoalProcess
from tests.cluster.test_other_ways_to_start import LOOPBACK, complete, ray_address

__all__ = ["ray_address"]  # the fixture
pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def refusal(*arguments: str, **env: str) -> str:
    """What a start says that ends within 30 s, and not well."""
    process = ShoalProcess(*arguments, env=env).process
    _, said = process.communicate(timeout=30)
    assert process.returncode in (1, 2), said
    assert "Traceback" not in said
    return said


def test_g04_what_no_node_can_hold_is_said_at_once() -> None:
    said = refusal("--set", "num_cpus_per_replica=640")
    assert "resources:" in said
    assert "640" in said


def test_g12_the_dashboards_ports_may_be_taken() -> None:
    """The HTTP port: test_a_port_in_use_is_said_at_once. Side channels of P/D choose their ports: the kernel's."""
    with ExitStack() as stack:
        for port in (8265, 52365):
            taken = stack.enter_context(socket.socket())
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):  # somebody has it already, which is as good
                taken.bind(("127.0.0.1", port))
                taken.listen()
        with ShoalProcess() as shoal:
            assert len(complete(shoal.url)) == 4
            assert shoal.stop() == 0


def test_g13_a_dead_address_is_an_error_within_seconds() -> None:
    said = refusal(RAY_ADDRESS="127.0.0.1:1", **LOOPBACK)
    assert "RAY_ADDRESS=127.0.0.1:1" in said


def test_g13_an_application_of_that_name_is_reported_and_left_alone(ray_address: str) -> None:
    env = {"RAY_ADDRESS": ray_address, **LOOPBACK}
    with ShoalProcess(env=env) as first:
        assert any(f"joining Ray at {ray_address}" in line for line in first.lines)
        assert "an application 'shoal' runs in that Ray cluster" in refusal(**env)
        assert len(complete(first.url)) == 4
        assert first.stop() == 0


#: eight processes ask for the connector of their node at the same moment, twice; in between it is killed
CROWD = """
import threading, time
import ray
from cluster.kv_connector.actor import NAMESPACE, _start
from cluster.kv_connector.config import KVCacheConfig
from replica.kv_events import KV_LAYOUT
from replica.kv_messages import KVSpace

SPACE = KVSpace("fake", 4, 32, 1, KV_LAYOUT)
CONFIG = KVCacheConfig(host_tier_gib=0.001).model_dump()

@ray.remote(num_cpus=0)
class Comer:
    def ready(self):
        pass
    def ask(self, at):
        while time.time() < at:
            pass
        for _ in range(60):
            try:
                return ray.get(_start("shoal", quiet, {}).door.remote(SPACE, CONFIG)).socket_name
            except ray.exceptions.RayError:
                threading.Event().wait(0.5)

def quiet():
    pass

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
comers = [Comer.remote() for _ in range(8)]
ray.get([each.ready.remote() for each in comers])
for _ in range(2):
    sockets = ray.get([each.ask.remote(time.time() + 1) for each in comers])
    names = ray.util.list_named_actors(all_namespaces=True)
    names = [one["name"] for one in names if one["namespace"] == NAMESPACE]
    print("round", len(set(sockets)), None in sockets, len(names), flush=True)
    ray.kill(ray.get_actor(names[0], namespace=NAMESPACE), no_restart=False)
ray.shutdown()
"""


def test_g18_many_ask_for_the_named_actor_at_once_and_one_is_made() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CROWD], cwd=ROOT, env={**os.environ, **LOOPBACK}, capture_output=True, text=True,
        check=False, timeout=120,
    )  # fmt: skip
    assert re.findall(r"^round (.*)$", done.stdout, re.MULTILINE) == ["1 False 1"] * 2, done.stderr[-2000:]
