"""What every tier shares: hypothesis profiles, where `../shared` is, and which tests are skipped and why."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent

# ci: the same examples in every run and no verdict that depends on how busy the machine is.
# long: as many as each test has in its long form (`tests/property/lengths.py`); `scripts/soak` runs them.
# explore: fresh random examples, for hunting by hand: HYPOTHESIS_PROFILE=explore make test TIERS=unit
settings.register_profile(
    "ci", derandomize=True, deadline=None, database=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("long", settings.get_profile("ci"), max_examples=300)
settings.register_profile(
    "explore", max_examples=1000, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The folder of pyproject.toml."""
    return ROOT


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of reference material beside the checkout (schemas, cases, traces)."""
    path = ROOT.parent / "shared"
    if not path.is_dir():
        pytest.skip("needs the reference material in ../shared, which is not beside this checkout")
    return path


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` on a machine without one. Looks for a device only if such a test was collected."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_cuda():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device: not run, so not verified here"))


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the developer's shell reaches a test, but for the place of the converted model."""
    for name in list(os.environ):
        if name.startswith("SHOAL_") and name != "SHOAL_CACHE":
            monkeypatch.delenv(name)


@pytest.fixture
def anyio_backend() -> str:
    """`async def` tests marked `anyio` run on asyncio alone: so does the product."""
    return "asyncio"
