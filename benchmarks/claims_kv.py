"""Claims of the KVConnector's bytes: copies, sockets and files beside the limit of the machine, in turns."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import kv_auto, kv_equality, kv_faults, kv_kills, kv_live, kv_loss, kv_speed, kv_worth
from benchmarks.claims import Measured, Skip, claim
from benchmarks.kv_speed import Pair
from replica.arena_map import HAS_ARENAS
from replica.config import GIB, DType

#: of the limit, at least
SHARE = 0.8


def _figures(name: str, pair: Pair, limit: str) -> Iterator[tuple[str, Measured]]:
    note = f"{pair.ours / 1e9:.2f} GB/s, {limit} {pair.limit / 1e9:.2f}"
    yield name, Measured(pair.share, "of the limit", SHARE, at_most=False, note=note)
    yield f"{name}_cpu".lstrip("_"), Measured(pair.cpu_s, "CPU s a GiB", note=f"{limit} {pair.limit_cpu_s:.3f}")


def _check() -> None:
    if not HAS_ARENAS:
        raise Skip("arenas of KV blocks need Linux")


@claim("kv.arena")
def arena(full: bool) -> Iterator[tuple[str, Measured]]:
    """Slabs from a pool to the arena and back, in scattered order, over np.copyto of 1 GiB."""
    _check()
    yield from _figures("", kv_speed.arena(15 if full else 5), "one large copy")


@claim("kv.tcp")
def tcp(full: bool) -> Iterator[tuple[str, Measured]]:
    """Slabs of another process over loopback, over as many bare sockets; CPU of both processes."""
    _check()
    yield from _figures("", asyncio.run(kv_speed.tcp(15 if full else 5)), "bare sockets")


@claim("kv.disk")
def disk(full: bool) -> Iterator[tuple[str, Measured]]:
    """Slabs to disk and back, over a sequential job on the same file system (the folder this is started in)."""
    _check()
    found = asyncio.run(kv_speed.disk(Path.cwd(), 9 if full else 3))
    by = f"by {'O_DIRECT' if found.is_direct else 'pages dropped after each write and read'}, {found.by}"
    yield from _figures("write", found.written, by)
    yield from _figures("read", found.read, by)


@claim("kv.worth")
def worth(full: bool) -> Iterator[tuple[str, Measured]]:
    """TTFT of turns 2 and later of conversations that do not fit the pool together, recomputed over loaded; and CPU
    seconds with a host tier over those without for prompts that never come again.
    """
    _check()
    if not full:  # in a minute there are no long conversations, and those are what a tier is for
        raise Skip("twenty conversations of five turns, three times, take five minutes: FULL=1")

    def run(mode: kv_worth.Mode) -> kv_worth.Worth:
        with tempfile.TemporaryDirectory(dir=".") as folder:
            return asyncio.run(kv_worth.conversations(mode, Path(folder)))

    plain = run(kv_worth.RECOMPUTE)
    for name, mode, at_least in (("host", kv_worth.HOST, 5.0), ("disk", kv_worth.DISK, 3.0)):
        one = run(mode)
        note = f"{1000 * one.mean_s:.0f} ms, recomputed {1000 * plain.mean_s:.0f}"
        yield name, Measured(plain.mean_s / one.mean_s, "times better", at_least, at_most=False, note=note)
        if mode.disk_gib:  # a disk tier reads by O_DIRECT, or drops the pages after each read
            yield "disk_read", Measured(one.read_bytes / GIB, "GiB from files", 0.01, at_most=False)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        found = asyncio.run(kv_worth.cpu_without_reuse(Path(folder), [kv_worth.HOST], 48))
    ratio, low, high = found[kv_worth.HOST.name]
    yield "no_reuse_cpu", Measured(ratio, "of that without", 1.03, note=f"quartiles {low:.3f} to {high:.3f}")


#: perplexity over that without compression, and CPU seconds of a core for a GiB of the pool, in and out together
_LOSS = {"int8": (1.005, 3.0), "int4": (1.06, 3.0)}


@claim("kv.loss")
def loss(full: bool) -> Iterator[tuple[str, Measured]]:
    """The default model reads a text behind KV that was held in 8 or 4 bits, over the same with exact KV."""
    reader = kv_loss.Reader()
    if not full:
        del reader.windows[2:]
    for one in kv_loss.losses(reader):
        note = f"logits apart {one.mean_distance:.3f}, at most {one.max_distance:.2f}; {one.num_tokens} tokens"
        if one.dtype == "model":
            yield "exact", Measured(one.max_distance, "apart, without compression", 0.0, note=note)
            continue
        perplexity, cpu_s = _LOSS[one.dtype]
        yield one.dtype, Measured(one.perplexity / one.plain_perplexity, "of the perplexity", perplexity, note=note)
        yield f"{one.dtype}_cpu", Measured(sum(kv_loss.cost(reader, one.dtype)), "CPU s a GiB", cpu_s)


@claim("kv.equal")
def equal(full: bool) -> Iterator[tuple[str, Measured]]:
    """The default model: requests whose tokens and logits, bit by bit, are not those of a run without tiers."""
    _check()
    dtypes: tuple[DType, ...] = ("bfloat16", "float32") if full else ("bfloat16",)
    for dtype in dtypes:
        bench = kv_equality.of_model("smollm2-135m-instruct", dtype, *((24, 24) if full else (12, 6)))
        asyncio.run(kv_equality.measure(bench))
        note = f"of {bench.num_cases} in {len(kv_equality.WAYS)} ways, {bench.num_loaded} blocks loaded"
        yield dtype, Measured(len(bench.different), "mismatches", 0, note=f"{note} {bench.different[:2] or ''}")


@claim("kv.kills")
def kills(full: bool) -> Iterator[tuple[str, Measured]]:
    """A live cluster with tiny tiers, and everything that holds KV killed, frozen, filled and damaged at moments that
    are seen. FULL: all faults, five times; and once with the real model, with ranks, with a runner in its own process.
    """
    _check()
    for shape in kv_live.SHAPES if full else ("fake",):
        names = kv_faults.faults_of(shape) if full else list(kv_faults.SHORT)
        found = asyncio.run(kv_kills.run(names, 5 if shape == "fake" and full else 1, kv_live.SHAPES[shape]))
        shape = shape.replace(" ", "_")
        yield f"{shape}.wrong", Measured(len(found.wrong) + len(found.errors), "streams", 0, note=str(found))
        yield f"{shape}.left", Measured(len(found.left) + found.most_stranded, "things", 0)
        yield f"{shape}.missed", Measured(len(found.missed), "faults", 0)


@claim("kv.auto")
def auto(full: bool) -> Iterator[tuple[str, Measured]]:
    """Preemption by `auto` over the better of both fixed strategies, default model, the worst length."""
    _check()
    rows = kv_auto.run(kv_auto.LENGTHS if full else kv_auto.SHORT, 3 if full else 2)
    worst = max(rows, key=lambda row: row.auto_ratio)
    yield "", Measured(worst.auto_ratio, "of the better one", 1.1, note=f"at {worst.length} tokens, {worst.better}")
    from_on = kv_auto.crossover(rows)
    yield "crossover", Measured(float("inf") if from_on is None else from_on, "tokens, offload is faster from there on")
