"""The real model, resolved once from the cache and fetched if it is not there; and the tiny ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """Folder of the default model."""
    from cluster import model_store

    return model_store.resolve("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a checkpoint of `benchmarks.tiny_models`, made when it is first asked for."""
    from benchmarks import tiny_models

    root = tmp_path_factory.mktemp("families")

    def get(name: str) -> Path:
        folder: Path = root / name
        return folder if folder.exists() else tiny_models.make(folder, name)

    return get
