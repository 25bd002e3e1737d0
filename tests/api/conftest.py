"""Two servers for the whole session, one over a fake runner and one over the default model; after each test that used
one, nothing of the test may be left in it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.api.harness", "tests.api.calls", "tests.api.wire")

from tests.api.harness import ApiUnderTest, fake_api, real_api  # noqa: E402  # after the line above


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """Folder of the default model, fetched if it is not there."""
    from cluster import model_store

    return Path(model_store.resolve("smollm2-135m-instruct"))


@pytest.fixture(scope="session", autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    """After the last server has stopped. gRPC's own threads belong to the process."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith(("shoal", "tokenizer", "api-under-test")):
            thread.join(5)
            assert not thread.is_alive(), f"a thread outlives its server: {thread.name}"


@pytest.fixture(scope="session")
def _fake() -> Iterator[ApiUnderTest]:
    with fake_api() as api:
        yield api


@pytest.fixture(scope="session")
def _real(model_folder: Path) -> Iterator[ApiUnderTest]:
    with real_api(model_folder) as api:
        yield api


@pytest.fixture
def fake(_fake: ApiUnderTest) -> Iterator[ApiUnderTest]:
    """The server over a fake runner: steps take no time, tokens are a function of the prefix."""
    yield _fake
    _fake.check_idle()


@pytest.fixture
def real(_real: ApiUnderTest) -> Iterator[ApiUnderTest]:
    """The server over the default model in float32."""
    yield _real
    _real.check_idle()
