"""RAY. `shoal serve`: start or join Ray, deploy, say when it is ready, and take everything down on Ctrl-C or
SIGTERM.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

from cluster.config import ClusterConfig
from cluster.process_sweep import record_children, sweep_orphans
from cluster.resources import NodeRoom, shortage
from replica.errors import ConfigError, ModelLoadError, ShoalError

#: beyond `drain_s`: Serve's own steps, and the last messages
_DRAIN_SLACK_S = 40.0


def serve_until_stopped(config: ClusterConfig, host: str, port: int) -> int:
    """Blocks until a signal. Returns the exit code. Raises ConfigError or ShoalError before anything is left
    running.
    """
    started = time.monotonic()
    if not os.environ.get("RAY_ADDRESS"):
        _check_port(host, port)
    config = _localize(config)
    set_environment()
    for line in sweep_orphans():
        _say(line)
    has_deployed = False
    with ThreadPoolExecutor(1) as pool:
        # the model is fetched and converted while Ray starts: both take seconds
        model = pool.submit(_prepare_model, config)
        attached = _start_ray(config)
        owns_serve = not _serve_is_running()
        try:
            if not attached:
                record_children(_found_by(port))
            _check_resources(config)
            model.result()
            _refuse_a_second_application(owns_serve)
            has_deployed = True
            _deploy(config, host, port)
            if not attached:
                record_children(_found_by(port))  # again: now with the replicas
            if not owns_serve and not _listens(host, port):
                _say(f"Serve ran here before with other HTTP options; nothing listens on {host}:{port} of this machine")
            _say(f"replicas: {_describe_replicas(config, host, port)}")
            _say(f"logs: {_log_folder()}  (a process that crashed: {_crash_files()})")
            elapsed = time.monotonic() - started
            _say(f"ready after {elapsed:.1f} s: http://{host}:{port}/v1  (model {config.served_name!r}; Ctrl-C stops)")
            _wait_for_signal()
            _say(f"stopping: streams have {config.drain_s:g} s to end (Ctrl-C again stops at once)")
        except KeyboardInterrupt:
            pass
        finally:
            _stop(owns_serve, has_deployed, config.drain_s + _DRAIN_SLACK_S)
    return 0


def _stop(owns_serve: bool, has_deployed: bool, drain_s: float) -> None:
    """Drain and end what was started here: our application, Serve if it was not there before, and a Ray of our own.

    The application goes first and alone: `serve.shutdown` takes the proxy away at once, and every open stream with it.
    A second signal skips the draining.
    """
    import ray
    from ray import serve

    from cluster.app import APP_NAME

    with _quiet():
        try:
            if has_deployed:
                _delete_application(APP_NAME, drain_s)
            if owns_serve and not serve.status().applications:
                serve.shutdown()
        except KeyboardInterrupt:
            pass
        finally:
            ray.shutdown()


def _delete_application(name: str, drain_s: float) -> None:
    """Serve waits 60 s for the end of an application and then raises; a drain may take longer."""
    from ray import serve

    end = time.monotonic() + drain_s
    while True:
        try:
            serve.delete(name)
            return
        except TimeoutError:
            if time.monotonic() > end:
                return


def _localize(config: ClusterConfig) -> ClusterConfig:
    """Paths of this shell mean nothing in Ray's processes: make the model absolute, take the template's text along.

    A model that is not there is refused here, before anything was started.
    """
    from cluster import hub, model_store

    update: dict[str, str] = {}
    if config.model not in model_store.BUILTIN_MODELS:
        folder = model_store.resolve(config.model).absolute()
        if config.runner == "torch":
            _check_model(folder, config.max_model_len, config.num_ranks)
        is_hub_id = model_store.is_hub_id(config.model)
        # other nodes have a cache of their own: they get the commit, not the path
        update["model"] = hub.pinned(config.model, folder) if is_hub_id else str(folder)
        update["served_model_name"] = config.served_name
        if is_hub_id and config.served_model_name is None:  # clients of other servers ask for the whole id
            update["served_model_name"] = config.model.partition("@")[0]
    elif config.runner == "torch" and config.num_ranks > 1:  # fetched now, to be asked whether it can be cut
        _check_model(model_store.resolve(config.model), config.max_model_len, config.num_ranks)
    if config.chat_template:
        update["chat_template"] = _template_text(config.chat_template)
    return config.model_copy(update=update)


def _check_model(folder: Path, max_model_len: int | None, num_ranks: int = 1) -> None:
    """In a process of its own, because it takes torch, which this one can do without."""
    command = [sys.executable, "-m", "replica.check_model", str(folder), "--ranks", str(num_ranks)]
    if max_model_len is not None:
        command += ["--max-model-len", str(max_model_len)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise ModelLoadError(result.stdout.strip() or result.stderr.strip().splitlines()[-1])


def _template_text(template: str) -> str:
    """The template itself, or the text of the file it names; compiled once, so that a mistake shows now."""
    from router.chat_template import ChatTemplate

    path = Path(template).expanduser()
    looks_like_a_path = "{" not in template
    if looks_like_a_path and not path.is_file():
        raise ConfigError(f"chat_template: there is no file {template!r}, and it is no template either")
    text = path.read_text() if looks_like_a_path else template
    ChatTemplate(text)
    return text


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Ray prints that the controller's last task failed, because it was killed: true, intended, and nobody's news.

    Parts of it write to the descriptors past Python, so the descriptors are what has to be turned away.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    saved = {number: os.dup(number) for number in (1, 2)}
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in saved:
            os.dup2(nowhere, number)
        yield
    finally:
        for number, copy in saved.items():
            os.dup2(copy, number)
            os.close(copy)
        os.close(nowhere)


def _prepare_model(config: ClusterConfig) -> None:
    """Fetch and convert a built-in model, and hold the wish for a context against it."""
    from cluster import model_store

    folder = model_store.resolve(config.model)
    limit = json.loads((folder / "config.json").read_text()).get("max_position_embeddings")
    is_bound = config.runner == "torch" and limit is not None  # the fake runner has no weights
    if is_bound and config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(f"max_model_len: {config.max_model_len} is longer than the model's context of {limit}")


def _start_ray(config: ClusterConfig) -> bool:
    """True if an existing Ray (RAY_ADDRESS) was joined, False if one was started here."""
    import ray

    address = os.environ.get("RAY_ADDRESS")
    if address:
        _say(f"joining Ray at {address}")
        check_ray_address(address)
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ShoalError(f"cannot join Ray at RAY_ADDRESS={address}: {error}") from None
        return True
    _say("starting Ray")
    of_replica = sum(bundle.get("CPU", 0) for bundle in replica_bundles(config))
    needed = config.replicas.both * of_replica + config.router.replicas + 1
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, int(needed)),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
        object_store_memory=100 << 20,  # nothing of ours goes through it
    )
    return False


def replica_bundles(config: ClusterConfig) -> list[dict[str, float]]:
    """What Ray reserves for one replica."""
    return config.bundles or [{"CPU": config.num_cpus_per_replica}]


def _check_resources(config: ClusterConfig) -> None:
    """Raises ConfigError if the nodes that are there have no room, which Ray would wait for without a word."""
    import ray
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    nodes = [
        NodeRoom(node["NodeManagerAddress"], dict(node["Resources"]), dict(free.get(node["NodeID"], {})))
        for node in ray.nodes()
        if node["Alive"]
    ]
    if short := shortage(replica_bundles(config), config.replicas.both, config.rank_placement, nodes):
        raise ConfigError(f"resources: {short}")


def _found_by(port: int) -> dict[str, object]:
    """What `shoal set` needs to find this cluster, from before the first answer on."""
    return {"port": port, "address": ray_address(), "auth_mode": os.environ.get("RAY_AUTH_MODE")}


def ray_address() -> str:
    """Where another process can join the Ray that this one is in."""
    import ray

    return str(ray.get_runtime_context().gcs_address)


def _serve_is_running() -> bool:
    import ray

    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return False
    return True


def _refuse_a_second_application(owns_serve: bool) -> None:
    """Deploying under a name that is taken would replace somebody's application without a word."""
    from ray import serve

    from cluster.app import APP_NAME

    if not owns_serve and APP_NAME in serve.status().applications:
        raise ShoalError(
            f"an application {APP_NAME!r} runs in that Ray cluster; stop it first, or delete it with `serve delete`"
        )


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError:
        return False
    return True


def check_ray_address(address: str) -> None:
    """Ray waits for minutes and in silence for an address where nothing is; two seconds tell as well."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return  # "auto", "local", "ray://...": Ray knows what to make of them
    if not address.startswith("ray://") and not _listens(host.strip("[]"), int(port)):
        raise ShoalError(f"RAY_ADDRESS={address}: nothing listens there")


def _deploy(config: ClusterConfig, host: str, port: int) -> None:
    from ray import serve
    from ray.serve.config import HTTPOptions, ProxyLocation

    from cluster.app import APP_NAME, build_from

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # on their way to stderr they only interrupt our own lines
    serve.start(
        proxy_location=ProxyLocation.HeadOnly,
        http_options=HTTPOptions(host=host, port=port, request_timeout_s=None, keep_alive_timeout_s=90),
    )
    _say(f"deploying {config.replicas.both} replica(s) and {config.router.replicas} router(s)")
    try:
        serve.run(build_from(config), name=APP_NAME, route_prefix="/", blocking=False)
    except RuntimeError:
        raise ShoalError(
            f"the application did not start: {_why(APP_NAME)}\nlogs: {_log_folder()} and {_crash_files()}"
        ) from None


def _why(app_name: str) -> str:
    """What Serve knows of the failure, without its tracebacks: the constructor's error is there and nowhere else."""
    from ray import serve

    application = serve.status().applications.get(app_name)
    if application is None:
        return ""
    text = "\n".join([application.message, *(d.message for d in application.deployments.values())])
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    errors = re.findall(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception)): (.+)$", plain, flags=re.MULTILINE)
    own = [message for name, message in errors if name not in ("RuntimeError", "RayTaskError")]
    return own[-1] if own else plain.strip()


def _log_folder() -> str:
    """Where routers and replicas log (`cluster/serve_logs.py`), and Serve as well."""
    return os.path.join(_ray_logs(), "serve")


def _crash_files() -> str:
    """What a process writes past its loggers, a crash of native code above all."""
    return os.path.join(_ray_logs(), "worker-*.err")


def _ray_logs() -> str:
    return os.path.join(os.environ.get("RAY_TMPDIR", tempfile.gettempdir()), "ray", "session_latest", "logs")


def _describe_replicas(config: ClusterConfig, host: str, port: int) -> str:
    """What the replicas say of their device, kernels and self-test; the first router may need a moment to hear of
    them.
    """
    from cluster.status import fetch_status

    reachable = "127.0.0.1" if host == "0.0.0.0" else host
    key = config.http.api_keys[0] if config.http.api_keys else None
    if key is None and config.tenants.needs_keys(()):
        return "see `shoal status` with a tenant's key"
    pause = threading.Event()
    for _ in range(50):
        with contextlib.suppress(ShoalError):
            replicas = fetch_status(reachable, port, key)["replicas"]
            if replicas:
                return "; ".join(sorted({replica["description"] for replica in replicas}))
        pause.wait(0.1)
    return "not heard of yet; see `shoal status`"


def set_environment() -> None:
    """Before `ray` is imported: Serve reads these when its modules load, in this process and in every one it starts."""
    from cluster.serve_env import SERVE_ENV

    for name, value in SERVE_ENV.items():
        os.environ.setdefault(name, value)
    if not os.environ.get("RAY_ADDRESS"):
        # one machine: Ray's own ports and our data plane listen on loopback (the switch is named after the systems it
        # was made for)
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")


def _check_port(host: str, port: int) -> None:
    if not 1 <= port <= 65535:
        raise ConfigError(f"--port: {port} is not a port; allowed are 1 to 65535")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: cannot listen there: {error.strerror}") from None


def _wait_for_signal() -> None:
    """Ray installs its own handlers in `init`; ours come after, so that `finally` above always runs."""
    stop = threading.Event()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()
        for each in numbers:  # the second one interrupts whatever the first began
            signal.signal(each, signal.default_int_handler)

    for number in numbers:
        signal.signal(number, on_signal)
    stop.wait()


def _say(line: str) -> None:
    print(f"shoal: {line}", file=sys.stderr, flush=True)
