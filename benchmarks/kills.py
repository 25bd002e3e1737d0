"""`python -m benchmarks.kills --kills 300`: random kill -9 of replica processes under load, and SIGSTOP of one. The
router runs in this process, replicas in processes of our own, without Ray. Each token of each stream is known.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from benchmarks.load import percentiles
from benchmarks.replica_processes import EOS, VOCAB_SIZE, ReplicaProcess, ReplicaProcesses
from replica.errors import ShoalError
from replica.fake_runner import expected_output
from replica.messages import FinishReason, GenerateRequest, RequestId, RouterId, SamplingParams, SequenceInput
from router.dispatcher import DispatcherConfig
from router.live_backend import LiveBackend
from router.pairing import PairingDispatcher
from router.placement import least_tokens

#: seconds between two kills, drawn evenly
BETWEEN_S = (0.02, 0.5)
#: what a lost replica sent last is read within that time
_IN_SOCKETS_S = 0.2
#: of kills: a second replica at the same moment
DOUBLE_SHARE = 0.1


class Stream(msgspec.Struct):
    """One request as its reader saw it. `times` are those of its events, in this process's clock."""

    request: GenerateRequest
    tokens: dict[int, list[int]]
    ends: dict[int, list[FinishReason]]
    times: list[float] = []
    error: str = ""
    ended_at: float = 0.0

    def faults(self) -> list[str]:
        """What is wrong with it, in words."""
        if self.error:
            return [f"{self.request.request_id}: {self.error}"]
        found = []
        for item in self.request.sequences:
            seed = item.sampling.seed if item.sampling.temperature else 0
            expected = expected_output(
                item.prompt_token_ids, item.sampling.max_tokens, seed=seed, vocab_size=VOCAB_SIZE, eos=frozenset({EOS})
            )
            if self.tokens[item.index] != expected:
                told = self.tokens[item.index]
                right = next((i for i, (a, b) in enumerate(zip(told, expected, strict=False)) if a != b), len(told))
                found.append(
                    f"{self.request.request_id}/{item.index}: {len(told)} of {len(expected)} tokens, {right} right"
                )
            if self.ends[item.index] != [FinishReason.LENGTH]:
                found.append(f"{self.request.request_id}/{item.index}: ended with {self.ends[item.index]}")
        return found

    def pause_at(self, instant: float) -> float | None:
        """Seconds of the longest gap between two events that begins before, or soon after, `instant`: what the replica
        had sent before may still be read then. None if the stream was not running.
        """
        if not self.times or not self.times[0] <= instant <= self.times[-1]:
            return None
        gaps = zip(self.times, self.times[1:], strict=False)
        return max(
            (end - begin for begin, end in gaps if end >= instant and begin <= instant + _IN_SOCKETS_S), default=0.0
        )


class Load:
    """`num_clients` readers on each router, each with its next request when the last one ended, until `stop`."""

    def __init__(
        self, routers: Sequence[LiveBackend], num_clients: int, seed: int, num_tokens: tuple[int, int]
    ) -> None:
        self._random = random.Random(seed)
        self._num_tokens = num_tokens
        self.is_over = False
        self.streams: list[Stream] = []
        self.running: dict[str, Stream] = {}
        self._tasks = [asyncio.create_task(self._client(r)) for r in routers for _ in range(num_clients)]

    async def stop(self) -> None:
        """Let everybody come to an end."""
        self.is_over = True
        await asyncio.gather(*self._tasks)

    async def _client(self, router: LiveBackend) -> None:
        while not self.is_over:
            stream = self._next()
            self.streams.append(stream)
            name = stream.request.request_id
            self.running[name] = stream
            try:
                async for events in await router.generate(stream.request):
                    stream.times.append(time.monotonic())
                    for event in events:
                        stream.tokens[event.index] += event.token_ids
                        if event.finish_reason is not None:
                            stream.ends[event.index].append(event.finish_reason)
            except ShoalError as error:
                stream.error = repr(error)
            stream.ended_at = time.monotonic()
            del self.running[name]

    def _next(self) -> Stream:
        draw = self._random
        prompt = [draw.randrange(3, VOCAB_SIZE) for _ in range(draw.choice((3, 20, 60, 300)))]
        max_tokens, num_copies = draw.randint(*self._num_tokens), draw.choice((1, 1, 1, 2, 3))
        temperature = draw.choice((0.0, 0.8))
        sequences = [
            SequenceInput(
                index,
                prompt,
                SamplingParams(max_tokens, temperature, seed=draw.randrange(1 << 40), ignore_eos=True),
            )
            for index in range(num_copies)
        ]
        request = GenerateRequest(RequestId(f"q{len(self.streams)}"), sequences, (0.0, 0, time.time()))
        return Stream(request, {i: [] for i in range(num_copies)}, {i: [] for i in range(num_copies)})


class Outcome(msgspec.Struct, frozen=True):
    """`faults`: errors, missing, doubled or wrong tokens, wrong ends. `num_hit`: streams on a replica when it was lost,
    of which `num_waiting` had no token yet; the pauses are those of the others. `left`: what is not back at baseline.
    """

    num_events: int
    num_streams: int
    num_hit: int
    num_waiting: int
    num_tokens: int
    faults: list[str]
    pauses_s: list[float]
    left: list[str]
    duration_s: float

    def __str__(self) -> str:
        pauses = percentiles(self.pauses_s)
        return (
            f"{self.num_events} losses in {self.duration_s:.0f} s, {self.num_streams} streams ({self.num_hit} lost "
            f"their replica, {self.num_waiting} of them before the first token), {self.num_tokens} tokens; "
            f"{len(self.faults)} faults {self.faults[:3]}, left: {self.left[:3]}; "
            f"pause p50 {pauses['p50']:.0f} ms, p99 {pauses['p99']:.0f}, max {pauses['max']:.0f}"
        )


@asynccontextmanager
async def routers_of(
    replicas: ReplicaProcesses, num_replicas: int, num_routers: int, config: DispatcherConfig
) -> AsyncIterator[list[LiveBackend]]:
    """Routers in this process that see `num_replicas`; all of it is taken down at the end."""
    routers = [
        LiveBackend(PairingDispatcher(config, least_tokens), RouterId(f"router-{i}"), "fake")
        for i in range(num_routers)
    ]
    replicas.on_view += [router.on_view for router in routers]
    try:
        await asyncio.gather(*(replicas.add() for _ in range(num_replicas)))
        await _until(lambda: all(r.health().detail["replicas_up"] == num_replicas for r in routers))
        yield routers
    finally:
        for router in routers:
            await router.close()
        replicas.close()


async def _until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  # what is waited for has no event
            await asyncio.sleep(0.01)


def _on(routers: Sequence[LiveBackend], load: Load, victim: ReplicaProcess) -> list[Stream]:
    """Streams that the victim has, begun or not."""
    names = {name for name in load.running for r in routers if r.dispatcher.replica_of(RequestId(name)) == victim.name}
    return [load.running[name] for name in names]


async def random_kills(
    num_kills: int, *, seed: int = 0, num_replicas: int = 3, num_routers: int = 2, num_clients: int = 10
) -> Outcome:
    """Kills at random moments; a replacement is there about as fast as it can start. Sometimes two at once."""
    draw = random.Random(seed)
    began = time.monotonic()
    replicas = ReplicaProcesses(step_s=0.004)
    hits: list[tuple[Stream, float]] = []
    async with routers_of(replicas, num_replicas, num_routers, DispatcherConfig(admission_wait_s=60.0)) as routers:
        load = Load(routers, num_clients, seed, (20, 150))
        num_killed = 0
        while num_killed < num_kills:
            await asyncio.sleep(draw.uniform(*BETWEEN_S))
            victims = draw.sample(replicas.up, k=2 if draw.random() < DOUBLE_SHARE else 1)
            for victim in victims:
                hits += [(stream, time.monotonic()) for stream in _on(routers, load, victim)]
                replicas.kill(victim)
                num_killed += 1
            await asyncio.gather(*(replicas.add() for _ in victims))
        await load.stop()
        left = await _left(routers)
    return _outcome(num_killed, load, hits, left, time.monotonic() - began)


async def freeze(
    stopped_s: float,
    *,
    seed: int = 0,
    give_up_silent_s: float = 10.0,
    max_num_seqs: int = 4,
    num_tokens: tuple[int, int] = (40, 200),
) -> Outcome:
    """SIGSTOP of one of two replicas for `stopped_s`, then SIGCONT. Two routers; requests run in it and wait in it."""
    began = time.monotonic()
    replicas = ReplicaProcesses(0.01, {"max_num_seqs": max_num_seqs})
    config = DispatcherConfig(admission_wait_s=60.0, give_up_silent_s=give_up_silent_s)
    async with routers_of(replicas, 2, 2, config) as routers:
        load = Load(routers, 8, seed, num_tokens)
        await _until(lambda: len(load.streams) > 20)
        victim = replicas.up[0]
        await _until(lambda: sum(not stream.times for stream in _on(routers, load, victim)) > 1)
        stopped_at = time.monotonic()
        victim.signal(signal.SIGSTOP)
        hit = [(stream, stopped_at) for stream in _on(routers, load, victim)]
        await asyncio.sleep(stopped_s)
        victim.signal(signal.SIGCONT)
        await _until(lambda: all(r.health().detail["replicas_up"] == 2 for r in routers))
        num_before = len(load.streams)
        await _until(lambda: len(load.streams) > num_before + 20)  # and it works again
        await load.stop()
        left = await _left(routers)
    return _outcome(1, load, hit, left, time.monotonic() - began)


async def _left(routers: Sequence[LiveBackend]) -> list[str]:
    """What replicas or routers still hold of requests that are all over; they have two seconds to let go of it."""
    end = time.monotonic() + 2.0
    while True:
        found = []
        for router in routers:
            if router.load() or router._streams or len(router._names):
                found.append(f"{router.router_id}: {router.load()} requests, {len(router._names)} names")
            for view in router.dispatcher.views.values():
                load: Any = view.load
                if load.num_running or load.num_queued or load.num_returning or load.num_free_blocks != load.num_blocks:
                    found.append(f"{view.replica_id}: {load.num_running} run, {load.num_queued} wait")
        if not found or time.monotonic() > end:
            return found
        await asyncio.sleep(0.05)


def _outcome(
    num_events: int, load: Load, hits: Sequence[tuple[Stream, float]], left: list[str], duration_s: float
) -> Outcome:
    pauses = [pause for stream, at in hits if (pause := stream.pause_at(at)) is not None]
    num_waiting = sum(not stream.times or stream.times[0] > at for stream, at in hits)
    faults = [fault for stream in load.streams for fault in stream.faults()]
    num_tokens = sum(len(tokens) for stream in load.streams for tokens in stream.tokens.values())
    return Outcome(num_events, len(load.streams), len(hits), num_waiting, num_tokens, faults, pauses, left, duration_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    outcome = asyncio.run(random_kills(options.kills, seed=options.seed))
    print(f"kills: {outcome}")
    return 1 if outcome.faults or outcome.left else 0


if __name__ == "__main__":
    raise SystemExit(main())
