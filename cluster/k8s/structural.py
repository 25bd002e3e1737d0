"""PURE. A custom resource against the structural schema of its CRD, as an API server with strict field validation takes
it: unknown fields are refused. (`schemas/` holds the schemas.)

Of CEL, two forms are evaluated: `self == oldSelf` and `self in [...]`. KubeRay 1.7 has no other; an interpreter of CEL
would bring four packages for five rules.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from cluster.k8s.finding import Finding
from cluster.k8s.quantity import quantity

Schema = Mapping[str, Any]
#: fields that every object has, beside those of its schema
_OF_A_PERSON = ("name", "namespace", "labels", "annotations", "generateName", "finalizers", "ownerReferences")
_OF_THE_SERVER = ("creationTimestamp", "uid", "resourceVersion", "generation", "managedFields")
_METADATA = frozenset(_OF_A_PERSON + _OF_THE_SERVER)
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}
_WORDS = {"object": "a mapping", "array": "a list", "string": "text", "integer": "a whole number"}
_WORDS |= {"number": "a number", "boolean": "true or false"}
_INTEGERS = {"int32": 31, "int64": 63}
_SUBDOMAIN = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")
_NOTHING = object()


def check_object(document: Mapping[str, Any], schema: Schema, old: Mapping[str, Any] | None = None) -> list[Finding]:
    """Everything an API server would refuse. `old`: what is there already, for rules of what may not change."""
    found = list(_metadata(document.get("metadata")))
    outside = ("apiVersion", "kind", "metadata")
    body = {key: value for key, value in document.items() if key not in outside}
    before = {key: value for key, value in (old or {}).items() if key not in outside}
    found += _walk({**schema, "required": []}, body, "", before if old is not None else _NOTHING)
    found += [
        Finding(key, "is missing") for key in schema.get("required", []) if key not in body and key not in outside
    ]
    return found


def _metadata(metadata: Any) -> Iterator[Finding]:
    if not isinstance(metadata, dict):
        yield Finding("metadata", f"must be a mapping (got {metadata!r})")
        return
    name = metadata.get("name", "")
    if not isinstance(name, str) or not _SUBDOMAIN.match(name) or len(name) > 253:
        yield Finding("metadata.name", f"{name!r} is no name; allowed: a-z, 0-9, - and ., at most 253")
    for key in metadata.keys() - _METADATA:
        yield Finding(f"metadata.{key}", _unknown(key, _METADATA))
    for part in ("labels", "annotations"):
        for key, value in (metadata.get(part) or {}).items():
            if not isinstance(value, str):
                yield Finding(f"metadata.{part}.{key}", f"must be text (got {value!r}); put it in quotes")


def _unknown(key: str, known: Any) -> str:
    close = get_close_matches(key, list(known), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return (
        f"unknown field{hint}" if hint or not known else f"unknown field; known here: {', '.join(sorted(known)[:12])}"
    )


def _walk(schema: Schema, value: Any, path: str, old: Any) -> Iterator[Finding]:
    if value is None:
        if not schema.get("nullable"):
            yield Finding(path, "is null, which is not allowed; leave it out")
        return
    if schema.get("x-kubernetes-int-or-string"):
        yield from _int_or_string(schema, value, path)
    else:
        kind = schema.get("type")
        if kind and (not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
            yield Finding(path, f"must be {_WORDS[kind]} (got {value!r:.60})")
            return
        if isinstance(value, dict):
            yield from _mapping(schema, value, path, old)
        elif isinstance(value, list):
            yield from _list(schema, value, path)
        else:
            yield from _scalar(schema, value, path)
    yield from _rules(schema, value, path, old)


def _int_or_string(schema: Schema, value: Any, path: str) -> Iterator[Finding]:
    if isinstance(value, bool) or not isinstance(value, int | str):
        yield Finding(path, f"must be a whole number or text (got {value!r:.60})")
    elif "pattern" in schema:
        try:
            quantity(value)
        except ValueError as error:
            yield Finding(path, str(error))


def _mapping(schema: Schema, value: dict[str, Any], path: str, old: Any) -> Iterator[Finding]:
    known, more = schema.get("properties", {}), schema.get("additionalProperties")
    anything = schema.get("x-kubernetes-preserve-unknown-fields") or schema.get("x-kubernetes-embedded-resource")
    for key in schema.get("required", []):
        if key not in value and "default" not in known.get(key, {}):
            yield Finding(_below(path, key), "is missing")
    for key, inner in value.items():
        before = old.get(key, _NOTHING) if isinstance(old, dict) else _NOTHING
        if key in known:
            yield from _walk(known[key], inner, _below(path, key), before)
        elif isinstance(more, dict):
            yield from _walk(more, inner, _below(path, key), before)
        elif not (anything or more):
            yield Finding(_below(path, key), _unknown(key, known))


def _below(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _list(schema: Schema, value: list[Any], path: str) -> Iterator[Finding]:
    least, most = schema.get("minItems", 0), schema.get("maxItems", len(value))
    if not least <= len(value) <= most:
        yield Finding(path, f"has {len(value)} items; allowed: {least} to {most}")
    for index, item in enumerate(value):
        yield from _walk(schema.get("items", {}), item, f"{path}[{index}]", _NOTHING)
    keys = schema.get("x-kubernetes-list-map-keys", [])
    kind = schema.get("x-kubernetes-list-type")
    if kind == "map":
        names = [str({key: item.get(key) for key in keys}) for item in value if isinstance(item, dict)]
    else:
        names = [json.dumps(item, sort_keys=True) for item in value] if kind == "set" else []
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Finding(path, f"{name} is given twice")


def _scalar(schema: Schema, value: Any, path: str) -> Iterator[Finding]:
    if isinstance(value, str):
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield Finding(path, f"{value!r} does not match {schema['pattern']}")
        if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
            yield Finding(path, f"{value!r:.60} has {len(value)} characters")
    elif not isinstance(value, bool):
        limit = 2 ** _INTEGERS.get(schema.get("format", ""), 63)
        low, high = schema.get("minimum", -limit), schema.get("maximum", limit - 1)
        if not low <= value <= high:
            yield Finding(path, f"{value} is out of range; allowed: {low} to {high}")
    if "enum" in schema and value not in schema["enum"]:
        yield Finding(path, f"{value!r} is not known; allowed: {', '.join(map(str, schema['enum']))}")


def _rules(schema: Schema, value: Any, path: str, old: Any) -> Iterator[Finding]:
    for rule in schema.get("x-kubernetes-validations", []):
        if not _holds(rule["rule"], value, old):
            yield Finding(path, f"{value!r}: {rule.get('message', rule['rule'])}")


def _holds(rule: str, value: Any, old: Any) -> bool:
    if rule == "self == oldSelf":
        return old is _NOTHING or bool(value == old)
    if rule.startswith("self in ["):
        return value in ast.literal_eval(rule.removeprefix("self in "))
    raise NotImplementedError(f"no evaluation of the CEL rule {rule!r}")
