"""RAY. `shoal set`, `shoal get` and `shoal scale` on a cluster that runs: what is in force, another overlay for all,
another number of replicas.

The one file that knows how Serve's controller takes a deployment (private; Ray is pinned, and
`tests/cluster/test_live_knobs.py` runs it). The public `serve.run` gives each deployment a new version, and Serve
replaces every process for that. Here the controller gets back what it holds itself, with another `user_config` or
number of replicas and nothing else changed: a replica is then told (`reconfigure`) and not replaced.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from cluster.config import ClusterConfig
from cluster.live_confirm import SETTLE_S, Confirmation, Confirmed, Held, Seen
from cluster.live_knobs import lay_over, overlay_of
from cluster.process_sweep import running_drivers
from cluster.ray_start import check_ray_address, set_environment
from cluster.role_config import DEPLOYMENTS
from replica.errors import ConfigError, ShoalError
from replica.messages import Role

#: how long a single question to all routers or replicas may take
_ASK_S = 10.0
#: and how long Serve's controller may take to take a change: it does so in 10 ms, unless it is dead
_CONTROLLER_S = 30.0
#: the same while a change is confirmed: one that is stopped must not keep the others' news from us for long
_ASK_AGAIN_S = 3.0

Answers = list[dict[str, Any]]


class InForce(msgspec.Struct, frozen=True):
    """The configuration of a running cluster."""

    start: Mapping[str, Any]
    now: ClusterConfig
    #: `auto` values of the scheduler as the replicas filled them
    resolved: Mapping[str, Any]
    #: sentences of those who could not take the last `user_config`
    refused: list[str]
    #: what Serve's controller held as this was found
    held: Held


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
    held = _settled_held()
    names = _deployments()
    routers, replicas = _ask("Router", _ASK_S), [one for name in names[:-1] for one in _ask(name, _ASK_S)]
    if not routers or not replicas:
        raise ShoalError(f"{len(routers)} routers and {len(replicas)} replicas answer; at least one of each is needed")
    first = routers[0]
    refused = sorted({answer["refused"] for answer in [*routers, *replicas] if answer["refused"]})
    try:
        # not what a router says: a change may be on its way, and the next one must not undo it
        now = lay_over(first["start"], first["overlay"] if refused else held.overlays["Router"])
    except ConfigError:  # it came by a file, and no router has refused it yet
        now = lay_over(first["start"], first["overlay"])
    if now.autoscaling.max_replicas is None:  # else it is the fewest, and the policy says how many there are
        held_now = {role.value: num_replicas_held(role) for role in now.replicas.counts}
        now = now.model_copy(update={"replicas": now.replicas.model_copy(update=held_now)})
    return InForce(first["start"], now, replicas[0]["scheduler"], refused, held)


def put_in_force(found: InForce, wanted: ClusterConfig, keys: Iterable[str]) -> Confirmed:
    """Give `wanted`, which differs from `found.now` in live keys only, to all, and wait until they have confirmed it.
    Raises ShoalError, also if another change came in between, or later with other values of `keys`.
    """
    refuse_declared("change `user_config` of all deployments there, see docs/knobs.md")
    confirmation = Confirmation(found.start, found.now, wanted, keys, time.monotonic())
    # the controller does not compare and set: of two commands within a few milliseconds both pass here
    confirmation.check_base(found.held, _held())
    _submit(overlay_of(lay_over(found.start, {}), wanted))
    return _confirm(confirmation)


def num_replicas_held(role: Role) -> int:
    """How many the controller is to keep up. Raises ShoalError when the application is gone."""
    return _num_held(DEPLOYMENTS[role])


def submit_num_replicas(role: Role, count: int) -> None:
    """Serve starts some, or tells some to stop; who stays is not touched."""

    def scale(name: str, config: Any) -> None:
        if name == DEPLOYMENTS[role]:
            config.num_replicas = count

    _submit_changed(scale)


def replica_states(role: Role) -> tuple[dict[str, int], str]:
    """How many of a role are in which of Serve's states; and what Serve says of them if it is not well."""
    application = application_status()
    deployment = application.deployments[DEPLOYMENTS[role]]
    is_unwell = deployment.status in ("UNHEALTHY", "DEPLOY_FAILED")
    return dict(deployment.replica_states), deployment.message if is_unwell else ""


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


def refuse_declared(instead: str) -> None:
    """An application that came by a file (`serve deploy`, KubeRay) is changed there: its owner would put it back."""
    from ray.serve.schema import APIType

    from cluster.app import APP_NAME

    details = _client().get_serve_details()["applications"].get(APP_NAME, {})
    if details.get("source") == APIType.DECLARATIVE:
        raise ShoalError(f"the application {APP_NAME!r} was deployed from a file (serve deploy, KubeRay): {instead}")


def _submit(overlay: Mapping[str, Any]) -> None:
    def lay(name: str, config: Any) -> None:
        config.user_config = dict(overlay)

    _submit_changed(lay)


def _submit_changed(change: Callable[[str, Any], None]) -> None:
    """Hand back to the controller what it holds; `change` may alter each deployment's configuration, by its name."""
    import ray
    from ray.serve._private.deploy_utils import get_deploy_args
    from ray.serve.generated import serve_pb2

    from cluster.app import APP_NAME

    protocol: Any = serve_pb2  # generated: types do not know what is in it
    client = _client()
    deployments = []
    for name in _deployments():
        info, route = _info(name)  # the route is not in the info; without it: 404
        change(name, info.deployment_config)
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
    told = client._controller.deploy_applications.remote({APP_NAME: deployments}, {APP_NAME: application})
    try:
        ray.get(told, timeout=_CONTROLLER_S)
    except ray.exceptions.GetTimeoutError:
        raise ShoalError(f"Serve's controller did not take the change within {_CONTROLLER_S:g} s") from None


def _confirm(confirmation: Confirmation) -> Confirmed:
    """Ask until all who are up say that this is what they go by."""
    pause = threading.Event()
    while True:
        held = _held()
        # before anybody is asked, who may take long to answer
        if confirmation.follow(held, time.monotonic()):
            seen = [_look(name) for name in _deployments()]
            if (confirmed := confirmation.judge(held, seen, time.monotonic())) is not None:
                return confirmed
        pause.wait(0.05)


def _held() -> Held:
    """Raises ShoalError when the application is gone."""
    # in this order: the controller marks an application as it gets a change, and unmarks it with the next turn of its
    # loop or later, which is when `_info` begins to tell the change
    is_settled = application_status().status != "DEPLOYING"
    return Held({name: _overlay_in(_info(name)[0]) for name in _deployments()}, is_settled)


def _settled_held() -> Held:
    """The same when nothing is on its way inside the controller, or after a while: something else may be starting."""
    pause, end = threading.Event(), time.monotonic() + SETTLE_S
    while not (held := _held()).is_settled and time.monotonic() < end:
        pause.wait(0.05)
    return held


def _look(name: str) -> Seen:
    answers = _ask(name, _ASK_AGAIN_S)
    deployment = application_status().deployments[name]
    starting = sum(count for state, count in deployment.replica_states.items() if state == "STARTING")
    return Seen(name, _num_held(name), starting, answers)


def _num_held(name: str) -> int:
    held = _info(name)[0].deployment_config
    if held.autoscaling_config is None:
        return int(held.num_replicas)
    from cluster.app import APP_NAME

    details = _client().get_serve_details()["applications"].get(APP_NAME, {})
    return int(details.get("deployments", {}).get(name, {}).get("target_num_replicas", 0))


def _deployments() -> list[str]:
    """Of our application: those of replicas, then the routers'. Raises ShoalError when it is gone."""
    there = application_status().deployments
    return [name for name in (*DEPLOYMENTS.values(), "Router") if name in there]


def application_status() -> Any:
    """Of the application, as Serve tells it. Raises ShoalError when it is gone."""
    from ray import serve

    from cluster.app import APP_NAME

    application = serve.status().applications.get(APP_NAME)
    if application is None:
        raise ShoalError(f"the application {APP_NAME!r} is gone")
    return application


def _info(deployment: str) -> tuple[Any, str | None]:
    """What the controller holds of it, and its route. Raises ShoalError when the application is gone."""
    from ray.exceptions import RayError

    from cluster.app import APP_NAME

    try:
        info, route = _client().get_deployment_info(deployment, APP_NAME)
    except (RayError, KeyError) as error:
        raise ShoalError(f"the application {APP_NAME!r} is gone, or Serve's controller does not answer") from error
    return info, route


def _overlay_in(info: Any) -> Mapping[str, Any]:
    return dict(info.deployment_config.user_config or {})


def _ask(deployment: str, timeout_s: float) -> Answers:
    """`configuration()` of each process of a deployment; those that do not answer in time are left out."""
    from ray import serve

    from cluster.app import APP_NAME

    handle = serve.get_deployment_handle(deployment, APP_NAME)
    try:
        answers = handle.broadcast("configuration").results(timeout_s=timeout_s, return_exceptions=True)
    except Exception:  # nobody is up, or one of them does not answer: whoever waits asks again
        return []
    return [answer for answer in answers if isinstance(answer, dict)]


def _client() -> Any:
    from ray.serve.context import _get_global_client

    return _get_global_client()
