"""RAY. `shoal k8s check`: what is wrong with manifests, without a cluster."""

from __future__ import annotations

import gzip
import importlib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from cluster.config import ClusterConfig, PlainYaml
from cluster.k8s import capacity, operator_rules, pod_memory, roles, structural
from cluster.k8s.finding import Finding
from cluster.k8s.serve_check import PATH, parse
from cluster.live_knobs import lay_over
from cluster.role_config import DEPLOYMENTS
from replica.errors import ConfigError

_SCHEMAS = Path(__file__).parent / "schemas"
#: kinds of Kubernetes itself are the API server's business; these groups are unknown to it until somebody installs them
_OF_KUBERNETES = ("", "apps", "batch", "policy", "autoscaling", "rbac.authorization.k8s.io", "networking.k8s.io")


class Document:
    """One document of a file: what it is, and what is wrong with it. `checked` is False for what nobody here knows."""

    def __init__(self, file: str, content: Any) -> None:
        self.file = file
        self.checked = True
        content = content if isinstance(content, dict) else {"kind": f"(not an object: {content!r:.40})"}
        metadata = content.get("metadata")
        name = metadata.get("name") if isinstance(metadata, dict) else None
        self.title = f"{content.get('kind', '(no kind)')}/{name or '(no name)'}"
        self.findings = self._check(content)

    def _check(self, content: dict[str, Any]) -> list[Finding]:
        version, kind = content.get("apiVersion"), content.get("kind")
        if not isinstance(version, str) or not isinstance(kind, str):
            return [Finding("", "needs apiVersion and kind")]
        schema = schema_of(version, kind)
        if schema is None:
            self.checked = False
            group = version.rpartition("/")[0]
            if group == "ray.io":
                return [Finding("apiVersion", f"{version} {kind}: known here is ray.io/v1 RayService")]
            return [] if group in _OF_KUBERNETES else [Finding("apiVersion", f"{version} {kind} is not known here")]
        found = structural.check_object(content, schema)
        if kind == "RayService" and not found:
            found = list(check_service(content))
        return found


@cache
def schema_of(version: str, kind: str) -> Mapping[str, Any] | None:
    """Of a custom resource; None if it is not here."""
    group, _, name = version.rpartition("/")
    path = _SCHEMAS / f"{group}_{name}_{kind}.json.gz"
    if not path.is_file():
        return None
    read: Mapping[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return read


def check_service(service: Mapping[str, Any]) -> Iterator[Finding]:
    """A RayService that its schema accepts."""
    yield from operator_rules.check(service)
    text = service["spec"].get("serveConfigV2")
    if not text:
        yield Finding(PATH, "is missing: nothing would be served")
        return
    config, found = parse(text)
    yield from found
    if found:
        return
    for index, application in enumerate(config["applications"]):
        path = f"{PATH}: applications[{index}]"
        yield from _import_path(application.get("import_path", ""), path)
        if application.get("import_path") != "cluster.app:build":
            continue  # the arguments of others are not ours to judge
        counts, read, sentences = roles.read(application.get("args") or {})
        yield from (Finding(f"{path}.args", sentence) for sentence in sentences)
        if read is not None:
            yield from _user_configs(application, read, path)
            yield from _drain_chain(service, read)
            yield from capacity.check(service, read, counts)
            yield from pod_memory.check(service, read, counts)


def _import_path(import_path: str, path: str) -> Iterator[Finding]:
    module, _, name = import_path.partition(":")
    try:
        found = callable(getattr(importlib.import_module(module), name, None))
    except (ImportError, ValueError):
        found = False
    if not found:
        yield Finding(f"{path}.import_path", f"{import_path!r} names no function here; Shoal's is cluster.app:build")


def _user_configs(application: Mapping[str, Any], config: ClusterConfig, path: str) -> Iterator[Finding]:
    told = {one["name"]: one.get("user_config") or {} for one in application.get("deployments") or []}
    names = [*(DEPLOYMENTS[role] for role in config.replicas.counts), "Router"]
    for name in told.keys() - set(names):
        yield Finding(f"{path}.deployments", f"{name!r} is no deployment here; allowed: {', '.join(names)}")
    if told and any(told.get(name) != told.get("Router") for name in names):
        yield Finding(f"{path}.deployments", f"user_config of {' and '.join(names)} need to be the same")
    try:
        lay_over(config.model_dump(), told.get("Router", {}))
    except ConfigError as error:
        yield from (Finding(f"{path}.deployments: user_config", line) for line in str(error).splitlines())


def _drain_chain(service: Mapping[str, Any], config: ClusterConfig) -> Iterator[Finding]:
    """Ray must wait for what Serve waits for, and an upgrade for both. (The pod's grace period: `operator_rules`.)"""
    serve_s = max(config.drain_s + 10, config.longest_stream_s)
    for path, name, group in operator_rules.groups(service):
        ray_s = operator_rules.drain_s(operator_rules.ray_container(group))
        if name != "head" and ray_s <= serve_s:
            text = (
                f"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S is {ray_s:g} and the work of a node may take {serve_s:g} s "
                f"(drain_s {config.drain_s:g} + 10, longest_stream_s {config.longest_stream_s:g}): needs more"
            )
            yield Finding(f"{path}.template.spec.containers[0].env", text)
    delay_s = service["spec"].get("rayClusterDeletionDelaySeconds", 60)
    if delay_s < serve_s:
        text = f"{delay_s:g} s: an upgrade would cut what may take {serve_s:g} s; needs at least that"
        yield Finding("spec.rayClusterDeletionDelaySeconds", text)


def check_text(text: str, file: str) -> list[Document]:
    """All documents of one file."""
    try:
        contents = [content for content in yaml.load_all(text, _Manifest) if content is not None]
    except yaml.YAMLError as error:
        broken = Document(file, {"kind": "File"})
        broken.findings = [Finding("", f"is not YAML: {error}")]
        return [broken]
    return [Document(file, content) for content in contents]


class _Manifest(PlainYaml):
    """YAML where a key is given once; timestamps stay text, as they do for Kubernetes."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in found if not tag.endswith(":timestamp")]
        for first, found in PlainYaml.yaml_implicit_resolvers.items()
    }
