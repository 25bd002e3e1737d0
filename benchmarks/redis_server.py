"""A Redis for the head's state: the one on the PATH, or Debian's package, unpacked into our cache folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from replica.cache_folder import cache_folder

_PACKAGES = ("redis-server", "redis-tools", "libjemalloc2", "liblzf1", "liblua5.1-0", "lua-cjson", "lua-bitop")


class NoRedis(Exception):
    """None is here, and none could be fetched; the text says why."""


def command() -> tuple[list[str], dict[str, str]]:
    """The program, and what its environment needs. Raises NoRedis."""
    if found := shutil.which("redis-server"):
        return [found], {}
    root = cache_folder() / "redis"
    if not root.is_dir():
        _fetch(root)
    # one program under several names: it is a server when it is called so
    program = root / "usr" / "bin" / "redis-server"
    libraries = ":".join(str(path) for path in (root / "usr" / "lib").glob("*-linux-gnu"))
    return [str(program)], {"LD_LIBRARY_PATH": libraries}


def _fetch(root: Path) -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise NoRedis("redis-server is not installed, and without apt-get it cannot be fetched")
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root.parent) as folder:
        done = subprocess.run(
            ["apt-get", "download", *_PACKAGES], cwd=folder, capture_output=True, text=True, check=False, timeout=120
        )
        if done.returncode:
            raise NoRedis(f"redis-server is not installed, and could not be fetched: {done.stderr.strip()[-200:]}")
        made = Path(folder) / "root"
        for package in Path(folder).glob("*.deb"):
            subprocess.run(["dpkg", "--extract", str(package), str(made)], check=True)
        shutil.move(made, root)


def start(address: str, password: str, folder: Path) -> subprocess.Popen[bytes]:
    """On port 6379 of `address`, nothing kept on disk. Raises NoRedis."""
    program, env = command()
    words = ["--bind", address, "--port", "6379", "--requirepass", password, "--save", "", "--dir", str(folder)]
    with (folder / "redis.log").open("w") as log:
        return subprocess.Popen([*program, *words], env={**os.environ, **env}, stdout=log, stderr=subprocess.STDOUT)
