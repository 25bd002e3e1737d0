"""RAY. The `shoal` command: serve, set, get, scale, status, why, k8s, key, model. Heavy imports happen inside the
commands, so that `shoal --help` is instant.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import yaml

from cluster import __version__
from cluster.config import PlainYaml
from cluster.k8s import command as k8s_command
from replica.errors import ConfigError, ShoalError
from replica.messages import Role

#: `shoal serve` flag -> key of ClusterConfig
_FLAGS = {
    "model": "model",
    "served_model_name": "served_model_name",
    "dtype": "dtype",
    "max_model_len": "max_model_len",
    "replicas": "replicas.both",
    "prefill": "replicas.prefill",
    "decode": "replicas.decode",
    "routers": "router.replicas",
    "tensor_parallel_size": "tensor_parallel_size",
    "num_gpus_per_replica": "num_gpus_per_replica",
    "chat_template": "chat_template",
    "runner": "runner",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code: 0 fine, 1 failed, 2 wrong usage or configuration."""
    parser = _parser()
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        # the command's own usage helps more than that of `shoal`
        getattr(options, "parser", parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    if options.command is None:
        parser.print_help()
        return 2
    try:
        code = int(options.run(options))
        sys.stdout.flush()  # here, where somebody catches that nobody reads
        return code
    except ConfigError as error:
        print(f"shoal: {error}", file=sys.stderr)
        return 2
    except ShoalError as error:
        print(f"shoal: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has enough: `shoal why | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is written at exit
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shoal", description="A distributed LLM serving cluster on Ray Serve.")
    parser.add_argument("--version", action="version", version=f"shoal {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_serve(commands)
    status = commands.add_parser("status", help="replicas, queue against cap, KV use of a running cluster")
    _add_address(status)
    status.add_argument("--api-key", help="bearer key, if the cluster wants one")
    status.add_argument("--json", action="store_true", help="machine-readable")
    status.set_defaults(run=_status, parser=status)
    why = commands.add_parser("why", help="where the time of a request went; without an id: what waits for what")
    _add_address(why)
    why.add_argument("request_id", nargs="?", help="the id in the answer (chatcmpl-...), or its X-Request-Id")
    why.add_argument("--limit", type=int, default=50, help="most lines without an id, default 50")
    why.add_argument("--api-key", help="bearer key, if the cluster wants one")
    why.add_argument("--json", action="store_true", help="machine-readable")
    why.set_defaults(run=_why, parser=why)
    _add_knobs(commands)
    k8s_command.add(commands)
    key = commands.add_parser("key", help="make an API key for a tenant, or the hash of one")
    key.add_argument("--hash", action="store_true", help="of a key on standard input, and nothing else")
    key.set_defaults(run=_key, parser=key)
    model = commands.add_parser("model", help="fetch, convert and locate a model")
    model.add_argument("name", nargs="?", default="smollm2-135m-instruct", help="built-in name, folder or .gguf file")
    model.set_defaults(run=_model, parser=model)
    return parser


def _add_knobs(commands: Any) -> None:
    change = commands.add_parser("set", help="change the configuration of a running cluster, without a restart")
    change.add_argument(
        "items", nargs="+", metavar="KEY=VALUE", help="e.g. scheduler.watermark=0.03; see docs/knobs.md"
    )
    change.set_defaults(run=_set, parser=change)
    show = commands.add_parser("get", help="the configuration of a running cluster")
    show.add_argument("keys", nargs="*", metavar="KEY", help="a key or a section; all without it")
    show.add_argument("--json", action="store_true", help="machine-readable")
    show.set_defaults(run=_get, parser=show)
    scale = commands.add_parser("scale", help="more or fewer replicas of a running cluster; no stream is cut")
    of_role = scale.add_mutually_exclusive_group(required=True)
    of_role.add_argument("--replicas", type=int, metavar="N", help="how many are to be up")
    of_role.add_argument("--prefill", type=int, metavar="N", help="the same of those that compute prompts for others")
    of_role.add_argument("--decode", type=int, metavar="N", help="the same of those whose prompts these may compute")
    scale.set_defaults(run=_scale, parser=scale)
    for command in (change, show, scale):
        command.add_argument("--address", help="of its Ray, host:port or auto; default: RAY_ADDRESS, else see --port")
        command.add_argument("--port", type=int, default=8000, help="of a `shoal serve` on this machine; default 8000")


def _add_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="default 127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="default 8000")


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser("serve", help="serve an OpenAI-compatible API")
    _add_address(serve)
    serve.add_argument("--config", help="YAML file with the keys of ClusterConfig; flags win over it")
    serve.add_argument("--model", help="built-in name, model folder or .gguf file")
    serve.add_argument("--served-model-name", help="name that clients use")
    serve.add_argument("--dtype", choices=["auto", "bfloat16", "float32"])
    serve.add_argument("--max-model-len", type=int, help="longest prompt + output in tokens")
    serve.add_argument("--replicas", type=int, help="data-parallel replicas")
    serve.add_argument("--prefill", type=int, metavar="N", help="replicas that compute prompts for others")
    serve.add_argument("--decode", type=int, metavar="N", help="replicas whose prompts those may compute")
    serve.add_argument("--tensor-parallel-size", type=int, metavar="N", help="ranks of a replica, each with a part")
    serve.add_argument("--num-gpus-per-replica", type=int, metavar="N", help="as many ranks, with a GPU each")
    serve.add_argument("--routers", type=int, help="router processes")
    serve.add_argument("--api-key", action="append", help="bearer key that clients must send; may be repeated")
    serve.add_argument("--chat-template", help="Jinja template or its path, instead of the model's")
    serve.add_argument("--runner", choices=["torch", "fake"], help="fake: no weights, tokens from a cost model")
    serve.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any key of ClusterConfig, e.g. --set scheduler.max_num_seqs=32; may be repeated",
    )
    serve.add_argument("--print-config", action="store_true", help="print the resolved configuration and stop")
    serve.set_defaults(run=_serve, parser=serve)


def config_overrides(options: argparse.Namespace) -> dict[str, Any]:
    """Dotted keys that flags set, in the order: named flags, then --set."""
    overrides = {key: value for flag, key in _FLAGS.items() if (value := getattr(options, flag)) is not None}
    if options.api_key:
        overrides["http.api_keys"] = options.api_key
    return {**overrides, **_assignments(options.set, "--set ")}


def _assignments(items: Sequence[str], name: str = "") -> dict[str, Any]:
    """KEY=VALUE, the value as in YAML, each key once."""
    found: dict[str, Any] = {}
    for item in items:
        key, separator, text = item.partition("=")
        if not separator or not key:
            raise ConfigError(f"{name}{item!r}: expected KEY=VALUE")
        if key in found:
            raise ConfigError(f"{name}{item!r}: {key} is given twice; allowed: once")
        try:
            found[key] = yaml.load(text, PlainYaml)
        except yaml.YAMLError:
            raise ConfigError(f"{name}{item!r}: {text!r} is not a YAML value") from None
    return found


def _serve(options: argparse.Namespace) -> int:
    from cluster.config import load

    config = load(options.config, config_overrides(options))
    if options.print_config:
        print(_resolved_yaml(config), end="")
        return 0
    from cluster.serve import serve_until_stopped
    from cluster.tenant_file import check_file

    if not os.environ.get("RAY_ADDRESS"):  # else routers may run where this machine's files are not
        check_file(config)
    return serve_until_stopped(config, options.host, options.port)


def _resolved_yaml(config: Any) -> str:
    """The configuration with every `auto` filled for this machine, with one replica group on it."""
    from replica.config import resolve
    from replica.hardware import detect_hardware

    engine = resolve(config.engine_config(), detect_hardware(), config.most_replicas)
    resolved = config.model_copy(
        update={
            "served_model_name": config.served_name,
            "dtype": engine.model.dtype,
            "scheduler": engine.scheduler,
            "kv_cache": config.kv_cache.model_copy(update=engine.cache.model_dump()),
            "threads_per_replica": engine.parallel.num_threads,
            "tensor_parallel_size": config.num_ranks,
        }
    )
    return str(resolved.to_yaml())


def _status(options: argparse.Namespace) -> int:
    from cluster.status import fetch_status, format_status

    status = fetch_status(options.host, options.port, options.api_key)
    if options.json:
        import json

        print(json.dumps(status, indent=2))
    else:
        print(format_status(status))
    return 0


def _why(options: argparse.Namespace) -> int:
    from cluster.why import format_living, format_request, why

    told = why(options.host, options.port, options.request_id, options.api_key, limit=options.limit)
    if options.json:
        import json

        print(json.dumps(told, indent=2))
    else:
        print(format_living(told) if options.request_id is None else format_request(told))
    return 0


def _set(options: argparse.Namespace) -> int:
    import time

    from cluster import live_knobs
    from cluster.live_apply import attached, in_force, put_in_force

    values = _assignments(options.items)
    live_knobs.check_keys(values)  # before anything takes time
    try:
        with attached(options.address, options.port):
            found = in_force()
            wanted = live_knobs.changed(found.now, values)
            started = time.monotonic()
            confirmed = put_in_force(found, wanted, values)
            took_s = time.monotonic() - started
    except KeyboardInterrupt:
        print("shoal: interrupted; the change may be in force or not: `shoal get` shows it", file=sys.stderr)
        raise
    print("\n".join(live_knobs.told_changes(found.now, wanted, values)))
    print(confirmed.sentence(took_s), file=sys.stderr)
    for sentence in live_knobs.warnings(found.now, wanted):
        print(f"shoal: warning: {sentence}", file=sys.stderr)
    return 0


def _scale(options: argparse.Namespace) -> int:
    from cluster.config import load

    flag = next(name for name in ("replicas", "prefill", "decode") if getattr(options, name) is not None)
    key, wanted = _FLAGS[flag], getattr(options, flag)
    load(None, {"replicas.both": 1, key: wanted})  # refused here as it is at the start
    if wanted < 1:
        raise ConfigError(f"--{flag}: {wanted} would end the role; allowed: at least 1")
    role = Role(key.removeprefix("replicas."))
    from cluster.live_apply import attached, in_force
    from cluster.live_scale import scale

    is_local = not (options.address or os.environ.get("RAY_ADDRESS"))
    try:
        with attached(options.address, options.port):
            found = in_force()
            took_s = scale(found, role, wanted, is_local, lambda line: print(f"shoal: {line}", file=sys.stderr))
    except KeyboardInterrupt:
        print("shoal: interrupted; the change goes on, `shoal status` shows it", file=sys.stderr)
        raise
    before = found.now.replicas.counts[role]
    print(f"{flag}: already {wanted}" if before == wanted else f"{flag}: {before} -> {wanted}")
    print(f"{wanted} replica(s) up and no other after {took_s:.1f} s", file=sys.stderr)
    return 0


def _get(options: argparse.Namespace) -> int:
    from cluster import live_knobs
    from cluster.live_apply import attached, in_force

    known = live_knobs.all_keys()
    for key in options.keys:
        if not any(name == key or name.startswith(f"{key}.") for name in known) and not key.startswith(
            live_knobs.TENANT
        ):
            live_knobs.check_keys({key: None})
    with attached(options.address, options.port):
        found = in_force()
    rows = {
        key: value
        for key, value in live_knobs.flat_values(found.now)
        if not options.keys or any(key == wanted or key.startswith(f"{wanted}.") for wanted in options.keys)
    }
    rows.update({key: ["***"] * len(value) for key, value in rows.items() if key.endswith("keys")})
    if options.json:
        import json

        print(json.dumps({"number": f"{live_knobs.number_of(found.now):08x}", "values": rows}, indent=2))
        return 0
    resolved = {f"scheduler.{name}": value for name, value in found.resolved.items()}
    for key, value in rows.items():
        filled = f" ({resolved[key]})" if value is None and key in resolved else ""
        when = "live" if live_knobs.is_live(key) else "needs a restart"
        print(f"{key:<46} {live_knobs.shown(value) + filled:<24} {when}")
    print(f"configuration {live_knobs.number_of(found.now):08x}", file=sys.stderr)
    for sentence in found.refused:
        print(f"shoal: the last user_config is refused: {sentence}", file=sys.stderr)
    return 0


def _key(options: argparse.Namespace) -> int:
    """The key is shown once and kept nowhere."""
    import getpass
    import secrets

    from router.tenants import hashed

    if options.hash:
        # as an argument it would be in the shell's history and in the list of processes
        key = getpass.getpass("key: ") if sys.stdin.isatty() else sys.stdin.readline()
        if not (key := key.strip()):
            raise ConfigError("--hash: standard input holds no key")
        print(hashed(key))
        return 0
    key = f"sk-{secrets.token_urlsafe(32)}"
    print(f"key   {key}\nhash  {hashed(key)}")
    print("the client sends the key; the hash goes to the tenant's `keys`. It is not shown again.", file=sys.stderr)
    return 0


def _model(options: argparse.Namespace) -> int:
    from cluster import model_store

    print(model_store.resolve(options.name))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
