"""A stand-in for a Kubernetes API server, on loopback and in memory: enough of it for the real helm and kubectl.

It has discovery, reading and writing of objects, dry runs, and the strict validation that decides what it takes. It has
no controllers: nothing happens because of an object. A server-side apply is taken as a replacement, since there is one
manager.
"""

from __future__ import annotations

import base64
import copy
import itertools
import json
import re
import threading
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

Object = dict[str, Any]
#: object, what was there before -> sentences
Validate = Callable[[Object, Object | None], list[str]]

RESOURCES: dict[str, dict[str, str]] = {
    "v1": {
        "namespaces": "Namespace",
        "secrets": "Secret",
        "configmaps": "ConfigMap",
        "services": "Service",
        "persistentvolumeclaims": "PersistentVolumeClaim",
        "pods": "Pod",
    },
    "apps/v1": {"statefulsets": "StatefulSet", "deployments": "Deployment"},
    "batch/v1": {"jobs": "Job"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
    "ray.io/v1": {"rayservices": "RayService"},
    "monitoring.coreos.com/v1": {"podmonitors": "PodMonitor", "prometheusrules": "PrometheusRule"},
}
#: what the server itself writes into metadata
_SERVER_SIDE = ("uid", "resourceVersion", "creationTimestamp", "generation", "managedFields", "namespace")
_VERBS = ["get", "list", "create", "update", "patch", "delete"]


class Refused(Exception):
    """An answer other than 2xx."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
        self.status |= {"reason": reason, "message": message, "code": code}  # type: ignore[dict-item]
        self.code = code


class ApiServer:
    """`objects` by (api version, plural, namespace, name)."""

    def __init__(self, validate: Validate, port: int = 0) -> None:
        self.objects: dict[tuple[str, str, str, str], Object] = {}
        self._validate = validate
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                try:
                    with server._lock:
                        code, answer = server.answer(
                            self.command, self.path, body, self.headers.get("Content-Type", "")
                        )
                except Refused as refused:
                    code, answer = refused.code, refused.status
                text = json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> ApiServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def of_kind(self, kind: str) -> dict[str, Object]:
        """All objects of a kind, by name."""
        return {name: one for (_, _, _, name), one in self.objects.items() if one["kind"] == kind}

    # ---- one request ----------------------------------------------------------------------------------------------

    def answer(self, method: str, target: str, body: bytes, content_type: str) -> tuple[int, Any]:
        url = urllib.parse.urlsplit(target)
        query = dict(urllib.parse.parse_qsl(url.query))
        path = url.path.rstrip("/")
        if (found := self._discovery(path)) is not None:
            return 200, found
        match = re.fullmatch(
            r"/(?:api/(v1)|apis/([^/]+/[^/]+))(?:/namespaces/([^/]+))?(?:/([^/]+))?(?:/([^/]+))?", path
        )
        if match is None:
            raise Refused(404, "NotFound", f"no such path {path}")
        version, namespace, plural, name = match[1] or match[2], match[3], match[4], match[5]
        if namespace and not plural:  # the namespace itself: every one is there
            return 200, {"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": namespace}}
        kind = RESOURCES.get(version, {}).get(plural)
        if kind is None:
            raise Refused(404, "NotFound", f"no resource {plural} in {version}")
        key = (version, plural, namespace or "", name or "")
        if method == "GET":
            return 200, self._get(key) if name else self._list(key, kind, query)
        if method == "DELETE":
            self._get(key)
            del self.objects[key]
            return 200, {"kind": "Status", "apiVersion": "v1", "status": "Success"}
        return self._write(method, key, kind, decoded(body), content_type, "dryRun" in query)

    def _get(self, key: tuple[str, str, str, str]) -> Object:
        if key not in self.objects:
            raise Refused(404, "NotFound", f'{key[1]} "{key[3]}" not found')
        return self.objects[key]

    def _list(self, key: tuple[str, str, str, str], kind: str, query: dict[str, str]) -> Object:
        terms = [
            term.replace("==", "=").split("=") for term in query.get("labelSelector", "").split(",") if "=" in term
        ]
        items = [
            one
            for (version, plural, namespace, _), one in self.objects.items()
            if (version, plural) == key[:2]
            and key[2] in ("", namespace)
            and all((one["metadata"].get("labels") or {}).get(name) == value for name, value in terms)
        ]
        return {"kind": f"{kind}List", "apiVersion": key[0], "metadata": {"resourceVersion": "1"}, "items": items}

    def _write(
        self, method: str, key: tuple[str, str, str, str], kind: str, body: Object, content_type: str, dry: bool
    ) -> tuple[int, Object]:
        name = key[3] or body["metadata"]["name"]
        key = (*key[:3], name)
        old = self.objects.get(key)
        if method == "POST" and old is not None:
            raise Refused(409, "AlreadyExists", f'{key[1]} "{name}" already exists')
        new = body
        if method == "PATCH" and "apply" not in content_type:
            new = merged(copy.deepcopy(self._get(key)), body)
        new.setdefault("apiVersion", key[0])
        new.setdefault("kind", kind)
        clean = copy.deepcopy(new)
        for field in _SERVER_SIDE:
            clean["metadata"].pop(field, None)
        if wrong := self._validate(clean, old):
            raise Refused(422, "Invalid", f'{kind} "{name}" is invalid: {"; ".join(wrong)}')
        if old is not None and clean == {
            **old,
            "metadata": {k: v for k, v in old["metadata"].items() if k not in _SERVER_SIDE},
        }:
            return 200, old
        number = next(self._numbers)
        before = old["metadata"] if old else {"uid": f"uid-{number}", "creationTimestamp": "2026-01-01T00:00:00Z"}
        new["metadata"] |= {"uid": before["uid"], "creationTimestamp": before["creationTimestamp"]}
        new["metadata"] |= {"resourceVersion": str(number)} | ({"namespace": key[2]} if key[2] else {})
        if not dry:
            self.objects[key] = new
        return (200 if old else 201), new

    # ---- what is there --------------------------------------------------------------------------------------------

    def _discovery(self, path: str) -> Any:
        if path == "/version":
            return {"major": "1", "minor": "37", "gitVersion": "v1.37.1"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            return {
                "kind": "APIGroupList",
                "apiVersion": "v1",
                "groups": [_group(one) for one in RESOURCES if "/" in one],
            }
        places = {f"{'apis' if '/' in one else 'api'}/{one}": one for one in RESOURCES}
        if path == "/openapi/v3":
            return {"paths": {place: {"serverRelativeURL": f"/openapi/v3/{place}"} for place in places}}
        if path.startswith("/openapi/v3/") and (version := places.get(path.removeprefix("/openapi/v3/"))):
            return _openapi(version)
        if version := places.get(path.removeprefix("/")):
            resources = [
                {
                    "name": plural,
                    "singularName": kind.lower(),
                    "namespaced": kind != "Namespace",
                    "kind": kind,
                    "verbs": _VERBS,
                }
                for plural, kind in RESOURCES[version].items()
            ]
            return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}
        return None


def _group(version: str) -> Object:
    served = {"groupVersion": version, "version": version.split("/")[1]}
    return {"name": version.split("/")[0], "versions": [served], "preferredVersion": served}


def _openapi(version: str) -> Object:
    """That the server validates fields, which kubectl asks before it sends anything."""
    group, _, number = version.rpartition("/")
    fields = [{"name": name, "in": "query", "schema": {"type": "string"}} for name in ("dryRun", "fieldValidation")]
    paths = {
        f"/{'apis' if group else 'api'}/{version}/namespaces/{{namespace}}/{plural}/{{name}}": {
            "patch": {
                "parameters": fields,
                "x-kubernetes-action": "patch",
                "x-kubernetes-group-version-kind": {"group": group, "version": number, "kind": kind},
                "responses": {"200": {"description": "OK"}},
            }
        }
        for plural, kind in RESOURCES[version].items()
    }
    return {
        "openapi": "3.0.0",
        "info": {"title": "stand-in", "version": "1"},
        "components": {"schemas": {}},
        "paths": paths,
    }


def merged(old: Object, patch: Object) -> Object:
    """A JSON merge patch. Of a strategic one, what it says of mappings; lists come whole."""
    for key, value in patch.items():
        if key.startswith("$"):
            continue
        if value is None:
            old.pop(key, None)
        elif isinstance(value, dict) and isinstance(old.get(key), dict):
            merged(old[key], value)
        else:
            old[key] = value
    return old


# ---- bodies -------------------------------------------------------------------------------------------------------


def decoded(body: bytes) -> Object:
    """JSON or YAML; and the protobuf in which helm writes Secrets."""
    if not body.startswith(b"k8s\0"):
        found = yaml.safe_load(body) if body else {}
        assert isinstance(found, dict)
        return found
    envelope = _fields(body[4:])
    kind, content = _fields(envelope[1][0]), _fields(envelope[2][0])
    metadata = _fields(content[1][0])
    result: Object = {"apiVersion": kind[1][0].decode(), "kind": kind[2][0].decode(), "metadata": {}}
    result["metadata"]["name"] = metadata[1][0].decode()
    if 11 in metadata:
        result["metadata"]["labels"] = {name: value.decode() for name, value in _entries(metadata[11])}
    assert result["kind"] == "Secret", result["kind"]
    result["data"] = {name: base64.b64encode(value).decode() for name, value in _entries(content.get(2, []))}
    result["type"] = content[3][0].decode()
    return result


def _entries(encoded: list[bytes]) -> list[tuple[str, bytes]]:
    return [(fields[1][0].decode(), fields.get(2, [b""])[0]) for fields in map(_fields, encoded)]


def _fields(message: bytes) -> dict[int, list[bytes]]:
    """Fields of a protobuf message whose wire type is bytes; numbers are passed over."""
    found: dict[int, list[bytes]] = {}
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        tag = number()
        if tag & 7 == 0:
            number()
            continue
        assert tag & 7 == 2, f"wire type {tag & 7}"
        length = number()
        found.setdefault(tag >> 3, []).append(message[at : at + length])
        at += length
    return found
