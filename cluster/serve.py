"""RAY. `shoal serve`: start or join Ray, deploy, say when it is ready, and take everything down on Ctrl-C or
SIGTERM.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from cluster.config import ClusterConfig
from cluster.line_socket import LineSocket
from cluster.memory_room import available_bytes, memory_shortage, needs
from cluster.port_hold import PortHold, check_port
from cluster.process_sweep import record_children, sweep_orphans
from cluster.ray_start import (
    PROXY_WAIT_S,
    check_resources,
    crash_files,
    join_ray,
    listens,
    log_folder,
    ray_address,
    refuse_oversubscription,
    serve_is_running,
    set_environment,
    start_ray,
)
from cluster.ray_words import cause
from cluster.serve_stop import DRAIN_SLACK_S, delete_application, stop_application
from cluster.supervisor import Driver, Supervisor
from cluster.terminal import new_log, say
from replica.config import resolve
from replica.errors import ConfigError, ModelLoadError, ShoalError
from replica.hardware import detect_hardware
from replica.messages import Role


def serve_until_stopped(config: ClusterConfig, host: str, port: int) -> int:
    """Blocks until a signal, or until it cannot go on, and says what is to be said. Returns the exit code; nothing is
    left running: 0 if it was told to stop, 1 failed, 2 wrong configuration, 128 + signal if streams were cut.
    """
    check_port(port)
    attached = bool(os.environ.get("RAY_ADDRESS"))
    supervisor = Supervisor(
        new_log(port),
        (host, port),
        # nothing of a Ray of our own needs an orderly end before there are streams
        before_ready_s=DRAIN_SLACK_S if attached else 3.0,
        stop_s=config.drain_s + DRAIN_SLACK_S,
    )
    return supervisor.run(lambda driver: (_serve_attached if attached else _serve_alone)(config, host, port, driver))


def _serve_alone(config: ClusterConfig, host: str, port: int, driver: Driver) -> int:
    """With a Ray of our own. The supervisor ends whatever is left of it, so only streams need our care."""
    started = time.monotonic()
    hold = PortHold(host, port)  # until the end: Serve may have to start its proxy anew
    config = _localize(config)
    refuse_oversubscription(config)
    set_environment()
    for line in sweep_orphans():
        say(line)
    # the model is fetched and converted while Ray starts: both take seconds; and Serve is imported, which takes one
    beside = ThreadPoolExecutor(2)
    model = beside.submit(_prepare_model, config, True)
    import ray  # noqa: F401  # whole, before parts of it are imported on a thread

    beside.submit(importlib.import_module, "cluster.app")
    if wait([model], 0.5).done:  # it was there: 50 ms, and Ray need not start for a refusal
        model.result()
    start_ray(config, driver)
    record_children(_found_by(port))
    check_resources(config)
    model.result()
    lines = LineSocket()
    _deploy(config, host, port, lines.name)
    record_children(_found_by(port))  # again: now with the replicas
    _serve_streams(config, host, port, driver, lines, started)
    hold.close()
    return 0


def _serve_attached(config: ClusterConfig, host: str, port: int, driver: Driver) -> int:
    """In a Ray that is there already, with Serve or without, and stays."""
    import ray
    from ray import serve

    from cluster.app import APP_NAME
    from cluster.kv_connector.actor import end_connectors

    started = time.monotonic()
    config = _localize(config)
    set_environment()
    join_ray(driver)
    owns_serve, has_deployed = not serve_is_running(), False
    try:
        check_resources(config)
        _prepare_model(config, False)
        _refuse_a_second_application(owns_serve)
        has_deployed = True
        lines = LineSocket()
        _deploy(config, host, port, lines.name)
        if not owns_serve and not listens(host, port):
            say(f"Serve ran here before with other HTTP options; nothing listens on {host}:{port} of this machine")
        has_deployed = False  # what follows deletes it
        _serve_streams(config, host, port, driver, lines, started)
    finally:
        if has_deployed:
            delete_application(APP_NAME, config.drain_s)
        if config.kv_cache.has_connector:
            end_connectors(APP_NAME)
        if owns_serve and not serve.status().applications:
            serve.shutdown()
        ray.shutdown()
    return 0


def _serve_streams(
    config: ClusterConfig, host: str, port: int, driver: Driver, lines: LineSocket, started: float
) -> None:
    """Until a signal; then let streams end. Another signal cuts them."""
    from cluster.app import APP_NAME

    try:
        try:
            driver.is_ready()  # some may have begun
            say(f"replicas: {_describe_replicas(config, host, port)}")
            say(f"logs: {log_folder()}  (a process that crashed: {crash_files()}; what Ray says: {driver.log})")
            elapsed = time.monotonic() - started
            say(f"ready after {elapsed:.1f} s: http://{host}:{port}/v1  (model {config.served_name!r}; Ctrl-C stops)")
            lines.follow(say)
            threading.Event().wait()
        except KeyboardInterrupt:
            say(f"stopping: streams have {config.drain_s:g} s to end (Ctrl-C again stops at once)")
        stop_application(APP_NAME, config.drain_s)
    except KeyboardInterrupt:
        say("stopped at once")


def _localize(config: ClusterConfig) -> ClusterConfig:
    """Paths of this shell mean nothing in Ray's processes: make the model absolute, take the template's text along.

    A model that is not there is refused here, before anything was started.
    """
    from cluster import hub, model_store

    update: dict[str, Any] = {}
    if config.kv_cache.disk_folder:
        folder = Path(config.kv_cache.disk_folder).expanduser().absolute()
        update["kv_cache"] = config.kv_cache.model_copy(update={"disk_folder": str(folder)})
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
        kind = ConfigError if result.returncode == 2 and result.stdout else ModelLoadError
        raise kind(result.stdout.strip() or result.stderr.strip().splitlines()[-1])
    for line in result.stdout.splitlines():
        if line.startswith("warning: "):
            say(line)


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


def _prepare_model(config: ClusterConfig, is_all_here: bool) -> None:
    """Fetch and convert a built-in model, and hold what is wished against it: the context, and, if the whole cluster is
    this machine, the memory.
    """
    from cluster import model_store

    folder = model_store.resolve(config.model)
    limit = json.loads((folder / "config.json").read_text()).get("max_position_embeddings")
    is_bound = config.runner == "torch" and limit is not None  # the fake runner has no weights
    if is_bound and config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(f"max_model_len: {config.max_model_len} is longer than the model's context of {limit}")
    if is_all_here:
        engine = resolve(config.engine_config(), detect_hardware(), config.most_replicas)
        if short := memory_shortage(config, engine, needs(config, engine, folder), available_bytes()):
            raise ConfigError(short)


def _found_by(port: int) -> dict[str, object]:
    """What `shoal set` needs to find this cluster, from before the first answer on."""
    return {"port": port, "address": ray_address(), "auth_mode": os.environ.get("RAY_AUTH_MODE")}


def _refuse_a_second_application(owns_serve: bool) -> None:
    """Deploying under a name that is taken would replace somebody's application without a word."""
    from ray import serve

    from cluster.app import APP_NAME

    if not owns_serve and APP_NAME in serve.status().applications:
        raise ShoalError(
            f"an application {APP_NAME!r} runs in that Ray cluster; stop it first, or delete it with `serve delete`"
        )


def _deploy(config: ClusterConfig, host: str, port: int, terminal: str = "") -> None:
    from ray import serve
    from ray.serve._private import api, client
    from ray.serve.config import HTTPOptions, ProxyLocation

    from cluster.app import APP_NAME, build_from

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # on their way to stderr they only interrupt our own lines
    api.HTTP_PROXY_TIMEOUT = PROXY_WAIT_S  # type: ignore[attr-defined]
    client.HTTP_PROXY_TIMEOUT = PROXY_WAIT_S  # type: ignore[attr-defined]
    client.CLIENT_POLLING_INTERVAL_S = 0.1  # type: ignore[attr-defined]  # 1: waits half a second too long at each end
    serve.start(
        proxy_location=ProxyLocation.HeadOnly,
        http_options=HTTPOptions(host=host, port=port, request_timeout_s=None, keep_alive_timeout_s=90),
    )
    counts = config.replicas.counts
    kinds = " and ".join(f"{n} {'' if role is Role.BOTH else role.value + ' '}replica(s)" for role, n in counts.items())
    say(f"deploying {kinds} and {config.router.replicas} router(s)")
    if config.replicas.prefill and config.kv_cache.has_connector:
        say(f"what is handed over passes through {config.kv_cache.host_tier_gib:g} GiB of memory of each node")
    try:
        serve.run(build_from(config, terminal), name=APP_NAME, route_prefix="/", blocking=False)
    except RuntimeError:
        raise ShoalError(
            f"the application did not start: {_why(APP_NAME)}\nlogs: {log_folder()} and {crash_files()}"
        ) from None


def _why(app_name: str) -> str:
    """What Serve knows of the failure, without its tracebacks: the constructor's error is there and nowhere else."""
    from ray import serve

    application = serve.status().applications.get(app_name)
    if application is None:
        return ""
    return cause("\n".join([application.message, *(d.message for d in application.deployments.values())]))


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
