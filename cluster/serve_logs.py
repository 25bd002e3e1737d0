"""ASYNC. Has a process of Ray Serve write our log lines where Serve writes its own: where `shoal serve` says they are.

Serve gives handlers to its own logger alone. Whatever other loggers say goes to the stderr of the process, bare and
without a time, and what is below a warning nowhere. Called in routers and replicas, which know nothing of this.
"""

from __future__ import annotations

import logging

_SERVE = "ray.serve"
#: ours, and asyncio's for exceptions of tasks that nobody waits for
_TOO = ("router", "replica", "cluster", "asyncio")


def join_serve_logs() -> None:
    """Idempotent. Serve's handlers keep a line on stderr as well. Without Serve's handlers nothing changes."""
    serve = logging.getLogger(_SERVE)
    if not serve.handlers:
        return
    for name in _TOO:
        logger = logging.getLogger(name)
        logger.handlers = list(serve.handlers)
        logger.setLevel(serve.getEffectiveLevel())
        logger.propagate = False
