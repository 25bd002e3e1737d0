"""A client that stops reading, through real Serve: the router stays small and the client loses nothing.

The bound rests on what Serve does with messages (`router/stream_sender.py`), so a fake alone cannot show it.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from replica.fake_runner import expected_output
from tests.cluster.shoal_process import ShoalProcess, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

#: repeated in each chunk, so that little is generated and much is sent: 32 MB, of which kernel and proxy take 8
MODEL = "m" * 8000
NUM_SEQUENCES, NUM_TOKENS = 8, 500
PROMPT = [5, 6, 7]


def resident_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def read_all(connection: socket.socket) -> bytes:
    """A whole chunked response; the pieces of its body, joined."""
    data = bytearray()
    while not data.endswith(b"\r\n0\r\n\r\n"):
        part = connection.recv(1 << 16)
        assert part, f"the stream was cut after {len(data)} bytes"
        data += part
    rest = bytes(data).partition(b"\r\n\r\n")[2]
    body = bytearray()
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        body += rest[:length]
        rest = rest[length + 2 :]
        if not length:
            break
    return bytes(body)


def test_client_that_stops_reading_costs_little_and_loses_nothing() -> None:
    with ShoalProcess("--served-model-name", MODEL) as shoal:
        router = shoal.pids("Router")[0]
        body = json.dumps(
            {
                "prompt": PROMPT,
                "n": NUM_SEQUENCES,
                "max_tokens": NUM_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "return_token_ids": True,
            }
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            connection.settimeout(60)
            connection.connect(("127.0.0.1", shoal.port))
            before = resident_mib(router)
            connection.sendall(head + body)

            def replica() -> dict[str, dict[str, float]]:
                return dict(shoal.status()["replicas"][0])

            total = float(NUM_SEQUENCES * NUM_TOKENS)
            wait_until(lambda: replica()["counters"].get("generation_tokens") == total, 60, "the end of the generation")
            assert resident_mib(router) - before < 20
            stream = read_all(connection)
        *chunks, done, _ = stream.decode().split("\n\n")
        assert done == "data: [DONE]"
        ids: list[list[int]] = [[] for _ in range(NUM_SEQUENCES)]
        for chunk in chunks:
            choice = json.loads(chunk[6:])["choices"][0]
            ids[choice["index"]] += choice["token_ids"]
        assert ids == [expected_output(PROMPT, NUM_TOKENS, vocab_size=49152, eos=frozenset({2}))] * NUM_SEQUENCES
        assert resident_mib(router) - before < 20
