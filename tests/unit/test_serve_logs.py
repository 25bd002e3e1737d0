"""Our loggers write where Serve's does, tracebacks included."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from cluster.serve_logs import join_serve_logs

NAMES = ("ray.serve", "router", "replica", "cluster", "asyncio")


@pytest.fixture(autouse=True)
def _loggers_as_before() -> Iterator[None]:
    before = [(logger, logger.handlers, logger.level, logger.propagate) for logger in map(logging.getLogger, NAMES)]
    yield
    for logger, handlers, level, propagate in before:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_lines_and_tracebacks_of_our_modules_go_where_serve_writes() -> None:
    serve, text = logging.getLogger("ray.serve"), io.StringIO()
    serve.handlers = [logging.StreamHandler(text)]
    serve.setLevel(logging.INFO)
    join_serve_logs()
    join_serve_logs()
    logging.getLogger("replica.deployment").info("what the device is")
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        logging.getLogger("replica.engine").exception("step 7 failed")
    logging.getLogger("router.http_middleware").debug("not this")
    logging.getLogger("asyncio").error("Task exception was never retrieved")
    lines = text.getvalue().splitlines()
    assert lines[:3] == ["what the device is", "step 7 failed", "Traceback (most recent call last):"]
    assert lines[-2:] == ["RuntimeError: broken", "Task exception was never retrieved"]


def test_without_serve_nothing_changes() -> None:
    logging.getLogger("ray.serve").handlers = []
    before = logging.getLogger("router").handlers
    join_serve_logs()
    assert logging.getLogger("router").handlers is before
    assert logging.getLogger("router").propagate
