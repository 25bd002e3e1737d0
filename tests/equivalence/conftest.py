"""The real model, resolved once from the cache and fetched if it is not there."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """Folder of the default model."""
    from cluster import model_store

    return model_store.resolve("smollm2-135m-instruct")
