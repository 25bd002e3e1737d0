"""RAY. The end of an application: routers refuse what comes and let streams end, then all is taken down."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

#: beyond `drain_s`: Serve's own steps, and the last messages
DRAIN_SLACK_S = 40.0
#: beyond `drain_s`: what routers may take to hear of it (0.1 to 0.3 s), and to say that nothing is left
_TELL_S = 2.0


def stop_application(app_name: str, drain_s: float) -> None:
    """Streams have `drain_s` to end. Raises KeyboardInterrupt on a second signal, which cuts them.

    Until they have ended routers answer whoever comes with 503. Then the application goes, alone: `serve.shutdown`
    takes the proxy away at once, and every open stream with it.
    """
    asyncio.run(_tell_routers(app_name, drain_s))
    delete_application(app_name, drain_s)


async def _tell_routers(app_name: str, drain_s: float) -> None:
    """Until nothing is left at any of them. Who does not hear it holds streams for `resume_wait_s`, as after a loss."""
    from ray.serve.handle import DeploymentHandle

    # not `get_deployment_handle`: Serve would end that one later, when the loop that it wants here is closed
    handle: DeploymentHandle[Any] = DeploymentHandle("Router", app_name)
    with contextlib.suppress(Exception):  # whatever is wrong there, the end does not depend on it
        async with asyncio.timeout(drain_s + _TELL_S):
            await handle.broadcast("stopping", drain_s).results_async(return_exceptions=True)
    with contextlib.suppress(Exception):
        async with asyncio.timeout(_TELL_S):
            await handle.shutdown_async()


def delete_application(name: str, drain_s: float) -> None:
    """Serve waits 60 s for the end of an application and then raises; a drain may take longer."""
    from ray import serve

    end = time.monotonic() + drain_s + DRAIN_SLACK_S
    while True:
        try:
            serve.delete(name)
            return
        except TimeoutError:
            if time.monotonic() > end:
                return
