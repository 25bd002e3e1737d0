"""The plain manifests, the kustomize folders and the values schema are what the chart gives."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

import pytest

from cluster.k8s.check import check_text
from tests.k8s import generate
from tests.k8s.conftest import documents

KEY = generate._key


@functools.cache
def made() -> dict[Path, str]:
    return generate.files()


def test_nothing_is_out_of_date() -> None:
    """If it is: python -m tests.k8s.generate."""
    stale = [str(path) for path, text in made().items() if not path.is_file() or path.read_text() != text]
    assert stale == []
    folders = ("rayservice", "kustomize")
    there = {path for folder in folders for path in (generate.K8S / folder).rglob("*") if path.is_file()}
    assert there <= made().keys(), "a file that nothing makes"


@pytest.mark.parametrize("name", [*generate.OVERLAYS, "base"])
def test_an_overlay_is_the_chart(name: str, kubectl: Path) -> None:
    folder = generate.K8S / "kustomize" / ("base" if name == "base" else f"overlays/{name}")
    done = subprocess.run([str(kubectl), "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    source = generate.OVERLAYS.get(name, generate.BASE)
    assert sorted(documents(done.stdout), key=KEY) == sorted(documents(generate.render(source)), key=KEY)


@pytest.mark.parametrize("name", generate.PLAIN)
def test_a_plain_manifest_passes_the_check(name: str) -> None:
    (document,) = check_text((generate.K8S / "rayservice" / name).read_text(), name)
    assert document.checked
    assert document.findings == []
