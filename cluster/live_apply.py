"""RAY. `shoal set` and `shoal get` on a cluster that runs: what is in force, and another overlay for all.

The one file that knows how Serve's controller takes a deployment (private; Ray is pinned, and
`tests/cluster/test_live_knobs.py` runs it). The public `serve.run` gives each deployment a new version, and Serve
replaces every process for that. Here the controller gets back what it holds itself, with another `user_config` and
nothing else changed: a replica is then told (`reconfigure`) and not replaced.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from cluster.config import ClusterConfig
from cluster.live_knobs import lay_over, number_of, overlay_of
from cluster.process_sweep import running_drivers
from cluster.serve import check_ray_address, set_environment
from replica.errors import ShoalError

#: how long a single question to all routers or replicas may take
_ASK_S = 10.0
#: how long all may take until they say that a change is in force
_CONFIRM_S = 60.0
_DEPLOYMENTS = ("Replica", "Router")

Answers = list[dict[str, Any]]


class InForce(msgspec.Struct, frozen=True):
    """The configuration of a running cluster."""

    start: Mapping[str, Any]
    now: ClusterConfig
    #: `auto` values of the scheduler as the replicas filled them
    resolved: Mapping[str, Any]
    #: sentences of those who could not take the last `user_config`
    refused: list[str]


@contextmanager
def attached(address: str | None, port: int) -> Iterator[None]:
    """Connected to the Ray of a running cluster: `address`, else RAY_ADDRESS, else the one that `shoal serve` started
    on this machine for `port`. Raises ShoalError.
    """
    if address:
        os.environ["RAY_ADDRESS"] = address  # before `set_environment`, which sets loopback for a Ray of our own
    address = os.environ.get("RAY_ADDRESS") or _local_address(port)
    # handles are used here without an event loop; routers and replicas have one
    os.environ["RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP"] = "1"
    set_environment()
    check_ray_address(address)
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ShoalError(
            f"cannot join Ray at {address}: {error} (if it asks for a token: RAY_AUTH_MODE=token)"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def in_force() -> InForce:
    """What the routers and replicas of the application go by. Raises ShoalError if there is none."""
    _check_running()
    routers, replicas = _ask("Router"), _ask("Replica")
    if not routers or not replicas:
        raise ShoalError(f"{len(routers)} routers and {len(replicas)} replicas answer; at least one of each is needed")
    first = routers[0]
    refused = sorted({answer["refused"] for answer in [*routers, *replicas] if answer["refused"]})
    now = lay_over(first["start"], first["overlay"])
    return InForce(first["start"], now, replicas[0]["scheduler"], refused)


def put_in_force(start: Mapping[str, Any], wanted: ClusterConfig) -> tuple[int, int]:
    """Give `wanted`, which differs from `start` in live keys only, to all. Returns how many routers and replicas
    confirmed it: all that should be there. Raises ShoalError.
    """
    _refuse_declared()
    _submit(overlay_of(lay_over(start, {}), wanted))
    return _confirm(number_of(wanted))


def _local_address(port: int) -> str:
    """Of the Ray behind a `shoal serve`. Sets how Ray asks for its token, as that one had it; Ray knows the token."""
    drivers = [driver for driver in running_drivers() if driver.get("address")]
    for driver in drivers:
        if driver["port"] == port:
            if driver.get("auth_mode"):
                os.environ.setdefault("RAY_AUTH_MODE", str(driver["auth_mode"]))
            return str(driver["address"])
    ports = ", ".join(sorted(str(driver["port"]) for driver in drivers)) or "none"
    raise ShoalError(
        f"no `shoal serve` of this machine listens on port {port} (running on: {ports}); "
        "name it with --port, or its Ray with --address or RAY_ADDRESS"
    )


def _check_running() -> None:
    from ray import serve
    from ray.serve.exceptions import RayServeException

    from cluster.app import APP_NAME

    try:
        applications = serve.status().applications
    except RayServeException:
        applications = {}
    for name in ("ray", "ray.serve"):  # set by Ray as it connects; of a busy machine they tell more than anybody wants
        logging.getLogger(name).setLevel(logging.ERROR)
    if APP_NAME not in applications:
        raise ShoalError(f"no application {APP_NAME!r} runs in that Ray cluster")


def _refuse_declared() -> None:
    """An application that came by a file (`serve deploy`, KubeRay) is changed there: its owner would put it back."""
    from ray.serve.schema import APIType

    from cluster.app import APP_NAME

    details = _client().get_serve_details()["applications"].get(APP_NAME, {})
    if details.get("source") == APIType.DECLARATIVE:
        raise ShoalError(
            f"the application {APP_NAME!r} was deployed from a file (serve deploy, KubeRay): change `user_config` of "
            "both deployments there, see docs/knobs.md"
        )


def _submit(overlay: Mapping[str, Any]) -> None:
    import ray
    from ray.serve._private.deploy_utils import get_deploy_args
    from ray.serve.generated import serve_pb2

    from cluster.app import APP_NAME

    protocol: Any = serve_pb2  # generated: types do not know what is in it
    client = _client()
    deployments = []
    for name in _DEPLOYMENTS:
        info, route = client.get_deployment_info(name, APP_NAME)  # the route is not in the info; without it: 404
        info.deployment_config.user_config = dict(overlay)
        arguments = get_deploy_args(
            name,
            info.replica_config,
            ingress=info.ingress,
            deployment_config=info.deployment_config,
            version=info.version,  # the same one: nobody is replaced
            route_prefix=route,
        )
        message = protocol.DeploymentArgs(
            deployment_name=name,
            deployment_config=arguments["deployment_config_proto_bytes"],
            replica_config=arguments["replica_config_proto_bytes"],
            deployer_job_id=arguments["deployer_job_id"],
            ingress=info.ingress,
        )
        if route:
            message.route_prefix = route
        deployments.append(message.SerializeToString())
    application = protocol.ApplicationArgs(external_scaler_enabled=False).SerializeToString()
    ray.get(client._controller.deploy_applications.remote({APP_NAME: deployments}, {APP_NAME: application}))


def _confirm(number: int) -> tuple[int, int]:
    """Wait until all processes that should be there say that this is what they go by."""
    pause = threading.Event()
    end = time.monotonic() + _CONFIRM_S
    while True:
        counts, missing = [], []
        for name in _DEPLOYMENTS:
            answers = _ask(name)
            having = sum(answer["number"] == number for answer in answers)
            counts.append(having)
            wanted = max(_num_wanted(name), len(answers))
            if having < wanted:
                missing.append(f"{name}: {having} of {wanted}")
        if not missing:
            return counts[1], counts[0]
        if time.monotonic() > end:
            raise ShoalError(
                f"after {_CONFIRM_S:g} s not everybody has confirmed ({', '.join(missing)}); whoever starts anew, and "
                "whoever answers again, will have the new values"
            )
        pause.wait(0.05)


def _num_wanted(deployment: str) -> int:
    from cluster.app import APP_NAME

    info, _ = _client().get_deployment_info(deployment, APP_NAME)
    return int(info.deployment_config.num_replicas)


def _ask(deployment: str) -> Answers:
    """`configuration()` of each process of a deployment; those that do not answer in time are left out."""
    from ray import serve

    from cluster.app import APP_NAME

    handle = serve.get_deployment_handle(deployment, APP_NAME)
    try:
        answers = handle.broadcast("configuration").results(timeout_s=_ASK_S, return_exceptions=True)
    except Exception:  # nobody is up, or one of them does not answer: whoever waits asks again
        return []
    return [answer for answer in answers if isinstance(answer, dict)]


def _client() -> Any:
    from ray.serve.context import _get_global_client

    return _get_global_client()
