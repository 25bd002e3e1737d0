"""RAY. `serveConfigV2` against Ray's own parser, and against what that parser passes over in silence: unknown keys, and
all of `autoscaling_config`.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeDeploySchema

from cluster.config import PlainYaml
from cluster.k8s.finding import Finding

PATH = "spec.serveConfigV2"


def parse(text: str) -> tuple[dict[str, Any], list[Finding]]:
    """The mapping that `serveConfigV2` holds, and what is wrong with it; empty if it cannot be read."""
    try:
        config = yaml.load(text, PlainYaml)
    except yaml.YAMLError as error:
        return {}, [Finding(PATH, f"is not YAML: {error}")]
    if not isinstance(config, dict):
        return {}, [Finding(PATH, f"holds {type(config).__name__}; needed: a mapping with `applications`")]
    found = [Finding(f"{PATH}: {path}", text) for path, text in _unknown_keys(ServeDeploySchema, config, "")]
    try:
        ServeDeploySchema.model_validate(config)
    except (ValidationError, ValueError) as error:
        found += list(_sentences(error, PATH))
    found += _autoscaling(config)
    if not config.get("applications"):
        found.append(Finding(f"{PATH}: applications", "is empty; needed: the application of cluster.app:build"))
    return config, found


def _sentences(error: ValueError, path: str) -> Iterator[Finding]:
    if not isinstance(error, ValidationError):
        yield Finding(path, str(error))
        return
    for item in error.errors():
        place = ".".join(str(part) for part in item["loc"])
        got = "" if isinstance(item["input"], dict | list) else f" (got {item['input']!r:.60})"
        yield Finding(f"{path}: {place}", str(item["msg"]).removeprefix("Value error, ") + got)


def _autoscaling(config: Mapping[str, Any]) -> list[Finding]:
    found: list[Finding] = []
    for place, value in _found(config, "autoscaling_config", ""):
        if not isinstance(value, Mapping):
            continue
        path = f"{PATH}: {place}"
        found += [Finding(f"{PATH}: {where}", text) for where, text in _unknown_keys(AutoscalingConfig, value, place)]
        try:
            AutoscalingConfig.model_validate(dict(value))
        except (ValidationError, ValueError) as error:
            found += list(_sentences(error, path))
    return found


def _found(tree: Any, key: str, path: str) -> Iterator[tuple[str, Any]]:
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else ()
    for name, value in items:
        below = f"{path}[{name}]" if isinstance(name, int) else f"{path}.{name}".lstrip(".")
        if name == key:
            yield below, value
        yield from _found(value, key, below)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """The pydantic models inside an annotation such as `list[X] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in _models_in(part)]


def _unknown_keys(model: type[BaseModel], data: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(data, list):
        for index, item in enumerate(data):
            yield from _unknown_keys(model, item, f"{path}[{index}]")
        return
    if not isinstance(data, Mapping):
        return
    known = {field.alias or name for name, field in model.model_fields.items()} | set(model.model_fields)
    for key, value in data.items():
        place = f"{path}.{key}".lstrip(".")
        if key not in known:
            close = get_close_matches(str(key), list(known), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; known here: {', '.join(sorted(known))}"
            yield place, f"unknown key, which Serve would pass over in silence{hint}"
            continue
        field = model.model_fields.get(key)
        for inner in _models_in(field.annotation)[:1] if field else []:
            if key != "autoscaling_config":  # has a check of its own
                yield from _unknown_keys(inner, value, place)
