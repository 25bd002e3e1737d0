"""Claims of prefill/decode disaggregation: the decision for each request, the transfer, faults at each step."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from benchmarks import kv_kills, pd_decision, pd_faults, pd_transfer
from benchmarks.claims import Measured, Skip, claim
from replica.arena_map import HAS_ARENAS


@claim("pd.decision")
def decision(full: bool) -> Iterator[tuple[str, Measured]]:
    """1P3D in virtual time, ten loads: mean TTFT of `auto` over the better of `always` and `never`."""
    for trace, scale in pd_decision.SCALES.items():
        try:
            rows = pd_decision.rows_of(trace, pd_decision.FOLDER, 500 if full else 100)
        except OSError:
            continue
        for point in pd_decision.points(rows, scale):
            note = ", ".join(f"{name} {1000 * s:.0f} ms" for name, s in point.ttft_s.items())
            note += f"; {100 * point.remote_share:.0f} % remote"
            yield f"{trace}.{point.load}", Measured(point.ratio, "x the better of both", 1.05, note=note)


@claim("pd.kills")
def kills(full: bool) -> Iterator[tuple[str, Measured]]:
    """A live 1P2D on two Ray nodes: `kill -9` of P, D and each connector at each step of a hand-over, at moments that
    are seen, a link that swallows, connectors that stand still. Each answer is right or a clear error, nothing is left.
    """
    if not HAS_ARENAS:
        raise Skip("arenas of KV blocks need Linux")
    names = list(pd_faults.PD_FAULTS) if full else list(pd_faults.PD_SHORT)
    found = asyncio.run(kv_kills.run_pd(names, 1))
    yield "wrong", Measured(len(found.wrong) + len(found.errors), "streams", 0, note=str(found))
    yield "left", Measured(len(found.left) + found.most_stranded, "things", 0)
    yield "missed", Measured(len(found.missed), "faults", 0)


@claim("pd.transfer")
def transfer(full: bool) -> Iterator[tuple[str, Measured]]:
    """TTFT of remote over local prefill, and what of the transfer is not hidden, on loopback and on 1 Gbit/s."""
    lengths, rounds = (pd_transfer.LENGTHS, 3) if full else ((128, 512, 2048), 1)
    for one in asyncio.run(_points(lengths, rounds)):
        way = one.way.replace("1 Gbit/s", "gbit").replace(", no overlap", "_at_the_end")
        note = f"local {one.local_s:.2f} s, remote {one.ttft_s:.2f} s; CPU {one.cpu_ratio:.2f} x local"
        if one.way == "loopback":
            yield f"{one.num_tokens}.remote", Measured(one.ratio, "x local TTFT", note=note)
        # of what the issue bounds, only a transfer that flows: how much that saves is told beside it
        bound = 0.1 if one.way == "1 Gbit/s" and one.num_tokens >= 2048 else None
        note = f"{1000 * one.waited_s:.0f} ms after the first token, {one.fetched_bytes / 1e6:.0f} MB"
        yield f"{one.num_tokens}.{way}", Measured(one.unhidden, "of TTFT not hidden", bound, note=note)


async def _points(lengths: Sequence[int], rounds: int) -> list[pd_transfer.Point]:
    return [one async for one in pd_transfer.measure(lengths, rounds)]
