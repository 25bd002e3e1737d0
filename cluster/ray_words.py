"""PURE. What Ray says, in a sentence: its errors come with tracebacks of several processes, its news in colours."""

from __future__ import annotations

import re

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
#: what an error of Ray wraps around the one that happened
_WRAPPERS = ("RuntimeError", "RayTaskError", "RayActorError", "ActorDiedError")


def plain(text: str) -> str:
    """Without colours."""
    return _COLOUR.sub("", text).strip()


def cause(text: str) -> str:
    """The message of the error that began it; all of `text` if there is none in it."""
    errors = re.findall(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception)): (.+)$", plain(text), flags=re.MULTILINE)
    own = [message for name, message in errors if name not in _WRAPPERS]
    return str(own[-1]) if own else plain(text)


def why_no_start(name: str, text: str, host: str, port: int) -> str:
    """A sentence for an exception, by the name of its class and its text, that ended the start."""
    text = plain(text)
    if "Failed to bind to address" in text:
        return f"--host {host} --port {port}: somebody else took the port while Ray started; choose another one"
    if "not available after" in text:
        return f"Serve's proxy did not come up: {_last_line(text)} Is the machine too busy?"
    if name == "ActorDiedError" or "SERVE_CONTROLLER" in text:
        return f"a process of Ray Serve ended while it started: {_last_line(cause(text))}"
    return f"{name}: {_last_line(cause(text))}"


def overheard(text: str) -> str:
    """What a person has to know of what Ray prints beside its work; empty for everything else."""
    text = plain(text)
    if "killed due to memory pressure" in text:
        return (
            "Ray ended processes because memory ran out; fewer replicas, or a smaller kv_cache.kv_cache_gib, need less"
        )
    return ""


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "nothing more is known."
