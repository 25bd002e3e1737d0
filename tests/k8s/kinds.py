"""Objects of Kubernetes itself against its own schemas, unknown fields refused."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jsonschema
from referencing import Registry, Resource

from cluster.k8s.check import schema_of
from cluster.k8s.structural import check_object


@functools.cache
def _definitions(folder: Path) -> Registry:
    return Resource.from_contents(json.loads((folder / "_definitions.json").read_text())) @ Registry()


@functools.cache
def _validator(folder: Path, kind: str, api_version: str) -> jsonschema.Draft202012Validator:
    group, _, version = api_version.rpartition("/")
    name = f"{kind.lower()}-{group.split('.')[0] + '-' if group else ''}{version}.json"
    schema = json.loads((folder / name).read_text())
    return jsonschema.Draft202012Validator(schema, registry=Resource.from_contents(schema) @ _definitions(folder))


def errors(document: dict[str, Any], schemas: Path, old: dict[str, Any] | None = None) -> list[str]:
    """What an API server of the version of `schemas` would refuse. Raises FileNotFoundError for a kind nobody knows."""
    custom = schema_of(document["apiVersion"], document["kind"])
    if custom is not None:
        return [str(finding) for finding in check_object(document, custom, old)]
    found = _validator(schemas, document["kind"], document["apiVersion"]).iter_errors(document)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message:.200}" for error in found]
