"""What is made of the chart for people who do not use Helm, and the schema of its values.
`python -m tests.k8s.generate` writes it; a test compares.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from cluster.k8s import dashboards, values
from tests.k8s import tools
from tests.k8s.conftest import CHART, documents

K8S = CHART.parents[1]
MADE = "# Made of the chart by `python -m tests.k8s.generate`: change the chart or its values, not this file.\n"
#: file -> values of the chart (in `ci`), what they are laid over with, what must be there already
PLAIN: dict[str, tuple[str, dict[str, Any], str]] = {
    "single-cpu.yaml": ("dev-cpu", {}, "Nothing else is needed. The loss of the head restarts everything."),
    "tp2.yaml": (
        "n-replicas-tp2",
        {"headState": {"address": "redis:6379"}, "cache": {"size": "", "existingClaim": "models"}},
        "Needed: Redis at redis:6379, its password in the Secret shoal-redis, a claim `models` for all pods.",
    ),
    "pd.yaml": (
        "pd-1p2d",
        {"headState": {"address": "redis:6379"}, "cache": {"size": "", "existingClaim": "models"}},
        "Needed: as for tp2.yaml.",
    ),
}
BASE = "single"
OVERLAYS = {"dev-cpu": "dev-cpu", "gpu": "n-replicas-tp2", "pd": "pd-1p2d"}
_HELMS_OWN = re.compile(r"^ +(app\.kubernetes\.io/managed-by|helm\.sh/chart): .*\n", re.MULTILINE)


def render(name: str, over: dict[str, Any] | None = None) -> str:
    """The chart with a file of `ci`, without what only Helm has use for."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(over or {}, file)
        file.flush()
        command = [str(tools.fetched("helm4") / "helm"), "template", "shoal", str(CHART)]
        command += ["--values", str(CHART / "ci" / f"{name}.yaml"), "--values", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return _HELMS_OWN.sub("", done.stdout)


def files() -> dict[Path, str]:
    """Path -> content of everything that is made."""
    made = _schema()
    for name, (source, over, needed) in PLAIN.items():
        text = render(source, over).partition("# Source: shoal/templates/rayservice.yaml\n")[2].partition("\n---")[0]
        made[K8S / "rayservice" / name] = f"{MADE}# {needed}\n{text.rstrip()}\n"
    return made | _kustomize()


def _schema() -> dict[Path, str]:
    """What helm needs before it renders anything."""
    return {
        CHART / "values.schema.json": json.dumps(values.schema(), indent=1) + "\n",
        CHART / "dashboards" / "shoal.json": dashboards.text(),
    }


def _key(document: dict[str, Any]) -> tuple[str, str]:
    return document["kind"], document["metadata"]["name"]


def _kustomize() -> dict[Path, str]:
    """The base, and of each overlay what differs from it: patches, and what only one of them has."""
    folder = K8S / "kustomize"
    base = {_key(one): one for one in documents(render(BASE))}
    made = {
        folder / "base" / "shoal.yaml": MADE + _dump(list(base.values())),
        folder / "base" / "kustomization.yaml": MADE + _dump([_kustomization(resources=["shoal.yaml"])]),
    }
    for name, source in OVERLAYS.items():
        wanted = {_key(one): one for one in documents(render(source))}
        patches = [
            _with_key(_difference(base[key], one), key, one)
            for key, one in wanted.items()
            if key in base and base[key] != one
        ]
        patches += [_with_key({"$patch": "delete"}, key, one) for key, one in base.items() if key not in wanted]
        more = [one for key, one in wanted.items() if key not in base]
        place = folder / "overlays" / name
        if more:
            made[place / "more.yaml"] = MADE + _dump(more)
        made[place / "patches.yaml"] = MADE + _dump(patches)
        resources = ["../../base", *(["more.yaml"] if more else [])]
        kustomization = _kustomization(resources=resources, patches=[{"path": "patches.yaml"}])
        made[place / "kustomization.yaml"] = MADE + _dump([kustomization])
    return made


def _kustomization(**content: Any) -> dict[str, Any]:
    return {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", **content}


def _with_key(patch: dict[str, Any], key: tuple[str, str], one: dict[str, Any]) -> dict[str, Any]:
    metadata = patch.get("metadata", {}) | {"name": key[1]}
    return {"apiVersion": one["apiVersion"], "kind": key[0], **patch, "metadata": metadata}


def _difference(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """As a JSON merge patch: lists whole, null for what goes."""
    patch: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            if inner := _difference(before, value):
                patch[key] = inner
        elif before != value:
            patch[key] = value
    return patch


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _dump(content: list[dict[str, Any]]) -> str:
    return str(yaml.dump_all(content, Dumper=_Dumper, sort_keys=False, width=120))


def _rendered() -> Iterator[tuple[Path, str]]:
    yield from files().items()


def main() -> None:
    # the schema first: helm refuses new values by the old one
    for path, text in itertools.chain(_schema().items(), _rendered()):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(path.relative_to(K8S.parent))


if __name__ == "__main__":
    main()
