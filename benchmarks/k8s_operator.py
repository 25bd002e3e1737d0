"""KubeRay's operator as far as a running RayService needs it: pods of a manifest, `serveConfigV2` through Serve's REST
API, a new pod for one that ended, a new head with the same state. And the Service: who is ready gets new connections.
"""

from __future__ import annotations

import copy
import json
import random
import secrets
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import yaml

from benchmarks import redis_server, servers
from benchmarks.pod_network import Pod, PodNetwork
from benchmarks.pod_plans import PodPlan, Secrets, plans
from cluster.k8s.operator_rules import DRAIN_ENV, groups, ray_container
from replica.cache_folder import cache_folder

RAYSERVICES = servers.ROOT / "k8s" / "rayservice"


class Site(msgspec.Struct, frozen=True):
    """What one machine without GPUs and Kubernetes must have other than the manifest says. All else is as rendered:
    labels, resources (GPUs are numbers to Ray), start parameters, environment, drain chain.

    `pods`: of each group. `replicas`: of each role, and routers; fewer than pods, so that some are spare, or as many.
    `ranks`: of a replica, and its GPUs. `drain_s`, `longest_stream_s`, `pre_stop_s`: values of the chart, whose
    arithmetic is that of `_derived.tpl` (a test compares).
    """

    pods: dict[str, int]
    replicas: dict[str, int]
    ranks: int = 1
    drain_s: int = 10
    longest_stream_s: int = 40
    pre_stop_s: int = 2

    @property
    def ray_s(self) -> int:
        return max(self.drain_s + 10, self.longest_stream_s) + 20

    def fit(self, service: dict[str, Any]) -> dict[str, Any]:
        """The manifest for this machine: the fake runner, which serves a tokenizer that is here."""
        service = copy.deepcopy(service)
        every: list[Any] = list(groups(service))
        for _, name, group in every:
            container: Any = ray_container(group)
            pod = group["template"]["spec"]
            pod["terminationGracePeriodSeconds"] = self.ray_s + self.pre_stop_s + 25
            next(e for e in container["env"] if e["name"] == DRAIN_ENV)["value"] = str(self.ray_s)
            if name == "head":
                continue
            group["replicas"] = self.pods[name]
            container["lifecycle"]["preStop"]["exec"]["command"][1] = str(self.pre_stop_s)
            limits = container["resources"]["limits"]
            if "nvidia.com/gpu" in limits:
                limits["nvidia.com/gpu"] = str(self.ranks)
        config = yaml.safe_load(service["spec"]["serveConfigV2"])
        args = config["applications"][0]["args"]
        args |= {
            "model": "smollm2-135m-instruct",
            "max_model_len": 8192,
            "runner": "fake",
            "tensor_parallel_size": self.ranks,
            "num_gpus_per_replica": self.ranks,
            "router": {"replicas": self.replicas["router"]},
            "replicas": {role: count for role, count in self.replicas.items() if role != "router"},
            "drain_s": self.drain_s,
            "longest_stream_s": self.longest_stream_s,
        }
        service["spec"]["serveConfigV2"] = yaml.safe_dump(config)
        return service


def manifest(name: str) -> dict[str, Any]:
    """One of k8s/rayservice, which is what the chart renders."""
    found: dict[str, Any] = yaml.safe_load((RAYSERVICES / f"{name}.yaml").read_text())
    return found


class Operator:
    """A context manager, inside `pod_network.enter`. Entered when the application runs and every worker is ready."""

    def __init__(self, service: dict[str, Any], folder: Path) -> None:
        self.service, self.folder = service, folder
        self.secrets = Secrets(secrets.token_hex(24), secrets.token_hex(24))
        self._random = random.Random(0)
        self.ready: list[Pod] = []

    def __enter__(self) -> Operator:
        self.network = PodNetwork(self.folder)
        self._redis: subprocess.Popen[bytes] | None = None
        if "gcsFaultToleranceOptions" in self.service["spec"]["rayClusterConfig"]:
            self._redis = redis_server.start(self.network.here, self.secrets.redis_password, self.folder)
        try:
            every = list(plans(self.service, self.secrets))
            self._plans = {plan.group: plan for plan, _ in every}
            self._start(self._plans["head"])
            self.until(self.answers, 90, "the head's dashboard answers")
            for plan, count in every[1:]:
                for _ in range(count):
                    self._start(plan)
            self.apply(yaml.safe_load(self.service["spec"]["serveConfigV2"]))
            self.until_runs()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for pod in self.network.pods:
            if pod.is_running:
                pod.kill()
        if self._redis is not None:
            self._redis.send_signal(signal.SIGKILL)
            self._redis.wait()

    def _start(self, plan: PodPlan) -> Pod:
        # the image has these in /models; here they are where they are
        cache = str(cache_folder())
        own = {"SHOAL_CACHE": cache, "HF_HOME": cache, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        return self.network.start(plan, own)

    # ---- what the operator asks of the head ----

    def rest(self, method: str, path: str, body: Any = None) -> Any:
        """Serve's REST API on the head's dashboard. Raises OSError."""
        request = urllib.request.Request(
            f"http://{self.network.head.address}:8265{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {self.secrets.ray_token}"},
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            text = response.read()
        return json.loads(text) if text else None

    def apply(self, config: dict[str, Any]) -> None:
        """`serveConfigV2`, as at an in-place upgrade."""
        self.rest("PUT", "/api/serve/applications/", config)

    def answers(self) -> bool:
        try:
            self.rest("GET", "/api/serve/applications/")
        except OSError:
            return False
        return True

    def application(self) -> dict[str, Any]:
        """Empty while nobody answers."""
        try:
            found = self.rest("GET", "/api/serve/applications/")
        except OSError:
            return {}
        return dict(found["applications"].get("shoal") or {})

    def until_runs(self, timeout_s: float = 150) -> None:
        """The application is RUNNING, and the readiness probe of every pod with something of it says yes."""
        self.until(lambda: self.application().get("status") == "RUNNING", timeout_s, "the application is RUNNING")
        self.until(self.look, 60, "every worker is ready")

    def places(self) -> dict[str, set[str]]:
        """Address of a pod -> ids of Serve's replicas and routers that run there."""
        found: dict[str, set[str]] = {}
        for each in (self.application().get("deployments") or {}).values():
            for one in each.get("replicas") or []:
                if one["state"] == "RUNNING":
                    found.setdefault(one["node_ip"], set()).add(one["replica_id"])
        return found

    def until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Raises TimeoutError, and RuntimeError when a pod ended that was not told to."""
        end = time.monotonic() + timeout_s
        while not condition():
            for pod in self.network.pods:
                if not pod.is_running and not pod.is_terminating:
                    log = (pod.folder / "log").read_text()[-1500:]
                    raise RuntimeError(f"{pod.name} ended by itself:\n{log}")
            if time.monotonic() > end:
                raise TimeoutError(f"not within {timeout_s} s: {what}; {json.dumps(self.application())[:1500]}")
            time.sleep(0.2)

    # ---- the Service ----

    def look(self) -> bool:
        """Endpoints are the workers that are ready. True if all are that have a replica or router; who is spare has no
        proxy and is not ready.
        """
        there = self.places()
        self.ready = [pod for pod in self.network.workers() if pod.is_ready()]
        wanted = {pod.address for pod in self.network.workers()} & there.keys()
        return bool(wanted) and wanted <= {pod.address for pod in self.ready}

    def url(self) -> str:
        """An endpoint for one new connection. A pod that is told to stop is none (Kubernetes: within preStop)."""
        return f"http://{self._random.choice([p for p in self.ready if not p.is_terminating]).address}:8000"

    # ---- what happens ----

    def replace(self, pod: Pod) -> Pod:
        """Another one of its group."""
        return self._start(self._plans[pod.plan.group])
