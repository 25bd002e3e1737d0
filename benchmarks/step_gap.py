"""`python -m benchmarks.step_gap`: how long the device waits between two steps, and for what.

The real model behind the production `Engine` and `RunnerThread`, one router that reads its messages, prompts of 128
random tokens, everybody decodes. The gap is what passes on the runner's thread from the end of one `execute` to the
begin of the next. Its parts: the result's way to the event loop, `update`, `schedule`, the plan's way to the thread.
Sending to routers comes after the next step was started, so it is no part of the gap (`publish` says what it takes).

Medians over the steps of a round; other processes only ever add, so the least of several rounds is told as well.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from cluster import model_store
from replica.config import CacheConfig, EngineConfig, ModelConfig
from replica.engine import Engine
from replica.messages import Abort, GenerateRequest, RequestId, RouterId, SamplingParams, SequenceInput, Submit
from replica.router_link import RouterLink
from replica.runner_thread import RunnerThread

PROMPT_TOKENS = 128
#: milliseconds: the whole gap, then its parts, then what runs beside the next step
COLUMNS = ("step", "gap", "to_loop", "update", "between", "schedule", "to_thread", "publish")


class Stopwatch:
    """Begin and end of each call of a function, in seconds."""

    def __init__(self) -> None:
        self.calls: dict[str, list[tuple[float, float]]] = {}

    def watch(self, owner: Any, name: str) -> None:
        """From now on, calls of `owner.name` are noted."""
        function: Callable[..., Any] = getattr(owner, name)
        calls = self.calls.setdefault(name, [])

        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = function(*args, **kwargs)
            calls.append((started, time.perf_counter()))
            return result

        setattr(owner, name, call)


class Bench:
    """One engine with the real model; rounds one after the other."""

    def __init__(self, model: str, dtype: str) -> None:
        from replica.model_runner import TorchModelRunner

        config = EngineConfig(
            model=ModelConfig.model_validate({"model": model, "dtype": dtype}), cache=CacheConfig(num_blocks=2048)
        )
        folder = model_store.resolve(model)
        self._watch = Stopwatch()
        self.runner: Any = None

        def make() -> Any:
            self.runner = TorchModelRunner(config, folder)
            self._watch.watch(self.runner, "execute")
            return self.runner

        self.engine = Engine(_resolved(config), RunnerThread(make), incarnation="gap")
        self._count = 0

    async def start(self) -> None:
        await self.engine.start()
        for name in ("update", "schedule"):
            self._watch.watch(self.engine.core, name)
        self._watch.watch(self.engine, "_publish")

    async def round(self, num_streams: int, num_steps: int) -> list[float]:
        """Medians in milliseconds, by `COLUMNS`."""
        link = self.engine.connect(RouterId("router"))
        reader = asyncio.create_task(_read(link))
        names = [self._submit(link, num_steps) for _ in range(num_streams)]
        running = self.engine.core.scheduler.running
        await _until(lambda: len(running) == num_streams and all(s.num_uncomputed_tokens == 1 for s in running))
        for seen in self._watch.calls.values():
            seen.clear()
        await _until(lambda: len(self._watch.calls["execute"]) >= num_steps)
        calls = {name: calls.copy() for name, calls in self._watch.calls.items()}
        for name in names:
            self.engine.handle(link, Abort(name))
        await _until(lambda: not self.engine.core.num_unfinished)
        self.engine.disconnect(link)
        await reader
        return figures(calls)

    def _submit(self, link: RouterLink, num_steps: int) -> RequestId:
        self._count += 1
        rng = random.Random(self._count)
        prompt = [rng.randrange(1000, 40000) for _ in range(PROMPT_TOKENS)]
        sampling = SamplingParams(2 * num_steps + 200, temperature=0.0, ignore_eos=True)
        name = RequestId(f"r{self._count}")
        self.engine.handle(link, Submit(GenerateRequest(name, [SequenceInput(0, prompt, sampling)])))
        return name


def figures(calls: dict[str, list[tuple[float, float]]]) -> list[float]:
    """From the instants of one round, in which every `execute` has its `update` and its `schedule` behind it."""
    rows = []
    for (begun, ended), (next_begun, _) in zip(calls["execute"], calls["execute"][1:], strict=False):
        update = _within(calls["update"], ended, next_begun)
        schedule = _within(calls["schedule"], ended, next_begun)
        if update is None or schedule is None:
            continue
        rows.append(
            (
                ended - begun,
                next_begun - ended,
                update[0] - ended,
                update[1] - update[0],
                schedule[0] - update[1],
                schedule[1] - schedule[0],
                next_begun - schedule[1],
            )
        )
    publish = statistics.median(end - start for start, end in calls["_publish"])
    return [*(1e3 * statistics.median(column) for column in zip(*rows, strict=True)), 1e3 * publish]


def _within(calls: Sequence[tuple[float, float]], start: float, end: float) -> tuple[float, float] | None:
    return next((call for call in calls if start <= call[0] <= end), None)


def _resolved(config: EngineConfig) -> EngineConfig:
    from replica.config import resolve
    from replica.hardware import detect_hardware

    return resolve(config, detect_hardware())


async def _until(condition: Callable[[], bool]) -> None:
    """Looks rarely, so that looking costs nothing."""
    while True:
        if condition():
            return
        await asyncio.sleep(0.02)


async def _read(link: RouterLink) -> None:
    async for _ in link.messages():
        pass


async def run(model: str, dtype: str, streams: list[int], num_steps: int, num_rounds: int) -> None:
    bench = Bench(model, dtype)
    await bench.start()
    print(bench.runner.info.description)
    print(f"{'streams':>7} {'':>7} " + " ".join(f"{name:>9}" for name in COLUMNS) + f" {'share':>7}   (ms)")
    await bench.round(1, 20)
    rounds: dict[int, list[list[float]]] = {num_streams: [] for num_streams in streams}
    for _ in range(num_rounds):
        for num_streams in streams:
            rounds[num_streams].append(await bench.round(num_streams, num_steps))
    for num_streams, found in rounds.items():
        middle = [statistics.median(column) for column in zip(*found, strict=True)]
        least = min(found, key=lambda row: row[1])
        for word, row in (("median", middle), ("least", least)):
            share = row[1] / (row[0] + row[1])
            print(f"{num_streams:>7} {word:>7} " + " ".join(f"{value:9.3f}" for value in row) + f" {100 * share:6.2f}%")
    await bench.engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    asyncio.run(run(options.model, options.dtype, options.streams, options.steps, options.rounds))


if __name__ == "__main__":
    main()
