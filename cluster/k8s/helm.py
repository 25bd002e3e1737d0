"""ASYNC. The chart, through the `helm` of whoever calls: pods are derived in the chart's templates and nowhere else."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from replica.errors import ConfigError, ShoalError

#: in a checkout; an installed Shoal is told where with --chart
CHART = Path(__file__).resolve().parents[2] / "k8s" / "chart" / "shoal"
#: what helm puts before the sentence of a template that refuses
_TEMPLATE_ERROR = re.compile(r"^execution error at \([^)]*\): ")


def template(
    values: Mapping[str, Any],
    *,
    release: str = "shoal",
    chart: str | Path = CHART,
    api_versions: Sequence[str] = (),
    helm: str = "helm",
) -> str:
    """All documents of the chart with `values`. Raises ConfigError with the chart's sentence, and ShoalError if there
    is no helm or no chart.
    """
    if shutil.which(helm) is None:
        raise ShoalError(f"rendering pods runs {helm} (3.14 or newer), which is not on PATH; --output serve needs none")
    if not str(chart).startswith("oci://") and not Path(chart).exists():
        raise ShoalError(
            f"--chart {chart}: not found; give the folder k8s/chart/shoal of the repository, or a packed chart"
        )
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(dict(values), file)
        file.flush()
        command = [helm, "template", release, str(chart), "--values", file.name]
        for version in api_versions:
            command += ["--api-versions", version]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(reason(done.stderr))
    return done.stdout


def reason(stderr: str) -> str:
    """The sentence in what helm says about a chart that refuses."""
    noise = ("level=", "Use --debug")
    lines = [line for line in stderr.splitlines() if line.strip() and not line.startswith(noise)]
    text = "\n".join(lines).removeprefix("Error: ")
    return _TEMPLATE_ERROR.sub("", text).strip()
