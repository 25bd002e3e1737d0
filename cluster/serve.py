"""RAY. `shoal serve`: start or join Ray, deploy, say when it is ready, and take everything down on Ctrl-C or
SIGTERM.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

from cluster.config import ClusterConfig
from cluster.process_sweep import record_children, sweep_orphans
from replica.errors import ConfigError, ShoalError

logger = logging.getLogger(__name__)


def serve_until_stopped(config: ClusterConfig, host: str, port: int) -> int:
    """Blocks until a signal. Returns the exit code. Raises ConfigError or ShoalError before anything is left
    running.
    """
    started = time.monotonic()
    if not os.environ.get("RAY_ADDRESS"):
        _check_port(host, port)
    config = _localize(config)
    _set_environment()
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
                record_children()
            model.result()
            _refuse_a_second_application(owns_serve)
            has_deployed = True
            _deploy(config, host, port)
            if not attached:
                record_children()  # again: now with the replicas
            if not owns_serve and not _listens(host, port):
                _say(f"Serve ran here before with other HTTP options; nothing listens on {host}:{port} of this machine")
            elapsed = time.monotonic() - started
            _say(f"ready after {elapsed:.1f} s: http://{host}:{port}/v1  (model {config.served_name!r}; Ctrl-C stops)")
            _wait_for_signal()
        except KeyboardInterrupt:
            pass
        finally:
            _stop(owns_serve, has_deployed)
    return 0


def _stop(owns_serve: bool, has_deployed: bool) -> None:
    """Drain and end what was started here: our application, Serve if it was not there before, and a Ray of our own.

    A second signal skips the draining.
    """
    import ray
    from ray import serve

    from cluster.app import APP_NAME

    _say("stopping: streams may end first (Ctrl-C again stops at once)")
    with _quiet_stderr():
        try:
            if owns_serve and serve.status().applications.keys() <= {APP_NAME}:
                serve.shutdown()
            elif has_deployed:
                serve.delete(APP_NAME)
        except KeyboardInterrupt:
            pass
        finally:
            ray.shutdown()


def _localize(config: ClusterConfig) -> ClusterConfig:
    """Paths of this shell mean nothing in Ray's processes: make the model absolute, take the template's text along.

    A model that is not there is refused here, before anything was started.
    """
    from cluster import model_store

    update: dict[str, str] = {}
    if config.model not in model_store.BUILTIN_MODELS:
        update["model"] = str(model_store.resolve(config.model).absolute())
        update["served_model_name"] = config.served_name
    if config.chat_template and (path := Path(config.chat_template).expanduser()).is_file():
        update["chat_template"] = path.read_text()
    return config.model_copy(update=update)


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Ray's core prints that the controller's last task failed, because it was killed: true, intended, and no news for
    anybody.

    It writes to the descriptor from C++, so the descriptor is what has to be turned away.
    """
    sys.stderr.flush()
    saved = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


def _prepare_model(config: ClusterConfig) -> None:
    from cluster import model_store

    model_store.resolve(config.model)


def _start_ray(config: ClusterConfig) -> bool:
    """True if an existing Ray (RAY_ADDRESS) was joined, False if one was started here."""
    import ray

    address = os.environ.get("RAY_ADDRESS")
    if address:
        _say(f"joining Ray at {address}")
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ShoalError(f"cannot join Ray at RAY_ADDRESS={address}: {error}") from None
        return True
    _say("starting Ray")
    needed = config.replicas.both * config.num_cpus_per_replica + config.router.replicas + 1
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, int(needed)),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
        object_store_memory=100 << 20,  # nothing of ours goes through it
    )
    return False


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
    except RuntimeError as error:
        raise ShoalError(f"the application did not start: {error}\n{_why(APP_NAME)}") from None


def _why(app_name: str) -> str:
    """What Serve knows of the failure: the constructor's error is there and nowhere else."""
    from ray import serve

    application = serve.status().applications.get(app_name)
    if application is None:
        return ""
    messages = [application.message, *(d.message for d in application.deployments.values())]
    return "\n".join(message for message in messages if message)


def _set_environment() -> None:
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
