"""Claims of loading weights."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.claims import Measured, claim
from benchmarks.load_weights import measure, run, write_checkpoint


@claim("tp.load")
def load(full: bool) -> Iterator[tuple[str, Measured]]:
    """A synthetic checkpoint of 1 GiB out of a cold page cache: speed over plain reading, memory over the shard."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("SHOAL_BENCH_DIR")) as name:
        folder = Path(name)
        write_checkpoint(folder, 1.0)
        found = measure(folder, 7 if full else 3)
        (runner,) = run(folder, ("runner",))
    note = f"plain {found['plain_gb_s']:.2f} GB/s, {found['gib']:.2f} GiB; by medians {found['median_one']:.2f}"
    yield "", Measured(found["share_one"], "of plain reading", 0.7, at_most=False, note=note)
    yield (
        "both",
        Measured(found["share_both"], "of plain reading", note="two ranks at once, on the same disk and cores"),
    )
    yield "unchecked", Measured(found["share_unchecked"], "of plain reading", note="not looking for inf and NaN")
    yield "peak", Measured(found["peak_one"], "x the shard at most in memory", 1.2)
    yield "peak_rank0", Measured(found["peak_rank0"], "x the shard at most in memory", 1.2, note="rank 0 of 2")
    note = f"one rank {found['disk_one']:.2f}, rank 0 of 2 alone {found['disk_rank0']:.2f}"
    yield "disk", Measured(found["disk_both"], "x the files fetched from disk by two ranks", 1.05, note=note)
    note = f"native decoder, one thread; peak {runner.peak_bytes / runner.shard_bytes:.2f} x the weights"
    yield "replica", Measured(runner.seconds, "s to read, put together and pack", note=note)
