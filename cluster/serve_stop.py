"""RAY. The end of `shoal serve`: routers are told, replicas drain, and what was started here goes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

#: beyond `drain_s`: Serve's own steps, and the last messages
_DRAIN_SLACK_S = 40.0
#: what routers may take to hear of it: 0.1 to 0.3 s
_TELL_S = 2.0


def stop(owns_serve: bool, has_deployed: bool, drain_s: float) -> None:
    """Drain and end what was started here: our application, Serve if it was not there before, and a Ray of our own.

    The application goes first and alone: `serve.shutdown` takes the proxy away at once, and every open stream with it.
    A second signal skips the draining.
    """
    import ray
    from ray import serve

    from cluster.app import APP_NAME

    with _quiet():
        try:
            if has_deployed:
                asyncio.run(_tell_routers(APP_NAME, drain_s))
                _delete_application(APP_NAME, drain_s + _DRAIN_SLACK_S)
            if owns_serve and not serve.status().applications:
                serve.shutdown()
        except KeyboardInterrupt:
            pass
        finally:
            ray.shutdown()


async def _tell_routers(app_name: str, drain_s: float) -> None:
    """Nothing will be replaced any more. Who does not hear it holds streams for `resume_wait_s`, as after any loss."""
    from ray.serve.handle import DeploymentHandle

    # not `get_deployment_handle`: Serve would end that one later, when the loop that it wants here is closed
    handle: DeploymentHandle[Any] = DeploymentHandle("Router", app_name)
    with contextlib.suppress(Exception):  # whatever is wrong there, the end does not depend on it
        async with asyncio.timeout(_TELL_S):
            await handle.broadcast("stopping", drain_s).results_async(return_exceptions=True)
    with contextlib.suppress(Exception):
        await handle.shutdown_async()


def _delete_application(name: str, drain_s: float) -> None:
    """Serve waits 60 s for the end of an application and then raises; a drain may take longer."""
    from ray import serve

    end = time.monotonic() + drain_s
    while True:
        try:
            serve.delete(name)
            return
        except TimeoutError:
            if time.monotonic() > end:
                return


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Ray prints that the controller's last task failed, because it was killed: true, intended, and nobody's news.

    Parts of it write to the descriptors past Python, so the descriptors are what has to be turned away.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    saved = {number: os.dup(number) for number in (1, 2)}
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in saved:
            os.dup2(nowhere, number)
        yield
    finally:
        for number, copy in saved.items():
            os.dup2(copy, number)
            os.close(copy)
        os.close(nowhere)
