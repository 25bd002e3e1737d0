"""Tenants through `shoal serve`: two routers follow the file and `shoal set`, and one that is replaced knows both."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest

from router.tenants import hashed
from tests.cluster.shoal_process import ShoalProcess, wait_until
from tests.cluster.test_live_knobs import command
from tests.cluster.test_serve import body

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def put(folder: Path, version: str, *names: str) -> None:
    """A file of tenants with these names and keys, as a Kubernetes Secret is written."""
    (folder / version).mkdir()
    lines = [f"{name}: {{keys: ['{hashed(f'key-of-{name}')}'], max_concurrent_requests: 64}}" for name in names]
    (folder / version / "tenants.yaml").write_text("\n".join(lines))
    (folder / "new").symlink_to(version)
    (folder / "new").rename(folder / "data")


def test_the_file_changes_and_a_replaced_router_knows_it(tmp_path: Path) -> None:
    put(tmp_path, "v1", "one")
    path = tmp_path / "data" / "tenants.yaml"
    with ShoalProcess("--routers", "2", "--set", f"tenants.file={path}") as shoal:

        def asked(name: str) -> int:
            """Each on a connection of its own, so that the proxy may choose another router."""
            headers = {"Authorization": f"Bearer key-of-{name}"}
            return httpx.post(f"{shoal.url}/v1/completions", json=body(1, 2), headers=headers, timeout=30).status_code

        def answers(name: str) -> set[int]:
            return {asked(name) for _ in range(8)}

        assert (answers("one"), answers("two")) == ({200}, {401})
        put(tmp_path, "v2", "two")
        wait_until(lambda: answers("two") == {200}, 15, "both routers have read the file again")
        wait_until(lambda: answers("one") == {401}, 15, "a key that was taken away")

        code, said, errors = asyncio.run(command(shoal, "set", "tenants.named.two.priority=[0,3]"))
        assert code == 0, errors
        assert "tenants.named.two.priority: auto -> [0, 3]" in said
        assert "in force at 1 replica(s) and 2 router(s)" in errors
        code, _, errors = asyncio.run(command(shoal, "set", "scheduler.policy=priority"))
        assert code == 0, errors
        headers = {"Authorization": "Bearer key-of-two"}

        def refusals() -> set[int]:
            return {
                httpx.post(
                    f"{shoal.url}/v1/completions", json=body(1, 2, priority=9), headers=headers, timeout=30
                ).status_code
                for _ in range(8)
            }

        assert refusals() == {400}
        gone = shoal.pids("Router")[0]
        os.kill(gone, signal.SIGKILL)
        wait_until(lambda: len(pids := shoal.pids("Router")) == 2 and gone not in pids, 60, "another router")
        wait_until(lambda: asked("two") == 200, 30, "an answer")
        assert refusals() == {400}
        assert answers("one") == {401}
