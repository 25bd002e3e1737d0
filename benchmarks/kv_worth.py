"""What KV tiers are worth: conversations that do not fit the pool together, and prompts that nobody says again.

    python -m benchmarks.kv_worth [--conversations 20] [--turns 5] [--blocks 400]

An engine with the default model, its link, a connector and its files in one process; time from the submission of a turn
to its first token. Conversations come in waves, each at its turn, so that between two turns of one all others have been
there. Answers are the model's own, so what decoding stored is used as well.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec

from cluster import model_store
from cluster.kv_connector.config import Admission, KVCacheConfig
from cluster.kv_connector.connector import Connector
from replica.arena_client import open_arena
from replica.config import (
    GIB,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    OffloadDType,
    ParallelConfig,
    SchedulerConfig,
    resolve,
)
from replica.engine import Engine
from replica.hardware import detect_hardware
from replica.kv_messages import KVPeer, KVSpace
from replica.kv_side import KVSide
from replica.messages import GenerateRequest, RequestId, RouterId, SamplingParams, SequenceInput, Submit
from replica.model_runner import TorchModelRunner
from replica.node_link import NodeLink
from replica.router_link import RouterLink
from replica.runner_thread import RunnerThread

OPENING, QUESTION, ANSWER = 1000, 20, 150
WAVE = 4
#: tokens 6,400: the waves fit, all conversations (20 x 850 own tokens) do not
NUM_BLOCKS = 400
_SECOND_S = 1.0


class Mode(msgspec.Struct, frozen=True):
    """Which tiers there are; 0 GiB of memory: none."""

    name: str
    host_gib: float = 0.0
    disk_gib: float = 0.0
    admission: Admission = "always"
    offload_dtype: OffloadDType = "model"


RECOMPUTE, HOST = Mode("recompute"), Mode("host tier", 1.0)
#: memory for what is on its way only: a wave leases up to 280 blocks of 360 KiB, and half of the arena may be leased
DISK = Mode("disk tier", 0.2, 2.0)
SECOND, INT8 = Mode("second_use", 1.0, admission="second_use"), Mode("int8", 1.0, offload_dtype="int8")


class Worth(msgspec.Struct, frozen=True):
    """Of one mode: TTFT of turns 2 and later, seconds; what was read from files, past the page cache."""

    mode: str
    mean_s: float
    median_s: float
    blocks_loaded: float
    read_bytes: float = 0.0


class Client:
    """One router of the engine: a sequence's tokens, and when the first came."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num = 0

    async def ask(self, prompt: list[int], num_tokens: int) -> tuple[float, list[int]]:
        """Seconds to the first token, and all of them."""
        self._num += 1
        name = f"c{self._num}-{id(self)}"
        link: RouterLink = self._engine.connect(RouterId(name))
        sampling = SamplingParams(num_tokens, temperature=0.0, ignore_eos=True)
        request = GenerateRequest(
            RequestId(name), [SequenceInput(0, prompt, sampling)], order_key=(time.time(), 0, 0.0)
        )
        began = time.perf_counter()
        self._engine.handle(link, Submit(request, 0))
        sequence = next(s for s in self._engine.core.scheduler.living() if s.request_id == name)
        first = 0.0
        async for _ in link.messages():
            if not first and len(sequence.token_ids) > len(prompt):
                first = time.perf_counter() - began
            if sequence.finish_reason is not None:
                break
        self._engine.disconnect(link)
        return first, sequence.token_ids[len(prompt) :]


@asynccontextmanager
async def serving(
    mode: Mode,
    folder: Path,
    num_blocks: int = NUM_BLOCKS,
    num_threads: int | None = None,
    scheduler: SchedulerConfig | None = None,
) -> AsyncIterator[tuple[Engine, Client]]:
    """An engine with the default model, connected."""
    connector: list[Connector] = []
    kv = KVCacheConfig(host_tier_gib=mode.host_gib, disk_tier_gib=mode.disk_gib, tier_admission=mode.admission)

    async def find(space: KVSpace) -> str:
        if not connector:
            connector.append(await Connector.open(kv, space, KVPeer("node", str(time.time_ns())), folder))
        return connector[0].socket_name

    config = EngineConfig(
        model=ModelConfig(dtype="auto"),
        cache=CacheConfig(num_blocks=num_blocks, load_wait_ms=1000, offload_dtype=mode.offload_dtype),
        parallel=ParallelConfig(num_threads=num_threads),
        scheduler=scheduler or SchedulerConfig(),
    )
    config = resolve(config, detect_hardware())
    model = model_store.resolve("smollm2-135m-instruct")
    link = NodeLink(KVPeer("replica", str(time.time_ns())), find) if mode.host_gib else None
    opens = open_arena if link is not None else None
    engine = Engine(
        config,
        RunnerThread(lambda: TorchModelRunner(config, model, self_test=False, open_arena=opens)),
        incarnation="i",
        kv_link=link,
    )
    await engine.start()
    try:
        async with asyncio.timeout(30):
            while link is not None and not link.is_connected:  # noqa: ASYNC110 (nobody would set an event)
                await asyncio.sleep(0.01)
        await asyncio.sleep(_SECOND_S)  # the arena is filled
        yield engine, Client(engine)
    finally:
        await engine.close()
        for one in connector:
            await one.close()


async def conversations(
    mode: Mode,
    folder: Path,
    num: int = 20,
    num_turns: int = 5,
    num_blocks: int = NUM_BLOCKS,
) -> Worth:
    """All of them, turn after turn."""
    rng = random.Random(1)
    opening = [rng.randrange(1000, 40000) for _ in range(OPENING)]
    said = [list(opening) for _ in range(num)]
    times: list[float] = []
    async with serving(mode, folder, num_blocks) as (engine, client):
        for turn in range(num_turns):
            for start in range(0, num, WAVE):
                wave = range(start, min(start + WAVE, num))
                for one in wave:
                    said[one] += [rng.randrange(1000, 40000) for _ in range(QUESTION)]
                answers = await asyncio.gather(*(client.ask(said[one], ANSWER) for one in wave))
                for one, (first_s, answer) in zip(wave, answers, strict=True):
                    said[one] += answer
                    if turn:
                        times.append(first_s)
        await asyncio.sleep(_SECOND_S)  # the connector tells its figures
        told = engine.core.kv.counters() if engine.core.kv is not None else {}
    figures = (told.get(name, 0.0) for name in ("kv_blocks_loaded", "tier_loaded_bytes_disk"))
    return Worth(mode.name, statistics.mean(times), statistics.median(times), *figures)


async def cpu_without_reuse(
    folder: Path, modes: Sequence[Mode], num_prompts: int = 24
) -> dict[str, tuple[float, float, float]]:
    """CPU seconds with tiers over those without, by mode: prompts of 500 tokens and answers of 30 that never come
    again. Each prompt is told to all, in changing order, on one thread (threads that wait for each other burn CPU on a
    busy machine), and counts until its blocks are stored. Ratio of the sums, and quartiles over prompts.
    """
    rng = random.Random(2)
    spent: dict[str, list[float]] = {mode.name: [] for mode in (RECOMPUTE, *modes)}
    async with AsyncExitStack() as stack:
        engines = [
            (mode.name, await stack.enter_async_context(serving(mode, folder / mode.name, num_threads=1)))
            for mode in (RECOMPUTE, *modes)
        ]
        for number in range(num_prompts + 2):
            prompt = [rng.randrange(1000, 40000) for _ in range(500)]
            turn = number % len(engines)
            for name, (engine, client) in engines[turn:] + engines[:turn]:
                began = time.process_time()
                await client.ask(prompt, 30)
                kv = engine.core.kv
                while kv is not None and not _is_at_rest(kv):  # noqa: ASYNC110 (nobody would set an event)
                    await asyncio.sleep(0.002)
                if number > 1:
                    spent[name].append(time.process_time() - began)
    plain = spent.pop(RECOMPUTE.name)
    found = {}
    for name, times in spent.items():
        quarters = statistics.quantiles((a / b for a, b in zip(times, plain, strict=True)), n=4)
        found[name] = sum(times) / sum(plain), quarters[0], quarters[2]
    return found


def _is_at_rest(kv: KVSide) -> bool:
    """Nothing is on its way to a slot."""
    transfer = kv._transfer
    return not (transfer.is_copying or len(transfer._stores) or transfer._stores._backlog)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=NUM_BLOCKS, help="of the pool")
    arguments = parser.parse_args()
    found: list[Worth] = []
    for mode in (RECOMPUTE, HOST, DISK):
        with tempfile.TemporaryDirectory(dir=".") as folder:
            sizes = arguments.conversations, arguments.turns, arguments.blocks
            found.append(asyncio.run(conversations(mode, Path(folder), *sizes)))
        one = found[-1]
        print(
            f"{one.mode}: TTFT of turns 2 and later {1000 * one.mean_s:.0f} ms mean, {1000 * one.median_s:.0f} median; "
            f"{found[0].mean_s / one.mean_s:.1f} times better than recompute; {one.blocks_loaded:.0f} blocks loaded, "
            f"{one.read_bytes / GIB:.2f} GiB read from disk",
            flush=True,
        )
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for name, (ratio, low, high) in asyncio.run(cpu_without_reuse(Path(folder), (HOST, SECOND, INT8))).items():
            print(f"no reuse, {name}: CPU {ratio:.3f} of that without tiers (quartiles {low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
