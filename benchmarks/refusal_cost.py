"""CPU of a refused request in the router's own code: the ASGI application with the production backend, in process.

No server and no socket: what Serve's replica wrapper, gRPC and its proxy cost beside it is measured on a live cluster
(`flood.py`). Before each variant the collector is emptied, and the best of several rounds counts, since a shared
machine only ever adds.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import json
import time
from collections import Counter

from starlette.types import ASGIApp, Message, Scope

from replica.messages import GenerateRequest, ReplicaId, ReplicaLoad, RequestId, RouterId
from router.app import create_app
from router.app_settings import AppSettings
from router.dispatcher import DispatcherConfig
from router.live_backend import LiveBackend
from router.live_stream import LiveStream
from router.pairing import PairingDispatcher
from router.placement import least_tokens
from router.prepare import TextCodec
from router.replica_view import ReplicaView
from router.tenants import DEFAULT_TENANT
from router.tokenizer import Tokenizer

CAP = 64
#: replicas that the router looks at
NUM_REPLICAS = 4


class RefusingRouter:
    """A router whose replicas are full, and which holds as many as may hope for a place. Use within a running loop."""

    def __init__(self, codec: TextCodec, config: DispatcherConfig = DispatcherConfig()) -> None:
        self.dispatcher = PairingDispatcher(config, least_tokens)
        self.backend = LiveBackend(self.dispatcher, RouterId("router"), "model")
        settings = AppSettings(served_model_names=("model",), max_model_len=8192, vocab_size=49152)
        self.app: ASGIApp = create_app(settings, codec, self.backend)
        self._full()
        for number in range(64):
            self._hold(RequestId(f"held-{number}"))

    def _full(self) -> None:
        now = time.monotonic()
        for number in range(NUM_REPLICAS):
            replica_id = ReplicaId(f"replica-{number}")
            self.dispatcher.add_replica(ReplicaView(replica_id, "", ""))
            load = ReplicaLoad(num_queued=CAP, queue_cap=CAP, drain_rate=4.0)
            # heard in the future, so that no one is silent while it is measured
            self.dispatcher.on_load(replica_id, load, now + 600)
            self.dispatcher.on_connected(replica_id, now)

    def _hold(self, request_id: RequestId) -> None:
        """For ten minutes, where the application's own are held for 0.1 s."""
        self.backend._streams[request_id] = LiveStream(GenerateRequest(request_id, []), _ignore, _ignore)
        self.dispatcher.submit(request_id, 1, 10, time.monotonic() + 600, tenant=DEFAULT_TENANT)


def _ignore(*_: object) -> None:
    """Nobody is told."""


async def answer(app: ASGIApp, body: bytes) -> tuple[int, dict[bytes, bytes]]:
    """One POST; its status and headers."""
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    started: list[Message] = []

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nobody leaves")

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            started.append(message)

    await app(scope, receive, send)
    return started[0]["status"], dict(started[0]["headers"])


def bodies() -> dict[str, bytes]:
    """By name: what clients send."""
    words = "time year people way day man thing woman life child world school state family student group "
    return {
        "short": json.dumps({"model": "model", "prompt": "What is the capital of France?", "max_tokens": 16}).encode(),
        "4KiB": json.dumps({"model": "model", "prompt": (words * 60)[:3900], "max_tokens": 16}).encode(),
        "64KiB": json.dumps({"model": "model", "prompt": (words * 1000)[:65000], "max_tokens": 16}).encode(),
        "malformed": b'{"model": "model", "prompt": ',
    }


async def measure(codec: TextCodec, rounds: int = 7, count: int = 400) -> dict[str, float]:
    """Microseconds of CPU of one refusal, by body."""
    found: dict[str, float] = {}
    router = RefusingRouter(codec)
    try:
        for name, body in bodies().items():
            statuses: Counter[int] = Counter()
            best = float("inf")
            for _ in range(rounds):
                gc.collect()
                started = time.process_time()
                for _ in range(count):
                    status, headers = await answer(router.app, body)
                    statuses[status] += 1
                    assert b"retry-after" in headers
                best = min(best, (time.process_time() - started) / count)
            assert statuses.keys() == {503}, statuses
            found[name] = 1e6 * best
    finally:
        await router.backend.close()
    return found


def main() -> None:
    from cluster import model_store

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", metavar="FILE", help="write what cProfile saw, for pstats")
    options = parser.parse_args()
    codec = Tokenizer.from_folder(model_store.resolve("smollm2-135m-instruct"))
    if options.profile:
        profile = cProfile.Profile()
        profile.runcall(asyncio.run, measure(codec, 1, 2000))
        profile.dump_stats(options.profile)
        return
    for name, cpu_us in asyncio.run(measure(codec)).items():
        print(f"{name:<10} {cpu_us:.0f} us")


if __name__ == "__main__":
    main()
