"""Real clients, unchanged, against a running server: one line a client and check, exit code 1 if one failed.

    python tests/clients/drive.py --url http://127.0.0.1:8000/v1

Wants the environment of `requirements.txt` beside this file; `scripts/clients` makes it. The default model is small:
what it says does not matter, shapes and what grammars guarantee do.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # started as a script, without Shoal installed

from tests.clients.checking import Check, Server, run  # after the line above

CLIENTS = ("openai", "langchain", "litellm", "instructor")


def main() -> int:
    """The number of failed checks, as an exit code of 0 or 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="with /v1 at its end")
    parser.add_argument("--model", help="default: the first that the server names")
    parser.add_argument("--only", nargs="*", choices=CLIENTS, default=CLIENTS, help="these clients")
    given = parser.parse_args()
    url = given.url.rstrip("/")
    server = Server(url, given.model or first_model(url))
    num_checks = num_failed = 0
    for name in given.only:
        checks: list[Check] = importlib.import_module(f"tests.clients.{name}_checks").check.all
        num_checks += len(checks)
        num_failed += run(checks, server)
    print(f"{num_checks} checks, {num_failed} failed")
    return min(num_failed, 1)


def first_model(url: str) -> str:
    with urllib.request.urlopen(f"{url}/models", timeout=10) as response:
        return str(json.load(response)["data"][0]["id"])


if __name__ == "__main__":
    sys.exit(main())
