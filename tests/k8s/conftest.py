"""The tools, and what is rendered with them once for all tests."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s import tools

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "k8s" / "chart" / "shoal"
CI = sorted((CHART / "ci").glob("*.yaml"))
HELMS = ("helm3", "helm4")
#: what of other groups a cluster may have
MONITORING = "monitoring.coreos.com/v1"

#: the one in C, where it is: a third of this tier's time was reading YAML
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@pytest.fixture(scope="session")
def kubernetes_schemas() -> Path:
    """Folders of strict schemas, one a version."""
    return tools.fetched("kubernetes-validate-1.37.0")


@pytest.fixture(scope="session")
def helm4() -> Path:
    return tools.fetched("helm4") / "helm"


@pytest.fixture(scope="session")
def kubectl() -> Path:
    return tools.fetched("helm4") / "kubectl"


@functools.cache
def rendered(helm: str, values: Path, *api_versions: str, name: str = "shoal") -> str:
    """All that the chart makes of a file of values. Raises CalledProcessError with what helm says."""
    command = [str(tools.fetched(helm) / "helm"), "template", name, str(CHART), "--values", str(values)]
    for version in api_versions:
        command += ["--api-versions", version]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"HOME": "/nonexistent"})
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return done.stdout


def documents(text: str) -> list[dict[str, Any]]:
    return [one for one in yaml.load_all(text, _LOADER) if one]


def service_of(text: str) -> dict[str, Any]:
    return next(one for one in documents(text) if one["kind"] == "RayService")


def serve_config_of(text: str) -> dict[str, Any]:
    config = yaml.safe_load(service_of(text)["spec"]["serveConfigV2"])
    assert isinstance(config, dict)
    return config


@pytest.fixture
def chart(tmp_path: Path) -> Path:
    """A copy of the chart, for tools that write beside it."""
    shutil.copytree(CHART, tmp_path / "shoal")
    return tmp_path / "shoal"
