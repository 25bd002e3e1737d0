"""`auto` beside both fixed strategies of preemption, with the default model, over context lengths.

    python -m benchmarks.kv_auto [--rounds 3] [--lengths 128 1000 6000] [--draw]

A pool that holds one request. A long one is put back by an urgent one of its size, which takes all of its blocks;
measured is the time from the arrival of that one to the end of the long one. Three engines side by side take turns,
each round in another order, so that what else the machine does meets all of them. `recompute` has no connector, since
it would find what was stored in the background. `--draw` puts table and figure into `docs/findings.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from pathlib import Path

import msgspec

from benchmarks.kv_worth import Mode, serving
from replica.config import SchedulerConfig
from replica.engine import Engine
from replica.messages import GenerateRequest, RequestId, RouterId, SamplingParams, SequenceInput, Submit
from replica.router_link import RouterLink
from replica.sequence import Sequence

LENGTHS = (128, 256, 512, 1000, 2000, 4000, 6000)
SHORT = (128, 1000)
MODES = ("recompute", "offload", "auto")
BLOCK = 16
#: output tokens of the long one, and before which of them the urgent one comes
NUM_TOKENS, BEFORE = 8, 4
#: two of the longest, and what is on its way
_HOST_GIB = 1.0


class Row(msgspec.Struct, frozen=True):
    """One length: seconds of each round by mode, the first of which is not counted."""

    length: int
    seconds: dict[str, list[float]]
    preemptions: dict[str, int]
    #: of those of `auto`, how many were kept and not computed again
    num_kept: int

    def median(self, mode: str) -> float:
        return statistics.median(self.seconds[mode])

    @property
    def better(self) -> str:
        return min(MODES[:2], key=self.median)

    def ratio(self, mode: str, other: str) -> float:
        """Median of the ratios within rounds."""
        pairs = zip(self.seconds[mode], self.seconds[other], strict=True)
        return statistics.median(mine / its for mine, its in pairs)

    @property
    def auto_ratio(self) -> float:
        """To the better of both."""
        return self.ratio("auto", self.better)


def crossover(rows: list[Row]) -> int | None:
    """The length from which on `offload` is the faster one; None: it never is."""
    found = None
    for row in reversed(rows):
        if row.ratio("offload", "recompute") >= 1:
            break
        found = row.length
    return found


class _Asker:
    """Requests with random prompts, so that nothing of an earlier one is found."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine, self._rng = engine, random.Random(seed)
        self._num = 0

    def ask(self, length: int, num_tokens: int, priority: int) -> tuple[Sequence, RouterLink]:
        self._num += 1
        name = f"a{self._num}"
        link = self._engine.connect(RouterId(name))
        prompt = [self._rng.randrange(1000, 40000) for _ in range(length)]
        sampling = SamplingParams(num_tokens, temperature=0.0, ignore_eos=True)
        sequence = SequenceInput(0, prompt, sampling)
        request = GenerateRequest(RequestId(name), [sequence], order_key=(0.0, priority, time.time()))
        self._engine.handle(link, Submit(request, 0))
        return next(s for s in self._engine.core.scheduler.living() if s.request_id == name), link

    async def until(self, sequence: Sequence, link: RouterLink, num_output: int) -> None:
        """It has so many tokens."""
        async for _ in link.messages():
            if sequence.num_output_tokens >= num_output or sequence.finish_reason is not None:
                return

    async def one_round(self, length: int) -> float:
        """Seconds from the urgent one's arrival to the end of the long one."""
        long, link = self.ask(length, NUM_TOKENS, priority=5)
        await self.until(long, link, BEFORE)
        began = time.perf_counter()
        urgent, its = self.ask(length, 2, priority=0)
        await self.until(urgent, its, 2)
        self._engine.disconnect(its)
        await self.until(long, link, NUM_TOKENS)
        took = time.perf_counter() - began
        self._engine.disconnect(link)
        return took


async def measure(length: int, rounds: int, folder: Path) -> Row:
    """`rounds` and one before them, in which `auto` learns what copies and tokens take."""
    async with contextlib.AsyncExitStack() as stack:
        engines: dict[str, Engine] = {}
        for mode in MODES:
            scheduler = SchedulerConfig(
                preemption_mode=mode, policy="priority", priority_ageing_s=1e6, max_preemptions=100, watermark=0.0
            )
            tier = Mode(mode, 0.0 if mode == "recompute" else _HOST_GIB)
            num_blocks = length // BLOCK + 4
            engines[mode], _ = await stack.enter_async_context(serving(tier, folder, num_blocks, scheduler=scheduler))
        askers = {mode: _Asker(engine, seed=length) for mode, engine in engines.items()}
        seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
        for turn in range(rounds + 1):
            for at in range(len(MODES)):
                mode = MODES[(at + turn) % len(MODES)]
                took = await askers[mode].one_round(length)
                if turn:
                    seconds[mode].append(took)
        kv = engines["auto"].core.kv
        assert kv is not None
        num_kept = int(kv.counters()["kv_offloads"])
        preemptions = {mode: engine.core.scheduler.counters.preemptions for mode, engine in engines.items()}
    assert all(count >= rounds for count in preemptions.values()), f"{length} tokens: {preemptions} preemptions"
    return Row(length, seconds, preemptions, num_kept)


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = ["| context, tokens | recompute, s | offload, s | auto, s | offload / recompute | auto / better |"]
    lines.append("|---|---|---|---|---|---|")
    for row in rows:
        medians = " | ".join(f"{row.median(mode):.2f}" for mode in MODES)
        ratios = f"{row.ratio('offload', 'recompute'):.2f} | {row.auto_ratio:.2f}"
        lines.append(f"| {row.length:,} | {medians} | {ratios} |")
    return "\n".join(lines)


def draw(rows: list[Row]) -> None:
    """Table and figure of the page of findings."""
    from benchmarks.findings import DOCS, put_tables
    from benchmarks.findings_plots import save_preemption

    page = DOCS / "findings.md"
    page.write_text(put_tables(page.read_text(), {"kv_auto": table(rows)}))
    values = {mode: [row.ratio(mode, "recompute") for row in rows] for mode in MODES}
    save_preemption([row.length for row in rows], values, DOCS / "figures" / "kv_auto.svg")


def run(lengths: tuple[int, ...], rounds: int) -> list[Row]:
    """All lengths, a line for each."""
    rows = []
    for length in lengths:
        with tempfile.TemporaryDirectory(dir=".") as folder:
            rows.append(asyncio.run(measure(length, rounds, Path(folder))))
        row = rows[-1]
        told = ", ".join(f"{mode} {row.median(mode):.2f} s ({row.preemptions[mode]})" for mode in MODES)
        kept = f"auto kept {row.num_kept} of {row.preemptions['auto']}"
        print(f"{length} tokens: {told}; auto / better {row.auto_ratio:.3f}; {kept}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--draw", action="store_true")
    options = parser.parse_args()
    rows = run(tuple(options.lengths), options.rounds)
    print(f"offload is faster from {crossover(rows)} tokens on")
    if options.draw:
        draw(rows)


if __name__ == "__main__":
    main()
