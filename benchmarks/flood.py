"""More clients than there are places: is the cap ever passed, is it used while requests are refused, do all come back?

A cluster with the fake runner and several routers, and clients in this process, each with a connection of its own, who
send their next request when the last one ended: at once after a 200, after a pause after a 503.

The figures of the cap are the replicas' own (`replica/cap_use.py`): maxima kept where places change hands, and
integrals over time, of which two readings are taken while requests are refused. Use is the mean number queued between
them over the cap. It counts only if no second between them is without a refusal (`longest_without_s`).

`one_router`: Serve's proxy spreads requests, so here each router has Serve's own HTTP port besides (Serve's "direct
ingress"), and all clients speak to one of them: the same processes, without the proxy.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import resource
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from benchmarks import servers
from benchmarks.cpu_time import cpu_time
from cluster.process_sweep import serve_replicas
from replica.permits import LEASE_S

#: a client that was refused comes again after this and up to twice as much, whatever `Retry-After` says: it would be
#: 60 s here, and nobody would be refused any more
PAUSE_S = 2.0
#: refusals are under way: from here on readings count
_WARM_S = 4.0
#: every client must have its answer so long after the last one was sent
_END_S = 60.0


class Shape(msgspec.Struct, frozen=True):
    """One flood. `num_blocks`: KV blocks of a replica; few of them make it preempt."""

    num_clients: int = 500
    cap: int = 64
    seconds: float = 12.0
    num_routers: int = 4
    num_replicas: int = 2
    max_num_seqs: int = 4
    prompt_len: int = 20
    output_len: int = 100
    num_blocks: int = 4096
    pause_s: float = PAUSE_S
    one_router: bool = False
    #: kill -9 of one router half way
    kills_router: bool = False
    settings: tuple[str, ...] = ()


class ReplicaUse(msgspec.Struct, frozen=True):
    """Of one replica; `use` and `places` over the span of refusals, as shares of the cap."""

    cap: int
    max_queued: int
    max_places: int
    use: float
    places: float
    preemptions: int


class Outcome(msgspec.Struct, frozen=True):
    """`codes`: 0 is a connection that broke. `permits_left` and `left` are what no replica should have at the end."""

    replicas: list[ReplicaUse]
    codes: dict[int, int]
    without_retry_after: int
    wrong_answers: int
    num_hanging: int
    longest_without_s: float
    span_s: float
    permits_left: int
    left: int
    #: seconds from the kill until no replica reserved more than others waited for, by its integrals: see `_watch_kill`
    permits_back_s: float
    max_wait_s: float
    by_process: dict[str, float]
    num_open_files: int

    @property
    def most_queued(self) -> int:
        return max(replica.max_queued for replica in self.replicas)

    @property
    def most_places(self) -> int:
        return max(replica.max_places for replica in self.replicas)

    @property
    def least_use(self) -> float:
        return min(replica.use for replica in self.replicas)


@contextmanager
def cluster(shape: Shape) -> Iterator[tuple[servers.Server, list[str]]]:
    """A server for it, and the addresses that its clients speak to."""
    settings = (
        f"router.max_queued_requests_per_replica={shape.cap}",
        f"scheduler.max_num_seqs={shape.max_num_seqs}",
        f"kv_cache.num_blocks={shape.num_blocks}",
        *shape.settings,
    )
    flags = ["--runner", "fake", "--replicas", str(shape.num_replicas), "--routers", str(shape.num_routers)]
    flags += [word for setting in settings for word in ("--set", setting)]
    with (
        tempfile.TemporaryDirectory() as folder,
        _direct_ingress(shape) as ports,
        servers.shoal(Path(folder), *flags) as server,
    ):
        yield server, [f"http://127.0.0.1:{port}" for port in ports] or [server.url]


@contextmanager
def _direct_ingress(shape: Shape) -> Iterator[list[int]]:
    """Environment of a server whose routers have HTTP ports of their own; the first of these, or none."""
    if not shape.one_router:
        yield []
        return
    first = servers.free_port()
    names = {
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(first + 50),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    }
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield [first]
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _Clients:
    """They note what they got."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, shape: Shape) -> None:
        self._session = session
        self._url = f"{url}/v1/completions"
        self._model = model
        self._shape = shape
        self.codes: Counter[int] = Counter()
        self.refused_at: list[float] = []
        self.without_retry_after = self.wrong_answers = 0
        self.max_wait_s = 0.0

    async def run(self, number: int, until: float) -> None:
        rng = random.Random(number)
        await asyncio.sleep(rng.random() * self._shape.pause_s)  # else all come in one moment
        while time.monotonic() < until:
            began = time.monotonic()
            status = await self._ask(rng)
            self.max_wait_s = max(self.max_wait_s, time.monotonic() - began)
            self.codes[status] += 1
            if status != 200:
                self.refused_at.append(time.monotonic())
                await asyncio.sleep(self._shape.pause_s * (1 + rng.random()))

    async def _ask(self, rng: random.Random) -> int:
        shape = self._shape
        prompt = [rng.randrange(1000, 40000) for _ in range(shape.prompt_len)]
        body = {"model": self._model, "prompt": prompt, "max_tokens": shape.output_len, "temperature": 0}
        try:
            async with self._session.post(self._url, json=body | {"ignore_eos": True}) as response:
                answer = await response.read()
                if response.status == 200:
                    used = msgspec.json.decode(answer)["usage"]["completion_tokens"]
                    self.wrong_answers += used != shape.output_len
                elif response.status == 503:
                    self.without_retry_after += int(response.headers.get("Retry-After", 0)) < 1
                return response.status
        except aiohttp.ClientError:
            return 0


async def drive(server: servers.Server, urls: list[str], shape: Shape) -> Outcome:
    """The flood, then a look at what is left."""
    num_files = allow_files(shape.num_clients + 200)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=600)
    before = cpu_time(server.process.pid)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        clients = _Clients(session, urls[0], server.model, shape)
        until = time.monotonic() + shape.seconds
        tasks = [asyncio.create_task(clients.run(number, until)) for number in range(shape.num_clients)]
        await asyncio.sleep(_WARM_S)
        first, began = await _replicas(session, urls[0]), time.monotonic()
        back_s = 0.0
        if shape.kills_router:
            await asyncio.sleep((shape.seconds - _WARM_S) / 4)
            back_s = await _kill_a_router(session, server, urls[0])
            # the killed one's clients are gone for a moment, and its places with them
            first, began = await _replicas(session, urls[0]), time.monotonic()
        await asyncio.sleep(max(0.0, until - time.monotonic() - 0.5))
        last, ended = await _replicas(session, urls[0]), time.monotonic()
        _, hanging = await asyncio.wait(tasks, timeout=_END_S)
        used = cpu_time(server.process.pid).since(before)
        for task in hanging:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        final = await _settled(session, urls[0])
    refused = [began, *(at for at in sorted(clients.refused_at) if began < at < ended), ended]
    return Outcome(
        replicas=[_use(first[name], last[name], final[name]) for name in final if name in first and name in last],
        codes=dict(sorted(clients.codes.items())),
        without_retry_after=clients.without_retry_after,
        wrong_answers=clients.wrong_answers,
        num_hanging=len(hanging),
        longest_without_s=max(later - earlier for earlier, later in pairwise(refused)),
        span_s=ended - began,
        permits_left=sum(replica["permits"] for replica in final.values()),
        left=sum(map(_num_left, final.values())),
        permits_back_s=back_s,
        max_wait_s=clients.max_wait_s,
        by_process=used.by_process,
        num_open_files=num_files,
    )


def measure(shape: Shape) -> Outcome:
    """A fresh cluster under it."""
    with cluster(shape) as (server, urls):
        return asyncio.run(drive(server, urls, shape))


def allow_files(number: int) -> int:
    """Raise this process's limit of open files as far as it may be. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < number:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


async def _replicas(session: aiohttp.ClientSession, url: str) -> dict[str, dict[str, Any]]:
    async with session.get(f"{url}/status") as response:
        status = await response.json()
    return {replica["replica_id"]: replica for replica in status["replicas"]}


def _num_left(replica: dict[str, Any]) -> int:
    blocks = replica["kv_blocks"] - replica["kv_blocks_free"]
    return int(replica["queued"] + replica["returning"] + replica["running"] + blocks)


async def _settled(session: aiohttp.ClientSession, url: str) -> dict[str, dict[str, Any]]:
    """Once nothing is left, or after twenty seconds whatever there is."""
    replicas: dict[str, dict[str, Any]] = {}
    for _ in range(200):
        with contextlib.suppress(aiohttp.ClientError, KeyError):
            replicas = await _replicas(session, url)
            if not any(_num_left(each) + each["permits"] for each in replicas.values()):
                break
        await asyncio.sleep(0.1)
    return replicas


async def _kill_a_router(session: aiohttp.ClientSession, server: servers.Server, url: str) -> float:
    """Seconds until the queues were full again. A permit of the dead would keep its place empty; so after it at least
    one reading has to show every place queued.
    """
    os.kill(serve_replicas(server.process.pid, "Router")[-1], signal.SIGKILL)
    killed = time.monotonic()
    while time.monotonic() < killed + 10 * LEASE_S:
        with contextlib.suppress(aiohttp.ClientError, KeyError, ValueError):
            replicas = await _replicas(session, url)
            if replicas and all(each["queued"] == each["queue_cap"] for each in replicas.values()):
                break
        await asyncio.sleep(0.02)
    return time.monotonic() - killed


def _use(first: dict[str, Any], last: dict[str, Any], final: dict[str, Any]) -> ReplicaUse:
    def during(name: str) -> float:
        return float(last["counters"][name] - first["counters"][name])

    seconds, cap = during("queue_watched_s"), int(final["queue_cap"])
    return ReplicaUse(
        cap=cap,
        max_queued=int(final["counters"]["max_queued"]),
        max_places=int(final["counters"]["max_queue_places"]),
        use=during("queued_s") / seconds / cap,
        places=during("queue_places_s") / seconds / cap,
        preemptions=int(final["counters"]["preemptions"]),
    )


#: by name: the floods of the claims
SHAPES: dict[str, Shape] = {
    "cap": Shape(),
    "one_router": Shape(one_router=True),
    "cap1": Shape(cap=1, num_clients=100, output_len=200),
    "preempted": Shape(num_blocks=32, max_num_seqs=8, prompt_len=60, output_len=40),
    "router_killed": Shape(kills_router=True, seconds=20),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", help=f"of {', '.join(SHAPES)}; all if none")
    parser.add_argument("--clients", type=int)
    parser.add_argument("--seconds", type=float)
    options = parser.parse_args()
    for name in options.shapes or SHAPES:
        changes = {"num_clients": options.clients, "seconds": options.seconds}
        shape = msgspec.structs.replace(SHAPES[name], **{k: v for k, v in changes.items() if v is not None})
        found = measure(shape)
        print(name, found, flush=True)


if __name__ == "__main__":
    main()
