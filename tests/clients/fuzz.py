"""schemathesis against a server's own description: examples, edge values and random requests, good and bad.

The last line is JSON: how many calls, how many failures, and what the server still held after the last one.
Exit code 1 if there was any failure. Run it with the environment that `scripts/clients` makes.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path

#: a server error, an answer that the description does not know, a bad request that was taken: each is a failure. That
#: every request which fits the description is taken is not demanded: rules over two fields are told there in words.
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
    "negative_data_rejection,unsupported_method"
)


def left_behind(url: str) -> int:
    """Requests, sequences and blocks that the server still holds; asks for a while, since aborts take a step."""
    pause = threading.Event()
    held = 0
    for _ in range(50):
        with urllib.request.urlopen(f"{url}/status", timeout=10) as response:
            status = json.load(response)
        held = int(status["requests"])
        for replica in status["replicas"]:
            held += replica["running"] + replica["queued"] + replica["returning"]
            held += replica["kv_blocks"] - replica["kv_blocks_free"]
        if not held:
            break
        pause.wait(0.1)
    return held


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True, help="of the server, without /v1")
    parser.add_argument("--examples", type=int, default=25, help="random requests an operation")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{options.url}/openapi.json", "--no-color"]
    command += ["--checks", CHECKS, "--phases", "examples,coverage,fuzzing", "--continue-on-failure"]
    command += ["--max-examples", str(options.examples), "--seed", str(options.seed), "--request-timeout", "60"]
    with tempfile.TemporaryDirectory() as folder:  # it leaves a cache where it runs
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    print(done.stdout)
    calls = re.search(r"(\d+) generated", done.stdout)
    failures = re.search(r"(\d+) (?:unique )?failures?", done.stdout)
    if calls is None or done.returncode not in (0, 1):
        print(done.stderr, file=sys.stderr)
        return 2
    num_failures = int(failures[1]) if failures else 0
    num_failures = num_failures or int(done.returncode != 0)
    left = left_behind(options.url)
    note = f"{options.examples} random requests an operation, seed {options.seed}"
    print(json.dumps({"calls": int(calls[1]), "failures": num_failures, "left": left, "note": note}))
    return int(num_failures > 0 or left > 0)


if __name__ == "__main__":
    raise SystemExit(main())
