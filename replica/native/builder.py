"""ASYNC (waits for a compiler). Compiles the kernels into the cache, once per machine, compiler and source."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from replica.cache_folder import cache_folder, locked
from replica.native.cpu import cpu_flags

SOURCE_FOLDER = Path(__file__).parent
MAIN_SOURCE = SOURCE_FOLDER / "forward.cpp"
# No -ffast-math: the order of additions is the promise. No -Wall: GCC 12 warns about its own AVX-512 headers.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-strict-aliasing",
    "-Wno-psabi",
    "-fopenmp",
    "-shared",
    "-fPIC",
)


class NativeUnavailableError(Exception):
    """The kernels cannot be built or are switched off; the message says why, and the runner falls back to torch."""


def find_compiler(environ: Mapping[str, str]) -> str:
    """Path of the C++ compiler: `CXX`, else g++, else c++. Raises NativeUnavailableError when there is none."""
    for name in (environ.get("CXX"), "g++", "c++"):
        if name and (path := shutil.which(name)):
            return path
    raise NativeUnavailableError("no C++ compiler found (looked for $CXX, g++, c++)")


def build_key(compiler: str) -> str:
    """Digest of everything that decides the machine code: sources, flags, compiler version, CPU."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.sha256()
    for part in (version, " ".join(FLAGS), platform.machine(), " ".join(sorted(cpu_flags()))):
        digest.update(part.encode() + b"\0")
    for source in sorted([*SOURCE_FOLDER.glob("*.h"), *SOURCE_FOLDER.glob("*.cpp")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:20]


def build(folder: Path | None = None, environ: Mapping[str, str] | None = None, source: Path = MAIN_SOURCE) -> Path:
    """Path of the compiled library, compiled now if need be (3 to 6 s; the other source, `slab_copy.cpp`, 0.3).

    Raises NativeUnavailableError when `SHOAL_NATIVE=0`, without a compiler, or when compiling fails.
    """
    environ = os.environ if environ is None else environ
    if environ.get("SHOAL_NATIVE", "1") == "0":
        raise NativeUnavailableError("switched off by SHOAL_NATIVE=0")
    compiler = find_compiler(environ)
    folder = folder or cache_folder(environ) / "native"
    name = "kernels" if source == MAIN_SOURCE else source.stem
    library = folder / f"{name}-{build_key(compiler)}.so"
    if library.exists():
        return library
    try:
        with locked(folder / "build.lock"):
            if not library.exists():
                _compile(compiler, library, source)
    except OSError as error:
        raise NativeUnavailableError(f"cannot write {folder}: {error}") from error
    return library


def _compile(compiler: str, library: Path, source: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        output = Path(scratch) / library.name
        command = [compiler, *FLAGS, str(source), "-o", str(output)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            last = (result.stderr.strip().splitlines() or ["no message"])[-1]
            raise NativeUnavailableError(f"{compiler} failed on the kernels: {last}")
        os.replace(output, library)


if __name__ == "__main__":
    print(build())
