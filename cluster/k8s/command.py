"""RAY. `shoal k8s render` and `shoal k8s check`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from cluster.config import PlainYaml, load
from replica.errors import ConfigError


def add(commands: Any) -> None:
    """The command `k8s`, among those of `shoal`."""
    parser = commands.add_parser("k8s", help="manifests for Kubernetes: render them, check them")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    render = actions.add_parser("render", help="what the chart makes of a configuration")
    render.add_argument("--config", help="YAML file with the keys of ClusterConfig, as for `shoal serve`")
    render.add_argument(
        "--values", action="append", default=[], help="values of the chart, over --config; may be repeated"
    )
    render.add_argument(
        "--output",
        choices=["serve", "values", "manifests"],
        default="serve",
        help="serveConfigV2 (default), values for the chart, or all documents (runs helm)",
    )
    render.add_argument("--name", default="shoal", help="of the release, default shoal")
    render.add_argument("--chart", help="folder or archive of the chart; default: that of this checkout")
    render.add_argument("--helm", default="helm", help="the program, default helm")
    render.set_defaults(run=_render, parser=render)
    check = actions.add_parser("check", help="what is wrong with manifests, without a cluster")
    check.add_argument("files", nargs="+", metavar="FILE", help="YAML files; - for standard input")
    check.set_defaults(run=_check, parser=check)


def _render(options: argparse.Namespace) -> int:
    from cluster.k8s import helm
    from cluster.k8s.serve_config import serve_config
    from cluster.k8s.values import load_values, merged, values_of

    values: dict[str, Any] = values_of(load(options.config)) if options.config else {}
    for path in options.values:
        values = merged(values, _mapping(path))
    if options.output == "values":
        print(yaml.safe_dump(values, sort_keys=False), end="")
    elif options.output == "manifests":
        print(helm.template(values, release=options.name, chart=options.chart or helm.CHART, helm=options.helm), end="")
    else:
        given = merged({"image": {"tag": "any"}}, values)  # not part of what is asked for
        print(yaml.safe_dump(serve_config(load_values(given)), sort_keys=False), end="")
    return 0


def _mapping(path: str) -> Mapping[str, Any]:
    try:
        found = yaml.load(Path(path).read_text(encoding="utf-8"), PlainYaml)
    except OSError as error:
        raise ConfigError(f"--values {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--values {path}: not YAML: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"--values {path}: expected a mapping at the top, found {type(found).__name__}")
    return found


def _check(options: argparse.Namespace) -> int:
    from cluster.k8s.check import check_text

    documents = [document for path in options.files for document in check_text(_text(path), path)]
    for document in documents:
        verdict = "ok" if document.checked else "not checked (a kind of Kubernetes itself)"
        if document.findings:
            verdict = f"{len(document.findings)} wrong"
        print(f"{document.file}: {document.title}: {verdict}")
        for finding in document.findings:
            print(f"  {finding}")
    if not documents:
        raise ConfigError(f"{', '.join(options.files)}: no document in it")
    return 1 if any(document.findings for document in documents) else 0


def _text(path: str) -> str:
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
