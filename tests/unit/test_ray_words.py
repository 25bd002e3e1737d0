"""What Ray says at length, in a sentence."""

from __future__ import annotations

import inspect

import pytest

from cluster.ray_words import cause, overheard, why_no_start

BIND = """\x1b[36mray::ProxyActor.ready()\x1b[39m (pid=1, ip=127.0.0.1)
  File "proxy.py", line 1730, in ready
OSError: [Errno 98] Address already in use

The above exception was the direct cause of the following exception:

RuntimeError: Failed to bind to address '127.0.0.1:41697'."""


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("RayTaskError", BIND,
         "--host 127.0.0.1 --port 41697: somebody else took the port while Ray started; choose another one"),
        ("TimeoutError", "HTTP proxies not available after 300s.",
         "Serve's proxy did not come up: HTTP proxies not available after 300s. Is the machine too busy?"),
        ("ActorDiedError", "The actor died unexpectedly before finishing this task.\n\tclass_name: ServeController",
         "a process of Ray Serve ended while it started: class_name: ServeController"),
        ("ValueError", "", "ValueError: nothing more is known."),
    ],
)  # fmt: skip
def test_an_error_of_the_start_is_one_line(name: str, text: str, sentence: str) -> None:
    assert why_no_start(name, text, "127.0.0.1", 41697) == sentence


def test_the_cause_is_what_was_raised_first_not_what_ray_wrapped_around_it() -> None:
    text = "Traceback\nreplica.errors.ModelLoadError: no weights\nray.exceptions.RayTaskError: failed\nRuntimeError: x"
    assert cause(text) == "no weights"
    assert cause("\x1b[33mnothing known\x1b[0m") == "nothing known"


def test_only_what_a_person_can_act_on_is_overheard() -> None:
    assert overheard("\x1b[33m(raylet)\x1b[0m 2 Workers (tasks / actors) killed due to memory pressure (OOM), 0 ...")
    assert not overheard("\x1b[33m(raylet)\x1b[0m A worker died or was killed while executing a task")


def test_serve_still_reads_the_limits_that_are_changed_when_it_is_started() -> None:
    """Ray is pinned, and these are no part of its API: `cluster/serve.py` sets them in these modules."""
    from ray.serve._private import api, client, constants

    assert "timeout=HTTP_PROXY_TIMEOUT" in inspect.getsource(api.serve_start)
    source = inspect.getsource(client)
    assert "timeout=HTTP_PROXY_TIMEOUT" in source
    assert source.count("CLIENT_POLLING_INTERVAL_S)") >= 4
    assert 'get_env_float_positive(\n    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"' in inspect.getsource(constants)
