"""ASYNC. Is this pod ready for requests (`ready`), or worth keeping (`alive`)? Exit 0 yes, 1 no, 2 wrong usage.

alive: the raylet answers. ready: also the Serve proxy of this pod, with its route table ("Route table is not populated
yet." comes just after start and is a no). Run by the kubelet, so it starts fast and needs no wget: urllib alone.
Ports can be given as SHOAL_PROBE_AGENT_PORT and SHOAL_PROBE_SERVE_PORT.
"""

from __future__ import annotations

import os
import sys
import urllib.request

#: seconds for one answer; the probe's own timeoutSeconds (5) covers both and the start of Python
TIMEOUT_S = 1.5


def answers_success(url: str) -> bool:
    """True if `url` answers 200 with a body that begins with "success". Never raises for what a network can do."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            return bool(response.status == 200 and response.read(64).strip().startswith(b"success"))
    except OSError:  # URLError and HTTPError are OSErrors
        return False


def check(what: str, agent_port: int, serve_port: int) -> list[str]:
    """Names of the parts that do not answer, for `what` = "alive" or "ready"."""
    parts = {"raylet": f"http://127.0.0.1:{agent_port}/api/local_raylet_healthz"}
    if what == "ready":
        parts["serve proxy"] = f"http://127.0.0.1:{serve_port}/-/healthz"
    return [name for name, url in parts.items() if not answers_success(url)]


def main(argv: list[str]) -> int:
    if len(argv) != 1 or argv[0] not in ("ready", "alive"):
        print("usage: python -m cluster.k8s.probe ready|alive", file=sys.stderr)
        return 2
    agent_port = int(os.environ.get("SHOAL_PROBE_AGENT_PORT", "52365"))
    serve_port = int(os.environ.get("SHOAL_PROBE_SERVE_PORT", "8000"))
    failed = check(argv[0], agent_port, serve_port)
    if failed:
        print(f"not {argv[0]}: no answer from {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
