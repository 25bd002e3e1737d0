"""A prompt computed by another replica: time to the first token over that of computing it where the request decodes,
and what of the transfer is not hidden, on a link as it is and on one of 1 Gbit/s, with and without overlap.

    python -m benchmarks.pd_transfer [--lengths 128,512,2048,6000] [--rounds 3] [--threads N]

The default model; two engines, their connectors, arenas and TCP on loopback in one process, without a router. Both
engines have all cores, since one of them computes at a time; the copies of the other one take from that. Ways take
turns, each with a prompt that nobody has seen.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec

from benchmarks.kv_engines import engine, node
from cluster import model_store
from cluster.kv_connector.connector import Connector
from cluster.kv_connector.tcp_wire import LinkBudget
from replica.arena_client import open_arena
from replica.config import CacheConfig, DType, EngineConfig, ModelConfig, ParallelConfig
from replica.engine import Engine
from replica.kv_events import slot_layout
from replica.kv_messages import KVSpace
from replica.messages import (
    Continue,
    FinishReason,
    GenerateRequest,
    KVSink,
    KVSource,
    RequestId,
    RouterId,
    SamplingParams,
    Seated,
    SequenceInput,
    SequenceOutput,
    StepOutput,
    Submit,
    UpMessage,
    decode_up,
)
from replica.model_runner import TorchModelRunner
from replica.router_link import RouterLink

LENGTHS = (128, 512, 2048, 6000)
TOKEN = b"t" * 32
GBIT = 1e9 / 8
#: for P, and then for blocks: a long prompt on a busy machine takes more than a minute
PATIENCE_S = 600.0
#: of a CPU; docs/knobs.md
CHUNK_TOKENS = 256
#: way -> bytes/s of the link, and whether blocks flow while the prompt is computed
WAYS: dict[str, tuple[float | None, bool]] = {
    "loopback": (None, True),
    "1 Gbit/s": (GBIT, True),
    "1 Gbit/s, no overlap": (GBIT, False),
}


class Remote(msgspec.Struct, frozen=True):
    """One request, in seconds. `waited_s`: from the first token until the decode replica went on."""

    ttft_s: float
    waited_s: float
    #: of this process, both replicas and connectors, to the end of the request
    cpu_s: float
    fetched_bytes: int


class Point(msgspec.Struct, frozen=True):
    """One way at one length: medians over rounds."""

    num_tokens: int
    way: str
    local_s: float
    ttft_s: float
    #: over local, of the same round
    ratio: float
    #: of the transfer, what is not hidden, over the time to the first token
    unhidden: float
    waited_s: float
    #: CPU seconds over those of local: does not depend on how busy the machine is
    cpu_ratio: float
    fetched_bytes: int


class Pair:
    """P and D on two nodes."""

    def __init__(self, p: Engine, d: Engine, giver: Connector, taker: Connector, block_bytes: int) -> None:
        self.p, self.d, self.block_bytes = p, d, block_bytes
        self._giver, self._taker = giver, taker
        self._rng = random.Random(1)
        self._number = 0

    def prompt(self, num_tokens: int) -> list[int]:
        """Words of the default model, drawn anew each time."""
        return [self._rng.randrange(1000, 40000) for _ in range(num_tokens)]

    async def local(self, num_tokens: int) -> tuple[float, float]:
        """Seconds to the first token where D computes the prompt, and of CPU to the end."""
        self._number += 1
        request = _request(f"l{self._number}", self.prompt(num_tokens), 2)
        began, cpu_s = time.perf_counter(), time.process_time()
        link = _submit(self.d, request)
        await _tokens(link)
        ttft_s = time.perf_counter() - began
        await _end(link)
        self.d.disconnect(link)
        return ttft_s, time.process_time() - cpu_s

    async def remote(self, num_tokens: int, way: str) -> Remote:
        """As a router does it. Raises RuntimeError if not all full blocks of the prompt crossed TCP."""
        self._number += 1
        name, prompt = f"r{self._number}", self.prompt(num_tokens)
        bytes_per_s, is_overlapped = WAYS[way]
        giver = self._giver.peers._giver
        assert giver is not None
        giver._budget = LinkBudget(bytes_per_s) if bytes_per_s else None
        before, let_go = self._fetched(), _hold_stores(self.p, not is_overlapped)
        began, cpu_s = time.perf_counter(), time.process_time()
        asked = msgspec.structs.replace(
            _request(name, prompt, 2), kv_source=KVSource(name, PATIENCE_S, PATIENCE_S, ["n1"])
        )
        at_d = _submit(self.d, asked)
        await _message(at_d, lambda message: isinstance(message, Seated))
        at_p = _submit(self.p, msgspec.structs.replace(_request(name, prompt, 1), kv_sink=KVSink(name)))
        first = await _tokens(at_p)
        ttft_s = time.perf_counter() - began
        self.d.handle(at_d, Continue(RequestId(name), name, {0: first}))
        output = await _end(at_d)
        cpu_s = time.process_time() - cpu_s
        let_go()
        for one, link in ((self.p, at_p), (self.d, at_d)):
            one.disconnect(link)
        if output.finish_reason is not FinishReason.LENGTH:
            raise RuntimeError(f"{num_tokens} tokens ended with {output.finish_reason} ({way})")
        fetched = self._fetched() - before
        if fetched < num_tokens // 16 * self.block_bytes:
            raise RuntimeError(f"{fetched} bytes crossed TCP for {num_tokens} tokens ({way}): some were computed twice")
        assert output.stages is not None
        return Remote(ttft_s, output.stages.transfer_wait_s, cpu_s, fetched)

    def _fetched(self) -> int:
        stats = self._taker.peers.stats
        return 0 if stats is None else stats.fetched_bytes


def _request(name: str, prompt: list[int], num_tokens: int) -> GenerateRequest:
    sampling = SamplingParams(num_tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(RequestId(name), [SequenceInput(0, prompt, sampling)])


def _submit(one: Engine, request: GenerateRequest) -> RouterLink:
    link = one.connect(RouterId(request.request_id))
    one.handle(link, Submit(request, 0))
    return link


async def _message(link: RouterLink, is_it: Callable[[UpMessage], bool]) -> UpMessage:
    async for raw in link.messages():
        message = decode_up(raw)
        if is_it(message):
            return message
    raise RuntimeError("the link ended")


async def _tokens(link: RouterLink) -> list[int]:
    """The first ones."""
    message = await _message(link, lambda one: isinstance(one, StepOutput) and bool(one.outputs))
    assert isinstance(message, StepOutput)
    return message.outputs[0].new_token_ids


async def _end(link: RouterLink) -> SequenceOutput:
    def is_end(one: UpMessage) -> bool:
        return isinstance(one, StepOutput) and any(output.finish_reason for output in one.outputs)

    message = await _message(link, is_end)
    assert isinstance(message, StepOutput)
    return message.outputs[-1]


def _hold_stores(one: Engine, is_held: bool) -> Callable[[], None]:
    """Store nothing of a prompt before all of it is computed, if `is_held`; what is returned ends that."""
    assert one.core.kv is not None
    transfer = one.core.kv._transfer
    plan = transfer.plan_stores
    if not is_held:
        return lambda: None

    def plan_at_the_end(now: float) -> None:
        if not transfer._stores.sinks._running:
            plan(now)

    transfer.plan_stores = plan_at_the_end  # type: ignore[method-assign]

    def restore() -> None:
        transfer.plan_stores = plan  # type: ignore[method-assign]

    return restore


@asynccontextmanager
async def pair(folder: Path, dtype: DType, num_threads: int, longest: int) -> AsyncIterator[Pair]:
    """Pools and arenas have room for two prompts of `longest` tokens."""
    num_blocks = 4 * (longest // 16 + 2)
    config = EngineConfig(
        model=ModelConfig(dtype=dtype),
        cache=CacheConfig(num_blocks=num_blocks),
        parallel=ParallelConfig(num_threads=num_threads),
    )
    runners = [TorchModelRunner(config, folder, self_test=False, open_arena=open_arena) for _ in range(2)]
    info = runners[0].info
    space = KVSpace(info.model_fingerprint, 16, info.block_bytes, 1, slot_layout(config.cache))
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        nodes = [await enter(node(num_blocks, space=space, name=name)) for name in ("n1", "n2")]
        addresses = [connector.peers.listen("127.0.0.1", TOKEN) for connector in nodes]
        for connector in nodes:
            connector.peers.set_peers(addresses)
        engines = [
            await enter(engine(connector, name, runner=runner, max_num_batched_tokens=CHUNK_TOKENS))
            for connector, name, runner in zip(nodes, ("p", "d"), runners, strict=True)
        ]
        yield Pair(engines[0], engines[1], nodes[0], nodes[1], info.block_bytes)


async def measure(
    lengths: Sequence[int] = LENGTHS, rounds: int = 3, dtype: DType = "bfloat16", num_threads: int | None = None
) -> AsyncIterator[Point]:
    """One point for each length and way."""
    folder = model_store.resolve("smollm2-135m-instruct")
    threads = num_threads or len(os.sched_getaffinity(0))
    async with pair(folder, dtype, threads, max(lengths)) as both:
        await both.local(128)  # warm
        for way in WAYS:
            await both.remote(128, way)
        for num_tokens in lengths:
            alone: list[tuple[float, float]] = []
            remotes: dict[str, list[Remote]] = {way: [] for way in WAYS}
            for _ in range(rounds):
                alone.append(await both.local(num_tokens))
                for way, found in remotes.items():
                    found.append(await both.remote(num_tokens, way))
            for way, found in remotes.items():
                yield Point(
                    num_tokens=num_tokens,
                    way=way,
                    local_s=statistics.median(ttft_s for ttft_s, _ in alone),
                    ttft_s=statistics.median(one.ttft_s for one in found),
                    ratio=statistics.median(one.ttft_s / s for one, (s, _) in zip(found, alone, strict=True)),
                    unhidden=statistics.median(one.waited_s / one.ttft_s for one in found),
                    waited_s=statistics.median(one.waited_s for one in found),
                    cpu_ratio=statistics.median(one.cpu_s / s for one, (_, s) in zip(found, alone, strict=True)),
                    fetched_bytes=found[-1].fetched_bytes,
                )


async def _print(lengths: Sequence[int], rounds: int, num_threads: int | None) -> None:
    print("tokens  way                     local     TTFT  ratio   CPU   waited  of TTFT  fetched")
    async for one in measure(lengths, rounds, num_threads=num_threads):
        print(
            f"{one.num_tokens:6}  {one.way:<21} {one.local_s:6.2f} s {one.ttft_s:6.2f} s  "
            f"{one.ratio:5.2f} {one.cpu_ratio:5.2f} {1000 * one.waited_s:5.0f} ms  {100 * one.unhidden:5.1f} % "
            f"{one.fetched_bytes / 1e6:5.1f} MB",
            flush=True,
        )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None, help="of each engine; all cores")
    options = parser.parse_args()
    asyncio.run(_print([int(one) for one in options.lengths.split(",")], options.rounds, options.threads))


if __name__ == "__main__":
    main()
