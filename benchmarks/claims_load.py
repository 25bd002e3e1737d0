"""Claims of loading weights."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.claims import Measured, claim
from benchmarks.load_weights import measure, run, write_checkpoint

_MEMORY = "x the shard at most in memory"


@claim("tp.load")
def load(full: bool) -> Iterator[tuple[str, Measured]]:
    """A synthetic checkpoint of 1 GiB out of a cold page cache: speed over plain reading, memory over the shard."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("SHOAL_BENCH_DIR")) as name:
        folder = Path(name)
        write_checkpoint(folder, 1.0)
        found = measure(folder, 7 if full else 3)
    plain = f"plain {found['plain_gb_s']:.2f} GB/s, {found['gib']:.2f} GiB, load average {os.getloadavg()[0]:.1f}"
    for suffix, kind, what in (
        ("", "one", plain),
        ("both", "both", "two ranks at once, on the same disk and cores"),
        ("unchecked", "unchecked", "not looking for inf and NaN"),
        ("replica", "replica", "read and packed for the native kernels, one thread"),
        ("ranks", "ranks", "two ranks at once, read and packed by torch"),
    ):
        note = f"{what}; by medians {found[f'median_{kind}']:.2f}; {found[f'cpu_{kind}']:.2f} s of CPU"
        bound = 0.7 if kind in ("one", "both") else None
        yield suffix, Measured(found[f"share_{kind}"], "of plain reading", bound, at_most=False, note=note)
    yield "peak", Measured(found["peak_one"], _MEMORY, 1.2, note="read only")
    yield "peak_both", Measured(found["peak_both"], _MEMORY, 1.2, note="read only, the worse of two ranks")
    yield "peak_replica", Measured(found["peak_replica"], _MEMORY, 1.2, note="packed for the native kernels")
    yield "peak_ranks", Measured(found["peak_ranks"], _MEMORY, 1.2, note="packed by torch, the worse of two ranks")
    yield "disk", Measured(found["disk_both"], "x the files fetched from disk by two ranks", 1.05)
    yield "peak_default", _default_model()


def _default_model() -> Measured:
    from cluster import model_store

    folder = model_store.resolve("smollm2-135m-instruct")
    (loaded,) = run(folder, ("replica", "0", "1"))
    note = f"default model, bfloat16, tokenizer and grammars included; {loaded.seconds:.2f} s"
    return Measured(loaded.peak_bytes / loaded.shard_bytes, _MEMORY, 1.2, note=note)
